"""CUDA graphs of decode-only steps for fixed batch sizes; a batch takes the next larger size.

Samplers are greedy, or by row with all filters; other changes of logits run eagerly. Large sizes have a second graph
without split contexts, for steps that need no split.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch

from tidewheel.batch import ScheduledBatch
from tidewheel.runner.accelerator import CapturedGraph, DeviceGraph, GraphPool
from tidewheel.runner.inputs import DeviceInputs, ForwardBounds, RowTable
from tidewheel.runner.sampler import draw_tokens
from tidewheel.runner.sampling_plan import greedy_columns
from tidewheel.runner.staging import InputSender
from tidewheel_kernels.launch_config import decode_splits, multiprocessors, splits_none

# From here a row is split only above 1,024 keys and twice the mean; at 24 rows, equal rows are split too.
LEAST_UNSPLIT = 64

Forward = Callable[[DeviceInputs, ForwardBounds], torch.Tensor]  # logits


def decode_sizes(max_num_rows: int) -> list[int]:
    """Return 1, 2, 4, 8, 16, 24, … (steps of 16 from 512, of 24 from 768, …), `max_num_rows`."""
    sizes, size = [], 1
    while size < max_num_rows:
        sizes.append(size)
        size += size if size < 8 else 8 * max(1, size // 256)
    return [*sizes, max_num_rows]


def unsplit_sizes(sizes: Sequence[int], num_kv_heads: int, max_model_len: int, device: torch.device) -> list[int]:
    large = [size for size in sizes if size >= LEAST_UNSPLIT]
    return [s for s in large if decode_splits(s, num_kv_heads, max_model_len, multiprocessors(device)).extra]


class DecodeGraph(NamedTuple):
    """Graphs of one batch size. A replay overwrites logits and tokens of all sizes."""

    num_rows: int
    inputs: DeviceInputs
    forward: DeviceGraph
    logits: torch.Tensor  # [num_rows, vocab_size]
    greedy: CapturedGraph[torch.Tensor]  # sampled ids [num_rows] int64
    drawn: CapturedGraph[torch.Tensor]

    def sample(self, *, any_sampled: bool) -> torch.Tensor:
        captured = self.drawn if any_sampled else self.greedy
        captured.graph.replay()
        return captured.output


class DecodeGraphs:
    def __init__(
        self,
        pool: GraphPool,
        forward: Forward,
        rows: RowTable,
        keys: torch.Tensor,  # [num_blocks, block_size, num_kv_heads, head_dim] of one layer
        sender: InputSender,
        max_model_len: int,
    ) -> None:
        self._pool = pool
        self._forward = forward
        self._rows = rows
        self._num_kv_heads, self._num_sms = keys.shape[2], multiprocessors(keys.device)
        self._sender = sender
        self._max_model_len = max_model_len
        self._of_count: list[DecodeGraph] = []
        self._unsplit: dict[int, DecodeGraph] = {}

    def capture(self, sizes: Sequence[int], tell: Callable[[int], None]) -> list[int]:
        """Return bytes by size, largest first; report finished graphs to `tell`."""
        graphs, taken = self._captured_all(sizes, tell, may_split=True)
        ascending = iter(reversed(graphs))
        graph = next(ascending)
        for count in range(1, graphs[0].num_rows + 1):
            graph = graph if count <= graph.num_rows else next(ascending)
            self._of_count.append(graph)
        return taken

    def capture_unsplit(self, sizes: Sequence[int], tell: Callable[[int], None]) -> list[int]:
        graphs, taken = self._captured_all(sizes, tell, may_split=False)
        self._unsplit = {graph.num_rows: graph for graph in graphs}
        return taken

    def find(self, batch: ScheduledBatch) -> DecodeGraph | None:
        count = len(batch.rows)
        if batch.num_decodes < count or count > len(self._of_count) or not batch.samples.all():
            return None
        graph = self._of_count[count - 1]
        unsplit = self._unsplit.get(graph.num_rows)
        if unsplit is None:
            return graph
        limits = decode_splits(graph.num_rows, self._num_kv_heads, self._max_model_len, self._num_sms)
        return unsplit if splits_none(batch.start_positions + 1, limits) else graph

    def _captured_all(
        self, sizes: Sequence[int], tell: Callable[[int], None], *, may_split: bool
    ) -> tuple[list[DecodeGraph], list[int]]:
        taken: list[int] = []
        graphs: list[DecodeGraph] = []
        for size in sorted(sizes, reverse=True):
            tell(len(graphs))
            before = self._pool.num_bytes
            graphs.append(self._captured(size, may_split))
            taken.append(self._pool.num_bytes - before)
        return graphs, taken

    def _captured(self, size: int, may_split: bool) -> DecodeGraph:
        sent = self._sender.send({"inputs": self._rows.padding(size), "draw": greedy_columns(size)})
        inputs, draw = DeviceInputs(*sent.group("inputs")), sent.group("draw")
        bounds = ForwardBounds(1, self._max_model_len, num_decodes=size, may_split=may_split)
        forward = self._pool.capture(lambda: self._forward(inputs, bounds))

        def sample(any_sampled: bool) -> torch.Tensor:
            token_ids = draw_tokens(forward.output, draw, (any_sampled,) * 4)
            self._rows.store(inputs.store_indices, token_ids)
            return token_ids

        captured = forward, *(self._pool.capture(partial(sample, any_sampled)) for any_sampled in (False, True))
        logits, greedy, drawn = (CapturedGraph(graph, self._pool.unowned(output)) for graph, output in captured)
        return DecodeGraph(size, inputs, logits.graph, logits.output, greedy, drawn)
