from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Generic, Literal, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from tidewheel.batch import SPARE_LOGITS, Int32Array, Int64Array, ScheduledBatch, no_ids
from tidewheel.runner.accelerator import CudaAccelerator
from tidewheel_kernels import AttentionMetadata, TokenHistory
from tidewheel_kernels.attention.metadata import HostInts

HostArray = npt.NDArray[np.generic]
Group = Sequence[HostArray]
GroupName = Literal[
    "lora", "inputs", "draw", "allowed", "bias", "words", "penalties", "logprob_rows", "mask_rows",
    "prompt", "pooling", "changes",
]  # fmt: skip
Groups = Mapping[GroupName, Group | None]
DeviceArrays = Mapping[GroupName, list[torch.Tensor]]  # valid until the next send; empty for a None group
InputSender = Callable[[Groups], DeviceArrays]  # of one-dimensional arrays, which must not be written afterwards
TypedViews = dict[np.dtype[Any], torch.Tensor]
Placement = tuple[int, HostArray]  # first byte

ALIGNMENT = 16  # bytes
NUM_SLOTS = 3
DTYPES: dict[np.dtype[Any], torch.dtype] = {
    np.dtype(np.int64): torch.int64,
    np.dtype(np.int32): torch.int32,
    np.dtype(np.float32): torch.float32,
    np.dtype(np.bool_): torch.bool,
}

Longs = TypeVar("Longs")
Ints = TypeVar("Ints")


class StepInputs(NamedTuple, Generic[Longs, Ints]):
    """Device arrays (int64, int32) of a step of T tokens in n entries, S of which sample."""

    token_indices: Longs  # [T] index into the flat token table
    positions: Longs  # [T]
    slot_mapping: Longs  # [T]
    cu_seqlens_q: Ints  # [n + 1]
    seq_lens: Ints  # [n]
    rows: Ints  # [n] rows of the block table
    logit_indices: Longs  # [S] last token of each sampling row, in [0, T)
    store_indices: Longs  # [S] index of the new token in the flat token table


HostInputs = StepInputs[Int64Array, Int32Array]
DeviceInputs = StepInputs[torch.Tensor, torch.Tensor]


class ForwardBounds(NamedTuple):
    """Host fields of `AttentionMetadata`: exact, or upper bounds for a CUDA graph."""

    max_seqlen_q: int
    max_seq_len: int
    num_decodes: int
    cu_seqlens_q: HostInts | None = None
    seq_lens: HostInts | None = None
    may_split: bool = True  # split the keys of a decode

    @classmethod
    def exact(cls, batch: ScheduledBatch, host: HostInputs) -> "ForwardBounds":
        longest_chunk, longest = int(batch.num_scheduled_tokens.max()), int(host.seq_lens.max())
        return cls(longest_chunk, longest, batch.num_decodes, host.cu_seqlens_q, host.seq_lens)


