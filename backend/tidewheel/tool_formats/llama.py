"""Llama 3: `{"name": …, "parameters": {…}}` as the whole answer, perhaps after `<|python_tag|>`."""

from __future__ import annotations

from tidewheel.tool_formats.tool_format import NAMED_OBJECT, OBJECT_HEAD, CallMark, ToolFormat

MARK = "<|python_tag|>"
LLAMA = ToolFormat(
    begin=NAMED_OBJECT.replace("arguments", "parameters"),
    end="}",
    marks={MARK: CallMark(OBJECT_HEAD)},
    has_one_call=True,  # the template refuses conversations with several
)
# Models whose template knows no tools: the form is like Llama's.
BARE = ToolFormat(begin=NAMED_OBJECT, end="}", has_one_call=True)
