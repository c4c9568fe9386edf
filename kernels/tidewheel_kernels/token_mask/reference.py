from __future__ import annotations

import sys

import torch


def apply_token_mask_reference(logits: torch.Tensor, rows: torch.Tensor, bits: torch.Tensor) -> None:
    assert sys.byteorder == "little"
    shifts = torch.arange(8, dtype=torch.uint8, device=bits.device)
    is_allowed = (bits.contiguous().view(torch.uint8).unsqueeze(-1) >> shifts & 1).flatten(1)[:, : logits.shape[1]]
    index = rows.long()
    logits[index] = logits[index].masked_fill_(is_allowed == 0, float("-inf"))
