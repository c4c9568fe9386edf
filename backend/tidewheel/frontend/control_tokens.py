"""Control tokens of a prompt, which only the chat template may write, not messages.

In messages, text that spells a control token is encoded as plain text. Random marks replace it while the template
runs; in the output, it replaces the marks, at *plain spans*. Then the template's control tokens get random names, and
a second tokenizer that knows only these encodes the prompt.
"""

import functools
import itertools
import json
import re
import secrets
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
import tokenizers

from tidewheel.batch import Int32Array
from tidewheel.errors import InvalidRequest
from tidewheel.frontend.chat import Conversation
from tidewheel.frontend.tokenizer import Tokenizer

Spans = Sequence[tuple[int, int]]  # characters of a prompt that are plain text, in order

_CONTROL_PREFIXES = ("<|", "<\uff5c")  # which some tokenizers do not flag as special
_NOTHING = r"(?!)"  # matches no text


class _RenamedTokenizer(NamedTuple):
    tokenizer: Tokenizer
    names: dict[str, str]  # by control token
    ids: dict[int | None, int]  # original id of an added token, by its id in the copy
    counted: frozenset[int]  # control tokens that plain text never makes: all but the unknown token


def _longest_of(texts: Iterable[str]) -> str:
    """Return a pattern of the longest of different `texts`. Alternatives begin differently: a search tries few."""
    alternatives = []
    # In reverse, so that an empty rest comes last.
    for _, group in itertools.groupby(sorted(texts, reverse=True), key=lambda text: text[:1]):
        alike = list(group)
        # All share what the first and last share: they are sorted.
        pairs = zip(alike[0], alike[-1], strict=False)
        length = len(list(itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)))
        rest = _longest_of(text[length:] for text in alike) if len(alike) > 1 else ""
        alternatives.append(re.escape(alike[0][:length]) + rest)
    return f"(?:{'|'.join(alternatives)})"


