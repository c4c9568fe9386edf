import contextlib
import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from tidewheel.config import EngineConfig
from tidewheel.entries.findings import CheckReport, MemoryNeeds, Problem, error, note, warning
from tidewheel.errors import ConfigError
from tidewheel.frontend.prompt_workers import PromptWorkers, TokenizerFolder
from tidewheel.frontend.settings import GenerationDefaults
from tidewheel.lora import parse_loras
from tidewheel.model_formats import foreign_format
from tidewheel.models.architectures import possible_num_ranks
from tidewheel.models.decoder import Decoder
from tidewheel.models.loader import ModelPlan, plan_model
from tidewheel.models.lora_folder import LoraFile, read_lora_config
from tidewheel.models.model_folder import cached_folder, gguf_file_of, read_config
from tidewheel.models.shard import Shard
from tidewheel.models.weight_source import SafetensorsFolder, WeightSource
from tidewheel.runner.device import check_deterministic, check_ranks_fit, resolve_device
from tidewheel.runner.drafter import DraftSource, find_draft, find_draft_source
from tidewheel.runner.host_memory import MemoryClaim, available_host_bytes, total_host_bytes
from tidewheel.runner.kv_tensors import CacheLayout, MemoryBudget, decide_size
from tidewheel.runner.loading import BLOCK_SIZES, cache_budget, left_of_utilization
from tidewheel.runner.warm_up import StepSize, estimated_activation_bytes
from tidewheel.settings import GIB, MIB, shown_bytes
from tidewheel_kernels.kv_cache.codes import head_bytes

UNKNOWN_VOCABULARY = 1 << 19  # tokens, without a size in `config.json`
_AFTER_PATH = re.compile(r": | (?:is|has|does|cannot|holds|became) ")


class ModelJudge:
    """Check of an entry's model by the code that loads it, without reading weights or taking memory.

    Iterating `problems` to its end adds what is known of the model to the report.
    """

    def __init__(self, config: EngineConfig, report: CheckReport, name: str, *, is_this_machine: bool) -> None:
        self._config, self._report, self._name = config, report, name
        self._is_this_machine = is_this_machine
        self._folder: Path | None = None
        self._device, self._shard = torch.device("cpu"), Shard(num_ranks=config.tensor_parallel_size)
        self._vocab_size: int | None = None
        self._plan: ModelPlan | None = None
        self._source: WeightSource | None = None
        self._draft: DraftSource | None = None

    def problems(self) -> Iterator[Problem]:
        yield from _with_refusal(None, self._find_folder)
        if (folder := self._folder) is None:
            return
        told: list[Problem] = []
        for file, step in (
            (None, self._find_device),
            (folder / "config.json", partial(self._read_config, folder)),
            (folder, partial(self._open_source, folder)),
            (Path(self._config.tokenizer or folder), partial(self._try_tokenizer, folder)),
            (folder, partial(self._read_defaults, folder)),
            (None, self._judge_draft),
            (None, self._judge_memory),
        ):
            new = [problem for problem in _with_refusal(file, step) if problem not in told]
            told += new  # several steps read `config.json`
            yield from new

    def refused_adapters(self) -> Iterator[tuple[str, str]]:
        """Yield (name, reason) of adapters that do not fit the model, by their configurations and file headers."""
        native = None if self._plan is None else self._plan.native
        for name, folder in parse_loras(self._config.lora_modules).items() if self._is_this_machine else ():
            try:
                read_lora_config(Path(folder))
                if isinstance(native, Decoder):
                    LoraFile(Path(folder), native, self._config.max_lora_rank)
            except ConfigError as refusal:
                yield name, str(refusal)

    def _find_folder(self) -> Iterator[Problem]:
        config = self._config
        folder = cached_folder(config.model, config.revision, config.download_dir)
        if folder is None:
            message = f"{config.model!r}, which is not cached here: it is fetched at load and was not checked"
            yield note("", f"model is {message}")
            return
        for name, path in (("model", config.model), ("draft_model", config.draft_model)):
            if path and not Path(path).is_absolute() and Path(path).is_dir():
                message = f"{name} is {path!r}, a folder only seen from here: write it from the version folder"
                yield warning("", message)
        if refusal := foreign_format(folder):
            raise ConfigError(refusal)
        self._folder = folder

    def _find_device(self) -> None:
        if self._is_this_machine:
            self._device = resolve_device(self._config)
            check_ranks_fit(self._config)

    def _read_config(self, folder: Path) -> None:
        fields = read_config(folder)
        if fields.values.get("vocab_size") is not None:
            self._vocab_size = min(fields.integer("vocab_size"), UNKNOWN_VOCABULARY)
        self._plan = plan = plan_model(folder, fields, self._config, self._device, self._shard)
        self._vocab_size = plan.vocab_size
        way = "through transformers" if plan.native is None else "native"
        self._report.models[self._name] = f"{plan.architecture}, {way}"

    def _open_source(self, folder: Path) -> None:
        if self._plan is not None:
            self._source = self._plan.open_source()
        elif self._config.load_format != "dummy" and gguf_file_of(folder) is None:
            SafetensorsFolder(folder)

    def _try_tokenizer(self, folder: Path) -> None:
        config, vocab_size = self._config, self._vocab_size or UNKNOWN_VOCABULARY
        tokenizer = TokenizerFolder(Path(config.tokenizer or folder), vocab_size, config.max_prompt_bytes)
        with contextlib.closing(PromptWorkers(tokenizer, 1)) as encoder:
            encoder.wait_started()

    def _read_defaults(self, folder: Path) -> None:
        config = self._config
        GenerationDefaults.load(folder, config.generation_config or "vllm", config.override_generation_config)

    def _judge_memory(self) -> Iterable[Problem]:
        if self._plan is None:
            return ()
        if (decoder := self._plan.rank_native) is not None:
            layout = CacheLayout(decoder.shape, 1, self._plan.cache_dtype)
            self._report.kv_cache[self._name] = _cache_of_a_request(self._plan, layout)
        if not self._is_this_machine or self._source is None:
            return ()
        try:
            needs, shortened, self._report.memory[self._name] = _needs(self._plan, self._source, self._draft)
        except ConfigError as refusal:
            raise ConfigError(f"{refusal}{_remedy_of_ranks(self._plan, self._source)}") from None
        self._report.needs[self._name] = self._config, needs
        return [note("", shortened)] if shortened else ()

    def _judge_draft(self) -> Iterator[Problem]:
        config, plan, beside = self._config, self._plan, None
        if config.draft_model and find_draft(config, cached_folder) is None:
            yield note("", f"draft_model is {config.draft_model!r}, which is not cached here: it was not checked")
        elif plan is not None:
            if self._is_this_machine and self._source is not None:
                with contextlib.suppress(ConfigError):  # which `_judge_memory` tells
                    beside = plan.check_fits(self._source)
            self._draft = find_draft_source(plan, beside)


