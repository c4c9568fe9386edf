"""Weights that do not fit onto a GPU are refused before anything is allocated, with what would fit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from support.models import tiny_models
from support.models.loading import loaded
from tidewheel.config import EngineConfig
from tidewheel.errors import ConfigError
from tidewheel.models import loader
from tidewheel.models.loader import check_weights_fit
from tidewheel.settings import GIB

CUDA = torch.device("cuda", 0)


def gpu(monkeypatch: pytest.MonkeyPatch, free: float, total: float) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (int(free * GIB), int(total * GIB)))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA X1")


@pytest.mark.parametrize(
    ("needed", "dtype", "free", "advice"),
    [
        (30, torch.float32, 20, "set dtype to 'bfloat16', which needs 15.0 GiB"),
        (30, torch.float32, 10, "use a GPU with more than 30.0 GiB"),
        (16, torch.bfloat16, 3, "21.0 GiB are in use; stop what else runs on this GPU, or use another"),
        (30, torch.bfloat16, 24, "use a GPU with more than 30.0 GiB"),
    ],
)
def test_what_would_fit_is_said(
    monkeypatch: pytest.MonkeyPatch, needed: int, dtype: torch.dtype, free: int, advice: str
) -> None:
    gpu(monkeypatch, free, 24)
    with pytest.raises(ConfigError) as caught:
        check_weights_fit(needed * GIB, dtype, CUDA)
    name = str(dtype).removeprefix("torch.")
    assert str(caught.value) == (
        f"the weights need {needed}.0 GiB as {name}, and NVIDIA X1 has {free}.0 GiB free of 24.0 GiB: {advice}"
    )


@pytest.mark.parametrize(
    ("needed", "dtype", "advice"),
    [
        (6, torch.float32, "set dtype to 'bfloat16', which needs 3.0 GiB"),
        (15, torch.bfloat16, "use a machine or a container with more memory, or a smaller model"),  # 8B
    ],
)
def test_what_would_fit_into_four_gib_of_a_cpu(
    monkeypatch: pytest.MonkeyPatch, needed: int, dtype: torch.dtype, advice: str
) -> None:
    monkeypatch.setattr(loader, "available_host_bytes", lambda: 4 * GIB)
    with pytest.raises(ConfigError, match=f"{needed}.0 GiB as .*, and 4.0 GiB of host memory are free: {advice}"):
        check_weights_fit(needed * GIB, dtype, torch.device("cpu"))
    check_weights_fit(4 * GIB, dtype, torch.device("cpu"))


@pytest.mark.parametrize(
    ("free", "advice"),
    [
        (9, "set quantization to 'int8', which needs about 8.0 GiB"),
        (5, "set quantization to 'int4', .* about 4.7 GiB"),
    ],
)
def test_weights_that_would_fit_rounded(monkeypatch: pytest.MonkeyPatch, free: int, advice: str) -> None:
    monkeypatch.setattr(loader, "available_host_bytes", lambda: free * GIB)
    with pytest.raises(ConfigError, match=advice):
        check_weights_fit(15 * GIB, torch.bfloat16, torch.device("cpu"), can_round=True)


def test_what_fits_is_not_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu(monkeypatch, 16, 24)
    check_weights_fit(16 * GIB, torch.bfloat16, CUDA)


@pytest.mark.parametrize("model", [tiny_models.llama, tiny_models.gpt2], ids=["native", "transformers"])
def test_a_model_is_refused_before_it_is_allocated(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, model: object
) -> None:
    """No GPU is there: an allocation on it would raise something else."""
    tiny_models.save(model, tmp_path)
    gpu(monkeypatch, 1e-6, 24)
    config = EngineConfig(model=str(tmp_path))
    with pytest.raises(ConfigError, match=r"the weights need .* as float32, and NVIDIA X1 has .* free of"):
        loaded(tmp_path, config, CUDA)
