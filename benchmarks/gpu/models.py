"""The models that are measured: real shapes with random weights, as folders that an engine can load."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from gpu.limits import MODELS, ModelShape
from random_model import SHAPES, Shape, config, make_model, save_tokenizer

TINY = "tiny"
MODEL_NAMES = ("qwen3-0.6b", "llama-3.1-8b")
DRY_MODELS = (TINY,)
_TINY = Shape(64, 2, 128, 4, 2, 16, 512, True, True, 1e6, 4096)


def shape_of(name: str) -> Shape:
    return _TINY if name == TINY else SHAPES[name]


def limits_of(name: str) -> ModelShape:
    """For the roofline."""
    if name in MODELS:
        return MODELS[name]
    shape = shape_of(name)
    return ModelShape(
        shape.layers, shape.hidden, shape.heads, shape.kv_heads, shape.head_dim, shape.intermediate, shape.vocab
    )


def without_weights(folder: Path, name: str) -> Path:
    """For `load_format: dummy`: configuration and tokenizer."""
    folder = folder / name
    folder.mkdir(parents=True, exist_ok=True)
    shape = shape_of(name)
    (folder / "config.json").write_text(json.dumps(config(shape, torch.bfloat16), indent=1))
    (folder / "generation_config.json").write_text(json.dumps({"bos_token_id": 1, "eos_token_id": 2}))
    save_tokenizer(folder, shape.vocab)
    return folder


def with_weights(folder: Path, name: str, dtype: torch.dtype, device: torch.device) -> Path:
    """The same files for every engine; made on the device, where 8B parameters take seconds."""
    return make_model(folder / name, shape_of(name), dtype, device=device)
