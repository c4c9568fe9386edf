"""From scheduled columns to the flat tensors of a forward pass, with numpy over whole columns at a time."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from tidewheel.batch import Int32Array, ScheduledBatch
from tidewheel_kernels import AttentionMetadata

Int64Array = npt.NDArray[np.int64]


class HostInputs(NamedTuple):
    """Everything about one step that the device needs to know. T tokens, n rows, S of them sample."""

    token_indices: Int64Array  # [T] of each token in the flat token table
    positions: Int64Array  # [T]
    slot_mapping: Int64Array  # [T]
    cu_seqlens_q: Int32Array  # [n + 1]
    seq_lens: Int32Array  # [n]
    block_tables: Int32Array  # [n, widest]
    logit_indices: Int64Array  # [S] last token of each sampling row, in [0, T)
    store_indices: Int64Array  # [S] where its new token belongs in the flat token table


class DeviceInputs(NamedTuple):
    """`HostInputs` as tensors, in the same order."""

    token_indices: torch.Tensor
    positions: torch.Tensor
    slot_mapping: torch.Tensor
    cu_seqlens_q: torch.Tensor
    seq_lens: torch.Tensor
    block_tables: torch.Tensor
    logit_indices: torch.Tensor
    store_indices: torch.Tensor


class RowTable:
    """Tokens and block table of every row.

    Token ids live on the device: the tokens of a new row are copied there once, and what is sampled is written in
    place, so a step can be launched before the tokens of the last one were read. One column more than the context
    holds the token that is sampled at its end.
    """

    def __init__(self, max_num_seqs: int, max_model_len: int, block_size: int, device: torch.device) -> None:
        self._width = max_model_len + 1
        self._block_size = block_size
        self._token_ids = torch.zeros(max_num_seqs, self._width, dtype=torch.int32, device=device)
        self._block_tables = np.zeros((max_num_seqs, -(-max_model_len // block_size)), dtype=np.int32)

    @property
    def flat_token_ids(self) -> torch.Tensor:
        return self._token_ids.view(-1)

    def update(self, batch: ScheduledBatch) -> None:
        """Takes what changed since the last batch."""
        for new in batch.new_rows:
            self._token_ids[new.row, : len(new.token_ids)].copy_(torch.from_numpy(new.token_ids.copy()))
        if len(batch.block_rows):
            self._block_tables[batch.block_rows, batch.block_indices] = batch.block_ids

    def host_inputs(self, batch: ScheduledBatch) -> HostInputs:
        rows, starts, counts = batch.rows, batch.start_positions.astype(np.int64), batch.num_scheduled_tokens
        cu_seqlens_q = np.zeros(len(rows) + 1, dtype=np.int32)
        np.cumsum(counts, out=cu_seqlens_q[1:])
        seq_lens = starts + counts
        tables = self._block_tables[rows, : -(-int(seq_lens.max()) // self._block_size)]
        if batch.num_tokens == len(rows):  # every row computes one token
            sequence, positions = np.arange(len(rows)), starts
        else:
            sequence = np.repeat(np.arange(len(rows)), counts)
            positions = np.arange(batch.num_tokens) + (starts - cu_seqlens_q[:-1])[sequence]
        blocks = tables[sequence, positions // self._block_size].astype(np.int64)
        sampling = np.flatnonzero(batch.samples)
        bases = rows.astype(np.int64) * self._width
        return HostInputs(
            token_indices=bases[sequence] + positions,
            positions=positions,
            slot_mapping=blocks * self._block_size + positions % self._block_size,
            cu_seqlens_q=cu_seqlens_q,
            seq_lens=seq_lens.astype(np.int32),
            block_tables=tables,
            logit_indices=cu_seqlens_q[1:][sampling].astype(np.int64) - 1,
            store_indices=bases[sampling] + seq_lens[sampling],
        )


def metadata(host: HostInputs, device: DeviceInputs, batch: ScheduledBatch) -> AttentionMetadata:
    return AttentionMetadata(
        slot_mapping=device.slot_mapping,
        block_tables=device.block_tables,
        cu_seqlens_q=device.cu_seqlens_q,
        seq_lens=device.seq_lens,
        max_seqlen_q=int(batch.num_scheduled_tokens.max()),
        max_seq_len=int(host.seq_lens.max()),
        num_decodes=batch.num_decodes,
        cu_seqlens_q_cpu=host.cu_seqlens_q,
        seq_lens_cpu=host.seq_lens,
    )
