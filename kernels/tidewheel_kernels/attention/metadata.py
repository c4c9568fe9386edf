from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

HostInts = npt.NDArray[np.int32]


@dataclass(frozen=True, eq=False)
class AttentionMetadata:
    """Packed batch of B sequences with T query tokens over a paged KV cache.

    Sequence i's queries, its last tokens, are rows ``cu_seqlens_q[i]:cu_seqlens_q[i + 1]``. Its token p lies in block
    ``block_tables[i, p // block_size]`` at offset ``p % block_size``. Decodes (one query) come first: row i is
    sequence i if ``i < num_decodes``. A decode with ``seq_lens[i] == 0`` is padding and outputs zeros.

    In a CUDA graph the `int` fields are upper bounds, and host copies are absent. Unless `may_split`, one program per
    KV head computes a decode. CPU attention caches its plan in the object, so each step needs a new one.
    """

    slot_mapping: torch.Tensor  # [T] int64; -1: padding
    block_tables: torch.Tensor  # [B, max_blocks] int32
    cu_seqlens_q: torch.Tensor  # [B + 1] int32
    seq_lens: torch.Tensor  # [B] int32; keys, including this step's tokens
    max_seqlen_q: int
    max_seq_len: int
    num_decodes: int
    cu_seqlens_q_cpu: HostInts | None = None
    seq_lens_cpu: HostInts | None = None
    may_split: bool = True

    @property
    def num_seqs(self) -> int:
        return self.seq_lens.shape[0]

    def host_cu_seqlens_q(self) -> HostInts:
        return self.cu_seqlens_q.cpu().numpy() if self.cu_seqlens_q_cpu is None else self.cu_seqlens_q_cpu

    def host_seq_lens(self) -> HostInts:
        return self.seq_lens.cpu().numpy() if self.seq_lens_cpu is None else self.seq_lens_cpu
