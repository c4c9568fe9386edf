"""A model that cannot be served: the load fails in seconds, and one line says what to change.

A server that has no other model ends with it.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from support.models import tiny_models
from support.models.gguf_files import write_model
from support.triton.serving import WEIGHTS, Server, start_server, stop_server, wait_for, wait_ready
from tidewheel.server import ServeError

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


def write_entry(entry: Path, **settings: str) -> None:
    (entry / "1").mkdir(parents=True)
    parameters = "".join(
        f'parameters {{ key: "{key}" value: {{ string_value: "{text}" }} }}\n' for key, text in settings.items()
    )
    (entry / "config.pbtxt").write_text(f'backend: "tidewheel"\n{parameters}')


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Serve a model without an engine, from a repository that takes more entries."""
    repository = tmp_path_factory.mktemp("repository")
    (repository / "plain" / "1").mkdir(parents=True)
    (repository / "plain" / "config.pbtxt").write_text('backend: "python"\n')
    (repository / "plain" / "1" / "model.py").write_text("class TritonPythonModel:\n    pass\n")
    arguments = ("--model-repository", str(repository), "--model-control", "explicit", "--models", "plain")
    running = wait_ready(start_server(*arguments, log=tmp_path_factory.mktemp("log") / "serve.log"))
    yield running
    assert stop_server(running) == 0, running.log.read_text()


@pytest.fixture
def entry(server: Server) -> Iterator[Path]:
    """Return the folder of an entry to be made, for one load."""
    command = server.process.args
    assert isinstance(command, list)
    folder = Path(command[command.index("--model-repository") + 1]) / "broken"
    yield folder
    shutil.rmtree(folder)


def refused_load(server: Server, entry: Path) -> str:
    """Return why the entry is not loaded; all else is as before."""
    with pytest.raises(ServeError) as refused:
        server.control("load", entry.name)
    assert "Traceback" not in server.log.read_text()
    index = server.session.post(f"{server.http}/v2/repository/index", timeout=60).json()
    assert [model["name"] for model in index if model.get("state") == "READY"] == ["plain"]
    return str(refused.value)


def refused_start(arguments: list[str], log: Path) -> str:
    """Return what the command printed. It must have ended by itself, not ready, with a failure."""
    server: Server = start_server(*arguments, log=log)
    try:
        wait_for(lambda: server.process.poll() is not None or server.is_ready(), LIMIT_S, "end of a failed load")
        assert server.process.poll() not in (None, 0), log.read_text()
    finally:
        server.process.kill()
        server.process.wait()
    assert "Traceback" not in log.read_text()
    return log.read_text()


def test_entries_that_want_more_of_a_device_than_it_has(server: Server, entry: Path) -> None:
    first = entry.with_name("first")
    write_entry(first, model=str(WEIGHTS), device_memory_share="0.5")
    write_entry(entry, model=str(WEIGHTS), device_memory_share="0.6")
    try:
        server.control("load", "first")
        holder = server.engine_process()
        assert holder is not None
        with pytest.raises(ServeError) as refused:
            server.control("load", entry.name)
        for words in ("device_memory_share is 0.6 of ", " are left: ", f"first (process {holder.pid}) has"):
            assert words in str(refused.value)
        server.control("unload", "first")
        wait_for(lambda: server.engine_process() is None, LIMIT_S, "the end of the engine")
        server.control("load", entry.name)
        server.control("unload", entry.name)
    finally:
        shutil.rmtree(first)


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
def test_damaged_model(
    server: Server, entry: Path, tmp_path: Path, damage: Callable[[Path], None], word: str
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(WEIGHTS, folder)
    damage(folder)
    write_entry(entry, model=str(folder))
    assert word in refused_load(server, entry)


@pytest.mark.parametrize(
    ("changes", "cut", "words"),
    [
        ({}, slice(-9), "it lacks 9; download it again"),
        ({}, slice(1, None), "instead of GGUF; download it again"),
        ({"general.architecture": "gemma3"}, slice(None), "is gemma3: GGUF files are served of llama, qwen2, qwen3"),
        ({"tokenizer.ggml.tokens": None}, slice(None), "has no tokenizer: take another file"),
    ],
    ids=["truncated", "magic", "architecture", "tokenizer"],
)
def test_gguf_file_that_cannot_be_served(
    server: Server, entry: Path, tmp_path: Path, changes: dict[str, object], cut: slice, words: str
) -> None:
    file = write_model(tmp_path / "a.gguf", tiny_models.llama(), **changes)
    file.write_bytes(file.read_bytes()[cut])
    write_entry(entry, model=str(file))
    message = refused_load(server, entry)
    assert str(file) in message and words in message


@pytest.mark.parametrize(
    ("parameter", "value", "word"),
    [
        ("max_num_seq", "4", "max_num_seqs"),
        ("max_model_len", "1000000", "1024"),
        ("block_size", "17", "block_size"),
        ("kv_cache_memory_mb", "100000000", "host memory does not suffice"),
        ("max_lora_rank", "512", "1 to 256"),
        ("num_speculative_tokens", "1000", "1 to 32"),
        ("draft_model", "/absent", "speculation is none: it has no effect then"),
    ],
)
def test_bad_setting_in_the_entry(server: Server, entry: Path, parameter: str, value: str, word: str) -> None:
    write_entry(entry, model=str(WEIGHTS), **{parameter: value})
    message = refused_load(server, entry)
    assert parameter in message and word in message


def pad_vocabulary(folder: Path) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "vocab_size": 1 << 20}))


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (shutil.rmtree, "draft_model cannot be found: "),
        (pad_vocabulary, "of vocab_size 1048576; the model has "),
        (truncate_weights, "model.safetensors"),
    ],
)
def test_damaged_draft_model(
    server: Server, entry: Path, tmp_path: Path, damage: Callable[[Path], None], words: str
) -> None:
    folder = Path(shutil.copytree(WEIGHTS, tmp_path / "draft"))
    damage(folder)
    write_entry(entry, model=str(WEIGHTS), speculation="draft_model", draft_model=str(folder))
    message = refused_load(server, entry)
    assert str(folder) in message and words in message


def test_a_start_with_a_damaged_model_fails(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(WEIGHTS, folder)
    truncate_weights(folder)
    output = refused_start(["--model", str(folder)], tmp_path / "serve.log")
    assert "model.safetensors" in output.splitlines()[-1]


def test_every_mistake_of_an_entry_is_named(tmp_path: Path) -> None:
    entry = tmp_path / "repository" / "broken"
    write_entry(entry, model=str(WEIGHTS), max_num_seq="4", block_size="17")
    output = refused_start(["--model-repository", str(entry.parent)], tmp_path / "serve.log")
    assert f"tidewheel check {entry} finds:" in output
    assert "config.pbtxt:3:14: unknown setting 'max_num_seq'" in output
    assert "config.pbtxt:4:14: block_size is 17" in output
    assert output.splitlines()[-1].startswith("tidewheel: error: model 'broken' cannot be loaded: ")


def test_twin_without_its_model(tmp_path: Path) -> None:
    entry = tmp_path / "repository" / "lonely_infer"
    write_entry(entry, engine_of="lonely")
    output = refused_start(["--model-repository", str(entry.parent)], tmp_path / "serve.log")
    assert [line for line in output.splitlines() if "engine_of" in line and "lonely" in line], output
