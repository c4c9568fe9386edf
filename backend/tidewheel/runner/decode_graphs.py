"""CUDA graphs of decode-only steps for some batch sizes; a batch takes the next larger size.

Each size has a forward pass and two samplers: greedy, or by row with all filters. Biases, penalties and
log-probabilities run eagerly on the graph's logits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch

from tidewheel.batch import ScheduledBatch
from tidewheel.runner.accelerator import Captured, Graph, GraphPool
from tidewheel.runner.inputs import Bounds, DeviceInputs, RowTable
from tidewheel.runner.sampler import draw_tokens
from tidewheel.runner.sampling_plan import greedy_columns
from tidewheel.runner.staging import Sender

Forward = Callable[[DeviceInputs, Bounds], torch.Tensor]  # logits


def decode_sizes(max_num_rows: int) -> list[int]:
    """Return 1, 2, 4, 8, 16, 24, … (16 apart from 512, 24 from 768, …), `max_num_rows`."""
    sizes, size = [], 1
    while size < max_num_rows:
        sizes.append(size)
        size += size if size < 8 else 8 * max(1, size // 256)
    return [*sizes, max_num_rows]


class DecodeGraph(NamedTuple):
    """Graphs of one batch size. A replay overwrites logits and tokens of all sizes."""

    num_rows: int
    inputs: DeviceInputs  # read by the graphs
    forward: Graph
    logits: torch.Tensor  # [num_rows, vocab_size]
    greedy: Captured[torch.Tensor]  # samplers store tokens in their rows and output ids, [num_rows] int64
    drawn: Captured[torch.Tensor]

    def sample(self, *, any_sampled: bool) -> torch.Tensor:
        captured = self.drawn if any_sampled else self.greedy
        captured.graph.replay()
        return captured.output


class DecodeGraphs:
    def __init__(self, pool: GraphPool, forward: Forward, rows: RowTable, sender: Sender, max_model_len: int) -> None:
        self._pool = pool
        self._forward = forward
        self._rows = rows
        self._sender = sender
        self._max_model_len = max_model_len
        self._of_count: list[DecodeGraph] = []  # index: number of rows - 1

    def capture(self, sizes: Sequence[int], tell: Callable[[int], None]) -> list[int]:
        """Return bytes by size, largest first. Tell how many are done."""
        taken: list[int] = []
        graphs: list[DecodeGraph] = []
        for size in sorted(sizes, reverse=True):
            tell(len(graphs))
            before = self._pool.num_bytes
            graphs.append(self._captured(size))
            taken.append(self._pool.num_bytes - before)
        ascending = iter(reversed(graphs))
        graph = next(ascending)
        for count in range(1, graphs[0].num_rows + 1):
            graph = graph if count <= graph.num_rows else next(ascending)
            self._of_count.append(graph)
        return taken

    def find(self, batch: ScheduledBatch) -> DecodeGraph | None:
        """Return the graph of a step that only decodes and samples all its rows, if they are not too many."""
        count = len(batch.rows)
        if batch.num_decodes < count or count > len(self._of_count) or not batch.samples.all():
            return None
        return self._of_count[count - 1]

    def _captured(self, size: int) -> DecodeGraph:
        sent = self._sender.send({"inputs": self._rows.padding(size), "draw": greedy_columns(size)})
        inputs, draw = DeviceInputs(*sent.group("inputs")), sent.group("draw")
        bounds = Bounds(max_seqlen_q=1, max_seq_len=self._max_model_len, num_decodes=size)
        forward = self._pool.capture(lambda: self._forward(inputs, bounds))

        def sample(any_sampled: bool) -> torch.Tensor:
            token_ids = draw_tokens(forward.output, draw, (any_sampled,) * 4)
            self._rows.store(inputs.store_indices, token_ids)
            return token_ids

        captured = forward, *(self._pool.capture(partial(sample, any_sampled)) for any_sampled in (False, True))
        logits, greedy, drawn = (Captured(graph, self._pool.unowned(output)) for graph, output in captured)
        return DecodeGraph(size, inputs, logits.graph, logits.output, greedy, drawn)
