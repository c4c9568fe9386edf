from __future__ import annotations

import dataclasses
from pathlib import Path

import torch

from tidewheel.config import EngineConfig
from tidewheel.models.causal_lm import CausalLM, no_progress
from tidewheel.models.loader import load_model, plan_model
from tidewheel.models.model_folder import read_config

CPU = torch.device("cpu")


def loaded(folder: Path, config: EngineConfig, device: torch.device = CPU) -> CausalLM:
    """Return a model in float32."""
    plan = plan_model(folder, read_config(folder), dataclasses.replace(config, dtype="float32"), device)
    source = plan.open_source()
    plan.check_fits(source)
    return load_model(plan, source, no_progress)
