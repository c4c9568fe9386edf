"""Shapes of decoders, and the least seconds of their steps: bytes over bandwidth or operations over arithmetic.

The roofline model (Williams, Waterman, Patterson, "Roofline", CACM 2009). Every step streams the weights, without the
embedding table; every decode reads its context's keys and values. No gap between kernels or on the host is counted.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

ELEMENT_BYTES = 2


@dataclass(frozen=True)
class Shape:
    """Sizes of a decoder, a Qwen3 if `qk_norm`, else a Llama."""

    hidden: int
    layers: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    tied: bool
    qk_norm: bool
    rope_theta: float
    context: int = 40_960

    @property
    def num_layer_weights(self) -> int:
        """Count attention's four projections and the gated MLP's three, in all layers."""
        qkv = self.hidden * (self.heads + 2 * self.kv_heads) * self.head_dim
        output = self.heads * self.head_dim * self.hidden
        return self.layers * (qkv + output + 3 * self.hidden * self.intermediate)

    @property
    def num_head_weights(self) -> int:
        return self.vocab * self.hidden


SHAPES = {
    "tiny": Shape(64, 2, 128, 4, 2, 16, 512, True, True, 1e6, 4096),
    "qwen3-40m": Shape(512, 8, 1536, 8, 4, 64, 32_000, True, True, 1e6),
    "smollm2-135m": Shape(576, 30, 1536, 9, 3, 64, 49_152, True, False, 1e5, 8192),
    "qwen3-0.6b": Shape(1024, 28, 3072, 16, 8, 128, 151_936, True, True, 1e6),
    "qwen3-8b": Shape(4096, 36, 12_288, 32, 8, 128, 151_936, False, True, 1e6),
    "llama-3.1-8b": Shape(4096, 32, 14_336, 32, 8, 128, 128_256, False, False, 5e5, 131_072),
}


def part_of(shape: Shape, num_ranks: int) -> Shape:
    """Return what a rank holds of a shape; several ranks hold the same key-value head if there are too few."""
    return replace(
        shape,
        intermediate=shape.intermediate // num_ranks,
        heads=shape.heads // num_ranks,
        kv_heads=max(shape.kv_heads // num_ranks, 1),
        vocab=shape.vocab // num_ranks,
    )


@dataclass(frozen=True, slots=True)
class Device:
    """Reachable ceilings, below the data sheet's; measured on an H200 by default."""

    copy_bandwidth: float = 4.3e12  # bytes per second, read and written
    flops: float = 790e12  # bf16 operations per second; a multiply-add is two


H200 = Device()


def weights_bytes(shape: Shape) -> int:
    return (shape.num_layer_weights + shape.num_head_weights) * ELEMENT_BYTES


def kv_bytes_per_token(shape: Shape) -> int:
    return 2 * shape.layers * shape.kv_heads * shape.head_dim * ELEMENT_BYTES


def activation_bytes(shape: Shape, num_tokens: int) -> int:
    """Return bytes of float32 logits and two-byte values between layers."""
    qkv = (shape.heads + 2 * shape.kv_heads) * shape.head_dim
    layer = 2 * (4 * shape.hidden + 2 * qkv + 3 * shape.intermediate)
    return num_tokens * (4 * shape.vocab + shape.layers * layer)


def attention_flops(shape: Shape, num_positions: float) -> float:
    """Count scores and their product with values, over `num_positions` of all queries."""
    return 4 * shape.layers * shape.heads * shape.head_dim * num_positions


def decode_seconds(shape: Shape, batch: int, context: float, device: Device = H200) -> float:
    """Return the seconds of a step of `batch` requests with a mean `context`."""
    moved = weights_bytes(shape) + batch * context * kv_bytes_per_token(shape) + activation_bytes(shape, batch)
    products = 2 * batch * (shape.num_layer_weights + shape.num_head_weights)
    return max(moved / device.copy_bandwidth, (products + attention_flops(shape, batch * context)) / device.flops)


def prefill_seconds(
    shape: Shape, num_tokens: Sequence[int], device: Device = H200, *, num_cached: Sequence[int] = ()
) -> float:
    """Return the seconds of causal prompts in one step, bound by arithmetic, without the output layer."""
    cached = num_cached or [0] * len(num_tokens)
    num_positions = sum(new * (old + new / 2) for new, old in zip(num_tokens, cached, strict=True))
    return (2 * shape.num_layer_weights * sum(num_tokens) + attention_flops(shape, num_positions)) / device.flops


def workload_seconds(
    shape: Shape, lengths: Sequence[tuple[int, int]], max_num_seqs: int, device: Device = H200
) -> float:
    """Return the seconds of (input, output) requests that all wait at the start.

    As many run as may, with room for all. Prompts never share a step's weights with decodes.
    """
    waiting = deque(lengths)
    running: list[list[int]] = []  # context, tokens to come
    seconds = 0.0
    while waiting or running:
        joining = [waiting.popleft() for _ in range(min(len(waiting), max_num_seqs - len(running)))]
        if joining:
            seconds += prefill_seconds(shape, [num_input for num_input, _ in joining], device)
            running += [[num_input + 1, num_output - 1] for num_input, num_output in joining]
        running = [row for row in running if row[1] > 0]
        if running:
            context = sum(row[0] for row in running) / len(running)
            seconds += decode_seconds(shape, len(running), context, device)
            for row in running:
                row[0] += 1
                row[1] -= 1
    return seconds
