from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, eq=False)
class TokenHistory:
    """Prompt and output tokens of B rows of logits."""

    tokens: torch.Tensor  # [M] int32; skipped outside [0, V)
    ends: torch.Tensor  # [B] int64; row i follows the tokens before tokens[ends[i]]


@dataclass(frozen=True, eq=False)
class PenaltyTensors:
    """Penalties of P rows, each row at most once."""

    max_num_tokens: int
    rows: torch.Tensor  # [P] int32, in [0, B)
    num_prompt_tokens: torch.Tensor  # [P] int32
    num_tokens: torch.Tensor  # [P] int32, > 0
    repetition: torch.Tensor  # [P] float32, > 0; 1 = off
    presence: torch.Tensor  # [P] float32; 0 = off
    frequency: torch.Tensor  # [P] float32; 0 = off


@dataclass(frozen=True, eq=False)
class WordTensors:
    """W forbidden words (token sequences), at most one token longer than their rows' histories."""

    rows: torch.Tensor  # [W] int32, in [0, B)
    starts: torch.Tensor  # [W] int32, ascending
    lengths: torch.Tensor  # [W] int32, > 0
    token_ids: torch.Tensor  # [N] int32


def apply_penalties_reference(logits: torch.Tensor, history: TokenHistory, penalties: PenaltyTensors) -> None:
    rows, num_tokens = penalties.rows.long(), penalties.num_tokens.unsqueeze(1)
    positions = torch.arange(penalties.max_num_tokens, device=logits.device).unsqueeze(0)
    is_output = (positions >= penalties.num_prompt_tokens.unsqueeze(1)) & (positions < num_tokens)
    # Past its end a row repeats its last token, with the same result.
    first = history.ends.index_select(0, rows).unsqueeze(1) - num_tokens
    tokens = history.tokens[first + positions.minimum(num_tokens - 1)].long()  # [P, max_num_tokens]
    is_entry = (tokens >= 0) & (tokens < logits.shape[1])
    # A token out of range becomes an uncounted repetition.
    tokens = tokens.where(is_entry, tokens.gather(1, is_entry.int().argmax(dim=1, keepdim=True)))
    tokens = tokens.clamp(0, logits.shape[1] - 1)
    counts = torch.zeros(len(rows), logits.shape[1], dtype=torch.int32, device=logits.device)
    occurrences = counts.scatter_add_(1, tokens, (is_output & is_entry).int()).gather(1, tokens)
    places = (rows.unsqueeze(1), tokens)
    values, repetition = logits[places].float(), penalties.repetition.unsqueeze(1)
    repetition = repetition.where(is_entry.any(dim=1, keepdim=True), 1.0)
    values = torch.where(values > 0, values / repetition, values * repetition)
    values = values - penalties.frequency.unsqueeze(1) * occurrences
    values = values - penalties.presence.unsqueeze(1) * (occurrences > 0)
    logits[places] = values.to(logits.dtype)


def forbid_words_reference(logits: torch.Tensor, history: TokenHistory, words: WordTensors) -> None:
    numbers = torch.arange(words.token_ids.shape[0], dtype=torch.int32, device=logits.device)
    word = torch.searchsorted(words.starts, numbers, right=True) - 1  # [N]
    offset = numbers - words.starts[word]
    num_before = words.lengths - 1
    is_last = offset == num_before[word]
    places = history.ends[words.rows.long()][word] - num_before[word] + offset
    differs = ~is_last & (history.tokens[places.clamp(max=history.tokens.shape[0] - 1)] != words.token_ids)
    num_different = torch.zeros_like(words.lengths).index_add(0, word, differs.int())
    values = torch.zeros(words.rows.shape, device=logits.device).masked_fill(num_different == 0, float("-inf"))
    apply_logit_bias_reference(logits, words.rows, words.token_ids[words.starts + num_before], values)


def apply_logit_bias_reference(
    logits: torch.Tensor, rows: torch.Tensor, token_ids: torch.Tensor, values: torch.Tensor
) -> None:
    is_entry = (rows >= 0) & (rows < logits.shape[0]) & (token_ids >= 0) & (token_ids < logits.shape[1])
    index = (rows.where(is_entry, 0).long(), token_ids.where(is_entry, 0).long())
    logits.index_put_(index, values.where(is_entry, 0.0).to(logits.dtype), accumulate=True)
