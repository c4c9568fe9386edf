"""What attention has to know about a batch."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

HostInts = npt.NDArray[np.int32]


@dataclass(frozen=True, eq=False)
class AttentionMetadata:
    """Layout of one packed batch of B sequences with T query tokens over a paged KV cache.

    Sequence i owns the query rows ``cu_seqlens_q[i]:cu_seqlens_q[i + 1]``; they are its last tokens, so row j of
    them stands at position ``seq_lens[i] - query_len + j``. Token p of sequence i lies in block
    ``block_tables[i, p // block_size]`` at offset ``p % block_size``. Sequences with one query token (decodes) that
    use the split-KV kernel come first: for i < num_decodes, row i is sequence i.

    A decode with ``seq_lens[i] == 0`` is padding: it reads nothing and its output row is zero. Entries of a block
    table past the last block of a sequence are never read.

    In a CUDA graph the tensors are static buffers, and `max_seqlen_q`, `max_seq_len` and `num_decodes` are frozen
    upper bounds: grids and the number of splits follow from them.

    On the CPU, attention plans once per object: there, make a new object for every step.
    """

    slot_mapping: torch.Tensor  # [T] int64; block * block_size + offset of each token, -1 = padding
    block_tables: torch.Tensor  # [B, max_blocks] int32
    cu_seqlens_q: torch.Tensor  # [B + 1] int32
    seq_lens: torch.Tensor  # [B] int32; keys of each sequence, this step's tokens included
    max_seqlen_q: int
    max_seq_len: int
    num_decodes: int
    cu_seqlens_q_cpu: HostInts | None = None  # host copy of cu_seqlens_q
    seq_lens_cpu: HostInts | None = None  # host copy of seq_lens

    @property
    def num_seqs(self) -> int:
        return self.seq_lens.shape[0]

    def host_cu_seqlens_q(self) -> HostInts:
        """`cu_seqlens_q` on the host; a device synchronisation where no copy was given."""
        return self.cu_seqlens_q.cpu().numpy() if self.cu_seqlens_q_cpu is None else self.cu_seqlens_q_cpu

    def host_seq_lens(self) -> HostInts:
        """`seq_lens` on the host; a device synchronisation where no copy was given."""
        return self.seq_lens.cpu().numpy() if self.seq_lens_cpu is None else self.seq_lens_cpu
