from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from tidewheel.batch import ScheduledBatch
from tidewheel.models.causal_lm import CausalLM, KVLayer, Progress, SplitLM
from tidewheel.runner.accelerator import GraphPool
from tidewheel.runner.decode_graphs import DecodeGraph, DecodeGraphs, Forward
from tidewheel.runner.inputs import RowTable
from tidewheel.runner.prompt_graphs import PromptGraph, PromptGraphs
from tidewheel.runner.staging import InputSender

STAGE = "graphs"


class GraphSizes(NamedTuple):
    decodes: Sequence[int] = ()  # rows
    prompts: Sequence[int] = ()  # tokens
    unsplit: Sequence[int] = ()  # rows, without splits

    def largest(self, count: int) -> GraphSizes:
        return GraphSizes(*(sizes[-count:] for sizes in self))


class GraphBytes(NamedTuple):
    decodes: Sequence[int] = ()
    prompts: Sequence[int] = ()
    unsplit: Sequence[int] = ()

    @property
    def total(self) -> int:
        return sum(map(sum, self))


class StepGraphs:
    def __init__(
        self,
        pool: GraphPool,
        model: CausalLM,
        forward: Forward,
        rows: RowTable,
        kv_layers: Sequence[KVLayer],
        sender: InputSender,
        max_model_len: int,
    ) -> None:
        self._decodes = DecodeGraphs(pool, forward, rows, kv_layers[0].keys, sender, max_model_len)
        self.prompts = PromptGraphs(pool, model, rows, kv_layers, sender) if isinstance(model, SplitLM) else None

    def capture(self, sizes: GraphSizes, progress: Progress) -> GraphBytes:
        """Capture graphs with padding rows, the largest first: smaller graphs reuse their memory."""
        num_decodes, num_prompts, num_unsplit = map(len, sizes)
        num_graphs = num_decodes + num_prompts + num_unsplit

        def tell(first: int) -> Callable[[int], None]:
            return lambda num_done: progress(STAGE, (first + num_done) / num_graphs)

        with _without_collections():
            of_decodes = self._decodes.capture(sizes.decodes, tell(0))
            of_unsplit = self._decodes.capture_unsplit(sizes.unsplit, tell(num_decodes))
            tell_prompts = tell(num_decodes + num_unsplit)
            of_prompts = self.prompts.capture(sizes.prompts, tell_prompts) if self.prompts is not None else []
        progress(STAGE, 1.0)
        return GraphBytes(of_decodes, of_prompts, of_unsplit)

    def find_decodes(self, batch: ScheduledBatch) -> DecodeGraph | None:
        return self._decodes.find(batch)

    def find_prompts(self, batch: ScheduledBatch) -> PromptGraph | None:
        return None if self.prompts is None else self.prompts.find(batch)


@contextmanager
def _without_collections() -> Iterator[None]:
    """Keep garbage collection from freeing memory that a capture needs."""
    was_enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
