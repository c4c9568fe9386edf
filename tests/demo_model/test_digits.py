"""The model of digits draws what it is asked for: a classifier that learnt the real digits recognises it."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from tidewheel.config import EngineConfig
from tidewheel.one_shot.adapters import load_adapter, with_kind
from tidewheel.one_shot.signature import StepOptions
from train_demo_model import ROOT

pytest.importorskip("diffusers")
FOLDER = ROOT / "demo_model" / "digits"
NUM_PICTURES = 200


def test_nine_in_ten_pictures_of_different_step_counts_are_recognised() -> None:
    from train_digits import load_classifier

    options = json.dumps({"null_label": 10, "default_guidance": 2})
    settings = {"model": str(FOLDER), "adapter": "diffusers", "adapter_options": options, "device": "cpu"}
    model = load_adapter(EngineConfig.from_settings(with_kind(settings)))[0]
    labels = np.arange(NUM_PICTURES) % 10
    states = [
        model.prepare(
            {"label": np.array([label], np.int32)}, seed, model.offer.completed(StepOptions(steps=(10, 20)[seed % 2]))
        )
        for seed, label in enumerate(labels.tolist())
    ]
    while left := [state for state in states if state.num_done < len(state.scheduler.timesteps)]:
        assert all(model.step(left))
    pictures = torch.tensor(np.stack([outputs["image"] for outputs in model.decode(states)])).permute(0, 3, 1, 2)
    with torch.no_grad():
        found = load_classifier(FOLDER)(pictures / 127.5 - 1).argmax(dim=1).numpy()
    assert (found == labels).mean() >= 0.9
    assert sum(path.stat().st_size for path in FOLDER.rglob("*")) < 1_000_000
