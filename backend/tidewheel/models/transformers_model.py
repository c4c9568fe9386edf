"""Models that run through transformers, with attention over the paged cache.

transformers tells the attention function its layer, not its step: a context variable holds the step's attention.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from transformers import AttentionInterface
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tidewheel.errors import ConfigError
from tidewheel.models.architectures import NATIVE, check_offered, not_offered
from tidewheel.models.causal_lm import ForwardInput, KVLayer, ModelShape
from tidewheel.models.config_fields import ConfigFields
from tidewheel.models.model_folder import one_line
from tidewheel.models.trial_prompt import TOLERANCE, one_sequence, random_tokens, relative_difference
from tidewheel.models.weight_source import named
from tidewheel_kernels import AttentionMetadata, paged_attention, write_kv_cache

IMPLEMENTATION = "tidewheel"
NO_INTERFACE = "its attention does not go through transformers' interface"
NUM_TOKENS = 16
# Arguments that do not change the attention.
HARMLESS = frozenset({
    "cache_position", "dropout", "is_causal", "output_attentions", "output_hidden_states", "output_router_logits",
    "past_key_values", "position_embeddings", "position_ids", "return_dict", "use_cache",
})  # fmt: skip


class AttentionCall(NamedTuple):
    """Arguments of an attention function of transformers, by its names."""

    module: torch.nn.Module
    query: torch.Tensor  # [1, num_q_heads, T, head_dim], rotated
    key: torch.Tensor  # [1, num_kv_heads, T, head_dim], rotated
    value: torch.Tensor
    attention_mask: object
    scaling: float | None = None  # None: by the size of a head
    sliding_window: int | None = None
    softcap: float | None = None
    others: Mapping[str, object] = {}

    @property
    def layer(self) -> int:
        index = getattr(self.module, "layer_idx", None)
        if not isinstance(index, int):
            raise ValueError(f"{type(self.module).__name__} does not say which layer it is")
        return index


Attend = Callable[[AttentionCall], torch.Tensor]  # [T, num_q_heads, head_dim]
_step: ContextVar[Attend | None] = ContextVar("step", default=None)


@contextmanager
def attending(attend: Attend) -> Iterator[None]:
    before = _step.set(attend)
    try:
        yield
    finally:
        _step.reset(before)


def attention_forward(*arguments: Any, **named: Any) -> tuple[torch.Tensor, None]:
    attend = _step.get()
    if attend is None:
        raise ValueError("attention is called outside of a step")
    named["others"] = {name: named.pop(name) for name in named.keys() - set(AttentionCall._fields)}
    return attend(AttentionCall(*arguments, **named)).unsqueeze(0), None


AttentionInterface.register(IMPLEMENTATION, attention_forward)


def attend_paged(meta: AttentionMetadata, kv: KVLayer, call: AttentionCall) -> torch.Tensor:
    query, key, value = (x.squeeze(0).transpose(0, 1) for x in (call.query, call.key, call.value))
    write_kv_cache(key, value, meta.slot_mapping, kv.keys, kv.values, scales=kv.scales)
    scale = query.shape[-1] ** -0.5 if call.scaling is None else call.scaling
    return paged_attention(
        query, kv.keys, kv.values, meta,
        scale=scale, sliding_window=call.sliding_window or 0, soft_cap=call.softcap or 0.0, scales=kv.scales,
    )  # fmt: skip


def _run_paged(model: Any, inputs: dict[str, Any], device: torch.device) -> tuple[torch.Tensor, dict[int, KVLayer]]:
    """Return logits of one sequence, and each layer's cache, of one block. Raise `ValueError`."""
    caches: dict[int, KVLayer] = {}
    meta = one_sequence(NUM_TOKENS, NUM_TOKENS, device)

    def attend(call: AttentionCall) -> torch.Tensor:
        if call.layer in caches:
            raise ValueError(f"layer {call.layer} attends twice")
        _check_call(call, _expected_window(model.config, call.layer))
        shape = (1, NUM_TOKENS, call.key.shape[1], call.key.shape[3])
        caches[call.layer] = KVLayer(call.key.new_zeros(shape), call.key.new_zeros(shape))
        return attend_paged(meta, caches[call.layer], call)

    with attending(attend):
        return model(**inputs).logits.float(), caches


def _expected_window(config: Any, layer: int) -> int | None:
    """Return a layer's sliding window in tokens, 0 for none, None if unknown."""
    window = getattr(config, "sliding_window", None) or 0
    kinds = getattr(config, "layer_types", None)
    if kinds:
        return window if kinds[layer] == "sliding_attention" else 0
    return window if getattr(config, "use_sliding_window", True) else None


def _check_call(call: AttentionCall, window: int | None) -> None:
    others = [key for key, value in call.others.items() if key not in HARMLESS and value is not None]
    if others:
        raise ValueError(f"its attention takes {', '.join(sorted(others))}, which paged attention does not know")
    if call.attention_mask is not None:
        raise ValueError("it makes an attention mask of its own")
    if not getattr(call.module, "is_causal", True) or call.others.get("is_causal") is False:
        raise ValueError("its attention is not causal")
    if call.key.shape != call.value.shape:
        raise ValueError("its values are not as wide as its keys")
    if window is not None and (found := call.sliding_window or 0) != window:
        raise ValueError(f"layer {call.layer} has a window of {found}, its configuration says {window}")


