from __future__ import annotations

import re
from collections import Counter

_RULE = re.compile(r"^[ \t]*([A-Za-z0-9_-]+)[ \t]*::=", re.MULTILINE)
_ROOT, _LARK_ROOT = "root", "start"
_PART = re.compile(
    r"""
        (?P<literal>"(?:\\.|[^"\\])*"?) | (?P<set>\[(?:\\.|[^\]\\])*\]?)
        | (?P<comment>\#[^\r\n]*) | (?P<name>[\w-]+)
    """,
    re.VERBOSE | re.DOTALL,
)
_ESCAPE = re.compile(r"\\(?:x([0-9A-Fa-f]{2})|u([0-9A-Fa-f]{4})|U([0-9A-Fa-f]{8})|.)|[\r\n]", re.DOTALL)
_LINE_ENDS = {"\n": "\\n", "\r": "\\r"}
_ASCII = 0x80
_SURROGATES = range(0xD800, 0xE000)


def to_lark(rules: str) -> str:
    """Return GBNF or Lark rules as Lark. Raise `ValueError`.

    llguidance's converter drops a rule given twice, merges names that differ only in case or `-`, and breaks
    `\\u00e9`.
    """
    from llguidance.gbnf_to_lark import any_to_lark

    names = _RULE.findall(rules)
    if not names:
        return str(any_to_lark(rules))
    if len(set(names)) < len(names):
        raise ValueError(f"the rule {Counter(names).most_common(1)[0][0]} is given twice")
    renamed = _distinct(names)
    return str(any_to_lark(_PART.sub(lambda part: _part(part, renamed), rules)))


def _part(part: re.Match[str], renamed: dict[str, str]) -> str:
    text = part[0]
    if part["name"] is not None:
        return renamed.get(text, text)
    return text if part["comment"] is not None else _ESCAPE.sub(_character, text)


def _character(escape: re.Match[str]) -> str:
    digits = escape[1] or escape[2] or escape[3]
    if digits is None:
        return _LINE_ENDS.get(escape[0], escape[0])
    code = int(digits, 16)
    if code in _SURROGATES or code > 0x10FFFF:
        raise ValueError(f"{escape[0]} is no character")
    return f"\\x{code:02x}" if code < _ASCII else chr(code)


def _distinct(names: list[str]) -> dict[str, str]:
    taken = {_LARK_ROOT}
    renamed = {}
    for number, name in enumerate(names):
        key = re.sub("([a-z])([A-Z])", r"\1_\2", name.replace("-", "_")).lower()
        if key in taken and name != _ROOT:
            renamed[name] = f"rule-{number}-of-gbnf"
        taken.add(key)
    return renamed
