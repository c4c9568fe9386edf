"""Names and folders of adapters, as operators write them."""

from __future__ import annotations

import json

import pytest

from tidewheel.errors import ConfigError
from tidewheel.lora import MAX_LORA_NAME_CHARS, MAX_LORA_NAMES, parse_loras


def test_names_and_folders() -> None:
    assert parse_loras('{"acme/sql": "/a", "ü": "b/c"}') == {"acme/sql": "/a", "ü": "b/c"}
    assert parse_loras("  ") == parse_loras("{}") == {}
    assert len(parse_loras(json.dumps(dict.fromkeys(map(str, range(MAX_LORA_NAMES)), "a")))) == MAX_LORA_NAMES


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "multi_lora.json is not JSON"),
        ("[]", "multi_lora.json holds a list: it must be a JSON object"),
        ('{"": "/a"}', "a name of 0 characters: it must be 1 to 128"),
        (json.dumps({"a" * (MAX_LORA_NAME_CHARS + 1): "/a"}), "a name of 129 characters"),
        (json.dumps({"a\nb": "/a"}), "a name with the control character U+000A at position 1: remove it"),
        ('{"a": 7}', "a is 7: it must be the path"),
        ('{"a": ""}', "a is '': it must be the path"),
        ('{"a": "/a\\u0000"}', "a is '/a\\x00': it must be the path"),
        (
            json.dumps({str(i): "/" + 99 * "a" for i in range(1000)}),
            "of names and folders: at most 98304 are allowed",
        ),
        (json.dumps(dict.fromkeys(map(str, range(10_000)), "a")), "names 10000 adapters: at most 4096 are allowed"),
    ],
)
def test_mistakes(text: str, words: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse_loras(text, "multi_lora.json")
    assert words in str(error.value) and "\n" not in str(error.value)
