"""Random LoRA adapters in PEFT's format for a model folder, and the model that holds their sum in its weights."""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

CONFIG_NAME, WEIGHTS_NAME = "adapter_config.json", "adapter_model.safetensors"
LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
PREFIX = "base_model.model."


def base_weights(base: Path) -> dict[str, torch.Tensor]:
    """Return a model folder's tensors by checkpoint name."""
    return {name: tensor for path in sorted(base.glob("*.safetensors")) for name, tensor in load_file(path).items()}


def write_peft(
    folder: Path, base: Path, *, seed: int = 0, rank: int = 4, alpha: float = 8, targets: Sequence[str] = LINEARS,
    layers: Sequence[int] | None = None, use_rslora: bool = False, strength: float = 0.5,
    dtype: torch.dtype = torch.float32, **config: object,
) -> Path:  # fmt: skip
    """Write an adapter of the linear layers `targets` of all or some `layers`, and return its folder.

    Its part of a weight has `strength` times the weight's standard deviation, so that greedy tokens change. More
    fields of `adapter_config.json` are given as `config`.
    """
    fields = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": str(base), "r": rank,
        "lora_alpha": alpha, "use_rslora": use_rslora, "rank_pattern": {},
        "alpha_pattern": {}, "target_modules": list(targets), "lora_dropout": 0.05,
        "bias": "none", "fan_in_fan_out": False, "inference_mode": True, "init_lora_weights": True,
        "layers_to_transform": None, "modules_to_save": None, "use_dora": False, "revision": None, **config,
    }  # fmt: skip
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, weight in base_weights(base).items():
        if _is_target(module := name.removesuffix(".weight"), targets, layers) and weight.dim() == 2:
            a = torch.randn(rank, weight.shape[1], generator=generator) / math.sqrt(weight.shape[1])
            b = torch.randn(weight.shape[0], rank, generator=generator)
            b *= strength * float(weight.float().std()) / float((_scale(fields) * (b @ a)).std())
            tensors[f"{PREFIX}{module}.lora_A.weight"] = a.to(dtype).contiguous()
            tensors[f"{PREFIX}{module}.lora_B.weight"] = b.to(dtype).contiguous()
    assert tensors, "no layer of the model is a target"
    return write_folder(folder, fields, tensors)


def write_folder(folder: Path, fields: Mapping[str, object], tensors: Mapping[str, torch.Tensor]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CONFIG_NAME).write_text(json.dumps(fields))
    save_file(dict(tensors), folder / WEIGHTS_NAME)
    return folder


def read_peft(folder: Path) -> tuple[dict[str, object], dict[str, torch.Tensor]]:
    """Return an adapter's configuration and tensors, to change and give to `write_folder`."""
    return json.loads((folder / CONFIG_NAME).read_text()), load_file(folder / WEIGHTS_NAME)


def deltas(adapter: Path) -> dict[str, torch.Tensor]:
    """Return what an adapter adds to weights [out, in] float32, by checkpoint name."""
    fields, tensors = read_peft(adapter)
    found = {}
    for name, a in tensors.items():
        if name.endswith(".lora_A.weight"):
            module = name.removeprefix(PREFIX).removesuffix(".lora_A.weight")
            b = tensors[f"{PREFIX}{module}.lora_B.weight"]
            found[f"{module}.weight"] = (_scale(fields) * (b.double() @ a.double())).float()
    return found


def merged_weights(base: Path, adapter: Path) -> dict[str, torch.Tensor]:
    """Return the base's tensors in float32 with the adapter added, by checkpoint name."""
    weights = {name: tensor.float() for name, tensor in base_weights(base).items()}
    for name, delta in deltas(adapter).items():
        weights[name] = weights[name] + delta
    return weights


def write_merged(folder: Path, base: Path, adapter: Path) -> Path:
    """Write a model folder in float32 whose weights hold the adapter, and return it."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in base.iterdir():
        if path.is_file() and ".safetensors" not in path.name:
            shutil.copy(path, folder)
    save_file(merged_weights(base, adapter), folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _is_target(module: str, targets: Sequence[str], layers: Sequence[int] | None) -> bool:
    layer = re.search(r"\.layers\.(\d+)\.", module)
    if layers is not None and (layer is None or int(layer[1]) not in layers):
        return False
    return module.rsplit(".", 1)[-1] in targets


def _scale(fields: Mapping[str, Any]) -> float:
    """Return the factor of an adapter's products, as PEFT has it."""
    rank: int = fields["r"]
    return float(fields["lora_alpha"] / (math.sqrt(rank) if fields["use_rslora"] else rank))
