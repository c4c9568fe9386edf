"""Mistakes in `multi_lora.json`, and in adapters that it names, are found at their places before a server starts."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from entries.conftest import WriteEntry
from entries.test_planted_mistakes import CONFIG, matches, place, quick_trial, setting
from support.models.peft_folders import WEIGHTS_NAME, read_peft, write_folder, write_peft
from support.triton.serving import WEIGHTS
from tidewheel.entries.checking import check

__all__ = ["quick_trial"]

ON = setting("enable_lora", "true")


@pytest.fixture
def entry(write: WriteEntry) -> Path:
    return write("demo", CONFIG + ON)


@pytest.mark.parametrize(
    ("text", "where", "field", "words"),
    [
        ("[]", "multi_lora.json", "", "multi_lora.json holds a list … JSON object"),
        ('{"a": ', "multi_lora.json", "", "multi_lora.json is not JSON"),
        ('{"": "/a"}', "multi_lora.json:1:2", "", "a name of 0 characters … 1 to 128"),
        ('{"a\\nb": "/a"}', "multi_lora.json", "", "control character U+000A at position 1: remove it"),
        (
            json.dumps(dict.fromkeys(map(str, range(10_000)), "a")),
            "multi_lora.json",
            "",
            "10000 adapters: at most 4096",
        ),
        ('{\n    "a": "/nowhere"\n}', "multi_lora.json:2:5", "a", "a: /nowhere/adapter_config.json does not exist"),
    ],
)
def test_mistakes_in_the_file(entry: Path, text: str, where: str, field: str, words: str) -> None:
    (entry / "1" / "multi_lora.json").write_text(text)
    (found,) = check(entry).findings
    assert (found.rule, found.severity, found.field) == ("multi-lora" if field else "settings", "error", field)
    assert place(found) == where and matches(words, found.message), found


def test_adapters_that_are_there_without_the_setting(write: WriteEntry) -> None:
    entry = write("demo", CONFIG)
    (entry / "1" / "multi_lora.json").write_text('{"a": "/nowhere"}')
    (found,) = (one for one in check(entry).findings if one.rule == "multi-lora")
    assert found.severity == "warning"
    assert matches("enable_lora is not true … set enable_lora to true in model.json", found.message)


Damage = Callable[[Path], object]


def with_fields(**changes: object) -> Damage:
    def damage(folder: Path) -> None:
        fields, tensors = read_peft(folder)
        write_folder(folder, {**fields, **changes}, tensors)

    return damage


def of_another_base(folder: Path) -> None:
    fields, tensors = read_peft(folder)
    first = next(name for name in tensors if "lora_A" in name)
    write_folder(folder, fields, {**tensors, first: torch.zeros(tensors[first].shape[0], 48)})


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda folder: (folder / "adapter_config.json").unlink(), "adapter_config.json does not exist"),
        (lambda folder: (folder / WEIGHTS_NAME).unlink(), "no weights"),
        (lambda folder: (folder / WEIGHTS_NAME).rename(folder / "adapter_model.bin"), "never loaded"),
        (lambda folder: (folder / WEIGHTS_NAME).write_bytes(b"\x80\x04pickle"), WEIGHTS_NAME),
        (with_fields(use_dora=True), "use_dora"),
        (with_fields(peft_type="LOHA"), "peft_type … LORA"),
        (with_fields(modules_to_save=["lm_head"]), "modules_to_save"),
        (lambda folder: write_peft(folder, WEIGHTS, rank=32), "r is 32 … max_lora_rank, which is 16"),
        (of_another_base, "has shape [4, 48], this base asks for"),
    ],
)
def test_mistakes_in_an_adapter(entry: Path, tmp_path: Path, damage: Damage, words: str) -> None:
    good, bad = write_peft(tmp_path / "good", WEIGHTS), write_peft(tmp_path / "bad", WEIGHTS, seed=1)
    damage(bad)
    (entry / "1" / "multi_lora.json").write_text(json.dumps({"good": str(good), "bad": str(bad)}))
    (found,) = (one for one in check(entry).findings if one.severity == "error")
    assert (found.rule, found.field) == ("multi-lora", "bad") and "\n" not in found.message
    assert matches(f"bad: … {words}", found.message), found.message
    assert [one.rule for one in check(entry, is_this_machine=False).findings if one.severity == "error"] == []


def test_adapters_of_the_setting(write: WriteEntry) -> None:
    entry = write("demo", CONFIG + ON)
    (entry / "1" / "model.json").write_text('{"lora_modules": {"a": "/nowhere"}}')
    (found,) = (one for one in check(entry).findings if one.severity == "error")
    assert (place(found), found.field) == ("model.json:1:2", "lora_modules")
    assert matches("a: /nowhere/adapter_config.json does not exist", found.message)
