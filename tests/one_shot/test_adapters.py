from __future__ import annotations

from pathlib import Path

import pytest

from tidewheel.config import EngineConfig
from tidewheel.errors import ConfigError
from tidewheel.one_shot import adapters
from tidewheel.one_shot.adapters import AdapterKind, load_adapter, with_kind


def test_a_file_in_the_version_folder_names_the_adapter(tmp_path: Path) -> None:
    assert "adapter" not in with_kind({}, tmp_path)
    (tmp_path / "model.onnx").touch()
    completed = with_kind({"max_num_seqs": "4"}, tmp_path)
    assert (completed["kind"], completed["adapter"], completed["model"]) == ("one_shot", "onnxruntime", "model.onnx")
    assert completed["max_num_seqs"] == "4" and completed["max_num_batched_tokens"] == 32
    config = EngineConfig.from_settings(completed, base_dir=tmp_path)
    assert config.model == str(tmp_path / "model.onnx")


@pytest.mark.parametrize(
    ("settings", "adapter"),
    [({"model": "other.onnx"}, "onnxruntime"), ({"model": "weights"}, None), ({"model": "m", "adapter": "x"}, "x")],
)
def test_a_setting_names_the_adapter(settings: dict, adapter: str | None, tmp_path: Path) -> None:
    (tmp_path / "model.onnx").touch()
    assert with_kind(settings, tmp_path).get("adapter") == adapter


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        ({"dtype": "float32"}, "dtype"),
        ({"tokenizer": "t"}, "tokenizer"),
        ({"kind": "text"}, "kind"),
        ({"buckets": "{"}, "buckets"),
        ({"buckets": {"L": []}}, "buckets"),
        ({"buckets": {"L": [0]}}, "buckets"),
        ({"batch_axes": {"x": -1}}, "batch_axes"),
        ({"adapter": "onnxruntim"}, "onnxruntime"),
        ({"model": "gone.onnx"}, "gone.onnx"),
    ],
)
def test_wrong_settings_are_one_line(settings: dict, word: str, tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    from support.one_shot.onnx_files import scaled

    (tmp_path / "model.onnx").write_bytes(scaled())
    with pytest.raises(ConfigError) as error:
        load_adapter(EngineConfig.from_settings(with_kind(settings, tmp_path), base_dir=tmp_path))
    assert word in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["buckets", "batch_axes", "max_input_mb", "check_finite"])
def test_a_text_model_refuses_settings_of_the_other_kind(name: str) -> None:
    values = {"buckets": '{"L": [2]}', "batch_axes": '{"x": 0}', "max_input_mb": 5, "check_finite": False}
    with pytest.raises(ConfigError, match=name):
        EngineConfig.from_settings({"model": "weights", name: values[name]})


def test_a_missing_package_names_its_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model.onnx").touch()
    other = AdapterKind("tidewheel.one_shot.gone", "extra-name", "model.onnx")
    monkeypatch.setattr(adapters, "ADAPTERS", {"other": other})
    with pytest.raises(ConfigError, match=r"pip install 'tidewheel\[extra-name\]'"):
        load_adapter(EngineConfig.from_settings(with_kind({}, tmp_path), base_dir=tmp_path))
