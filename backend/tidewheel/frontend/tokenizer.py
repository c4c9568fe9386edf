import functools
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import tokenizers

from tidewheel.batch import Int32Array
from tidewheel.errors import ConfigError, InternalError, InvalidRequest
from tidewheel.model_formats import sentencepiece_only
from tidewheel.regular_files import read_object, read_text

_REPLACEMENT = "\ufffd"  # of bytes that are no character
_MAX_CHARACTER_BYTES = 4
_PROMPT_CONTEXT = 6  # tokens
_MAX_HELD = 32  # tokens
_Ids = Sequence[int] | Int32Array
_NAMED_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token", "sep_token", "cls_token", "mask_token")


class Tokenizer:
    """Thread-safe tokenizer from `tokenizer.json`. `vocab_size` is the model's, not the file's."""

    def __init__(
        self, backend: tokenizers.Tokenizer, *, vocab_size: int, named_tokens: dict[str, str] | None = None
    ) -> None:
        # Training scripts leave both on.
        backend.no_truncation()
        backend.no_padding()
        self.vocab_size = vocab_size
        self.named_tokens = named_tokens or {}  # text by role: "bos_token", "eos_token", …
        self.backend = backend
        added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        eos = backend.token_to_id(self.named_tokens.get("eos_token", ""))
        self.eos_token_ids = frozenset(() if eos is None else (eos,))
        self.joins_bytes = isinstance(backend.decoder, tokenizers.decoders.ByteLevel)
        self.max_token_bytes = _max_token_bytes(backend) if self.joins_bytes else None
        self.token_text = functools.cache(self._text_of)

    @classmethod
    def load(cls, folder: Path, *, vocab_size: int) -> "Tokenizer":
        """Raise `ConfigError`."""
        path = folder / "tokenizer.json"
        content = read_text(path)
        if content is None:
            found = sentencepiece_only(folder)
            what = f", {found}; or" if found else ":"
            raise ConfigError(f"{folder} has no tokenizer.json{what} set tokenizer to a folder that has one")
        try:
            backend = tokenizers.Tokenizer.from_str(content)
        except BaseException as error:
            raise _failure(ConfigError, f"{path} is not a tokenizer", error) from None
        num_tokens = backend.get_vocab_size(with_added_tokens=False)
        if num_tokens == 0:
            raise ConfigError(f"{path} has an empty vocabulary: it makes no tokens of any text")
        if num_tokens > vocab_size:
            raise ConfigError(
                f"{path} has {num_tokens} tokens and the model {vocab_size}: it is the tokenizer of another model"
            )
        return cls(backend, vocab_size=vocab_size, named_tokens=_named_tokens(folder))

    def encode(self, text: str, *, add_special_tokens: bool = True) -> Int32Array:
        """Return token ids [num_tokens]. Raise `InvalidRequest`, also for invalid Unicode."""
        try:
            # Releases the GIL, unlike `encode` (0.23 held it for 10 s over 4 MB).
            encoding = self.backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0]
        except BaseException as error:
            raise _failure(InvalidRequest, "the model's tokenizer fails at this text", error) from None
        return np.array(encoding.ids, dtype=np.int32)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Raise `InternalError`."""
        try:
            return str(self.backend.decode(token_ids, skip_special_tokens=skip_special_tokens))
        except BaseException as error:
            raise _failure(InternalError, "the model's tokenizer fails at these tokens", error) from None

    def _text_of(self, token_id: int) -> str:
        """Return a token's text, with the leading space that decoders drop."""
        alone = self.decode((token_id,), skip_special_tokens=False)
        return self.decode((token_id, token_id), skip_special_tokens=False)[len(alone) :]


class Detokenizer:
    """Incremental detokenizer of one sequence: its text is the joined results of `push` and `flush`.

    Each call decodes the new tokens, behind the last emitted ones if a space may depend on these.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_ids: _Ids = (), *, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._hidden = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._ids = self._context_of(prompt_ids)  # window
        self._num_context = len(self._ids)  # leading tokens with emitted text
        self._sent = len(self._decode(self._ids))  # emitted leading characters

    def push(self, token_ids: Sequence[int]) -> str:
        if not self._hidden.isdisjoint(token_ids):
            token_ids = [token_id for token_id in token_ids if token_id not in self._hidden]
        if not token_ids:
            return ""
        self._ids += token_ids
        num_new = len(self._ids) - self._num_context
        for num_held in range(min(num_new, _MAX_CHARACTER_BYTES)):  # tokens of a partial character
            num_whole = len(self._ids) - num_held
            text = self._decode(self._ids[:num_whole])
            if not text.endswith(_REPLACEMENT):
                return self._emit(text, begin=self._num_context, end=num_whole)
        return self._emit_garbage() if num_new > _MAX_HELD else ""

    def flush(self) -> str:
        return self._emit(self._decode(self._ids), begin=self._num_context, end=len(self._ids))

    def _emit(self, text: str, *, begin: int, end: int) -> str:
        new_text = text[self._sent :]
        if self._tokenizer.joins_bytes:
            begin = end
        self._sent = len(self._decode(self._ids[begin:end])) if begin < end else 0
        self._num_context = end - begin
        del self._ids[:begin]
        return new_text

    def _emit_garbage(self) -> str:
        text = self._decode(self._ids)
        num_held = min(len(text) - len(text.rstrip(_REPLACEMENT)), _MAX_CHARACTER_BYTES - 1)
        new_text = text[self._sent : len(text) - num_held]
        del self._ids[: -_MAX_HELD // 2]
        self._sent = len(self._decode(self._ids)) - num_held
        self._num_context = len(self._ids)
        return new_text

    def _context_of(self, prompt_ids: _Ids) -> list[int]:
        tail = prompt_ids[-4 * _PROMPT_CONTEXT :]
        ids = [int(token_id) for token_id in tail if token_id not in self._hidden]
        for num_tokens in range(_PROMPT_CONTEXT, _PROMPT_CONTEXT + _MAX_CHARACTER_BYTES):
            if _REPLACEMENT not in self._decode(ids[-num_tokens:]):
                return ids[-num_tokens:]
        return ids[-_PROMPT_CONTEXT:]

    def _decode(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=self._skip)


def _failure(cls: type[Exception], what: str, error: BaseException) -> BaseException:
    return error if isinstance(error, KeyboardInterrupt | MemoryError) else cls(f"{what}: {error}")


def _named_tokens(folder: Path) -> dict[str, str]:
    named: dict[str, str] = {}
    for file in ("special_tokens_map.json", "tokenizer_config.json"):
        values = read_object(folder / file)
        for name in _NAMED_TOKENS:
            value = values.get(name)
            text = value.get("content") if isinstance(value, dict) else value
            if isinstance(text, str):
                named[name] = text
    return named


def _max_token_bytes(backend: tokenizers.Tokenizer) -> int | None:
    added: Iterable[tokenizers.AddedToken] = backend.get_added_tokens_decoder().values()
    if backend.normalizer is not None or any(token.lstrip or token.rstrip for token in added):
        return None
    if getattr(backend.model, "unk_token", None) is not None:
        return None
    longest_added = max((len(token.content.encode()) for token in added), default=1)
    return max(longest_added, max(map(len, backend.get_vocab(with_added_tokens=False)), default=1))
