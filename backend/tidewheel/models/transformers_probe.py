"""Load-time proof that paged attention computes the model's attention.

A few tokens run with paged attention and with transformers' own, and the logits must agree. This finds biases, sinks
and masks that do not arrive as arguments, which no list of names can.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch

from tidewheel.errors import ConfigError
from tidewheel.models.base import KVLayer
from tidewheel.models.config_file import one_line
from tidewheel.models.transformers_attention import IMPLEMENTATION, AttentionCall, AttentionSlot, PagedAttention
from tidewheel.models.transformers_checks import expected_window
from tidewheel_kernels import AttentionMetadata

NO_INTERFACE = "its attention does not go through transformers' interface"
NUM_TOKENS = 16
# Limit of the RMS difference of logits, relative to their RMS.
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.05}
# Bookkeeping arguments; any other one that is set changes the attention.
HARMLESS = frozenset({
    "cache_position", "dropout", "is_causal", "output_attentions", "output_hidden_states", "output_router_logits",
    "past_key_values", "position_embeddings", "position_ids", "return_dict", "use_cache",
})  # fmt: skip


class Probe(PagedAttention):
    """Attention of one sequence, with a cache made at each layer's first call."""

    def __init__(self, config: Any, device: torch.device) -> None:
        self.caches: dict[int, KVLayer] = {}
        self._config = config
        super().__init__(_one_sequence(device), self.caches)  # type: ignore[arg-type]

    def attend(self, call: AttentionCall) -> torch.Tensor:
        if call.layer in self.caches:
            raise ValueError(f"layer {call.layer} attends twice")
        _check_call(call, expected_window(self._config, call.layer))
        num_kv_heads, head_dim = call.key.shape[1], call.key.shape[3]
        shape = (1, NUM_TOKENS, num_kv_heads, head_dim)  # one block
        self.caches[call.layer] = (call.key.new_zeros(shape), call.key.new_zeros(shape))
        return super().attend(call)


def _one_sequence(device: torch.device) -> AttentionMetadata:
    bounds, length = np.array([0, NUM_TOKENS], dtype=np.int32), np.array([NUM_TOKENS], dtype=np.int32)
    return AttentionMetadata(
        slot_mapping=torch.arange(NUM_TOKENS, device=device),
        block_tables=torch.zeros(1, 1, dtype=torch.int32, device=device),
        cu_seqlens_q=torch.from_numpy(bounds).to(device),
        seq_lens=torch.from_numpy(length).to(device),
        max_seqlen_q=NUM_TOKENS,
        max_seq_len=NUM_TOKENS,
        num_decodes=0,
        cu_seqlens_q_cpu=bounds,
        seq_lens_cpu=length,
    )


def _check_call(call: AttentionCall, window: int | None) -> None:
    others = [key for key, value in call.others.items() if key not in HARMLESS and value is not None]
    if others:
        raise ValueError(f"its attention takes {', '.join(sorted(others))}, which paged attention does not know")
    if call.mask is not None:
        raise ValueError("it makes an attention mask of its own")
    if not getattr(call.module, "is_causal", True) or call.others.get("is_causal") is False:
        raise ValueError("its attention is not causal")
    if call.key.shape != call.value.shape:
        raise ValueError("its values are not as wide as its keys")
    if window is not None and call.sliding_window != window:
        raise ValueError(f"layer {call.layer} has a window of {call.sliding_window}, its configuration says {window}")


class ProbeResult(NamedTuple):
    kv_shapes: list[tuple[int, int]]  # num_kv_heads and head_dim of each layer
    vocab_size: int  # width of the logits


def probe(model: Any, slot: AttentionSlot, name: str, device: torch.device) -> ProbeResult:
    """Raise `ConfigError` if paged attention cannot run the model."""
    generator = torch.Generator().manual_seed(0)
    token_ids = torch.randint(0, model.config.vocab_size, (1, NUM_TOKENS), generator=generator).to(device)
    inputs = {
        "input_ids": token_ids,
        "position_ids": torch.arange(NUM_TOKENS, device=device).unsqueeze(0),
        "use_cache": False,
    }
    probed = Probe(model.config, device)
    try:
        with slot.holding(probed):
            paged = model(**inputs).logits.float()
    except (AttributeError, IndexError, KeyError, NotImplementedError, RuntimeError, TypeError, ValueError) as error:
        raise ConfigError(f"{name} cannot run with paged attention: {one_line(error)}") from error
    if not probed.caches:
        raise ConfigError(f"{name} is not offered: {NO_INTERFACE}")
    layers = sorted(probed.caches)
    if layers != list(range(model.config.num_hidden_layers)):
        raise ConfigError(f"{name} is not offered: {len(layers)} of {model.config.num_hidden_layers} layers attend")
    model.set_attn_implementation("eager")
    difference = _relative_difference(paged, model(**inputs).logits.float())
    model.set_attn_implementation(IMPLEMENTATION)
    limit = TOLERANCE[model.dtype]
    if not difference <= limit:
        raise ConfigError(
            f"{name} is not offered: paged attention changes its logits by {difference:.2g}, at most {limit} is right"
        )
    keys = [probed.caches[layer][0] for layer in layers]
    return ProbeResult([(key.shape[2], key.shape[3]) for key in keys], paged.shape[-1])


def _relative_difference(values: torch.Tensor, expected: torch.Tensor) -> float:
    return float((values - expected).square().mean().sqrt() / expected.square().mean().sqrt().clamp(min=1e-20))