class ControlTokens:
    """Finder and safe encoder of a tokenizer's control tokens. Not thread-safe."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        added = tokenizer.backend.get_added_tokens_decoder()
        control = [token for token in added.values() if token.special or token.content.startswith(_CONTROL_PREFIXES)]
        self._added = {token.content: token_id for token_id, token in added.items()}
        self._texts = {token.content for token in control if token.content}
        self._pattern = re.compile(_longest_of(self._texts) if self._texts else _NOTHING)
        self._beginnings = {text[:length] for text in self._texts for length in range(1, len(text))}
        self._endings = {text[start:] for text in self._texts for start in range(1, len(text))}
        self._longest = max(map(len, self._texts), default=0)
        self._normalizer = tokenizer.backend.normalizer if any(token.normalized for token in control) else None

    def plain_spans(self, conversation: Conversation, text: str, render: Callable[[Conversation], str]) -> Spans:
        """Return the spans of `text`, the rendered conversation, where messages spell control tokens.

        Raise `InvalidRequest` if the template changes such a span.
        """
        marks = _Marks(self.risky_spans)
        marked = marks.conversation(conversation)
        if not marks.texts:
            return ()
        try:
            rendered = render(marked)
        except InvalidRequest:  # a template that wants certain words
            rendered = ""
        restored, spans = marks.restore(rendered)
        becomes_control = self._find_controls(rendered) != self._find_controls(text)
        if restored != text and (becomes_control or any(map(self._find_controls, marks.texts))):
            raise InvalidRequest(
                "messages contain the text of a special token, which the model's chat template strips, encodes or "
                "reads: leave it out"
            )
        return spans if becomes_control else ()

    def risky_spans(self, text: str) -> list[tuple[int, int]]:
        """Return the spans that spell a control token, or a part that text before or after could complete."""
        spans = [match.span() for match in self._pattern.finditer(text)]
        if not spans and self._normalizer is not None and self._find_controls(text):
            return [(0, len(text))]
        first, last = (spans[0][0], spans[-1][1]) if spans else (len(text), 0)
        longest = min(self._longest, len(text))
        head = next((n for n in range(min(longest, first), 0, -1) if text[:n] in self._endings), 0)
        begin = max(len(text) - longest, last, head)
        tail = next((n for n in range(begin, len(text)) if text[n:] in self._beginnings), len(text))
        return [(start, end) for start, end in ((0, head), *spans, (tail, len(text))) if start < end]

    @functools.cached_property
    def renamed(self) -> _RenamedTokenizer:
        """Tokenizer of `encode`. The first access may take seconds."""
        nonce = secrets.token_hex(8)
        state = json.loads(self._tokenizer.backend.to_str())
        names = {text: f"<{nonce}-{self._added[text]}>" for text in self._texts}
        for token in state["added_tokens"]:
            token["content"] = names.get(token["content"], token["content"])
        backend = tokenizers.Tokenizer.from_str(json.dumps(state))
        ids = {backend.token_to_id(names.get(text, text)): token_id for text, token_id in self._added.items()}
        model = state["model"]
        unknown = model.get("unk_id", self._added.get(model.get("unk_token")))
        counted = frozenset(self._added[text] for text in self._texts) - {unknown}
        return _RenamedTokenizer(Tokenizer(backend, vocab_size=self._tokenizer.vocab_size), names, ids, counted)

    def encode(self, text: str, plain: Spans, *, add_special_tokens: bool) -> Int32Array:
        """Return token ids [num_tokens] int32. Raise `InvalidRequest` if a plain span becomes a control token."""
        tokenizer, names, ids, counted = self.renamed
        parts, written, begin = [], [], 0
        for start, end in (*plain, (len(text), len(text))):
            written += [self._added[control] for control in self._pattern.findall(text[begin:start])]
            parts += [self._pattern.sub(lambda match: names[match[0]], text[begin:start]), text[start:end]]
            begin = end
        found = tokenizer.encode("".join(parts), add_special_tokens=False).tolist()
        token_ids = [ids.get(token_id, token_id) for token_id in found]
        if [each for each in token_ids if each in counted] != [each for each in written if each in counted]:
            raise InvalidRequest(
                "messages contain the text of a special token, which the model's tokenizer knows only as that token: "
                "leave it out"
            )
        before, after = self._surroundings() if add_special_tokens else ([], [])
        return np.array([*before, *token_ids, *after], dtype=np.int32)

    def _surroundings(self) -> tuple[list[int], list[int]]:
        bare, whole = (self._tokenizer.encode("a", add_special_tokens=flag).tolist() for flag in (False, True))
        start = next(n for n in range(len(whole)) if whole[n : n + len(bare)] == bare)
        return whole[:start], whole[start + len(bare) :]

    def _find_controls(self, text: str) -> list[str]:
        found: list[str] = self._pattern.findall(text)
        if self._normalizer is not None:
            found += self._pattern.findall(self._normalizer.normalize_str(text))
        return found


class _Marks:
    """Random marks in place of a conversation's `risky_spans` while the template runs."""

    def __init__(self, risky_spans: Callable[[str], list[tuple[int, int]]]) -> None:
        self.texts: list[str] = []  # replaced, by mark
        self._risky_spans = risky_spans
        self._name = f"x{secrets.token_hex(8)}"  # JSON escapes none of it

    def conversation(self, given: Conversation) -> Conversation:
        return msgspec.convert(self._replaced(msgspec.to_builtins(given)), Conversation)

    def restore(self, text: str) -> tuple[str, list[tuple[int, int]]]:
        """Return the text with its marks replaced, and the spans of the replaced texts."""
        parts, spans, length = [], [], 0
        for index, part in enumerate(re.split(f"{self._name}n([0-9]+)x", text)):
            parts.append(self.texts[int(part)] if index % 2 else part)
            length += len(parts[-1])
            if index % 2:
                spans.append((length - len(parts[-1]), length))
        return "".join(parts), spans

    def _replaced(self, value: Any) -> Any:
        if isinstance(value, str):
            return self._marked(value)
        if isinstance(value, list):
            return [self._replaced(item) for item in value]
        if isinstance(value, dict):
            return {self._marked(key): self._replaced(item) for key, item in value.items()}
        return value

    def _marked(self, text: str) -> str:
        parts, begin = [], 0
        for start, end in self._risky_spans(text):
            parts += [text[begin:start], f"{self._name}n{len(self.texts)}x"]
            self.texts.append(text[start:end])
            begin = end
        return "".join(parts) + text[begin:]
