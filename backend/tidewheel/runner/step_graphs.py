"""CUDA graphs of steps, for fixed sizes; a step takes the next larger size.

Decode steps: graphs of the forward pass, greedy sampling, and sampling with all filters; penalties, biases and masks
run eagerly. Large sizes have second graphs, whose attention splits no context. Prompt steps: graphs of the parts
between attentions, which run eagerly. Padding tokens write no keys.
"""

import gc
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

import numpy as np
import torch

from tidewheel.batch import Int32Array, ScheduledBatch, no_ids
from tidewheel.lora import NO_SLOT, LoraLoad
from tidewheel.models.causal_lm import AttentionInput, CausalLM, ForwardInput, KVLayer, Progress, TokenLocations
from tidewheel.models.decoder import Decoder, DecoderLayer
from tidewheel.models.shard import Shard
from tidewheel.runner.accelerator import CapturedGraph, CudaGraphPool
from tidewheel.runner.encoder_cache import EncoderCache
from tidewheel.runner.inputs import (
    DeviceArrays,
    DeviceInputs,
    ForwardBounds,
    Groups,
    InputSender,
    RowTable,
    StepInputs,
)
from tidewheel.runner.sampler import draw_tokens, largest_of_ranks
from tidewheel.runner.sampling_plan import greedy_columns
from tidewheel_kernels import AttentionMetadata
from tidewheel_kernels.launch_config import decode_splits, multiprocessors, splits_none
from tidewheel_kernels.lora import TILE, LoraGroups, group_tokens, max_tiles

STAGE = "graphs"
# From here a row is split only above 1,024 keys and twice the mean; at 24 rows, equal rows are split too.
LEAST_UNSPLIT = 64
MOST_TOKENS = 8192  # launches of a small model take as long as its layers: with 2,048, 0.6B left an H100 14 % idle
FINE_STEP, FINE_TOKENS = 16, 128
STEP, STEP_TOKENS = 64, 2048  # matrix products compute tiles of about 64 rows
COARSE_STEP = 256

HostGroups = tuple[Int32Array, Int32Array]  # tokens and slots of `LoraGroups`, on the host


class StepModel(NamedTuple):
    model: CausalLM
    rows: RowTable
    kv_layers: Sequence[KVLayer]
    encoder: EncoderCache | None = None
    shard: Shard = Shard()

    def input(self, sent: DeviceArrays, bounds: ForwardBounds) -> ForwardInput:
        inputs, lora = StepInputs(*sent["inputs"]), LoraGroups(*sent["lora"]) if sent["lora"] else None
        token_ids = self.rows.known_tokens_at(inputs.token_indices, self.model.shape.vocab_size)
        meta = self.rows.metadata(inputs, bounds)
        encoded = None if self.encoder is None else self.encoder.input(inputs)
        return ForwardInput(token_ids, inputs.positions, meta, self.kv_layers, inputs.logit_indices, encoded, lora)

    def forward(self, sent: DeviceArrays, bounds: ForwardBounds) -> torch.Tensor:
        return self.model.forward(self.input(sent, bounds))


class GraphSizes(NamedTuple):
    decodes: Sequence[int] = ()  # rows
    prompts: Sequence[int] = ()  # tokens
    unsplit: Sequence[int] = ()  # rows, without splits


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


def prompt_sizes(max_num_tokens: int) -> list[int]:
    """Return 16, 32, …, 128, 192, …, 2048, 2304, … up to the first size of at least `max_num_tokens`."""
    fine, coarse = range(FINE_STEP, FINE_TOKENS, FINE_STEP), range(STEP_TOKENS, MOST_TOKENS + 1, COARSE_STEP)
    sizes = [*fine, *range(FINE_TOKENS, STEP_TOKENS, STEP), *coarse]
    return sizes[: bisect_left(sizes, max_num_tokens) + 1]


