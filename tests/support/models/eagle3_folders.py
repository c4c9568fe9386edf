"""Random EAGLE-3 heads for a model folder, and their drafts by a plain computation of the whole sequence."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch.nn.functional import scaled_dot_product_attention, silu
from transformers import PreTrainedModel

from tidewheel.config import EngineConfig
from tidewheel.models.decoder import Decoder
from tidewheel.models.loader import plan_model
from tidewheel.models.model_folder import read_config
from tidewheel.runner.eagle3 import Eagle3Source

CONFIG_NAME, WEIGHTS_NAME = "config.json", "model.safetensors"
EPS, THETA = 1e-5, 10_000.0


def write_eagle3(
    folder: Path, model: PreTrainedModel, *, draft_vocab_size: int = 160, has_table: bool = True, num_heads: int = 4,
    num_kv_heads: int = 2, seed: int = 0, strength: float = 1.0, lacks: Sequence[str] = (), **changes: object,
) -> Path:  # fmt: skip
    """Write a random head of a model, and return its folder; `changes`: fields of its `config.json`.

    `lacks`: tensors left out. With `strength` 0 the layer adds nothing to the states that it is given.
    """
    of_model = model.config.to_dict()
    vocab_size, hidden, width = of_model["vocab_size"], of_model["hidden_size"], 96
    head_dim = hidden // num_heads
    fields = {
        "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "hidden_act": "silu",
        "hidden_size": hidden, "intermediate_size": width, "num_hidden_layers": 1, "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads, "rms_norm_eps": EPS, "rope_theta": THETA, "vocab_size": vocab_size,
        "draft_vocab_size": draft_vocab_size, "max_position_embeddings": 64, "tie_word_embeddings": False, **changes,
    }  # fmt: skip
    generator = torch.Generator().manual_seed(seed)

    def matrix(outputs: int, inputs: int, scale: float = 1.0) -> torch.Tensor:
        return torch.randn(outputs, inputs, generator=generator) * (scale * inputs**-0.5)

    def norm() -> torch.Tensor:
        return 1 + 0.1 * torch.randn(hidden, generator=generator)

    q_width, kv_width = num_heads * head_dim, num_kv_heads * head_dim
    ids = torch.randperm(vocab_size, generator=generator)[:draft_vocab_size].sort().values
    is_drafted = torch.zeros(vocab_size, dtype=torch.bool)
    is_drafted[ids] = True
    tensors = {
        "fc.weight": matrix(hidden, 3 * hidden),
        "midlayer.input_layernorm.weight": norm(),
        "midlayer.hidden_norm.weight": norm(),
        "midlayer.self_attn.q_proj.weight": matrix(q_width, 2 * hidden),
        "midlayer.self_attn.k_proj.weight": matrix(kv_width, 2 * hidden),
        "midlayer.self_attn.v_proj.weight": matrix(kv_width, 2 * hidden),
        "midlayer.self_attn.o_proj.weight": matrix(hidden, q_width, strength),
        "midlayer.post_attention_layernorm.weight": norm(),
        "midlayer.mlp.gate_proj.weight": matrix(width, hidden),
        "midlayer.mlp.up_proj.weight": matrix(width, hidden),
        "midlayer.mlp.down_proj.weight": matrix(hidden, width, strength),
        "norm.weight": norm(),
        "lm_head.weight": matrix(draft_vocab_size, hidden),
        "d2t": ids - torch.arange(draft_vocab_size),
        "t2d": is_drafted,
    }
    if has_table:
        tensors["embed_tokens.weight"] = matrix(vocab_size, hidden, hidden**0.5)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CONFIG_NAME).write_text(json.dumps(fields))
    save_file({name: tensor for name, tensor in tensors.items() if name not in lacks}, folder / WEIGHTS_NAME)
    return folder


def find_head(folder: Path, target: Path) -> Eagle3Source:
    """Return the head in a folder, checked for a target in float32. Raise `ConfigError`."""
    config = EngineConfig(model=str(target), dtype="float32", speculation="eagle3", draft_model=str(folder))
    plan = plan_model(target, read_config(target), config, torch.device("cpu"))
    assert isinstance(plan.native, Decoder)
    return Eagle3Source.of(plan, plan.native.config, folder, 0)


class ReferenceHead:
    """A head in float32 that computes the whole sequence for each draft, without a cache."""

    def __init__(self, folder: Path, model: PreTrainedModel, layers: Sequence[int]) -> None:
        self._fields = json.loads((folder / CONFIG_NAME).read_text())
        self._weights = load_file(folder / WEIGHTS_NAME)
        self._model, self._layers = model, layers
        table = model.get_input_embeddings().weight
        self._table = self._weights.get("embed_tokens.weight", table).detach()

    @torch.inference_mode()
    def drafts(self, token_ids: Sequence[int], count: int) -> list[int]:
        """Return the drafts after `token_ids`, of whose last token the model has computed no state."""
        ids = torch.tensor(token_ids)
        hidden = self._model(ids[None, :-1], output_hidden_states=True).hidden_states
        states = torch.cat([hidden[layer][0] for layer in self._layers], dim=1) @ self._weights["fc.weight"].T
        inputs, drafts = token_ids[1:], []
        for _ in range(count):
            output = self._layer(torch.tensor([*inputs, *drafts]), states)[-1]
            logits = self._weights["lm_head.weight"] @ self._norm(output, "norm")
            draft_id = int(logits.argmax())
            drafts.append(draft_id + int(self._weights["d2t"][draft_id]))
            states = torch.cat((states, output[None]))
        return drafts

    def _layer(self, token_ids: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        length, heads = len(token_ids), self._fields["num_attention_heads"]
        embedded = self._norm(self._table[token_ids], "midlayer.input_layernorm")
        pairs = torch.cat((embedded, self._norm(states, "midlayer.hidden_norm")), dim=1)
        of_heads = (length, -1, states.shape[1] // heads)
        q, k, v = (
            (pairs @ self._weights[f"midlayer.self_attn.{name}_proj.weight"].T).view(of_heads) for name in "qkv"
        )
        q, k, v = (x.transpose(0, 1) for x in (_rotated(q), _rotated(k), v))
        attended = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(0, 1).flatten(1)
        residual = states + attended @ self._weights["midlayer.self_attn.o_proj.weight"].T
        x = self._norm(residual, "midlayer.post_attention_layernorm")
        gate, up, down = (self._weights[f"midlayer.mlp.{name}_proj.weight"].T for name in ("gate", "up", "down"))
        return residual + (silu(x @ gate) * (x @ up)) @ down

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return torch.rms_norm(x, x.shape[-1:], self._weights[f"{name}.weight"], EPS)


def _rotated(x: torch.Tensor) -> torch.Tensor:
    """Rotate halves of each head [length, num_heads, head_dim] by the angles of its position."""
    half = x.shape[2] // 2
    angles = torch.outer(torch.arange(len(x)).float(), THETA ** (-torch.arange(half) / half))[:, None]
    first, second = x.split(half, dim=2)
    return torch.cat((first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()), 2)
