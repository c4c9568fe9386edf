from __future__ import annotations

import torch

from tidewheel_kernels.choice import Op
from tidewheel_kernels.penalties.cpu import apply_penalties_cpu
from tidewheel_kernels.penalties.reference import (
    PenaltyTensors,
    TokenHistory,
    WordTensors,
    apply_logit_bias_reference,
    apply_penalties_reference,
    forbid_words_reference,
)


def apply_penalties(logits: torch.Tensor, history: TokenHistory, penalties: PenaltyTensors) -> None:
    """Apply repetition, frequency and presence penalties to `logits` [B, V] in place.

    Repetition (prompt and output) divides positive logits and multiplies others (Keskar et al. 2019, CTRL, section
    4.1). Then logits of generated tokens fall by ``frequency * output_count + presence`` (OpenAI). Counts take 4 V
    bytes per penalised row.
    """
    if penalties.rows.shape[0]:
        _PENALTIES.chosen[logits.device, logits.dtype](logits, history, penalties)


def forbid_words(logits: torch.Tensor, history: TokenHistory, words: WordTensors) -> None:
    """Set a forbidden word's last token to -inf in `logits` [B, V], in place, if the others end its row's history.

    Words whose last token is out of range are skipped. NaN stays.
    """
    if words.rows.shape[0]:
        _WORDS.chosen[logits.device, logits.dtype](logits, history, words)


def apply_logit_bias(
    logits: torch.Tensor,  # [B, V] float32
    rows: torch.Tensor,  # [N] int32
    token_ids: torch.Tensor,  # [N] int32
    values: torch.Tensor,  # [N] float32
) -> None:
    """Add ``values[i]`` to ``logits[rows[i], token_ids[i]]`` in place; repeated pairs add up.

    Those out of range are skipped. Raise `TypeError` unless float32: some devices lack 16-bit atomics.
    """
    if logits.dtype != torch.float32:
        raise TypeError(f"logit bias needs float32 logits, got {logits.dtype}; convert with logits.float()")
    if rows.shape[0]:
        _BIAS.chosen[logits.device, logits.dtype](logits, rows, token_ids, values)


_PENALTIES = Op("apply_penalties", __name__, reference=apply_penalties_reference, cpu=apply_penalties_cpu)
_WORDS = Op("forbid_words", __name__, reference=forbid_words_reference)
_BIAS = Op("apply_logit_bias", __name__, reference=apply_logit_bias_reference)