class LoraStacks:
    """Slots of a model's layers for adapters; it also groups the tokens of a step by slot."""

    def __init__(self, model: Decoder) -> None:
        self.model = model
        self._stacks = [(linear.name, linear.lora) for linear in model.lora_linears if linear.lora is not None]
        *_, self._max_loras, self.max_rank = self._stacks[0][1].sizes
        self._slots, self._groups = no_ids(), (no_ids(), no_ids())  # of the tokens of the last step with adapters

    @classmethod
    def of(cls, model: CausalLM) -> "LoraStacks | None":
        """Return the stacks of a model, None if it has none."""
        return cls(model) if isinstance(model, Decoder) and model.lora_linears[0].lora is not None else None

    def load(self, loads: Sequence[LoraLoad]) -> None:
        """Fill slots. A device copies in the order of its steps, so this waits for none of them."""
        for slot, lora in loads:
            for name, stack in self._stacks:
                stack.set(slot, lora.weights.by_layer[name])

    def num_bytes(self, num_tokens: int) -> int:
        """Return the size of a step's groups."""
        return max_tiles(num_tokens, self._max_loras) * (TILE + 1) * np.dtype(np.int32).itemsize

    def groups(self, slots: Int32Array, num_tokens: int) -> HostGroups:
        """Return the groups of tokens with these slots, and of padding without an adapter up to `num_tokens`."""
        slots = np.concatenate((slots, np.full(num_tokens - len(slots), NO_SLOT, np.int32)))
        if not np.array_equal(slots, self._slots):  # decode steps often repeat the last one's
            self._groups = group_tokens(slots, max_tiles(num_tokens, self._max_loras))
            self._slots = slots
        return self._groups


class DecodeGraph(NamedTuple):
    """CUDA graphs of one batch size. A replay overwrites logits and tokens of all sizes."""

    num_rows: int
    inputs: DeviceInputs
    forward: CapturedGraph[torch.Tensor]  # logits [num_rows, vocab_size], or this rank's part of them
    greedy: CapturedGraph[torch.Tensor]  # sampled ids [num_rows] int64
    drawn: CapturedGraph[torch.Tensor]


class PromptGraph(NamedTuple):
    """CUDA graphs of one number of prompt tokens: before, between and after the layers' attentions."""

    num_tokens: int
    model: Decoder
    kv_layers: Sequence[KVLayer]
    pieces: list[torch.cuda.CUDAGraph]
    queries: list[torch.Tensor]  # [num_tokens, num_q_heads, head_dim] before each attention
    attended: torch.Tensor  # same shape, after it
    x: torch.Tensor  # [num_tokens, hidden_size] after the last layer
    residual: torch.Tensor

    def logits(self, meta: AttentionMetadata, num_tokens: int, logit_indices: torch.Tensor) -> torch.Tensor:
        """Return logits of `logit_indices`, as `CausalLM.forward` does, from padded inputs on the device."""
        first, *others = self.pieces
        attended = self.attended[:num_tokens]
        first.replay()
        for layer, kv, queries, piece in zip(self.model.layers, self.kv_layers, self.queries, others, strict=True):
            layer.attend(queries[:num_tokens], meta, kv, out=attended)
            piece.replay()
        return self.model.logits(self.x, self.residual, logit_indices)


