"""Capturable part of a step, from device inputs to logits: it neither waits for the device nor reads its values."""

from __future__ import annotations

from typing import NamedTuple

import torch

from tidewheel.batch import ScheduledBatch
from tidewheel.models.base import CausalLM
from tidewheel.runner.inputs import DeviceInputs, HostInputs, RowTable
from tidewheel.runner.kv_tensors import KVTensors
from tidewheel_kernels import AttentionMetadata
from tidewheel_kernels.attention.metadata import HostInts


class Bounds(NamedTuple):
    """Launch sizes: exact in an eager step, upper bounds in a graph."""

    max_seqlen_q: int
    max_seq_len: int
    num_decodes: int
    cu_seqlens_q: HostInts | None = None  # host copies, if any
    seq_lens: HostInts | None = None


def exact_bounds(batch: ScheduledBatch, host: HostInputs) -> Bounds:
    return Bounds(
        max_seqlen_q=int(batch.num_scheduled_tokens.max()),
        max_seq_len=int(host.seq_lens.max()),
        num_decodes=batch.num_decodes,
        cu_seqlens_q=host.cu_seqlens_q,
        seq_lens=host.seq_lens,
    )


class Forward:
    def __init__(self, model: CausalLM, rows: RowTable, kv: KVTensors) -> None:
        self._model = model
        self._rows = rows
        self._kv = kv

    def __call__(self, inputs: DeviceInputs, bounds: Bounds) -> torch.Tensor:
        """Return logits [S, vocab_size] in the model's dtype."""
        meta = AttentionMetadata(
            slot_mapping=inputs.slot_mapping,
            block_tables=self._rows.block_tables(inputs.rows, bounds.max_seq_len),
            cu_seqlens_q=inputs.cu_seqlens_q,
            seq_lens=inputs.seq_lens,
            max_seqlen_q=bounds.max_seqlen_q,
            max_seq_len=bounds.max_seq_len,
            num_decodes=bounds.num_decodes,
            cu_seqlens_q_cpu=bounds.cu_seqlens_q,
            seq_lens_cpu=bounds.seq_lens,
        )
        token_ids = self._rows.tokens_at(inputs.token_indices)
        return self._model.forward(token_ids, inputs.positions, meta, self._kv.layers, inputs.logit_indices)
