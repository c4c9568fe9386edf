"""GPT-OSS: messages on channels. A call is the last message of an answer: `<|call|>` ends the text."""

from __future__ import annotations

import re

from tidewheel.tool_formats.tool_format import NAME, CallMark, ToolFormat

CHANNEL = "<|channel|>"
_MESSAGE, _END, _NEXT, _TO = "<|message|>", "<|end|>", "<|start|>assistant", " to=functions."
_ANALYSIS, _FINAL, _COMMENTARY = (f"{CHANNEL}{name}{_MESSAGE}" for name in ("analysis", "final", "commentary"))
_CALL = f"{CHANNEL}commentary{_TO}"
_CALL_MARK = CallMark(re.compile(rf"{NAME}(?:(?!<\|message\|>).){{,200}}<\|message\|>\s*(?=\{{)", re.DOTALL))
_BEFORE = ("", _NEXT, _END + _NEXT)  # a message
HARMONY = ToolFormat(
    begin=f"{_CALL}NAME <|constrain|>json{_MESSAGE}",
    trigger=_CALL,
    marks={before + form: _CALL_MARK for before in _BEFORE for form in (_CALL, _TO) if before + form != _TO},
    silent=tuple(before + form for before in _BEFORE for form in (_FINAL, _COMMENTARY)),
    thoughts=(_ANALYSIS, _END),
    more_thoughts=tuple(before + _ANALYSIS for before in _BEFORE),
    after_thoughts=_NEXT,
    answer=_FINAL,
    preamble=(_COMMENTARY, _END + _NEXT),
    has_one_call=True,
)
