"""JSON as clients send it, with every flaw an `InvalidRequest` that names the field it came in."""

from __future__ import annotations

import json
from collections import Counter

from tidewheel.errors import InvalidRequest
from tidewheel.frontend.coercion import show


def parse_json(text: str | bytes, name: str) -> object:
    """The value that `text` holds. A key that an object has twice is refused: which one counts is anyone's guess.

    NaN and Infinity are read as floats, so that the check of the field they stand in can name it.
    """
    try:
        if isinstance(text, bytes):
            text = text.decode("utf-8")
        return json.loads(text, object_pairs_hook=lambda pairs: _unique(pairs, name))
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"{name} is not valid UTF-8: {error.reason} at byte {error.start}") from None
    except json.JSONDecodeError as error:
        raise InvalidRequest(f"{name} is not JSON: {error.msg} at character {error.pos}") from None
    except RecursionError:
        raise InvalidRequest(f"{name} is not JSON that can be read: it is nested too deep") from None
    except ValueError:  # the interpreter's limit on the digits of an integer
        raise InvalidRequest(f"{name} holds an integer with thousands of digits") from None


def _unique(pairs: list[tuple[str, object]], name: str) -> dict[str, object]:
    values = dict(pairs)
    if len(values) == len(pairs):
        return values
    ((key, _),) = Counter(key for key, _ in pairs).most_common(1)
    raise InvalidRequest(f"{name} has the key {show(key)} twice")
