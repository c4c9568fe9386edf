"""Mistral: `[TOOL_CALLS][{"name": …, "arguments": {…}}]`, or in later models `[TOOL_CALLS]name[ARGS]{…}`."""

from __future__ import annotations

import re

from tidewheel.tool_formats.tool_format import NAME, NAMED_OBJECT, OBJECT, CallMark, ToolFormat

MARK, ARGUMENTS = "[TOOL_CALLS]", "[ARGS]"
_NAMED = rf"\s*{NAME.replace('name', 'bare')}\s*(?:\[CALL_ID\]\w*)?(?:\[ARGS\])?\s*(?=\{{)"
_MARKS = {MARK: CallMark(re.compile(rf"(?:\s*\[)?{OBJECT}|{_NAMED}"))}
MISTRAL = ToolFormat(
    opening=f"{MARK}[", begin=NAMED_OBJECT, end="}", separator=", ", closing="]", trigger=MARK, marks=_MARKS
)
MISTRAL_NAMED = ToolFormat(begin=f"{MARK}NAME{ARGUMENTS}", trigger=MARK, marks=_MARKS)
