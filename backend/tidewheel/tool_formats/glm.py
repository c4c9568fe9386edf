"""GLM: `<tool_call>name`, `<arg_key>` and `<arg_value>` of arguments, `</tool_call>`; since 4.7 without newlines."""

from __future__ import annotations

import re
from dataclasses import replace

from tidewheel.tool_formats.hermes import END, MARK
from tidewheel.tool_formats.tool_format import NAME, CallMark, Tags, ToolFormat

KEY_END, TOGETHER = "</arg_key>", "</arg_key><arg_value>"
_HEAD, _KEY = re.compile(rf"\s*{NAME}\s*(?=<arg_key>|{END})"), re.compile(rf"([^<]*){KEY_END}\s*<arg_value>")
_TAGS = Tags("<arg_key>", TOGETHER, _KEY, "</arg_value>")
_TAGS_IN_LINES = replace(_TAGS, key_end=f"{KEY_END}\n<arg_value>", separator="\n")
GLM_TOGETHER = ToolFormat(begin=f"{MARK}NAME", end=END, trigger=MARK, marks={MARK: CallMark(_HEAD, END, _TAGS)})
GLM = replace(GLM_TOGETHER, begin=f"{MARK}NAME\n", separator="\n", marks={MARK: CallMark(_HEAD, END, _TAGS_IN_LINES)})
