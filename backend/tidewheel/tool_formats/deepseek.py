"""DeepSeek: calls between marks of their own, before V3.1 with a code block around the arguments."""

from __future__ import annotations

import re
from dataclasses import replace

from tidewheel.tool_formats.tool_format import NAME, CallMark, ToolFormat

OPENING, _CLOSING, _BEGIN, _END, _SEPARATOR = (
    f"<\uff5ctool\u2581{name}\uff5c>"
    for name in ("calls\u2581begin", "calls\u2581end", "call\u2581begin", "call\u2581end", "sep")
)
BLOCK = "```json\n"
_HEAD = re.compile(rf"\s*(?:function{_SEPARATOR})?{NAME}(?:{_SEPARATOR}|\s*{BLOCK})\s*(?=\{{)")
DEEPSEEK = ToolFormat(
    opening=OPENING,
    begin=f"{_BEGIN}NAME{_SEPARATOR}",
    end=_END,
    closing=_CLOSING,
    trigger=OPENING,
    marks={_BEGIN: CallMark(_HEAD, _END)},
    silent=(OPENING, _CLOSING),
)
DEEPSEEK_BLOCK = replace(
    DEEPSEEK, begin=f"{_BEGIN}function{_SEPARATOR}NAME\n{BLOCK}", end=f"\n```{_END}", separator="\n"
)
