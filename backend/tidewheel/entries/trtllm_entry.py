"""Make one entry of the parts that a model of Triton's TensorRT-LLM backend has.

The parameters are those of `all_models/inflight_batcher_llm` of tensorrtllm_backend up to its release 1.0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

from tritonclient.grpc import model_config_pb2

from tidewheel.adapter.tensors import INPUTS
from tidewheel.byte_sizes import GIB
from tidewheel.entries.checking import located
from tidewheel.entries.entry import CONFIG_NAME, Entry
from tidewheel.entries.finding import Finding, Problem, error, warning
from tidewheel.entries.migration import Migration, NewEntry
from tidewheel.errors import ConfigError
from tidewheel.server.repository import entry_text, resolve_model

BACKEND = "tensorrtllm"
ENGINE_NAME = "tensorrt_llm"  # the samples' name; newer ones have the backend python
MODEL_NAME_PARAMETER = "tensorrt_llm_model_name"
BLOCK_SIZE = 64
_UINT32 = model_config_pb2.DataType.Value("TYPE_UINT32")


class Kept(NamedTuple):
    settings: Mapping[str, str]
    word: str = ""  # on what differs


def _as(name: str, word: str = "") -> Callable[[str], Kept]:
    return lambda value: Kept({name: value}, word)


def _if_positive(name: str) -> Callable[[str], Kept]:
    return lambda value: Kept({name: value} if int(value) > 0 else {})


def _only(wanted: str, word: str, settings: Mapping[str, str] | None = None) -> Callable[[str], Kept]:
    """Keep the usual value silently; any other gives settings, or a word."""
    return lambda value: Kept(
        {} if value.lower() == wanted else settings or {}, "" if value.lower() == wanted else word
    )


# What becomes of a parameter that has a counterpart here.
_KEPT: Mapping[str, Callable[[str], Kept]] = {
    "kv_cache_free_gpu_mem_fraction": _as(
        "gpu_memory_utilization", "here it is a fraction of all the GPU's memory, weights included"
    ),
    "enable_kv_cache_reuse": _as("enable_prefix_caching"),
    "max_num_sequences": _if_positive("max_num_seqs"),
    "kv_cache_host_memory_bytes": lambda value: Kept({"swap_space": f"{int(value) / GIB:g}"}),
    "max_tokens_in_paged_kv_cache": lambda value: Kept(
        {"num_blocks": str(-(-int(value) // BLOCK_SIZE)), "block_size": str(BLOCK_SIZE)}
    ),
    "batch_scheduler_policy": _only(
        "guaranteed_no_evict",
        "a running request may still be preempted, and goes on later",
        {"admit_by_growth": "false"},
    ),
    "gpt_model_type": _only("inflight_fused_batching", "requests join and leave at any step"),
    "cuda_graph_mode": _only("true", "", {"enforce_eager": "true"}),
    "max_beam_width": _only("1", "beam search is not offered"),
    "enable_chunked_context": _only("true", "prompts are always chunked"),
    "FORCE_CPU_ONLY_INPUT_TENSORS": lambda _: Kept({}),
}

# What has none: the reason, and names.
_LEFT_OUT = (
    ("the engine file is not read: weights come from --model",
     "gpt_model_path encoder_model_path executor_worker_path"),
    ("the tokenizer comes from --model", "tokenizer_dir tokenizer_type"),
    ("a request says so, by a parameter",
     "exclude_input_in_output accumulate_tokens add_special_tokens skip_special_tokens"),
    ("LoRA is not offered",
     "lora_cache_optimal_adapter_size lora_cache_max_adapter_size lora_cache_gpu_memory_fraction "
     "lora_cache_host_memory_bytes lora_prefetch_dir"),
    ("speculative decoding is not offered",
     "medusa_choices eagle_choices lookahead_window_size lookahead_ngram_size lookahead_verification_set_size "
     "speculative_decoding_fast_logits tensorrt_llm_draft_model_name"),
    ("grammars are llguidance's",
     "guided_decoding_backend xgrammar_tokenizer_info_path"),
    ("images are not offered", "visual_model_path multimodal_model_path multimodal_encoders_name"),
    ("the engine takes the first GPU that it sees: set CUDA_VISIBLE_DEVICES for the server",
     "gpu_device_ids participant_ids num_nodes"),
    ("the attention window is the model's own",
     "max_attention_window_size sink_token_length cross_kv_cache_fraction"),
    ("the parameters of each request say how it is decoded", "decoding_mode"),
    ("log-probabilities are never divided by the length", "normalize_log_probs"),
    ("weights stay on the device", "gpu_weights_percent"),
    ("an option of the TensorRT-LLM executor",
     "enable_trt_overlap cancellation_check_period_ms stats_check_period_ms recv_poll_period_ms "
     "iter_stats_max_iterations request_stats_max_iterations kv_cache_onboard_blocks multi_block_mode "
     "enable_context_fmha_fp32_acc cuda_graph_cache_size"),
    ("all parts are one entry now", MODEL_NAME_PARAMETER),
)  # fmt: skip
_REASONS = {name: reason for reason, names in _LEFT_OUT for name in names.split()}


class Parts(NamedTuple):
    engine: Entry
    faces: list[Entry]  # that clients call: ensemble, tensorrt_llm_bls
    others: list[Entry]

    @property
    def all(self) -> list[Entry]:
        return [self.engine, *self.faces, *self.others]


def find_parts(entries: Iterable[Entry]) -> list[Parts]:
    """Return the parts of each model of the TensorRT-LLM backend."""
    entries = list(entries)
    return [
        _parts(entry, entries) for entry in entries if entry.config.backend == BACKEND or entry.name == ENGINE_NAME
    ]


def _parts(engine: Entry, entries: list[Entry]) -> Parts:
    ensembles = [entry for entry in entries if engine.name in _steps(entry)]
    bls = [
        entry
        for entry in entries
        if MODEL_NAME_PARAMETER in entry.parameters
        and _value(entry, MODEL_NAME_PARAMETER, ENGINE_NAME) == engine.name
    ]
    steps = {name for ensemble in ensembles for name in _steps(ensemble)} - {engine.name}
    return Parts(engine, [*ensembles, *bls], [entry for entry in entries if entry.name in steps])


def _steps(entry: Entry) -> set[str]:
    return {step.model_name for step in entry.config.ensemble_scheduling.step}


def _value(entry: Entry, name: str, default: str = "") -> str:
    """Return a parameter; the default if it is empty or its place in the template is not filled in."""
    value = entry.parameters.get(name, "").strip()
    return default if not value or value.startswith("${") else value


def from_trtllm(parts: Parts, model: str) -> Migration:
    """Make an entry of the first face's name, and others that share its engine. Raise `ConfigError`."""
    if not model:
        tokenizer = next((text for part in parts.all if (text := _value(part, "tokenizer_dir"))), "")
        hint = f"; the tokenizer was in {tokenizer!r}" if tokenizer else ""
        raise ConfigError(
            f"{parts.engine.folder}: an engine of TensorRT-LLM cannot be read: name the Hugging Face folder or id "
            f"it was made of with --model{hint}"
        )
    settings: dict[str, str] = {"model": resolve_model(model), "io_dialect": "trtllm"}
    lost: list[Finding] = []
    unknown: list[Finding] = []
    for part in parts.all:
        lost += located(part, "settings", _keep(part, settings))
        unknown += located(part, "settings", _keep_unknown(part, settings))
    lost += located(parts.engine, "native-queue", _keep_queue(parts.engine, settings))
    decoupled = bool(parts.engine.config.model_transaction_policy.decoupled)
    first, *others = parts.faces or [parts.engine]
    twin = {"engine_of": first.name, "io_dialect": "trtllm"}
    texts = {first.name: entry_text(settings, decoupled=decoupled) + _declarations(first)}
    texts |= {face.name: entry_text(twin, decoupled=decoupled) + _declarations(face) for face in others}
    for face in (first, *others):
        lost += located(face, "tensors", _lost_inputs(face))
    return Migration([NewEntry(name, {CONFIG_NAME: text}) for name, text in texts.items()], lost, unknown)


