"""Hermes and Qwen: `<tool_call>{"name": …, "arguments": {…}}</tool_call>`."""

from __future__ import annotations

from tidewheel.tool_formats.tool_format import NAMED_OBJECT, OBJECT_HEAD, CallMark, ToolFormat

MARK, END = "<tool_call>", "</tool_call>"
HERMES = ToolFormat(
    begin=f"{MARK}\n{NAMED_OBJECT}",
    end=f"}}\n{END}",
    separator="\n",
    trigger=MARK,
    marks={MARK: CallMark(OBJECT_HEAD, END)},
)
