"""All formats, and the choice of a model's by its chat template."""

from __future__ import annotations

from tidewheel.tool_formats import deepseek, glm, harmony, hermes, mistral, qwen3_coder
from tidewheel.tool_formats.llama import BARE, LLAMA
from tidewheel.tool_formats.tool_format import ToolFormat

# Format by texts that its templates have; the first that fits.
_BY_TEXTS: tuple[tuple[tuple[str, ...], ToolFormat], ...] = (
    ((harmony.CHANNEL,), harmony.HARMONY),
    ((deepseek.OPENING, "```json"), deepseek.DEEPSEEK_BLOCK),
    ((deepseek.OPENING,), deepseek.DEEPSEEK),
    ((mistral.MARK, mistral.ARGUMENTS), mistral.MISTRAL_NAMED),
    ((mistral.MARK,), mistral.MISTRAL),
    ((glm.TOGETHER,), glm.GLM_TOGETHER),
    ((glm.KEY_END,), glm.GLM),
    ((qwen3_coder.FUNCTION, qwen3_coder.PARAMETER), qwen3_coder.QWEN3_CODER),
    ((hermes.MARK,), hermes.HERMES),
    (("<|start_header_id|>",), LLAMA),
    (("<|python_tag|>",), LLAMA),
)
FORMATS = (*(each for _, each in _BY_TEXTS), BARE)
_RESTS = tuple({(mark, rest): None for each in FORMATS for mark, rest in each.marks.items()})
# What may follow a mark: the rests of one mark have the same closing.
CALL_MARKS = {mark: tuple(rest for other, rest in _RESTS if other == mark) for mark, _ in _RESTS}
SILENT_MARKS = tuple({mark: None for each in FORMATS for mark in each.silent})
# Marks around thoughts: at the beginning of an answer, and within.
THOUGHT_MARKS = {"<think>": "</think>", "[THINK]": "[/THINK]"}
THOUGHT_MARKS |= dict(each.thoughts for each in FORMATS if each.thoughts)
MORE_THOUGHT_MARKS = {mark: each.thoughts[1] for each in FORMATS if each.thoughts for mark in each.more_thoughts}


def format_of(template: str) -> ToolFormat:
    """Return the format of a model's calls."""
    return next((each for texts, each in _BY_TEXTS if all(text in template for text in texts)), BARE)


def thoughts_of(template: str, chosen: ToolFormat) -> tuple[str, str] | None:
    """Return the marks of a model's thoughts; None if it has none."""
    found = (pair for pair in THOUGHT_MARKS.items() if pair[1] in template and chosen.thoughts is None)
    return chosen.thoughts or next(found, None)
