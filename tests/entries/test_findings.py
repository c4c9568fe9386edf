"""Where fields stand in protobuf texts and JSON."""

from __future__ import annotations

from pathlib import Path

from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

from tidewheel.entries.entry import Entry
from tidewheel.entries.findings import Field, json_fields, place_of

TEXT = """# backend: "none"
backend : 'tide' "wheel" ; max_batch_size:0,
input [ { name: "a" dims: [ -1, 2 ] }, < name: "b # c" data_type: TYPE_FP32 > ]
input { name: "d\\"e" }
parameters: { key: "k" value: { string_value: "{ [ \\\\" } }
instance_group [ { count: 1 } , { count: 2 } ] version_policy { all { } }
"""


def cut(field: Field) -> str:
    return TEXT[field.start : field.end]


def test_every_form_of_a_field() -> None:
    text_format.Parse(TEXT, model_config_pb2.ModelConfig())
    fields = Entry(folder=Path("demo"), text=TEXT, config=None, model_json={}).fields
    assert (fields["backend"].value, place_of(TEXT, fields["backend"].start)) == ("tidewheel", (2, 1))
    assert cut(fields["max_batch_size"]) == "max_batch_size:0"
    assert cut(fields["input.a"]) == '{ name: "a" dims: [ -1, 2 ] }'
    assert cut(fields["input.b # c"]) == '< name: "b # c" data_type: TYPE_FP32 >'
    assert fields["input.b # c.data_type"].value == "TYPE_FP32"
    assert cut(fields['input.d\\"e']) == 'input { name: "d\\"e" }'
    assert TEXT[fields["input.a.dims"].name_start : fields["input.a.dims"].list_end] == "dims: [ -1, 2 ]"
    assert fields["parameters.k.value.string_value"].value == "{ [ \\\\"
    assert [fields[f"instance_group.{index}.count"].value for index in (0, 1)] == ["1", "2"]
    assert cut(fields["version_policy.all"]) == "all { }"


def test_keys_of_the_outermost_object() -> None:
    text = '{"a": {"b": 1}, "c": [{"d": ":"}, 2], "e\\"": "f",\n "g": {}}'
    assert [field.name for field in json_fields(text)] == ["a", "c", 'e\\"', "g"]
    assert place_of(text, json_fields(text)[-1].start) == (2, 2)
