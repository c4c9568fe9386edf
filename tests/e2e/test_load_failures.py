"""A model that cannot be served: the load fails in seconds, one line says what to change, nothing is ever ready."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from support.triton.serving import WEIGHTS, Server, start_server, wait_for

pytestmark = pytest.mark.e2e

LIMIT_S = 120.0


def truncate_weights(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:100_000])


def remove_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def rename_architecture(folder: Path) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, "architectures": ["HovercraftForCausalLM"], "model_type": "hovercraft"}))


def break_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("{}")


def remove_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()


def ask_for_remote_code(folder: Path) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, "auto_map": {"AutoModelForCausalLM": "evil.Model"}}))
    (folder / "evil.py").write_text("raise SystemExit('must never run')")


def refused(arguments: list[str], log: Path) -> str:
    """What the command printed; it must have ended by itself, not ready, with a failure."""
    server: Server = start_server(*arguments, log=log)
    try:
        wait_for(lambda: server.process.poll() is not None or server.is_ready(), LIMIT_S, "end of a failed load")
        assert server.process.poll() not in (None, 0), log.read_text()
    finally:
        server.process.kill()
        server.process.wait()
    return log.read_text()


@pytest.mark.parametrize(
    ("damage", "word"),
    [
        (truncate_weights, "model.safetensors"),
        (remove_weights, "safetensors"),
        (rename_architecture, "HovercraftForCausalLM"),
        (break_tokenizer, "tokenizer.json"),
        (remove_tokenizer, "tokenizer.json"),
        (ask_for_remote_code, "auto_map"),
    ],
)
def test_damaged_model(tmp_path: Path, damage: Callable[[Path], None], word: str) -> None:
    folder = tmp_path / "model"
    shutil.copytree(WEIGHTS, folder)
    damage(folder)
    output = refused(["--model", str(folder)], tmp_path / "serve.log")
    lines = [line for line in output.splitlines() if word in line]
    assert lines, output
    assert "Traceback" not in output


@pytest.mark.parametrize(
    ("parameter", "value", "word"),
    [
        ("max_num_seq", "4", "max_num_seqs"),
        ("max_model_len", "1000000", "1024"),
        ("block_size", "17", "block_size"),
        ("kv_cache_memory_mb", "100000000", "host memory does not suffice"),
        ("enable_lora", "True", "LoRA is not offered"),
    ],
)
def test_bad_setting_in_the_entry(tmp_path: Path, parameter: str, value: str, word: str) -> None:
    entry = tmp_path / "repository" / "broken"
    (entry / "1").mkdir(parents=True)
    settings = {"model": str(WEIGHTS), parameter: value}
    parameters = "".join(
        f'parameters {{ key: "{key}" value: {{ string_value: "{text}" }} }}\n' for key, text in settings.items()
    )
    (entry / "config.pbtxt").write_text(f'backend: "tidewheel"\n{parameters}')
    output = refused(["--model-repository", str(entry.parent)], tmp_path / "serve.log")
    assert [line for line in output.splitlines() if parameter in line and word in line], output
    assert "Traceback" not in output


def test_every_mistake_of_an_entry_is_named(tmp_path: Path) -> None:
    entry = tmp_path / "repository" / "broken"
    (entry / "1").mkdir(parents=True)
    settings = {"model": str(WEIGHTS), "max_num_seq": "4", "block_size": "17"}
    parameters = (
        f'parameters {{ key: "{key}" value: {{ string_value: "{text}" }} }}\n' for key, text in settings.items()
    )
    (entry / "config.pbtxt").write_text('backend: "tidewheel"\n' + "".join(parameters))
    output = refused(["--model-repository", str(entry.parent)], tmp_path / "serve.log")
    assert f"tidewheel check {entry} finds:" in output
    assert "config.pbtxt:3:14: unknown setting 'max_num_seq'" in output
    assert "config.pbtxt:4:14: block_size is 17" in output
    assert output.splitlines()[-1].startswith("tidewheel: error: model 'broken' cannot be loaded: ")


def test_twin_without_its_model(tmp_path: Path) -> None:
    entry = tmp_path / "repository" / "lonely_infer"
    (entry / "1").mkdir(parents=True)
    (entry / "config.pbtxt").write_text(
        'backend: "tidewheel"\nparameters { key: "engine_of" value: { string_value: "lonely" } }\n'
    )
    output = refused(["--model-repository", str(entry.parent)], tmp_path / "serve.log")
    assert [line for line in output.splitlines() if "engine_of" in line and "lonely" in line], output
