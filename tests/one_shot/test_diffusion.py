"""Pictures equal those of diffusers' own pipelines: tiny ones with random weights, alone and joined."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tidewheel.config import EngineConfig
from tidewheel.errors import ConfigError, InvalidRequest
from tidewheel.one_shot.adapters import load_adapter, with_kind
from tidewheel.one_shot.signature import Array, StepOptions

diffusers: Any = pytest.importorskip("diffusers")
ONE_LEVEL = 1  # of 255: sums of a batch are rounded in another order


def load(folder: Path, **options: object) -> Any:
    settings = {"model": str(folder), "adapter": "diffusers", "adapter_options": json.dumps(options), "device": "cpu"}
    return load_adapter(EngineConfig.from_settings(with_kind(settings)))[0]


def unet(**more: Any) -> Any:
    torch.manual_seed(0)
    blocks = {
        "down_block_types": ("DownBlock2D", "AttnDownBlock2D"),
        "up_block_types": ("AttnUpBlock2D", "UpBlock2D"),
    }
    sizes = {
        "sample_size": 8,
        "in_channels": 1,
        "out_channels": 1,
        "block_out_channels": (8, 16),
        "norm_num_groups": 4,
    }
    return diffusers.UNet2DModel(**blocks, **sizes, layers_per_block=1, attention_head_dim=4, **more).eval()


@pytest.fixture(scope="module")
def ddpm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ddpm")
    diffusers.DDPMPipeline(unet(), diffusers.DDPMScheduler(num_train_timesteps=100)).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def stable(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stable")
    torch.manual_seed(1)
    blocks = {"block_out_channels": (8, 16), "layers_per_block": 1, "norm_num_groups": 4}
    vae = diffusers.AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        latent_channels=4,
        **blocks,
    )
    network = diffusers.UNet2DConditionModel(
        sample_size=8, cross_attention_dim=16, attention_head_dim=4, **blocks,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"), up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
    )  # fmt: skip
    words = {
        "<|startoftext|>": 0,
        "<|endoftext|>": 1,
        "a</w>": 2,
        "c": 3,
        "at</w>": 4,
        "a": 5,
        "t</w>": 6,
        "c</w>": 7,
    }
    from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer

    tokenizer = CLIPTokenizer(words, [("a", "t</w>")], model_max_length=8)
    text = CLIPTextModel(
        CLIPTextConfig(
            vocab_size=8, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
            max_position_embeddings=8, bos_token_id=0, eos_token_id=1, pad_token_id=1,
        )
    )  # fmt: skip
    scheduler = diffusers.DDIMScheduler(clip_sample=False, set_alpha_to_one=False, steps_offset=1)
    diffusers.StableDiffusionPipeline(
        vae=vae.eval(), text_encoder=text.eval(), tokenizer=tokenizer, unet=network.eval(), scheduler=scheduler,
        safety_checker=None, feature_extractor=None, requires_safety_checker=False,
    ).save_pretrained(folder)  # fmt: skip
    return folder


def begin(model: Any, seed: int, steps: int, guidance: float | None = None, **inputs: Any) -> Any:
    arrays = {
        name: np.array([value], object if isinstance(value, bytes) else np.int32) for name, value in inputs.items()
    }
    return model.prepare(arrays, seed, model.offer.completed(StepOptions(steps=steps, guidance_scale=guidance)))


def run(model: Any, states: Sequence[Any]) -> list[Array]:
    """Compute rows that end at different steps, each joined as long as it runs."""
    while left := [state for state in states if state.num_done < len(state.scheduler.timesteps)]:
        assert model.step(left) == [True] * len(left)
    return [outputs["image"] for outputs in model.decode(states)]


def is_equal(picture: Array, expected: Any) -> bool:
    reference = (np.asarray(expected) * 255).round().astype(int).reshape(picture.shape)
    return int(np.abs(picture.astype(int) - reference).max()) <= ONE_LEVEL and np.ptp(reference) > 20


@pytest.mark.parametrize("name", ["DDPMPipeline", "DDIMPipeline"])
def test_pictures_without_condition_equal_the_pipelines(ddpm: Path, tmp_path: Path, name: str) -> None:
    pipeline = getattr(diffusers, name).from_pretrained(ddpm)
    pipeline.save_pretrained(tmp_path)
    pipeline.set_progress_bar_config(disable=True)
    model = load(tmp_path)
    rows = {3: 10, 4: 7, 5: 10}  # seed → steps
    pictures = run(model, [begin(model, seed, steps) for seed, steps in rows.items()])
    for picture, (seed, steps) in zip(pictures, rows.items(), strict=True):
        generator = torch.Generator().manual_seed(seed)
        expected = pipeline(generator=generator, num_inference_steps=steps, output_type="np").images[0]
        assert is_equal(picture, expected)
        [alone] = run(model, [begin(model, seed, steps)])
        assert is_equal(alone, expected)
    assert np.array_equal(run(model, [begin(model, 3, 10)])[0], run(model, [begin(model, 3, 10)])[0])


def test_pictures_of_a_text_equal_the_pipelines_with_and_without_guidance(stable: Path) -> None:
    pipeline, model = diffusers.StableDiffusionPipeline.from_pretrained(stable), load(stable, default_guidance=5.0)
    pipeline.set_progress_bar_config(disable=True)
    assert model.offer.sizes == ("16x16",)
    rows = [(3, 6, 5.0, b"a cat"), (4, 4, 1.0, b"cat"), (5, 5, 7.5, b"a")]
    pictures = run(model, [begin(model, seed, steps, scale, prompt=text) for seed, steps, scale, text in rows])
    for picture, (seed, steps, scale, text) in zip(pictures, rows, strict=True):
        generator = torch.Generator().manual_seed(seed)
        asked = {"num_inference_steps": steps, "guidance_scale": scale, "output_type": "np"}
        assert is_equal(picture, pipeline(text.decode(), generator=generator, **asked).images[0])


def test_labels_and_guidance_away_from_the_label_for_none(tmp_path: Path) -> None:
    diffusers.DDPMPipeline(unet(num_class_embeds=4), diffusers.DDPMScheduler(num_train_timesteps=50)).save_pretrained(
        tmp_path
    )
    model = load(tmp_path, null_label=3, default_guidance=2.0)
    assert [spec.describe() for spec in model.signature.inputs] == ["label INT32 [1]"]
    joined = run(model, [begin(model, 1, 6, label=0), begin(model, 1, 6, 1.0, label=0), begin(model, 1, 6, label=2)])
    [alone] = run(model, [begin(model, 1, 6, label=0)])
    assert int(np.abs(joined[0].astype(int) - alone.astype(int)).max()) <= ONE_LEVEL
    assert len({picture.tobytes() for picture in joined}) == 3
    for label in (-1, 3):
        with pytest.raises(InvalidRequest, match="labels are 0 to 2"):
            begin(model, 1, 6, label=label)
    first = load(tmp_path, null_label=0)
    begin(first, 1, 6, label=3)
    with pytest.raises(InvalidRequest, match="labels are 1 to 3"):
        begin(first, 1, 6, label=0)
    with pytest.raises(ConfigError, match="null_label is 4: the model has 4 labels, from 0 on"):
        load(tmp_path, null_label=4)


def test_a_preview_is_the_guess_at_the_picture_and_does_not_change_it(ddpm: Path) -> None:
    model = load(ddpm)
    watched, other = begin(model, 3, 5), begin(model, 3, 5)
    for _ in range(5):
        model.step([watched])
        preview = model.decode([watched])[0]["image"]
    assert preview.shape == (8, 8, 1) and np.array_equal(preview, run(model, [other])[0])


def test_a_size_is_width_by_height(ddpm: Path) -> None:
    model = load(ddpm, sizes=["16x8"])
    state = model.prepare({}, 3, model.offer.completed(StepOptions(steps=1)))
    assert run(model, [state])[0].shape == (8, 16, 1)


def test_numbers_that_are_not_finite_are_told_row_by_row(ddpm: Path) -> None:
    model = load(ddpm)
    good, bad = begin(model, 3, 5), begin(model, 4, 5)
    bad.sample = bad.sample * torch.nan
    assert model.step([good, bad]) == [True, False]


def test_what_is_not_served_is_refused_in_one_line(ddpm: Path, tmp_path: Path) -> None:
    def refusal(folder: Path, **options: object) -> str:
        with pytest.raises(ConfigError) as refused:
            load(folder, **options)
        assert "\n" not in str(refused.value)
        return str(refused.value)

    assert "has no model_index.json" in refusal(tmp_path)
    for size in ("8", "0x0", "9x8", "10000x8", "8x9999999999999999999"):
        assert f"sizes has '{size}': give width x height, multiples of 2 up to 9999" in refusal(ddpm, sizes=[size])
    assert "default_steps is 51: at most 50 are allowed (max_steps)" in refusal(ddpm, default_steps=51, max_steps=50)
    assert "max_steps" in refusal(ddpm, max_steps=0) and "default_steps" in refusal(ddpm, default_steps=0)
    assert "default_guidance" in refusal(ddpm, default_guidance=-1)
    assert "null_label is 0: the model has 0 labels" in refusal(ddpm, null_label=0)
    (tmp_path / "model_index.json").write_text('{"_class_name": "FluxPipeline"}')
    assert "FluxPipeline: served are DDPMPipeline" in refusal(tmp_path)
    pickled = tmp_path / "pickled"
    diffusers.DDPMPipeline.from_pretrained(ddpm).save_pretrained(pickled, safe_serialization=False)
    assert "is pickled: save the model as safetensors" in refusal(pickled)
    scheduler = tmp_path / "scheduler"
    diffusers.DDPMPipeline.from_pretrained(ddpm).save_pretrained(scheduler)
    (scheduler / "scheduler" / "scheduler_config.json").write_text('{"_class_name": "os"}')
    assert "names the scheduler os" in refusal(scheduler)
    (scheduler / "scheduler" / "scheduler_config.json").write_text('{"_class_name": "KarrasVeScheduler"}')
    assert "cannot be loaded by diffusers" in refusal(scheduler)
    (scheduler / "unet" / "config.json").unlink()
    assert "unet has no config.json" in refusal(scheduler)
    (scheduler / "model_index.json").write_text("[]")
    assert "holds a list" in refusal(scheduler)
