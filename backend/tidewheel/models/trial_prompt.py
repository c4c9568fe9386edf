import numpy as np
import torch

from tidewheel_kernels import AttentionMetadata

# Limit of `relative_difference` between logits of equivalent computations.
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.05}


def random_tokens(count: int, vocab_size: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """Return [count] int64 token ids, the same each time."""
    return torch.randint(0, vocab_size, (count,), generator=torch.Generator().manual_seed(0)).to(device)


def one_sequence(num_tokens: int, block_size: int, device: torch.device) -> AttentionMetadata:
    bounds, length = np.array([0, num_tokens], dtype=np.int32), np.array([num_tokens], dtype=np.int32)
    return AttentionMetadata(
        slot_mapping=torch.arange(num_tokens, device=device),
        block_tables=torch.arange(-(-num_tokens // block_size), dtype=torch.int32, device=device).unsqueeze(0),
        cu_seqlens_q=torch.from_numpy(bounds).to(device),
        seq_lens=torch.from_numpy(length).to(device),
        max_seqlen_q=num_tokens,
        max_seq_len=num_tokens,
        num_decodes=0,
        cu_seqlens_q_cpu=bounds,
        seq_lens_cpu=length,
    )


def relative_difference(values: torch.Tensor, expected: torch.Tensor) -> float:
    """Return RMS(values - expected) / RMS(expected)."""
    values, expected = values.float(), expected.float()
    return float((values - expected).square().mean().sqrt() / expected.square().mean().sqrt().clamp(min=1e-20))
