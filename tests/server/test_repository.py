"""Entries that `--model` writes, and repositories that are there already."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

from tidewheel.adapter.repository_entry import ORIGIN, real_entry
from tidewheel.errors import ConfigError
from tidewheel.server.repository import (
    check_name,
    entries,
    load_again,
    mirror,
    num_front_ends,
    parse_settings,
    resolve_model,
    select,
    served_name,
    write_entry,
)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / 'odd "name" \\ of a model'
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    return folder


def read(folder: Path) -> model_config_pb2.ModelConfig:
    return text_format.Parse((folder / "config.pbtxt").read_text(), model_config_pb2.ModelConfig())


def parameters(config: model_config_pb2.ModelConfig) -> dict[str, str]:
    return {key: value.string_value for key, value in config.parameters.items()}


def test_entry_and_twin(tmp_path: Path, model: Path) -> None:
    repository = tmp_path / "repository"
    write_entry(repository, str(model), "mine", {"dtype": "float32", "max_num_seqs": "8"})
    assert entries(repository) == ["mine", "mine_infer"]
    entry, twin = read(repository / "mine"), read(repository / "mine_infer")
    assert entry.backend == twin.backend == "tidewheel"
    assert entry.model_transaction_policy.decoupled
    assert not twin.model_transaction_policy.decoupled
    own = {"generation_config": "auto", "dtype": "float32", "max_num_seqs": "8"}
    assert parameters(entry) == {"model": str(model), **own}
    assert parameters(twin) == {"engine_of": "mine"}
    assert (repository / "mine" / "1").is_dir()
    assert (repository / "mine_infer" / "1").is_dir()


@pytest.mark.parametrize(("adapter", "decoupled"), [("diffusers", True), ("encoder", False)])
def test_models_of_many_steps_are_decoupled_for_their_previews(
    tmp_path: Path, model: Path, adapter: str, decoupled: bool
) -> None:
    write_entry(tmp_path / "repository", str(model), "mine", {"adapter": adapter})
    assert entries(tmp_path / "repository") == ["mine"]
    assert read(tmp_path / "repository" / "mine").model_transaction_policy.decoupled is decoupled


def test_hub_ids_stay_as_they_are(tmp_path: Path) -> None:
    write_entry(tmp_path, "Qwen/Qwen3-0.6B", "q", {})
    assert parameters(read(tmp_path / "q")) == {"model": "Qwen/Qwen3-0.6B", "generation_config": "auto"}


@pytest.mark.parametrize(
    ("settings", "word"),
    [({"max_num_seq": "1"}, "max_num_seqs"), ({"block_size": "17"}, "17"), ({"max_num_seqs": "many"}, "integer")],
)
def test_settings_are_checked_before_anything_is_written(
    tmp_path: Path, model: Path, settings: dict[str, str], word: str
) -> None:
    with pytest.raises(ConfigError, match=word):
        write_entry(tmp_path / "repository", str(model), "mine", settings)
    assert not (tmp_path / "repository").exists()


@pytest.mark.parametrize("text", ["/no/such/folder", "./no", "no", "a/b/c", "", "~/nothing here"])
def test_neither_folder_nor_id(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError, match="no such folder"):
        write_entry(tmp_path, text, "x", {})


def test_a_folder_without_a_model(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no config\.json"):
        write_entry(tmp_path / "repository", str(tmp_path), "x", {})


def test_a_config_that_is_no_file_is_left_to_the_load(tmp_path: Path) -> None:
    """It says what it is; it is not missing."""
    os.mkfifo(tmp_path / "config.json")
    assert resolve_model(str(tmp_path)) == str(tmp_path)


def test_a_pipeline_of_diffusers_has_no_config(tmp_path: Path) -> None:
    (tmp_path / "model_index.json").write_text("{}")
    assert resolve_model(str(tmp_path)) == str(tmp_path)


@pytest.mark.parametrize(("num_cores", "expected"), [(1, 1), (2, 1), (15, 1), (16, 2), (24, 3), (128, 4)])
def test_front_ends_by_cores(num_cores: int, expected: int) -> None:
    assert num_front_ends(num_cores) == expected


def test_served_names(model: Path) -> None:
    assert served_name("Qwen/Qwen3-0.6B") == "Qwen3-0.6B"
    assert served_name("detector.pt2") == "detector"
    assert served_name(str(model)) == "odd_name_of_a_model"
    assert check_name("Qwen3-0.6B") == "Qwen3-0.6B"
    for bad in ("a/b", "..", "", "a b", ".hidden"):
        with pytest.raises(ConfigError):
            check_name(bad)


def test_parse_settings() -> None:
    assert parse_settings(["a=1", "max-num-seqs = 2", "c=x=y"]) == {"a": "1", "max_num_seqs": "2", "c": "x=y"}
    for bad in (["a"], ["=1"], ["a=1", "a=2"], ["model=x"]):
        with pytest.raises(ConfigError, match="--set"):
            parse_settings(bad)


def test_repositories_with_nothing_to_serve(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such folder"):
        entries(tmp_path / "missing")
    (tmp_path / "no_config").mkdir()
    with pytest.raises(ConfigError, match="no entry"):
        entries(tmp_path)


def test_a_selection_of_entries(tmp_path: Path, model: Path) -> None:
    repository = tmp_path / "repository"
    for name in ("one", "two", "three"):
        write_entry(repository, str(model), name, {})
    chosen = select(repository, ["two", "one", "two"], tmp_path / "chosen")
    assert entries(chosen) == ["one", "two"]
    assert (chosen / "two").resolve() == (repository / "two").resolve()
    with pytest.raises(ConfigError, match=r"'four'.*one, one_infer, three"):
        select(repository, ["four"], tmp_path / "other")
    assert not (tmp_path / "other").exists()


def test_a_mirror_shows_triton_one_file_that_changes(tmp_path: Path, model: Path) -> None:
    repository = tmp_path / "repository"
    for name in ("one", "two"):
        write_entry(repository, str(model), name, {})
    mirrored = mirror(repository, [], tmp_path / "mirrored")
    assert entries(mirrored) == entries(repository) == ["one", "one_infer", "two", "two_infer"]
    assert entries(mirror(repository, ["two"], tmp_path / "part")) == ["two"]
    entry = mirrored / "one"
    assert real_entry(entry) == (repository / "one").resolve()
    (entry / "1" / "new").touch()
    times = {path.name: path.stat().st_mtime for path in entry.iterdir()}
    assert max(times, key=times.__getitem__) == ORIGIN
    load_again(entry)
    assert (entry / ORIGIN).stat().st_mtime > times[ORIGIN]
    assert not (repository / "one" / ORIGIN).exists()
