"""Least cost of a step: bytes over bandwidth or operations over arithmetic, whichever is longer.

The roofline model (Williams, Waterman, Patterson, "Roofline", CACM 2009) for a decoder: every step streams the
weights once, without the embedding table; every decode reads its context's keys and values. Gaps between kernels and
on the host are left out, so measured steps take at least this long.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ModelShape:
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    bytes_per_weight: int = 2
    bytes_per_kv_element: int = 2

    @property
    def num_layer_weights(self) -> int:
        """Attention's four projections and the gated MLP's three, in all layers, without norms."""
        qkv = self.hidden_size * (self.num_heads + 2 * self.num_kv_heads) * self.head_dim
        output = self.num_heads * self.head_dim * self.hidden_size
        mlp = 3 * self.hidden_size * self.intermediate_size
        return self.num_layers * (qkv + output + mlp)

    @property
    def num_head_weights(self) -> int:
        return self.vocab_size * self.hidden_size


@dataclass(frozen=True, slots=True)
class Device:
    """Reachable ceilings, below the data sheet's; measured on an H200 by default."""

    copy_bandwidth: float = 4.3e12  # bytes per second, read and written
    flops: float = 790e12  # bf16 operations per second; a multiply-add is two


MODELS = {
    "qwen3-0.6b": ModelShape(28, 1024, 16, 8, 128, 3072, 151_936),
    "llama-3.1-8b": ModelShape(32, 4096, 32, 8, 128, 14_336, 128_256),
    "qwen3-8b": ModelShape(36, 4096, 32, 8, 128, 12_288, 151_936),
}
H200 = Device()


def weights_bytes(shape: ModelShape) -> int:
    return (shape.num_layer_weights + shape.num_head_weights) * shape.bytes_per_weight


def kv_bytes_per_token(shape: ModelShape) -> int:
    return 2 * shape.num_layers * shape.num_kv_heads * shape.head_dim * shape.bytes_per_kv_element


def activation_bytes(shape: ModelShape, num_tokens: int) -> int:
    """Return bytes of a decode step's float32 logits and two-byte values between layers."""
    qkv = (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim
    layer = 2 * (4 * shape.hidden_size + 2 * qkv + 3 * shape.intermediate_size)
    return num_tokens * (4 * shape.vocab_size + shape.num_layers * layer)


def attention_flops(shape: ModelShape, num_positions: float) -> float:
    """Count scores and their product with values, over `num_positions` of all queries."""
    return 4 * shape.num_layers * shape.num_heads * shape.head_dim * num_positions


def decode_seconds(shape: ModelShape, batch: int, context: float, device: Device = H200) -> float:
    """Return the seconds of a step of `batch` requests with a mean `context`."""
    moved = weights_bytes(shape) + batch * context * kv_bytes_per_token(shape) + activation_bytes(shape, batch)
    products = 2 * batch * (shape.num_layer_weights + shape.num_head_weights)
    return max(moved / device.copy_bandwidth, (products + attention_flops(shape, batch * context)) / device.flops)


def prefill_seconds(
    shape: ModelShape, num_tokens: Sequence[int], device: Device = H200, *, num_cached: Sequence[int] = ()
) -> float:
    """Return the seconds of causal prompts in one step, by new and cached tokens (default 0).

    Bound by arithmetic; the output layer, which only last tokens need, is not counted.
    """
    cached = num_cached or [0] * len(num_tokens)
    num_positions = sum(new * (old + new / 2) for new, old in zip(num_tokens, cached, strict=True))
    return (2 * shape.num_layer_weights * sum(num_tokens) + attention_flops(shape, num_positions)) / device.flops


def workload_seconds(
    shape: ModelShape, lengths: Sequence[tuple[int, int]], max_num_seqs: int, device: Device = H200
) -> float:
    """Return the seconds of (input, output) requests that all wait at the start.

    As many run as may; a prefill gives a prompt's first token, every step one to all others. Room for keys and values
    is unlimited, and prefill never shares a step's weights with decodes.
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