def _declarations(face: Entry) -> str:
    """Declare the inputs that clients of older releases send as UINT32."""
    ours = {spec.name for spec in INPUTS if (spec.data_type, spec.dims) == ("TYPE_INT32", (1,))}
    old = [tensor.name for tensor in face.config.input if tensor.data_type == _UINT32 and tensor.name in ours]
    lines = [f'  {{ name: "{name}" data_type: TYPE_UINT32 dims: [ 1 ] optional: true }}' for name in old]
    return "max_batch_size: 1\ninput [\n{}\n]\n".format(",\n".join(lines)) if lines else ""


def _lost_inputs(face: Entry) -> Iterator[Problem]:
    ours = {spec.name for spec in INPUTS}
    for tensor in face.config.input:
        if tensor.name not in ours:
            yield warning(f"input.{tensor.name}", f"input {tensor.name!r} is not offered: clients must not send it")


def _keep(part: Entry, settings: dict[str, str]) -> Iterator[Problem]:
    """Add the settings that stand for a part's parameters; yield what could not be kept."""
    for name in part.parameters:
        value = _value(part, name)
        if not value:
            continue
        if name in _REASONS:
            yield warning(f"parameters.{name}", f"{name} is {value!r}: {_REASONS[name]}")
        if name in _REASONS or name not in _KEPT:
            continue
        try:
            kept = _KEPT[name](value)
        except ValueError:
            raise ConfigError(f"{part.path}: {name} is {value!r}: it must be a number") from None
        settings.update(kept.settings)
        if kept.word:
            yield warning(f"parameters.{name}", f"{name} is {value!r}: {kept.word}")


def _keep_unknown(part: Entry, settings: dict[str, str]) -> Iterator[Problem]:
    """Copy parameters that neither TensorRT-LLM nor Tidewheel knows, and yield an error for each.

    The new entry does not load until they are removed.
    """
    for name in part.parameters:
        if name not in _KEPT and name not in _REASONS and (value := _value(part, name)):
            settings[name] = value
            yield error(f"parameters.{name}", f"{name} is {value!r}: no parameter that is known here")


def _keep_queue(engine: Entry, settings: dict[str, str]) -> Iterator[Problem]:
    config = engine.config
    if config.max_batch_size > 0:
        settings.setdefault("max_num_seqs", str(config.max_batch_size))
    if config.dynamic_batching.default_queue_policy.max_queue_size > 0:
        settings["max_waiting_requests"] = str(config.dynamic_batching.default_queue_policy.max_queue_size)
    if config.dynamic_batching.max_queue_delay_microseconds > 0:
        path = "dynamic_batching.max_queue_delay_microseconds"
        yield warning(path, "requests start at once: the engine never waits for a batch to fill")
    if config.dynamic_batching.priority_levels > 0:
        path = "dynamic_batching.priority_levels"
        yield warning(path, "a request's parameter priority says its class; for Triton's levels, add the block")