class StepGraphs:
    """Graphs of steps in which rows have adapters, or, without `lora`, none has."""

    def __init__(
        self, pool: CudaGraphPool, steps: StepModel, sender: InputSender, max_model_len: int,
        *, lora: LoraStacks | None = None,
    ) -> None:  # fmt: skip
        self._pool = pool
        self._steps = steps
        self._sender = sender
        self._max_model_len = max_model_len
        self._lora = lora
        keys = steps.kv_layers[0].keys
        self._num_kv_heads, self._num_sms = keys.shape[2], multiprocessors(keys.device)
        self._decodes: list[DecodeGraph] = []  # ascending
        self._unsplit: dict[int, DecodeGraph] = {}
        self._prompts: list[PromptGraph] = []  # ascending

    def capture(self, sizes: GraphSizes, progress: Progress) -> GraphSizes:
        """Capture the largest graphs first, since smaller ones reuse their memory. Return the bytes of each."""
        captures = [partial(self._add_decodes, size) for size in sorted(sizes.decodes, reverse=True)]
        captures += [partial(self._add_decodes, s, may_split=False) for s in sorted(sizes.unsplit, reverse=True)]
        captures += [partial(self._add_prompts, size) for size in sorted(sizes.prompts, reverse=True)]
        taken: list[int] = []
        with _without_collections():
            for num_done, capture in enumerate(captures):
                progress(STAGE, num_done / len(captures))
                before = self._pool.num_bytes
                capture()
                taken.append(self._pool.num_bytes - before)
        progress(STAGE, 1.0)
        num_decodes, num_both = len(sizes.decodes), len(sizes.decodes) + len(sizes.unsplit)
        return GraphSizes(taken[:num_decodes], taken[num_both:], taken[num_decodes:num_both])

    def find_decodes(self, batch: ScheduledBatch) -> DecodeGraph | None:
        count = len(batch.rows)
        if batch.num_decodes < count or not batch.samples.all():
            return None
        index = bisect_left(self._decodes, count, key=lambda graph: graph.num_rows)
        graph = self._decodes[index] if index < len(self._decodes) else None
        unsplit = None if graph is None else self._unsplit.get(graph.num_rows)
        if unsplit is None:
            return graph
        limits = decode_splits(unsplit.num_rows, self._num_kv_heads, self._max_model_len, self._num_sms)
        return unsplit if splits_none(batch.start_positions + 1, limits) else graph

    def find_prompts(self, batch: ScheduledBatch) -> PromptGraph | None:
        index = bisect_left(self._prompts, batch.num_tokens, key=lambda graph: graph.num_tokens)
        return self._prompts[index] if index < len(self._prompts) else None

    def _sent(self, num_tokens: int, groups: Groups) -> DeviceArrays:
        lora = None if self._lora is None else self._lora.groups(no_ids(), num_tokens)
        return self._sender({"lora": lora, **groups})

    def _add_decodes(self, size: int, *, may_split: bool = True) -> None:
        rows, shard = self._steps.rows, self._steps.shard
        sent = self._sent(size, {"inputs": rows.padding(size), "draw": greedy_columns(size)})
        inputs, draw = StepInputs(*sent["inputs"]), sent["draw"]
        bounds = ForwardBounds(1, self._max_model_len, num_decodes=size, may_split=may_split)
        forward = self._pool.capture(lambda: self._steps.forward(sent, bounds))

        def sample(any_sampled: bool) -> torch.Tensor:
            if shard.num_ranks > 1 and not any_sampled:
                token_ids = largest_of_ranks(forward.output, shard)
            else:
                token_ids = draw_tokens(shard.gather(forward.output), draw, (any_sampled,) * 4)
                shard.collectives.broadcast(token_ids)
            rows.store(inputs.store_indices, token_ids)
            return token_ids

        captured = forward, *(self._pool.capture(partial(sample, any_sampled)) for any_sampled in (False, True))
        kept = (CapturedGraph(graph, self._pool.unowned(output)) for graph, output in captured)
        decode = DecodeGraph(size, inputs, *kept)
        if may_split:
            self._decodes.insert(0, decode)
        else:
            self._unsplit[size] = decode

    def _add_prompts(self, size: int) -> None:
        pool, (model, rows, kv_layers, *_) = self._pool, self._steps
        assert isinstance(model, Decoder)
        sent = self._sent(size, {"inputs": rows.padding(0, size)})
        inputs, lora = StepInputs(*sent["inputs"]), LoraGroups(*sent["lora"]) if sent["lora"] else None
        places = TokenLocations(inputs.positions, inputs.slot_mapping, lora)

        def begin() -> AttentionInput:
            x = model.embedding.rows(rows.known_tokens_at(inputs.token_indices, model.shape.vocab_size))
            return model.layers[0].begin(x, None, places, kv_layers[0])

        def go_on(
            before: DecoderLayer, after: DecoderLayer, kv: KVLayer, attended: torch.Tensor, cut: AttentionInput
        ) -> AttentionInput:
            return after.begin(*before.end(attended, cut.residual, lora), places, kv)

        graph, cut = pool.capture(begin)
        # Outside the pool: written between replays. Larger graphs have room for smaller ones.
        attended = self._prompts[0].attended[:size] if self._prompts else torch.zeros_like(cut.queries)
        pieces, queries = [graph], [pool.unowned(cut.queries)]
        for before, after, kv in zip(model.layers, model.layers[1:], kv_layers[1:], strict=False):
            graph, cut = pool.capture(partial(go_on, before, after, kv, attended, cut))
            pieces.append(graph)
            queries.append(pool.unowned(cut.queries))
        graph, (x, residual) = pool.capture(partial(model.layers[-1].end, attended, cut.residual, lora))
        x, residual = pool.unowned(x), pool.unowned(residual)
        self._prompts.insert(0, PromptGraph(size, model, kv_layers, [*pieces, graph], queries, attended, x, residual))


@contextmanager
def _without_collections() -> Iterator[None]:
    was_enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
