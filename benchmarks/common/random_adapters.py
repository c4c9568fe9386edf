"""Random LoRA adapters of a decoder's linear layers, as folders of PEFT."""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path

import torch
from safetensors.torch import save_file

from modelled.roofline import Shape

ATTENTION, MLP = ("q_proj", "k_proj", "v_proj", "o_proj"), ("gate_proj", "up_proj", "down_proj")
ALL_LINEARS = (*ATTENTION, *MLP)


def linear_sizes(shape: Shape) -> dict[str, tuple[int, int]]:
    """Return inputs and outputs of each linear of a layer, by its name in a checkpoint."""
    queries, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    return {
        "q_proj": (shape.hidden, queries),
        "k_proj": (shape.hidden, kv),
        "v_proj": (shape.hidden, kv),
        "o_proj": (queries, shape.hidden),
        "gate_proj": (shape.hidden, shape.intermediate),
        "up_proj": (shape.hidden, shape.intermediate),
        "down_proj": (shape.intermediate, shape.hidden),
    }


def make_adapter(
    folder: Path, shape: Shape, *, seed: int, rank: int = 16, targets: Collection[str] = ALL_LINEARS
) -> Path:
    """Write an adapter whose matrices are Normal(0, 0.02) in bfloat16, and whose factor is 1."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(shape.layers):
        for name, (inputs, outputs) in linear_sizes(shape).items():
            if name in targets:
                block = "self_attn" if name in ATTENTION else "mlp"
                prefix = f"base_model.model.model.layers.{layer}.{block}.{name}"
                for matrix, size in (("lora_A", (rank, inputs)), ("lora_B", (outputs, rank))):
                    values = 0.02 * torch.randn(size, generator=generator)
                    tensors[f"{prefix}.{matrix}.weight"] = values.to(torch.bfloat16)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    config = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": rank, "lora_dropout": 0.0,
        "target_modules": sorted(targets), "bias": "none", "use_rslora": False, "use_dora": False,
        "base_model_name_or_path": None, "inference_mode": True, "modules_to_save": None, "fan_in_fan_out": False,
    }  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=1))
    return folder
