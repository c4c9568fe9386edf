from __future__ import annotations

import torch

from tidewheel_kernels.penalties.reference import PenaltyTensors, TokenHistory, apply_penalties_reference

MAX_COUNTS = 1 << 20


def apply_penalties_cpu(logits: torch.Tensor, history: TokenHistory, penalties: PenaltyTensors) -> None:
    """Apply penalties to few rows at a time, which saves memory and time."""
    columns = (
        penalties.rows, penalties.num_prompt_tokens, penalties.num_tokens, penalties.repetition, penalties.presence,
        penalties.frequency,
    )  # fmt: skip
    size = max(1, MAX_COUNTS // logits.shape[1])
    for part in zip(*(torch.split(column, size) for column in columns), strict=True):
        apply_penalties_reference(logits, history, PenaltyTensors(penalties.max_num_tokens, *part))