class RowTable:
    """Tokens and block table of every row, on host and device.

    Sampled tokens go to the device table, so a step can start before the host has read them. A spare column takes the
    token after a full context, a spare row padding. With `shares_memory` (CPU), both tables are one.
    """

    def __init__(
        self, max_num_seqs: int, max_model_len: int, block_size: int, device: torch.device, *, shares_memory: bool
    ) -> None:
        self._width = max_model_len + 1
        self._block_size = block_size
        self._max_num_seqs = max_num_seqs
        self._shares_memory = shares_memory
        self._blocks = np.zeros((max_num_seqs + 1, -(-max_model_len // block_size)), dtype=np.int32)
        tokens = np.zeros((max_num_seqs + 1, self._width), dtype=np.int32)
        tables = (torch.from_numpy(table) for table in (tokens, self._blocks))
        self._device_tokens, self._device_blocks = (
            table if shares_memory else torch.zeros_like(table, device=device) for table in tables
        )
        self._tokens = tokens if shares_memory else None
        self._flat_tokens = self._device_tokens.view(-1)
        self._padding = self.padding(max_num_seqs + SPARE_LOGITS)

    def padding(self, size: int, num_tokens: int | None = None) -> HostInputs:
        first = self._max_num_seqs * self._width
        num_tokens = size if num_tokens is None else num_tokens
        return StepInputs(
            token_indices=np.full(num_tokens, first),
            positions=np.zeros(num_tokens, dtype=np.int64),
            slot_mapping=np.full(num_tokens, -1),
            cu_seqlens_q=np.arange(size + 1, dtype=np.int32),
            seq_lens=np.zeros(size, dtype=np.int32),
            rows=np.full(size, self._max_num_seqs, dtype=np.int32),
            logit_indices=np.arange(size),
            store_indices=np.full(size, first + 1),
        )

    def update(self, batch: ScheduledBatch) -> Sequence[HostArray]:
        """Update the host tables; return arrays for `apply`."""
        places = (batch.block_rows, batch.block_indices)
        self._blocks[places] = batch.block_ids
        if not (batch.new_rows or len(batch.block_rows) or len(batch.draft_tokens)):
            return ()
        known = np.flatnonzero(batch.draft_tokens >= 0)
        rows, positions, drafts = batch.rows[known], batch.start_positions[known], batch.draft_tokens[known]
        if self._tokens is not None:
            for new in batch.new_rows:
                self._tokens[new.row, : len(new.token_ids)] = new.token_ids
            self._tokens[rows, positions] = drafts
            return ()
        prompts = [new.token_ids for new in batch.new_rows]
        # Read back: duplicate indices get one value in any order of writes.
        return (
            batch.block_rows.astype(np.int64) * self._blocks.shape[1] + batch.block_indices,
            self._blocks[places],
            np.concatenate(prompts) if prompts else no_ids(),
            rows.astype(np.int64) * self._width + positions,
            drafts,
        )

    def host_inputs(self, batch: ScheduledBatch) -> HostInputs:
        if batch.num_tokens == len(batch.rows) and batch.samples.all():
            return self._decode_inputs(batch.rows, batch.start_positions)
        rows, starts, counts = batch.rows, batch.start_positions.astype(np.int64), batch.num_scheduled_tokens
        cu_seqlens_q = np.zeros(len(rows) + 1, dtype=np.int32)
        np.cumsum(counts, out=cu_seqlens_q[1:])
        sequence = np.repeat(np.arange(len(rows)), counts)
        positions = np.arange(batch.num_tokens) + (starts - cu_seqlens_q[:-1])[sequence]
        seq_lens = starts + counts
        bases = rows.astype(np.int64) * self._width
        sampling = np.flatnonzero(batch.samples)
        return StepInputs(
            token_indices=bases[sequence] + positions,
            positions=positions,
            slot_mapping=self.slots(rows[sequence], positions),
            cu_seqlens_q=cu_seqlens_q,
            seq_lens=seq_lens.astype(np.int32),
            rows=rows,
            logit_indices=cu_seqlens_q[1:][sampling].astype(np.int64) - 1,
            store_indices=bases[sampling] + seq_lens[sampling],
        )

    def _decode_inputs(self, rows: Int32Array, starts: Int32Array) -> HostInputs:
        positions = starts.astype(np.int64)
        token_indices = rows.astype(np.int64) * self._width + positions
        return StepInputs(
            token_indices=token_indices,
            positions=positions,
            slot_mapping=self.slots(rows, positions),
            cu_seqlens_q=self._padding.cu_seqlens_q[: len(rows) + 1],
            seq_lens=starts + np.int32(1),
            rows=rows,
            logit_indices=self._padding.logit_indices[: len(rows)],
            store_indices=token_indices + 1,
        )

    def slots(self, rows: Int32Array, positions: Int64Array) -> Int64Array:
        """Return the rows' cache slots of positions [n]."""
        blocks: Int64Array = self._blocks[rows, positions // self._block_size].astype(np.int64)
        return blocks * self._block_size + positions % self._block_size

    def padded(self, host: HostInputs, num_rows: int) -> HostInputs:
        extra = num_rows - len(host.rows)
        if extra == 0:
            return host
        pairs: Iterable[tuple[HostArray, HostArray]] = zip(host, self._padding, strict=True)
        return StepInputs(*(np.concatenate((column, fill[len(column) :][:extra])) for column, fill in pairs))

    def padded_tokens(self, host: HostInputs, num_tokens: int) -> HostInputs:
        extra = self.padding(0, num_tokens - len(host.positions))
        names = ("token_indices", "positions", "slot_mapping")
        return host._replace(**{name: np.concatenate((getattr(host, name), getattr(extra, name))) for name in names})

    def apply(self, batch: ScheduledBatch, sent: Sequence[torch.Tensor]) -> None:
        if not sent:
            return
        places, block_ids, token_ids, draft_places, draft_tokens = sent
        if places.shape[0]:
            self._device_blocks.view(-1).index_copy_(0, places, block_ids)
        first = 0
        for new in batch.new_rows:
            count = len(new.token_ids)
            self._device_tokens[new.row, :count].copy_(token_ids[first : first + count])
            first += count
        if draft_places.shape[0]:
            self._flat_tokens.index_copy_(0, draft_places, draft_tokens)

    def block_tables(self, rows: torch.Tensor, max_seq_len: int) -> torch.Tensor:
        """Return the rows' block ids [n, max_blocks] int32."""
        blocks = self._device_blocks
        if self._shares_memory:  # elsewhere constant: other strides recompile kernels
            blocks = blocks[:, : -(-max_seq_len // self._block_size)]
        return blocks.index_select(0, rows)

    def metadata(self, inputs: DeviceInputs, bounds: ForwardBounds) -> AttentionMetadata:
        tables = self.block_tables(inputs.rows, bounds.max_seq_len)
        return AttentionMetadata(inputs.slot_mapping, tables, inputs.cu_seqlens_q, inputs.seq_lens, *bounds)

    def tokens_at(self, indices: torch.Tensor) -> torch.Tensor:
        return self._flat_tokens.index_select(0, indices)

    def known_tokens_at(self, indices: torch.Tensor, vocab_size: int) -> torch.Tensor:
        """Return token ids, clamped to the vocabulary: others would end the device context."""
        return self.tokens_at(indices).clamp_(0, vocab_size - 1)

    def history(self, store_indices: torch.Tensor) -> TokenHistory:
        return TokenHistory(self._flat_tokens, store_indices)

    def store(self, indices: torch.Tensor, token_ids: torch.Tensor) -> None:
        """Store sampled tokens; a negative id, whose request fails, as 0."""
        self._flat_tokens.index_copy_(0, indices, token_ids.clamp(min=0).int())


def share_memory(groups: Groups) -> DeviceArrays:
    return {name: [torch.from_numpy(array) for array in group or ()] for name, group in groups.items()}


class StagingSender:
    """Asynchronous copier of step inputs to fixed device memory, after the device has read the old ones.

    As graphs require, an array keeps its address while the sizes of earlier arrays stay. The first array that does
    not fit, and all after it, go into a new tensor.
    """

    def __init__(self, accelerator: CudaAccelerator, num_bytes: int) -> None:
        num_bytes = -(-num_bytes // ALIGNMENT) * ALIGNMENT
        self._num_bytes = num_bytes
        self._static = torch.empty(num_bytes, dtype=torch.uint8, device=accelerator.device)
        self._views: TypedViews = {dtype: self._static.view(torch_dtype) for dtype, torch_dtype in DTYPES.items()}
        self._slots = [_PinnedBuffer(accelerator, num_bytes) for _ in range(NUM_SLOTS)]
        self._next = 0

    def __call__(self, groups: Groups) -> DeviceArrays:
        placed: dict[GroupName, list[Placement]] = {}
        end = 0
        for name, group in groups.items():
            placed[name] = []
            for array in group or ():
                placed[name].append((end, array))
                end += -(-array.nbytes // ALIGNMENT) * ALIGNMENT
        places = [place for of_group in placed.values() for place in of_group]
        slot = self._slots[self._next]
        self._next = (self._next + 1) % NUM_SLOTS
        host = slot.filled(places, end)
        split = end
        if end > self._num_bytes:
            split = next(start for start, array in places if start + array.nbytes > self._num_bytes)
        self._static[:split].copy_(host[:split], non_blocking=True)
        rest = self._static[:0]
        if split < end:
            rest = torch.empty(end - split, dtype=torch.uint8, device=self._static.device)
            rest.copy_(host[split:end], non_blocking=True)
        slot.copied.record()
        return _PackedArrays(placed, split, self._views, rest)


class _PinnedBuffer:
    def __init__(self, accelerator: CudaAccelerator, num_bytes: int) -> None:
        self._accelerator = accelerator
        self.copied = accelerator.event()
        self._make(num_bytes)

    def _make(self, num_bytes: int) -> None:
        self._buffer = self._accelerator.pinned((num_bytes,), torch.uint8)
        self._bytes = self._buffer.numpy()

    def filled(self, places: Sequence[Placement], num_bytes: int) -> torch.Tensor:
        self.copied.synchronize()
        if self._buffer.numel() < num_bytes:
            self._make(2 * num_bytes)
        for start, array in places:
            self._bytes[start : start + array.nbytes].view(array.dtype)[:] = array
        return self._buffer


class _PackedArrays(dict[GroupName, list[torch.Tensor]]):
    def __init__(
        self, placed: dict[GroupName, list[Placement]], split: int, static: TypedViews, rest: torch.Tensor
    ) -> None:
        super().__init__()
        self._placed = placed
        self._split = split
        self._static = static
        self._rest = rest

    def __missing__(self, name: GroupName) -> list[torch.Tensor]:
        self[name] = views = [self._view(*place) for place in self._placed[name]]
        return views

    def _view(self, start: int, array: HostArray) -> torch.Tensor:
        if start >= self._split and array.size:
            start -= self._split
            return self._rest[start : start + array.nbytes].view(DTYPES[array.dtype])
        first = start // array.itemsize
        return self._static[array.dtype][first : first + array.size]
