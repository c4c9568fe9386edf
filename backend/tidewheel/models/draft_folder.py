"""Folders of draft models, which propose tokens for speculative decoding. Nothing here imports torch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tokenizers import Tokenizer

from tidewheel.errors import ConfigError
from tidewheel.models.model_folder import read_config, resolve_folder
from tidewheel.regular_files import read_text

_REMEDY = "drafts are token ids, so take a model with the same tokenizer"


def find_draft(
    model: str, download_dir: str = "", find: Callable[[str, str, str], Path | None] = resolve_folder
) -> Path | None:
    """Return the folder of the setting `draft_model`, None if `find` has none. Raise `ConfigError`."""
    try:
        return find(model, "", download_dir)
    except ConfigError as error:
        raise ConfigError(f"draft_model cannot be found: {error}") from None


def check_tokens(draft: Path, tokenizer: Path, vocab_size: int) -> None:
    """Raise `ConfigError` if a token id of a draft model may mean another text to the model that it drafts for.

    `tokenizer`, `vocab_size`: folder with the model's `tokenizer.json`, and size of its vocabulary. That of the draft
    may be smaller, as the models of a family may pad it differently.
    """
    drafted = read_config(draft).integer("vocab_size")
    if drafted > vocab_size:
        raise ConfigError(f"draft_model is {draft}, of vocab_size {drafted}; the model has {vocab_size}: {_REMEDY}")
    theirs, ours = _ids(draft), _ids(tokenizer)
    wrong = [(token_id, token) for token, token_id in theirs.items() if ours.get(token) != token_id < drafted]
    if wrong:
        token_id, token = min(wrong)
        other = f"is {ours[token]} in the model's" if token in ours else "is not in the model's"
        raise ConfigError(
            f"draft_model is {draft}, in whose tokenizer.json {token[:40]!r} is {token_id}; it {other}: {_REMEDY}"
        )


def _ids(folder: Path) -> dict[str, int]:
    """Return a tokenizer's ids by token. Raise `ConfigError`."""
    path = folder / "tokenizer.json"
    try:
        return Tokenizer.from_str(read_text(path) or "").get_vocab()
    except Exception as error:  # tokenizers has no class of its own
        raise ConfigError(f"{path} has no tokens that draft_model could be compared with: {error}") from None
