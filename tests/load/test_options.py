"""Options as users of locust write them."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from tidewheel_client.load.load_options import (
    OptionError,
    Work,
    parse_counts,
    parse_mix,
    parse_qos,
    parse_range,
    read_prompts,
)


def test_ranges() -> None:
    assert parse_range("2") == (2, 2)
    assert parse_range("0.5-2.5") == (0.5, 2.5)
    assert parse_counts("1-64") == (1, 64)


@pytest.mark.parametrize("text", ["", "a", "5-", "-5", "5-2", "1-2-3", "nan", "1-inf", "1e9"])
def test_no_ranges(text: str) -> None:
    with pytest.raises(OptionError, match="range"):
        parse_range(text)


@pytest.mark.parametrize("text", ["0", "0-5", "1.5", "1-2.5"])
def test_no_counts(text: str) -> None:
    with pytest.raises(OptionError, match="whole numbers from 1"):
        parse_counts(text)


def test_mixes() -> None:
    assert parse_mix("a") == {"a": 1}
    assert parse_mix(" a = 3 , b=0.5") == {"a": 3, "b": 0.5}


@pytest.mark.parametrize("text", ["", "a,", "a=1,a=2", "a=", "a=x", "a=0", "a=-1", "a=nan", "a=inf", "=1"])
def test_no_mixes(text: str) -> None:
    with pytest.raises(OptionError, match="mix"):
        parse_mix(text)


def test_qos_classes_are_the_four() -> None:
    assert parse_qos("critical,low=2") == {"critical": 1, "low": 2}
    with pytest.raises(OptionError, match="hi is no QoS class: they are critical, high, normal, low"):
        parse_qos("hi=1")


def test_prompt_files(tmp_path: Path) -> None:
    path = tmp_path / "prompts"
    path.write_text("one\n\n  \ntwo words\n")
    assert read_prompts(str(path)) == ("one", "two words")
    for name, content in (("blank", b"\n \n"), ("latin", b"\xff\n")):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(OptionError, match=name):
            read_prompts(str(tmp_path / name))
    with pytest.raises(OptionError, match="missing"):
        read_prompts(str(tmp_path / "missing"))


def test_defaults(arguments: argparse.Namespace) -> None:
    work = Work(arguments, "x")
    request = work.next()
    assert (request.qos, request.parameters.keys()) == ("normal", {"max_tokens", "ignore_eos", "priority"})
    assert 8 <= len(request.prompt.split()) <= 64
    assert work.think_time() == 0


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("output_tokens", "0"),
        ("qos_mix", "hi"),
        ("think_time", "x"),
        ("tenants", "a=0"),
        ("request_timeout", 0.0),
        ("prompt_file", "/no/such/file"),
    ],
)
def test_the_web_page_is_not_trusted(arguments: argparse.Namespace, name: str, value: object) -> None:
    setattr(arguments, name, value)
    with pytest.raises(OptionError):
        Work(arguments, "")


def test_the_command_line_says_which_option(capsys: pytest.CaptureFixture[str]) -> None:
    from locust.argument_parser import LocustArgumentParser

    from tidewheel_client.load.load_options import add_arguments

    parser = LocustArgumentParser()
    add_arguments(parser)
    assert "prompt_file" not in parser.args_included_in_web_ui
    assert {"model", "qos_mix", "think_time"} <= parser.args_included_in_web_ui.keys()
    with pytest.raises(SystemExit) as end:
        parser.parse_args(["--qos-mix", "hi"])
    assert end.value.code == 2
    assert "--qos-mix: 'hi': hi is no QoS class" in capsys.readouterr().err
