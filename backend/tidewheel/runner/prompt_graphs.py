"""CUDA graphs of steps with prompts: the parts between attentions, for fixed numbers of tokens.

Attention depends on prompt lengths and stays outside. A step takes the next larger number; padding writes no key.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch

from tidewheel.batch import ScheduledBatch
from tidewheel.models.causal_lm import AttentionInput, KVLayer, SplitLayer, SplitLM, TokenLocations
from tidewheel.runner.accelerator import DeviceGraph, GraphPool
from tidewheel.runner.inputs import DeviceInputs, RowTable
from tidewheel.runner.staging import InputSender
from tidewheel_kernels import AttentionMetadata

MOST_TOKENS = 2048  # beyond, device time hides launches
FINE_STEP, FINE_TOKENS = 16, 128
STEP = 64  # matrix products compute tiles of about 64 rows


def prompt_sizes(max_num_tokens: int) -> list[int]:
    """Return 16, 32, …, 128, 192, … up to the first size of at least `max_num_tokens`."""
    sizes = [*range(FINE_STEP, FINE_TOKENS, FINE_STEP), *range(FINE_TOKENS, MOST_TOKENS + 1, STEP)]
    return sizes[: bisect_left(sizes, max_num_tokens) + 1]


class PromptGraph(NamedTuple):
    """Graphs of one number of tokens: before, between and after attentions."""

    num_tokens: int
    model: SplitLM
    kv_layers: Sequence[KVLayer]
    pieces: list[DeviceGraph]
    queries: list[torch.Tensor]  # [num_tokens, num_q_heads, head_dim] before each attention
    attended: torch.Tensor  # same shape, after it
    x: torch.Tensor  # [num_tokens, hidden_size] after the last layer
    residual: torch.Tensor

    def logits(self, meta: AttentionMetadata, num_tokens: int, logit_indices: torch.Tensor) -> torch.Tensor:
        """Run a step whose padded inputs have been sent; return logits [S, vocab_size]."""
        first, *others = self.pieces
        attended = self.attended[:num_tokens]
        first.replay()
        for layer, kv, queries, piece in zip(self.model.layers, self.kv_layers, self.queries, others, strict=True):
            layer.attend(queries[:num_tokens], meta, kv, out=attended)
            piece.replay()
        return self.model.logits(self.x, self.residual, logit_indices)


class PromptGraphs:
    def __init__(
        self, pool: GraphPool, model: SplitLM, rows: RowTable, kv_layers: Sequence[KVLayer], sender: InputSender
    ) -> None:
        self._pool = pool
        self._model = model
        self._rows = rows
        self._kv_layers = kv_layers
        self._sender = sender
        self._graphs: list[PromptGraph] = []  # ascending

    def capture(self, sizes: Sequence[int], tell: Callable[[int], None]) -> list[int]:
        """Return bytes by size, largest first; report finished graphs to `tell`."""
        taken: list[int] = []
        attended: torch.Tensor | None = None
        for size in sorted(sizes, reverse=True):
            tell(len(taken))
            before = self._pool.num_bytes
            graph = self._captured(size, attended)
            attended = graph.attended
            self._graphs.insert(0, graph)
            taken.append(self._pool.num_bytes - before)
        return taken

    def find(self, batch: ScheduledBatch) -> PromptGraph | None:
        index = bisect_left(self._graphs, batch.num_tokens, key=lambda graph: graph.num_tokens)
        return self._graphs[index] if index < len(self._graphs) else None

    def _captured(self, size: int, attended: torch.Tensor | None) -> PromptGraph:
        pool, model, kv_layers = self._pool, self._model, self._kv_layers
        inputs = DeviceInputs(*self._sender.send({"inputs": self._rows.padding(0, size)}).group("inputs"))
        places = TokenLocations(inputs.positions, inputs.slot_mapping)

        def begin() -> AttentionInput:
            x = model.embed(self._rows.known_tokens_at(inputs.token_indices, model.shape.vocab_size))
            return model.layers[0].begin(x, None, places, kv_layers[0])

        def go_on(
            before: SplitLayer, after: SplitLayer, kv: KVLayer, attended: torch.Tensor, cut: AttentionInput
        ) -> AttentionInput:
            return after.begin(*before.end(attended, cut.residual), places, kv)

        graph, cut = pool.capture(begin)
        # Outside the pool, as it is written between replays. Larger graphs have room for smaller ones.
        attended = torch.zeros_like(cut.queries) if attended is None else attended[:size]
        pieces, queries = [graph], [pool.unowned(cut.queries)]
        for before, after, kv in zip(model.layers, model.layers[1:], kv_layers[1:], strict=False):
            graph, cut = pool.capture(partial(go_on, before, after, kv, attended, cut))
            pieces.append(graph)
            queries.append(pool.unowned(cut.queries))
        graph, (x, residual) = pool.capture(partial(model.layers[-1].end, attended, cut.residual))
        x, residual = pool.unowned(x), pool.unowned(residual)
        return PromptGraph(size, model, kv_layers, [*pieces, graph], queries, attended, x, residual)
