"""Complete checkpoints load, whole or in shards; anything else stops in one line that says what is wrong."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.utils._python_dispatch import TorchDispatchMode

from support.models import tiny_models
from support.models.loading import loaded
from support.models.odd_files import ODD_FILES, put_odd_file
from tidewheel.config import EngineConfig
from tidewheel.errors import ConfigError
from tidewheel.models import model_folder
from tidewheel.models.decoder import Decoder
from tidewheel.models.linear import Linear
from tidewheel.models.model_folder import resolve_folder
from tidewheel.models.weight_source import INDEX_NAME, SINGLE_NAME, RandomWeights, uncounted
from tidewheel.runner.loading import load_parts
from tidewheel_kernels.packed_linear import can_pack

CPU = torch.device("cpu")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tiny_models.save(tiny_models.llama, tmp_path)
    return tmp_path


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    tiny_models.save(tiny_models.llama, tmp_path, shard_size="80KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    return tmp_path


def load(folder: Path, **settings: object) -> Decoder:
    config = EngineConfig(model=str(folder), **settings)
    model = loaded(folder, config)
    assert isinstance(model, Decoder)
    return model


def refusal(folder: Path, **settings: object) -> str:
    with pytest.raises(ConfigError) as caught:
        load(folder, **settings)
    message = str(caught.value)
    assert "\n" not in message
    return message


def edit_weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = load_file(folder / SINGLE_NAME)
    change(tensors)
    save_file(tensors, folder / SINGLE_NAME)


def edit_json(path: Path, **changes: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_every_tensor_arrives(folder: Path) -> None:
    model = load(folder)
    expected = load_file(folder / SINGLE_NAME)
    fresh = Decoder(model.config, max_model_len=8, dtype=torch.float32, device=CPU)
    assert set(fresh.destinations) == set(expected)
    assert torch.equal(model.embedding.weight, expected["model.embed_tokens.weight"])
    assert torch.equal(model.layers[1].mlp_norm, expected["model.layers.1.post_attention_layernorm.weight"])
    assert model.weights_bytes == sum(tensor.nbytes for tensor in expected.values())


def test_shards_hold_the_same_model(sharded: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    whole = tmp_path_factory.mktemp("whole")
    tiny_models.save(tiny_models.llama, whole)
    expected, model = load(whole), load(sharded)
    x = torch.randn(3, model.config.hidden_size)
    torch.testing.assert_close(model.lm_head(x), expected.lm_head(x))  # packed weights have no other way to be read
    assert torch.equal(model.norm, expected.norm)


def test_weights_are_converted(folder: Path) -> None:
    edit_weights(folder, lambda tensors: tensors.update({name: t.bfloat16() for name, t in tensors.items()}))
    assert load(folder).embedding.weight.dtype == torch.float32


def test_progress_goes_from_start_to_end(folder: Path) -> None:
    seen: list[tuple[str, float]] = []
    load_parts(EngineConfig(model=str(folder)), lambda stage, fraction: seen.append((stage, fraction)))
    fractions = [fraction for _, fraction in seen]
    assert {stage for stage, _ in seen} == {"weights"}
    assert fractions == sorted(fractions)
    assert (fractions[0], fractions[-1]) == (0.0, 1.0)


def test_harmless_left_overs_are_ignored(folder: Path) -> None:
    edit_weights(folder, lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}))
    load(folder)


def test_missing_weights_are_named(folder: Path) -> None:
    edit_weights(folder, lambda t: [t.pop("model.norm.weight"), t.pop("model.layers.1.self_attn.k_proj.weight")])
    assert "lacks model.layers.1.self_attn.k_proj.weight, model.norm.weight;" in refusal(folder)


def test_many_missing_weights_are_counted(folder: Path) -> None:
    edit_json(folder / "config.json", num_hidden_layers=3)
    assert "and 6 more" in refusal(folder)


def test_left_over_weights_are_named(folder: Path) -> None:
    edit_json(folder / "config.json", num_hidden_layers=1)
    message = refusal(folder)
    assert "model.layers.1.input_layernorm.weight" in message
    assert "no place for" in message


def test_wrong_shapes_are_named(folder: Path) -> None:
    edit_json(folder / "config.json", intermediate_size=120)
    message = refusal(folder)
    assert "has shape [" in message
    assert "112" in message
    assert "120" in message


def test_integer_weights_are_refused(folder: Path) -> None:
    edit_weights(folder, lambda t: t.update({"model.norm.weight": torch.ones(64, dtype=torch.int32)}))
    assert "model.norm.weight has dtype torch.int32" in refusal(folder)


def test_truncated_files_are_refused(folder: Path) -> None:
    path = folder / SINGLE_NAME
    path.write_bytes(path.read_bytes()[:-100])
    assert "not a valid safetensors file" in refusal(folder)


def test_pickled_weights_are_refused(folder: Path) -> None:
    (folder / SINGLE_NAME).rename(folder / "pytorch_model.bin")
    assert "pickled weights only, which are never loaded" in refusal(folder)


@pytest.mark.parametrize("name", ["config.json", SINGLE_NAME])
@pytest.mark.parametrize("kind", ODD_FILES)
def test_what_is_no_file_is_refused_instead_of_read(folder: Path, name: str, kind: str) -> None:
    put_odd_file(folder / name, kind)
    message = refusal(folder)
    assert f"{folder / name} cannot be read" in message
    assert ("Too many levels of symbolic links" if kind == "loop" else "not a regular file") in message


@pytest.mark.parametrize("kind", ODD_FILES)
def test_a_shard_or_index_that_is_no_file_is_named(sharded: Path, kind: str) -> None:
    victim = sorted(sharded.glob("*.safetensors"))[1]
    put_odd_file(victim, kind)
    assert f"{victim} cannot be read" in refusal(sharded)
    put_odd_file(sharded / INDEX_NAME, kind)
    assert f"{sharded / INDEX_NAME} cannot be read" in refusal(sharded)


def test_no_weights_at_all(folder: Path) -> None:
    (folder / SINGLE_NAME).unlink()
    assert re.search("has no weights: .* run hf download OWNER/NAME FILE.gguf", refusal(folder))


def test_a_shard_that_is_absent_is_named(sharded: Path) -> None:
    victim = sorted(sharded.glob("*.safetensors"))[1]
    victim.unlink()
    assert f"{victim} is missing" in refusal(sharded)


@pytest.mark.parametrize("name", ["../evil.safetensors", "/tmp/evil.safetensors", "a\\b.safetensors", "x.bin", ".."])
def test_an_index_names_only_files_beside_it(sharded: Path, name: str) -> None:
    edit_json(sharded / INDEX_NAME, weight_map={"model.norm.weight": name})
    assert "only safetensors files beside it are read" in refusal(sharded)


def test_a_tensor_in_two_shards_is_refused(sharded: Path) -> None:
    first, second = sorted(sharded.glob("*.safetensors"))[:2]
    save_file({**load_file(first), **load_file(second)}, first)
    assert "is in more than one file" in refusal(sharded)


def test_an_index_without_a_map_is_refused(sharded: Path) -> None:
    (sharded / INDEX_NAME).write_text("{}")
    assert "has no weight_map" in refusal(sharded)


def test_the_context_is_a_limit(folder: Path) -> None:
    assert "max_model_len is 257: the model was made for at most 256 tokens" in refusal(folder, max_model_len=257)


def test_dummy_weights_depend_on_the_seed_only(folder: Path) -> None:
    (folder / SINGLE_NAME).unlink()
    first, same, other = (load(folder, load_format="dummy", seed=seed) for seed in (1, 1, 2))
    assert torch.equal(first.embedding.weight, same.embedding.weight)
    assert not torch.equal(first.embedding.weight, other.embedding.weight)
    assert torch.equal(first.norm, torch.ones(64))


class Launches(TorchDispatchMode):
    """The operations of the device that are called, with what they write to."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[tuple[str, torch.dtype]] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operations.append((function.overloadpacket.__name__, args[0].dtype))
        return function(*args, **(kwargs or {}))


