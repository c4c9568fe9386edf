"""Requests whose answers repeat their prompts, and requests whose answers do not."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import NamedTuple


class ChatText(NamedTuple):
    user: str
    schema: Mapping[str, object] | None = None  # of an answer in JSON
    stop: str | None = None  # ends an answer

    @property
    def prompt(self) -> str:
        return f"<|im_start|>user\n{self.user}<|im_end|>\n<|im_start|>assistant\n"


_SHOP = """def compute_total(items, tax):
    total = 0
    for item in items:
        if item.price > 0:
            total += item.price * item.count
    total = total * (1 + tax)
    return total


def print_items(items):
    for item in items:
        print(item.name, item.price, item.count)
"""
_STACK = """class Stack:
    def __init__(self):
        self.values = []

    def push(self, value):
        self.values.append(value)

    def pop(self):
        if not self.values:
            raise IndexError("the stack is empty")
        return self.values.pop()

    def size(self):
        return len(self.values)
"""
_LOADER = """import json


def load_settings(path):
    with open(path) as file:
        settings = json.load(file)
    if "name" not in settings:
        raise ValueError("settings need a name")
    if "port" not in settings:
        settings["port"] = 8000
    return settings
"""
_COUNTER = """def count_words(text):
    counts = {}
    for word in text.split():
        word = word.lower().strip(".,;:!?")
        if word in counts:
            counts[word] += 1
        else:
            counts[word] = 1
    return counts
"""
_EDIT = "Rewrite this Python code with {change}. Answer with the whole code.\n```python\n{code}```"
_END_OF_CODE = "\n```"  # an explanation would follow
_HARBOUR = (
    "The harbour of Ellmouth was built in 1874 by the engineer Ruth Calloway. It has three piers of granite. The "
    "north pier is 310 metres long and carries a lighthouse of white brick. In 1921 a storm broke the south pier, "
    "and it took four years to mend it. Today the harbour has berths for 62 boats, a school for sailors and a "
    "market hall where fish is sold on Tuesdays and Fridays. The harbour master, Owen Tate, lives above the hall."
)
_MINUTES = (
    "The meeting began at nine. Anna Berg reported that the new pump had run for six weeks without a fault. Carl "
    "Diaz asked for a second pump before the summer. The council agreed to pay 12,500 euros for it. Eva Fox said "
    "that the filters must be changed every three months, and that the next change is due on the fourth of May. "
    "Nobody spoke against it. The meeting ended at half past ten, and the next one is on the second of June."
)
_COPY = "{ask} Answer with sentences of the text, word for word.\n\nText: {text}"
_RECORDS = (
    "Anna Berg, 34 years old, lives in Oslo and works as a nurse.\nCarl Diaz, 51 years old, lives in Lima and works "
    "as a carpenter.\nEva Fox, 28 years old, lives in Leeds and works as a teacher.\nGus Hale, 45 years old, lives "
    "in Perth and works as a pilot."
)
_BOATS = (
    "The Heron is 12 metres long, was built in 1988 and belongs to Owen Tate.\nThe Plover is 9 metres long, was "
    "built in 2003 and belongs to Ruth Lane.\nThe Curlew is 15 metres long, was built in 1979 and belongs to Sam "
    "Reed."
)


def _list_of(**fields: str) -> Mapping[str, object]:
    item = {
        "type": "object",
        "properties": {name: {"type": kind} for name, kind in fields.items()},
        "required": list(fields),
        "additionalProperties": False,
    }
    return {"type": "array", "items": item, "minItems": 3, "maxItems": 4}


_PEOPLE = _list_of(name="string", age="integer", city="string", occupation="string")
_BOAT = _list_of(name="string", length_metres="integer", built="integer", owner="string")


def _json(ask: str, text: str, schema: Mapping[str, object]) -> ChatText:
    return ChatText(f"{ask} Answer in JSON, an array of objects.\n\n{text}", schema)


def _edit(change: str, code: str) -> ChatText:
    return ChatText(_EDIT.format(change=change, code=code), stop=_END_OF_CODE)


REPEATING: Mapping[str, tuple[ChatText, ...]] = {
    "code edits": (
        _edit("`item` renamed to `entry`", _SHOP),
        _edit("a method `clear` that empties the stack", _STACK),
        _edit('a check that "host" is in the settings', _LOADER),
        _edit("type hints", _COUNTER),
    ),
    "extraction": (
        ChatText(_COPY.format(ask="What does the text say of the piers?", text=_HARBOUR)),
        ChatText(_COPY.format(ask="What can one find at the harbour today?", text=_HARBOUR)),
        ChatText(_COPY.format(ask="What was said of pumps and filters?", text=_MINUTES)),
        ChatText(_COPY.format(ask="What was decided, and when is the next meeting?", text=_MINUTES)),
    ),
    "JSON by schema": (
        _json("List these people.", _RECORDS, _PEOPLE),
        _json("Make a table of the boats.", _BOATS, _BOAT),
        _json(f"Return the people of this text by the schema {json.dumps(_PEOPLE)}.", _RECORDS, _PEOPLE),
        _json("For each boat give its name, length, year and owner.", _BOATS, _BOAT),
    ),
}
_SUBJECTS = (
    "a lighthouse keeper who cannot sleep", "why the sky changes its colour at dusk", "a market in a mountain town",
    "how bread came to be baked", "a letter from a sailor to her brother", "the first snow of a year",
    "what makes a good teacher", "a walk along a river in spring", "an old clock that runs backwards",
    "how people found their way at sea", "a concert in a railway station", "what a gardener learns from weather",
    "a dispute between two neighbours", "how glass is made", "a city seen from its roofs", "a dream about a library",
)  # fmt: skip
VARIED = tuple(ChatText(f"Write about {subject}.") for subject in _SUBJECTS)
