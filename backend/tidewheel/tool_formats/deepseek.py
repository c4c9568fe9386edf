"""DeepSeek: calls between marks of their own, since V3.1 without a code block around the arguments."""

from __future__ import annotations

from tidewheel.tool_formats.tool_format import NAME, CallMark, ToolFormat

OPENING, CLOSING = "<\uff5ctool\u2581calls\u2581begin\uff5c>", "<\uff5ctool\u2581calls\u2581end\uff5c>"
BLOCK = "```json\n"
_BEGIN, _SEPARATOR, _END = (
    "<\uff5ctool\u2581call\u2581begin\uff5c>",
    "<\uff5ctool\u2581sep\uff5c>",
    "<\uff5ctool\u2581call\u2581end\uff5c>",
)
_HEAD = rf"\s*(?:function{_SEPARATOR})?{NAME}(?:{_SEPARATOR}|\s*{BLOCK})\s*(?=\{{)"
_MARKS, _SILENT = {_BEGIN: CallMark(_HEAD, _END)}, (OPENING, CLOSING)
DEEPSEEK = ToolFormat(
    opening=OPENING,
    begin=f"{_BEGIN}NAME{_SEPARATOR}",
    end=_END,
    closing=CLOSING,
    trigger=OPENING,
    marks=_MARKS,
    silent=_SILENT,
)
DEEPSEEK_BLOCK = ToolFormat(
    opening=OPENING,
    begin=f"{_BEGIN}function{_SEPARATOR}NAME\n{BLOCK}",
    end=f"\n```{_END}",
    separator="\n",
    closing=CLOSING,
    trigger=OPENING,
    marks=_MARKS,
    silent=_SILENT,
)
