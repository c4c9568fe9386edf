from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from support.models.eagle3_folders import CONFIG_NAME, WEIGHTS_NAME, find_head, write_eagle3
from support.models.tiny_models import llama, save
from tidewheel.errors import ConfigError
from tidewheel.runner.eagle3 import Eagle3Source


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("target")


@pytest.fixture(scope="module")
def model(target: Path) -> PreTrainedModel:
    return save(partial(llama, num_hidden_layers=8), target)


@pytest.fixture
def find(model: PreTrainedModel, target: Path, tmp_path: Path) -> Callable[..., Eagle3Source]:
    def written(**changes: object) -> Eagle3Source:
        return find_head(write_eagle3(tmp_path, model, **changes), target)  # type: ignore[arg-type]

    return written


def refusal(find: Callable[[], Eagle3Source]) -> str:
    with pytest.raises(ConfigError) as caught:
        find()
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_heads_map_their_ids_to_the_targets(find: Callable[..., Eagle3Source], tmp_path: Path) -> None:
    head = find(draft_vocab_size=100)
    is_drafted = load_file(tmp_path / WEIGHTS_NAME)["t2d"]
    assert head.target_ids.tolist() == is_drafted.nonzero().flatten().tolist()


def test_heads_of_the_whole_vocabulary_need_no_map(find: Callable[..., Eagle3Source]) -> None:
    head = find(draft_vocab_size=384, lacks=["d2t", "t2d"])
    assert head.target_ids.tolist() == list(range(384))


@pytest.mark.parametrize(
    ("changes", "layers"),
    [
        ({}, (2, 4, 5)),
        ({"eagle_aux_hidden_state_layer_ids": [1, 3, 7]}, (1, 3, 7)),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 3, 6]}}, (1, 4, 7)),
        ({"eagle_config": {"use_aux_hidden_state": True}}, (2, 4, 5)),
    ],
)
def test_heads_read_the_states_before_these_layers(
    find: Callable[..., Eagle3Source], changes: dict[str, object], layers: tuple[int, ...]
) -> None:
    assert find(**changes).target_layers == layers


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, "LlamaForCausalLM is no EAGLE-3 head"),
        ({"num_hidden_layers": 2}, "num_hidden_layers is 2, it must be 1"),
        ({"hidden_size": 128}, "hidden_size is 128, it must be that of its target, 64"),
        ({"vocab_size": 500}, "vocab_size is 500, it must be that of its target, 384"),
        ({"norm_before_residual": True}, "norm_before_residual is not offered"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 2]}, "it must be 3 ascending layers of 8"),
        ({"eagle_aux_hidden_state_layer_ids": [4, 2, 1]}, "it must be 3 ascending layers of 8"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 2, 8]}, "it must be 3 ascending layers of 8"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 7]}}, "it must be 3 ascending layers of 8"),
        ({"eagle_aux_hidden_state_layer_ids": "all"}, "it must be 3 ascending layers of 8"),
        ({"lacks": ["fc.weight"]}, "the checkpoint lacks fc.weight"),
        ({"lacks": ["midlayer.hidden_norm.weight"]}, "the checkpoint lacks midlayer.hidden_norm.weight"),
        ({"lacks": ["d2t"]}, "it has no d2t"),
        ({"intermediate_size": 100}, "has shape [96, 64], config.json asks for [100, 64]"),
    ],
)  # fmt: skip
def test_other_heads_are_refused_in_one_line(
    find: Callable[..., Eagle3Source], changes: dict[str, object], words: str
) -> None:
    assert words in refusal(lambda: find(**changes))


@pytest.mark.parametrize(
    ("offsets", "words"),
    [
        (torch.full((160,), 300), "d2t leads to tokens outside the vocabulary of 384"),
        (torch.full((160,), -1), "d2t leads to tokens outside the vocabulary of 384"),
        (torch.zeros(159, dtype=torch.int64), "d2t is torch.int64 [159], it must be int64 [160]"),
        (torch.zeros(160), "d2t is torch.float32 [160], it must be int64 [160]"),
    ],
)
def test_bad_maps_are_refused(
    model: PreTrainedModel, target: Path, tmp_path: Path, offsets: torch.Tensor, words: str
) -> None:
    file = write_eagle3(tmp_path, model) / WEIGHTS_NAME
    save_file({**load_file(file), "d2t": offsets}, file)
    assert words in refusal(lambda: find_head(tmp_path, target))


def test_a_head_drafts_no_more_tokens_than_there_are(
    find: Callable[..., Eagle3Source], target: Path, tmp_path: Path
) -> None:
    find()
    config = tmp_path / CONFIG_NAME
    config.write_text(config.read_text().replace('"draft_vocab_size": 160', '"draft_vocab_size": 400'))
    words = "draft_vocab_size is 400, it must be an integer from 1 to 384"
    assert words in refusal(lambda: find_head(tmp_path, target))


def test_pickled_heads_are_never_loaded(model: PreTrainedModel, target: Path, tmp_path: Path) -> None:
    weights = write_eagle3(tmp_path, model) / WEIGHTS_NAME
    weights.rename(tmp_path / "pytorch_model.bin")
    assert "has pickled weights only" in refusal(lambda: find_head(tmp_path, target))


def test_targets_of_few_layers_need_a_head_that_names_its_layers(tmp_path: Path) -> None:
    small = save(llama, tmp_path / "target")
    head = write_eagle3(tmp_path / "head", small)
    words = "eagle_aux_hidden_state_layer_ids is missing"
    assert words in refusal(lambda: find_head(head, tmp_path / "target"))


def test_heads_that_do_not_fit_the_memory_are_refused(
    find: Callable[..., Eagle3Source], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tidewheel.models.loader.available_host_bytes", lambda: 1000)
    assert "its weights and the model's need" in refusal(find)
