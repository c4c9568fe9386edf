"""A request's prompt, in one of its three forms, to text and token ids; what cannot be a prompt is refused."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from tidewheel.batch import Int32Array
from tidewheel.errors import InvalidRequest, PromptTooLarge
from tidewheel.frontend.chat import ChatTemplate
from tidewheel.frontend.coercion import check_unicode, to_text
from tidewheel.frontend.messages import parse_messages
from tidewheel.frontend.tokenizer import Tokenizer
from tidewheel.frontend.values import GenerateRequest


class Prompt(NamedTuple):
    token_ids: Int32Array  # [num_prompt_tokens]
    text: str | None  # None: it came as token ids


class PromptReader:
    """Checks sizes before it does any work in proportion to them. Thread-safe."""

    def __init__(
        self, tokenizer: Tokenizer, template: ChatTemplate | None, *, max_prompt_bytes: int, max_model_len: int
    ) -> None:
        self._tokenizer = tokenizer
        self._template = template
        self._max_prompt_bytes = max_prompt_bytes
        self._max_model_len = max_model_len

    def read(self, request: GenerateRequest) -> Prompt:
        """Raises `InvalidRequest` naming the field, the value and the limit. Leaves room for one token of output."""
        forms = {"text_input": request.text, "input_ids": request.input_ids, "messages": request.messages}
        given = [name for name, value in forms.items() if value is not None]
        if len(given) != 1:
            raise InvalidRequest(
                f"give one of text_input, input_ids and messages, not {' and '.join(given) or 'none'}"
            )
        self._check_bytes(given[0], request.prompt_bytes)
        if request.input_ids is not None:
            return Prompt(self._check_ids(request.input_ids), None)
        if request.messages is not None:
            text = self._render(request.messages)
            token_ids = self._encode("messages", text, add_special_tokens=False)
        else:
            text = to_text("text_input", request.text)
            token_ids = self._encode("text_input", text, add_special_tokens=True)
        return Prompt(token_ids, text)

    def _render(self, messages: str | bytes) -> str:
        if self._template is None:
            raise InvalidRequest("messages is set, and the model has no chat template: send text_input")
        text = self._template.render(parse_messages(messages))
        check_unicode("messages", text)
        self._check_bytes("messages, as the chat template writes them,", len(text.encode("utf-8")))
        return text

    def _encode(self, name: str, text: str, *, add_special_tokens: bool) -> Int32Array:
        if not text:
            raise InvalidRequest(f"{name} is empty: give at least one character")
        self._check_least_tokens(name, text)
        token_ids = self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        return self._check_ids(token_ids, name)

    def _check_least_tokens(self, name: str, text: str) -> None:
        """Refuses a text that is too long however it is tokenised, before seconds go into tokenising it."""
        if self._tokenizer.max_token_bytes is None:
            return
        num_tokens = -(-len(text.encode("utf-8")) // self._tokenizer.max_token_bytes)
        if num_tokens >= self._max_model_len:
            raise InvalidRequest(f"{name} has {num_tokens} tokens or more: {self._limit}")

    def _check_ids(self, token_ids: Int32Array, name: str = "input_ids") -> Int32Array:
        num_tokens, vocab_size = len(token_ids), self._tokenizer.vocab_size
        if num_tokens == 0:
            raise InvalidRequest(f"{name} has no tokens: give at least one")
        if num_tokens >= self._max_model_len:
            raise InvalidRequest(f"{name} has {num_tokens} tokens: {self._limit}")
        outside = np.flatnonzero((token_ids < 0) | (token_ids >= vocab_size))
        if outside.size:
            index = int(outside[0])
            found = f"token id {token_ids[index]} at position {index}"
            raise InvalidRequest(f"{name} has {found}: the model's ids are 0 to {vocab_size - 1}")
        return token_ids

    def _check_bytes(self, name: str, num_bytes: int) -> None:
        if num_bytes > self._max_prompt_bytes:
            raise PromptTooLarge(f"{name} has {num_bytes} bytes: at most {self._max_prompt_bytes} are allowed")

    @property
    def _limit(self) -> str:
        return f"at most {self._max_model_len - 1} fit the context of {self._max_model_len} and leave room for output"
