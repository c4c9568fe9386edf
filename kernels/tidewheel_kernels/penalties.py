"""Changes to the logits before sampling, from sparse (row, token) entries: no dense mask, no loop over rows."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tidewheel_kernels.backend import Op


@dataclass(frozen=True, eq=False)
class PenaltyTensors:
    """Tokens that have occurred, as N entries, and the penalties of each of the B rows.

    A (row, token) pair occurs at most once. Entries with a row or token id out of range are skipped, so the columns
    may be padded with -1.
    """

    rows: torch.Tensor  # [N] int32
    token_ids: torch.Tensor  # [N] int32
    output_counts: torch.Tensor  # [N] int32; occurrences in the generated tokens, 0 if only in the prompt
    in_prompt: torch.Tensor  # [N] bool
    repetition: torch.Tensor  # [B] float32, > 0; 1 = off
    presence: torch.Tensor  # [B] float32; 0 = off
    frequency: torch.Tensor  # [B] float32; 0 = off


def apply_penalties(logits: torch.Tensor, penalties: PenaltyTensors) -> None:
    """Applies repetition, frequency and presence penalties to `logits` [B, V] in place.

    Repetition (tokens of the prompt or the output): a positive logit is divided by it, another multiplied
    (Keskar et al. 2019, CTRL, section 4.1). Then, for generated tokens, the logit falls by
    ``frequency * output_count + presence`` (OpenAI's definition).
    """
    if penalties.rows.shape[0]:
        _PENALTIES.on(logits)(logits, penalties)


def apply_penalties_reference(logits: torch.Tensor, penalties: PenaltyTensors) -> None:
    entry = in_range(logits, penalties.rows, penalties.token_ids)
    rows, tokens = penalties.rows[entry].long(), penalties.token_ids[entry].long()
    counts = penalties.output_counts[entry].float()
    values = logits[rows, tokens].float()
    repetition = penalties.repetition[rows].where(penalties.in_prompt[entry] | (counts > 0), 1.0)
    values = torch.where(values > 0, values / repetition, values * repetition)
    values = values - penalties.frequency[rows] * counts - penalties.presence[rows] * (counts > 0)
    logits[rows, tokens] = values.to(logits.dtype)


def apply_logit_bias(
    logits: torch.Tensor,  # [B, V] float32
    rows: torch.Tensor,  # [N] int32
    token_ids: torch.Tensor,  # [N] int32
    values: torch.Tensor,  # [N] float32; -inf forbids the token
) -> None:
    """Adds ``values[i]`` to ``logits[rows[i], token_ids[i]]`` in place. Pairs may repeat; their values add up.

    Entries with a row or token id out of range are skipped. float32 logits only: repeated pairs are summed by atomic
    additions, which 16-bit formats lack on some devices.
    """
    if logits.dtype != torch.float32:
        raise TypeError(f"logit bias needs float32 logits, got {logits.dtype}; convert with logits.float()")
    if rows.shape[0]:
        _BIAS.on(logits)(logits, rows, token_ids, values)


def apply_logit_bias_reference(
    logits: torch.Tensor, rows: torch.Tensor, token_ids: torch.Tensor, values: torch.Tensor
) -> None:
    entry = in_range(logits, rows, token_ids)
    index = (rows[entry].long(), token_ids[entry].long())
    logits.index_put_(index, values[entry].float(), accumulate=True)


def in_range(logits: torch.Tensor, rows: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """[N] bool: entries that name an element of `logits`."""
    return (rows >= 0) & (rows < logits.shape[0]) & (token_ids >= 0) & (token_ids < logits.shape[1])


_PENALTIES = Op("apply_penalties", reference=apply_penalties_reference, kernel="jit.penalties:apply_penalties")
_BIAS = Op("apply_logit_bias", reference=apply_logit_bias_reference, kernel="jit.penalties:apply_logit_bias")
