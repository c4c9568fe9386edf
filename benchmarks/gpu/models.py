"""Real shapes with random weights, as folders for an engine."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from gpu.limits import MODELS, ModelShape
from random_model import SHAPES, Shape, config, save_tokenizer


def shape_of(name: str) -> Shape:
    return SHAPES[name]


def limits_of(name: str) -> ModelShape:
    if name in MODELS:
        return MODELS[name]
    shape = shape_of(name)
    return ModelShape(
        shape.layers, shape.hidden, shape.heads, shape.kv_heads, shape.head_dim, shape.intermediate, shape.vocab
    )


def without_weights(folder: Path, name: str) -> Path:
    """Write configuration and tokenizer, for `load_format: dummy`."""
    folder = folder / name
    folder.mkdir(parents=True, exist_ok=True)
    shape = shape_of(name)
    (folder / "config.json").write_text(json.dumps(config(shape, torch.bfloat16), indent=1))
    (folder / "generation_config.json").write_text(json.dumps({"bos_token_id": 1, "eos_token_id": 2}))
    save_tokenizer(folder, shape.vocab)
    return folder
