from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from tidewheel_kernels.attention.metadata import AttentionMetadata

Ints = npt.NDArray[np.int64]

# Longer chunks are cut, for small masks.
MAX_QUERY_LEN = 256
# Padded keys that cost less than a call.
FREE_PADDING = 128
MAX_PADDING_RATIO = 1.25
# Longer chunks join only equal numbers of keys: padding costs more than a call.
MAX_PADDED_QUERY_LEN = 16
# Keys of a group fit the second-level cache.
MAX_GATHERED_BYTES = 1 << 19


class PlanKey(NamedTuple):
    block_size: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    sliding_window: int
    dtype: torch.dtype


class AttentionGroup(NamedTuple):
    """Pieces of equal query length that one attention call computes.

    Single queries gather keys with all KV heads, in few long rows; longer pieces once per query head.
    """

    num_seqs: int
    query_len: int
    rows: torch.Tensor  # [num_seqs * query_len] int64 rows of q and out
    gather: torch.Tensor  # [num_seqs * num_keys] or [num_seqs * num_q_heads * num_keys] int64 rows of the cache
    mask: torch.Tensor | None  # [query_len, num_keys] or [num_seqs, 1, query_len, num_keys], 0 or -inf
    is_causal: bool  # replaces the mask


class AttentionPlan(NamedTuple):
    groups: list[AttentionGroup]
    empty_rows: torch.Tensor  # [n] int64, sequences without keys


@dataclass(frozen=True)
class QueryPieces:
    """Arrays by piece: piece i has query_len[i] queries of a sequence, and keys [key_start, key_end)."""

    seq: Ints
    first_row: Ints
    query_len: Ints
    key_start: Ints
    key_end: Ints

    @property
    def num_keys(self) -> Ints:
        return self.key_end - self.key_start

    def take(self, index: Ints | slice) -> QueryPieces:
        return QueryPieces(
            self.seq[index], self.first_row[index], self.query_len[index], self.key_start[index], self.key_end[index]
        )


def make_plan(meta: AttentionMetadata, key: PlanKey) -> AttentionPlan:
    starts = meta.host_cu_seqlens_q().astype(np.int64)
    seq_lens = meta.host_seq_lens().astype(np.int64)
    block_tables = meta.block_tables.numpy()
    pieces = cut(starts, seq_lens, key.sliding_window)
    bytes_per_key = key.num_kv_heads * key.head_dim * key.dtype.itemsize
    groups = [_group(part, block_tables, key) for part in grouped(pieces, MAX_GATHERED_BYTES // bytes_per_key)]
    empty = starts[0] + np.flatnonzero(np.repeat(seq_lens == 0, np.diff(starts)))
    return AttentionPlan(groups, torch.from_numpy(empty))


def cut(starts: Ints, seq_lens: Ints, sliding_window: int) -> QueryPieces:
    query_lens = np.where(seq_lens > 0, np.diff(starts), 0)
    num_pieces = -(-query_lens // MAX_QUERY_LEN)
    seq = np.repeat(np.arange(len(seq_lens)), num_pieces)
    nth = np.arange(len(seq)) - np.repeat(np.cumsum(num_pieces) - num_pieces, num_pieces)
    offset = nth * MAX_QUERY_LEN
    query_len = np.minimum(query_lens[seq] - offset, MAX_QUERY_LEN)
    first_position = seq_lens[seq] - query_lens[seq] + offset
    key_start = (
        np.maximum(first_position - sliding_window + 1, 0) if sliding_window else np.zeros_like(first_position)
    )
    return QueryPieces(seq, starts[seq] + offset, query_len, key_start, first_position + query_len)


def grouped(pieces: QueryPieces, max_keys: int) -> Iterator[QueryPieces]:
    """Yield groups of pieces, padded to at most `max_keys` keys if there are several."""
    ordered = pieces.take(np.lexsort((pieces.num_keys, pieces.query_len)))
    begin, total = 0, 0
    num_keys, query_len = ordered.num_keys.tolist(), ordered.query_len.tolist()
    for i, keys in enumerate(num_keys):
        padded = (i - begin + 1) * keys
        uneven = query_len[i] > MAX_PADDED_QUERY_LEN and keys != num_keys[begin]
        full = uneven or padded > min(MAX_PADDING_RATIO * (total + keys) + FREE_PADDING, max_keys)
        if i > begin and (full or query_len[i] != query_len[begin]):
            yield ordered.take(slice(begin, i))
            begin, total = i, 0
        total += keys
    if num_keys:
        yield ordered.take(slice(begin, len(num_keys)))


def _group(pieces: QueryPieces, block_tables: npt.NDArray[np.int32], key: PlanKey) -> AttentionGroup:
    query_len, num_keys = int(pieces.query_len[0]), int(pieces.num_keys.max())
    positions = pieces.key_start[:, None] + np.arange(num_keys)
    exists = positions < pieces.key_end[:, None]
    positions = np.where(exists, positions, pieces.key_start[:, None])
    blocks = block_tables[pieces.seq[:, None], positions // key.block_size].astype(np.int64)
    slots = blocks * key.block_size + positions % key.block_size
    kv_head = np.arange(key.num_q_heads) * key.num_kv_heads // key.num_q_heads
    gather = slots if query_len == 1 else slots[:, None, :] * key.num_kv_heads + kv_head[:, None]
    rows = pieces.first_row[:, None] + np.arange(query_len)
    return AttentionGroup(
        num_seqs=len(pieces.seq),
        query_len=query_len,
        rows=torch.from_numpy(rows.reshape(-1)),
        gather=torch.from_numpy(gather.reshape(-1)),
        mask=_mask(pieces, query_len, exists, key),
        is_causal=query_len > 1 and num_keys == query_len and not key.sliding_window,
    )


def _mask(pieces: QueryPieces, query_len: int, exists: npt.NDArray[np.bool_], key: PlanKey) -> torch.Tensor | None:
    if exists.all() and query_len == 1:
        return None
    if exists.all() and not key.sliding_window:
        mask = torch.zeros(query_len, exists.shape[1], dtype=key.dtype)
        mask[:, -query_len:] = torch.full((query_len, query_len), -torch.inf).triu_(1)
        return mask
    key_position = (pieces.key_start[:, None] + np.arange(exists.shape[1]))[:, None, :]
    query_position = (pieces.key_end[:, None] - query_len + np.arange(query_len))[:, :, None]
    visible = exists[:, None, :] & (key_position <= query_position)
    if key.sliding_window:
        visible &= key_position > query_position - key.sliding_window
    additive = np.where(visible, np.float32(0), np.float32(-np.inf))
    return torch.from_numpy(additive).unsqueeze(1).to(key.dtype)
