"""Parameters of the way from a prompt to its tokens."""

from __future__ import annotations

from typing import NamedTuple

from tidewheel.errors import InvalidRequest


class PromptOptions(NamedTuple):
    """None: the prompt's kind decides."""

    add_special_tokens: bool | None = None  # default: for text, not for messages, whose template writes its own
    add_generation_prompt: bool | None = None  # default: true
    return_token_strs: bool = False  # of the task tokenize
    echo: bool = False  # the prompt before the text, also in a stream

    def check_for(self, name: str) -> None:
        """Raise `InvalidRequest` for one that has no meaning for the prompt's field."""
        if name == "input_ids" and self.add_special_tokens is not None:
            raise InvalidRequest("add_special_tokens is set, and the prompt is token ids: leave it out")
        if name == "input_ids" and self.return_token_strs:
            raise InvalidRequest("return_token_strs is true: it goes with the task tokenize")
        if name != "messages" and self.add_generation_prompt is False:
            raise InvalidRequest("add_generation_prompt is false: it goes with messages")
