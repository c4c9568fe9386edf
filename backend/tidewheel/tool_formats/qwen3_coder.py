"""Qwen3-Coder: `<tool_call><function=name><parameter=key>value</parameter></function></tool_call>`, in lines."""

from __future__ import annotations

import re

from tidewheel.tool_formats.hermes import END, MARK
from tidewheel.tool_formats.tool_format import NAME, CallMark, Tags, ToolFormat

FUNCTION, PARAMETER = "<function=", "<parameter="
_KEY = re.compile(r"([^<>\n]*)>(?:\n|(?=[^\n]))")
_TAGS = Tags(PARAMETER, ">", _KEY, "</parameter>", separator="\n", frame="\n")
QWEN3_CODER = ToolFormat(
    begin=f"{MARK}\n{FUNCTION}NAME>\n",
    end=f"</function>\n{END}",
    separator="\n",
    trigger=MARK,
    marks={MARK: CallMark(re.compile(rf"\s*{FUNCTION}{NAME}>"), END, _TAGS)},
)
