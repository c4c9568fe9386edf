"""Answers printed as they arrive, with their timing."""

from __future__ import annotations

import sys
import time
import unicodedata
from dataclasses import dataclass
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from tidewheel_client import Stream

_KEPT_CONTROLS = "\n\t"


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    text: str
    finish_reason: str | None  # None: cancelled here
    num_input_tokens: int
    num_output_tokens: int
    first_s: float  # until the first text
    total_s: float

    @property
    def stats(self) -> str:
        """One line of token counts, timing and finish reason."""
        after_first = self.total_s - self.first_s
        speed = (self.num_output_tokens - 1) / after_first if self.num_output_tokens > 1 and after_first > 0 else 0.0
        return (
            f"{self.num_input_tokens} tokens in, {self.num_output_tokens} out; "
            f"first after {self.first_s * 1e3:.0f} ms, then {speed:.0f} tokens/s; "
            f"ended by {self.finish_reason or 'you'}"
        )


def show(stream: Stream, out: TextIO | None = None) -> Answer:
    """Print a stream's chunks and a line break; Ctrl-C cancels it, keeping what came."""
    out = out or sys.stdout
    start = time.monotonic()
    first_s, texts, num_input, num_output = 0.0, [], 0, 0
    try:
        for chunk in stream:
            first_s = first_s or time.monotonic() - start
            texts.append(chunk.text)
            num_input = chunk.num_input_tokens or num_input
            num_output += chunk.num_output_tokens or 0
            out.write(printable(chunk.text) if out.isatty() else chunk.text)
            out.flush()
    except KeyboardInterrupt:
        stream.cancel()
    finally:
        if texts:
            out.write("\n")
            out.flush()
    return Answer(
        text="".join(texts),
        finish_reason=stream.finish_reason,
        num_input_tokens=num_input,
        num_output_tokens=num_output,
        first_s=first_s,
        total_s=time.monotonic() - start,
    )


def printable(text: str) -> str:
    """Drop control characters: a terminal would obey a model's escape sequences."""
    return "".join(c for c in text if c in _KEPT_CONTROLS or unicodedata.category(c) not in ("Cc", "Cf", "Cs"))