def probe(model: Any, name: str, device: torch.device) -> ModelShape:
    """Return the model's sizes.

    Raise `ConfigError` if paged attention changes logits of a few tokens, as hidden biases, sinks and masks would.
    """
    inputs = {
        "input_ids": random_tokens(NUM_TOKENS, model.config.vocab_size, device).unsqueeze(0),
        "position_ids": torch.arange(NUM_TOKENS, device=device).unsqueeze(0),
        "use_cache": False,
    }
    try:
        paged, caches = _run_paged(model, inputs, device)
    except (AttributeError, IndexError, KeyError, NotImplementedError, RuntimeError, TypeError, ValueError) as error:
        raise ConfigError(f"{name} cannot run with paged attention: {one_line(error)}") from error
    if not caches:
        raise not_offered(name, NO_INTERFACE)
    layers = sorted(caches)
    if layers != list(range(model.config.num_hidden_layers)):
        raise not_offered(name, f"{len(layers)} of {model.config.num_hidden_layers} layers attend")
    model.set_attn_implementation("eager")
    difference = relative_difference(paged, model(**inputs).logits.float())
    model.set_attn_implementation(IMPLEMENTATION)
    limit = TOLERANCE[model.dtype]
    if not difference <= limit:
        raise not_offered(name, f"paged attention changes its logits by {difference:.2g}, at most {limit} is right")
    vocab_size, num_embeddings = paged.shape[-1], model.get_input_embeddings().weight.shape[0]
    if num_embeddings < vocab_size:
        raise not_offered(name, f"it has logits of {vocab_size} tokens, embeddings of {num_embeddings}")
    if len({kv.keys.shape for kv in caches.values()}) != 1:
        raise not_offered(name, "its layers keep keys of different shapes")
    _, _, num_kv_heads, head_dim = caches[0].keys.shape
    hidden_size = model.config.hidden_size
    intermediate_size = getattr(model.config, "intermediate_size", None) or 4 * hidden_size
    return ModelShape(len(layers), num_kv_heads, head_dim, vocab_size, hidden_size, intermediate_size)


# Keys that choose an implementation, some of which fetch code.
IMPLEMENTATION_KEYS = ("attn_implementation", "experts_implementation")


class TransformersModel:
    is_capturable = False  # a trial decides

    def __init__(self, model: Any, name: str, device: torch.device) -> None:
        self._model = model
        self.shape = probe(model, name, device)
        self.weights_bytes = sum(parameter.nbytes for parameter in model.parameters())

    def forward(self, step: ForwardInput) -> torch.Tensor:
        with attending(lambda call: attend_paged(step.meta, step.kv_layers[call.layer], call)):
            logits: torch.Tensor = self._model(
                input_ids=step.token_ids.long().unsqueeze(0),
                position_ids=step.positions.unsqueeze(0),
                use_cache=False,
                logits_to_keep=step.logit_indices,
            ).logits
        return logits.squeeze(0)

    def forward_with_states(self, step: ForwardInput, indices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return logits, and as states the logits [P, vocab_size] of tokens `indices` [P] int64."""
        both = self.forward(step._replace(logit_indices=torch.cat((step.logit_indices, indices))))
        logits, states = both.tensor_split([len(step.logit_indices)])
        return logits, states

    def logits_of(self, states: torch.Tensor) -> torch.Tensor:
        return states


def transformers_config(fields: ConfigFields) -> tuple[Any, Any]:
    name = fields.architecture
    offered = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
    if not any(name in ((names,) if isinstance(names, str) else names) for names in offered):
        raise ConfigError(
            f"{fields.where}: architecture {name!r} is unknown; offered are {', '.join(NATIVE)} "
            "and the causal decoders of transformers"
        )
    cls = getattr(transformers, name)
    values = {k: v for k, v in fields.values.items() if not k.startswith("_") and k not in IMPLEMENTATION_KEYS}
    try:
        config = cls.config_class.from_dict(values)
    except Exception as error:
        raise ConfigError(f"{fields.where}: transformers refuses it for {name}: {one_line(error)}") from error
    check_offered(cls, config)
    return cls, config


@torch.inference_mode()
def load_transformers_model(
    cls: Any, config: Any, folder: Path, seed: int | None, dtype: torch.dtype, device: torch.device
) -> TransformersModel:
    """Load the folder's validated weights, or random ones from `seed`. Raise `ConfigError`."""
    try:
        if seed is None:
            transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
            model, found = cls.from_pretrained(
                folder, config=config, dtype=dtype, attn_implementation=IMPLEMENTATION, use_safetensors=True,
                local_files_only=True, trust_remote_code=False, output_loading_info=True,
            )  # fmt: skip
        else:
            torch.manual_seed(seed)
            found = {}
            with device:
                model = cls._from_config(config, dtype=dtype, attn_implementation=IMPLEMENTATION)
    except Exception as error:
        if isinstance(error, KeyError) and error.args == (IMPLEMENTATION,):  # own attention table
            raise not_offered(cls.__name__, NO_INTERFACE) from error
        raise ConfigError(f"{folder}: transformers cannot load {cls.__name__}: {one_line(error)}") from error
    if missing := found.get("missing_keys"):
        raise ConfigError(f"{folder}: the checkpoint lacks {named(missing)}")
    if unexpected := found.get("unexpected_keys"):
        raise ConfigError(f"{folder}: the checkpoint has {named(unexpected)}, which has no place")
    return TransformersModel(model.to(device).eval().requires_grad_(False), cls.__name__, device)