def _needs(plan: ModelPlan, source: WeightSource, draft: DraftSource | None = None) -> tuple[MemoryNeeds, str, str]:
    """Return what the model takes, the log line of a shortened context, and both in words. Raise `ConfigError`."""
    config, decoder, device, ranks = plan.config, plan.rank_native, plan.device, plan.shard.num_ranks
    of_all = ""
    if ranks > 1:
        whole = plan._replace(shard=Shard()).decoder(source, torch.device("meta")).weights_bytes
        of_all = f"{shown_bytes(whole)}, on each of {ranks} ranks "
    weights = plan.check_fits(source) + (0 if draft is None else draft.num_bytes)
    memory = f"weights {of_all}{shown_bytes(weights)}; {_free_memory(device)}"
    check_deterministic(config.deterministic, device)
    cache, shortened = (config.kv_cache_memory_mb or 0) * MIB, ""
    if decoder is not None:
        layout = CacheLayout(decoder.shape, config.block_size or BLOCK_SIZES[device.type], plan.cache_dtype)
        layout = layout._replace(draft_bytes=0 if draft is None else layout.block_size * draft.token_bytes)
        budget = _budget(layout, weights, plan)
        is_automatic = config.max_model_len == "auto"
        size = decide_size(config.num_blocks, budget, layout, plan.max_model_len, may_shorten=is_automatic)
        one_request = 1 if is_automatic else -(-plan.max_model_len // layout.block_size)
        num_blocks = one_request if config.has_automatic_cache else size.num_blocks  # it takes what is left
        cache, shortened = num_blocks * layout.all_block_bytes, size.shortened
        memory += f": room for {size.num_blocks:,} blocks, {size.num_blocks * layout.block_size:,} tokens"
    of_device = ranks if device.type == "cpu" else 1
    needs = MemoryNeeds(device.type, of_device * weights, of_device * cache, ranks * int(config.swap_space * GIB))
    if device.type == "cuda":
        needs = needs._replace(device_bytes=torch.cuda.mem_get_info(device)[1])
    _check_host_memory(needs)
    return needs, shortened, memory


def _free_memory(device: torch.device) -> str:
    is_cpu = device.type == "cpu"
    free, total = (available_host_bytes(), total_host_bytes()) if is_cpu else torch.cuda.mem_get_info(device)
    name = "this machine" if is_cpu else torch.cuda.get_device_name(device)
    return f"{name} has {shown_bytes(free)} free of {shown_bytes(total)}"


def _budget(layout: CacheLayout, weights: int, plan: ModelPlan) -> MemoryBudget:
    config, claim = plan.config, None
    rows = min(config.max_num_seqs, config.max_num_batched_tokens)
    step = StepSize(rows, -(-config.max_num_batched_tokens // rows))
    needs = {"weights": weights, "estimated steps": estimated_activation_bytes(step, layout.shape, plan.dtype)}
    if plan.device.type == "cpu":
        needs["swap_space"] = int(config.swap_space * GIB)
        claim = MemoryClaim(takes_share=False, others=sum(needs.values()), num_ranks=plan.shard.num_ranks)
    return cache_budget(config, layout, plan.max_model_len, needs, plan.device, claim)


def _remedy_of_ranks(plan: ModelPlan, source: WeightSource) -> str:
    """Return the least larger number of GPUs that holds the model, as a remedy; empty if there is none."""
    if plan.device.type == "cpu" or not isinstance(plan.native, Decoder):  # ranks share a CPU's memory
        return ""
    for number in possible_num_ranks(plan.native.config):
        if number > plan.shard.num_ranks:
            with contextlib.suppress(ConfigError):
                config = replace(plan.config, tensor_parallel_size=number)
                of_rank = plan_model(plan.folder, plan.fields, config, plan.device, Shard(num_ranks=number))
                _needs(of_rank, source)
                return f"; it fits {number} such GPUs, with tensor_parallel_size {number}"
    return ""


def _with_refusal(file: Path | None, step: Callable[[], Iterable[Problem] | None]) -> Iterator[Problem]:
    try:
        yield from step() or ()
    except ConfigError as refusal:
        blamed = Path(_AFTER_PATH.split(str(refusal), maxsplit=1)[0])
        yield error("", str(refusal), file=blamed if blamed.is_absolute() else file)


def _check_host_memory(needs: MemoryNeeds) -> None:
    available = available_host_bytes()
    if needs.of_host <= available:
        return
    parts = {"weights": needs.weights, "KV cache": needs.cache} if needs.device == "cpu" else {}
    shown = ", ".join(f"{name} {shown_bytes(size)}" for name, size in {**parts, "swap_space": needs.host}.items())
    raise ConfigError(
        f"host memory does not suffice: {shown}, and {shown_bytes(available)} are available; lower "
        "kv_cache_memory_mb or swap_space, or use a smaller model"
    )


def _cache_of_a_request(plan: ModelPlan, layout: CacheLayout) -> str:
    shape, token, itemsize = layout.shape, layout.block_bytes, layout.dtype.itemsize
    elements = head_bytes(shape.head_dim, layout.dtype) // itemsize
    return (
        f"2 x {shape.num_layers} layers x {shape.num_kv_heads} KV heads x {elements} x {itemsize} "
        f"bytes = {token:,} bytes a token; {shown_bytes(token * plan.max_model_len)} for a request of "
        f"{plan.max_model_len:,} tokens"
    )


def together(engines: Mapping[str, tuple[EngineConfig, MemoryNeeds]]) -> Iterator[str]:
    names = ", ".join(sorted(engines))
    host, available = sum(needs.of_host for _, needs in engines.values()), available_host_bytes()
    if host > available:
        yield (
            f"{names} together need {shown_bytes(host)} of host memory, and {shown_bytes(available)} are free: "
            "lower kv_cache_memory_mb or swap_space, or serve fewer with --models"
        )
    total = 0.0
    for device, place in (("cpu", "machine"), ("cuda", "GPU")):
        of_device = {name: config for name, (config, needs) in engines.items() if needs.device == device}
        shares = {
            name: config.device_memory_share for name, config in of_device.items() if config.device_memory_share
        }
        if (total := sum(shares.values())) > 1.0:
            names = ", ".join(sorted(shares))
            yield f"device_memory_share of {names} is {total:g} together: at most 1 is allowed on one {place}"
    rest = [one for one in of_device.items() if one[1].device_memory_share is None and not one[1].kv_cache_memory_mb]
    by_size = sorted((config.gpu_memory_utilization, name) for name, config in rest)  # their best order
    for (taken, holder), (part, name) in itertools.pairwise([(total, "shares"), *by_size] if total else by_size):
        needs = engines[name][1]
        taken_bytes = int(taken * needs.device_bytes)
        if left_of_utilization(part, needs.device_bytes, taken_bytes, needs.weights + needs.cache) < 0:
            yield (
                f"gpu_memory_utilization of {name} is {part:g}; {holder} may take {taken:g} of the GPU first: "
                "that counts and leaves no room; set device_memory_share of each engine"
            )