def test_dummy_weights_are_made_in_place_by_one_launch_a_tensor() -> None:
    """In their own dtype: no float32 copy of a large matrix, and nothing from the host."""
    tensors = {f"{i}.weight": torch.empty(8, 4, dtype=torch.bfloat16) for i in range(5)}
    tensors["norm.weight"] = torch.empty(4, dtype=torch.bfloat16)
    with Launches() as launches:
        RandomWeights({}, torch.bfloat16, 0).copy(tensors, uncounted)
    assert launches.operations == [("normal_", torch.bfloat16)] * 5 + [("fill_", torch.bfloat16)]


def test_the_lm_head_of_a_tied_model_is_its_embedding(tmp_path: Path) -> None:
    tiny_models.save(lambda: tiny_models.llama(tie_word_embeddings=True), tmp_path)
    model = load(tmp_path)
    x = torch.randn(5, 64)
    torch.testing.assert_close(model.lm_head(x), x @ model.embedding.weight.T)


def test_packed_weights_compute_the_same() -> None:
    assert can_pack(torch.float32), "this build of torch lacks oneDNN's packed linear layer"
    layer = Linear(torch.randn(72, 48), torch.randn(72), None, {})
    inputs = [torch.randn(rows, 48) for rows in (0, 1, 5, 64, 200)]
    expected = [layer(x) for x in inputs]
    layer.pack()
    assert layer.weight.numel() == 0
    for x, y in zip(inputs, expected, strict=True):
        torch.testing.assert_close(layer(x), y)


def test_a_download_that_fails_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object, **kwargs: object) -> str:
        raise OSError("network is\nunreachable")

    monkeypatch.setattr(model_folder, "snapshot_download", fail)
    with pytest.raises(ConfigError, match=r"'owner/name' .* network is unreachable$"):
        resolve_folder("owner/name")


def test_a_download_fetches_data_only(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    wanted: dict[str, object] = {}
    monkeypatch.setattr(
        model_folder, "snapshot_download", lambda name, **kwargs: wanted.update(kwargs) or str(tmp_path)
    )
    with pytest.raises(ConfigError, match=r"'owner/name' has no config.json .* run hf download owner/name FILE.gguf"):
        resolve_folder("owner/name")
    (tmp_path / "config.json").write_text("{}")
    assert resolve_folder("owner/name", "v1", "/models") == tmp_path
    assert (wanted["revision"], wanted["cache_dir"]) == ("v1", "/models")
    assert resolve_folder("owner/name") == tmp_path
    assert (wanted["revision"], wanted["cache_dir"]) == (None, None)
    assert not {"*.py", "*.bin", "*.pt", "*"} & set(wanted["allow_patterns"])


@pytest.mark.parametrize("model", ["/no/such/folder", "no-such-folder", "a/b/c"])
def test_what_is_no_model_is_refused(model: str) -> None:
    with pytest.raises(ConfigError, match="no such folder"):
        resolve_folder(model)
