"""Random weights of real shapes, as a Hugging Face folder for every engine.

    python benchmarks random_model FOLDER --shape qwen3-40m

The tokenizer has one word per id (`t17` is id 17).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from modelled.roofline import SHAPES, Shape

CPU = torch.device("cpu")
CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }} {% endfor %}"


def weights(
    shape: Shape, dtype: torch.dtype, seed: int, device: torch.device = CPU
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield Normal(0, 0.02) matrices, drawn on `device`, and unit norms, in host memory."""
    generator = torch.Generator(device).manual_seed(seed)

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return (torch.randn(rows, columns, generator=generator, device=device) * 0.02).to(dtype).cpu()

    def ones(size: int) -> torch.Tensor:
        return torch.ones(size, dtype=dtype)

    yield "model.embed_tokens.weight", matrix(shape.vocab, shape.hidden)
    if not shape.tied:
        yield "lm_head.weight", matrix(shape.vocab, shape.hidden)
    for layer in range(shape.layers):
        prefix = f"model.layers.{layer}."
        q_size, kv_size = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        yield prefix + "self_attn.q_proj.weight", matrix(q_size, shape.hidden)
        yield prefix + "self_attn.k_proj.weight", matrix(kv_size, shape.hidden)
        yield prefix + "self_attn.v_proj.weight", matrix(kv_size, shape.hidden)
        yield prefix + "self_attn.o_proj.weight", matrix(shape.hidden, q_size)
        yield prefix + "mlp.gate_proj.weight", matrix(shape.intermediate, shape.hidden)
        yield prefix + "mlp.up_proj.weight", matrix(shape.intermediate, shape.hidden)
        yield prefix + "mlp.down_proj.weight", matrix(shape.hidden, shape.intermediate)
        yield prefix + "input_layernorm.weight", ones(shape.hidden)
        yield prefix + "post_attention_layernorm.weight", ones(shape.hidden)
        if shape.qk_norm:
            yield prefix + "self_attn.q_norm.weight", ones(shape.head_dim)
            yield prefix + "self_attn.k_norm.weight", ones(shape.head_dim)
    yield "model.norm.weight", ones(shape.hidden)


def config(shape: Shape, dtype: torch.dtype) -> dict[str, object]:
    kind = "qwen3" if shape.qk_norm else "llama"
    return {
        "architectures": ["Qwen3ForCausalLM" if shape.qk_norm else "LlamaForCausalLM"],
        "model_type": kind,
        "vocab_size": shape.vocab,
        "hidden_size": shape.hidden,
        "num_hidden_layers": shape.layers,
        "intermediate_size": shape.intermediate,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "max_position_embeddings": shape.context,
        "rope_theta": shape.rope_theta,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": shape.tied,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "torch_dtype": str(dtype).removeprefix("torch."),
    }


def save_tokenizer(folder: Path, vocab: int) -> None:
    tokenizer = Tokenizer(models.WordLevel({f"▁t{i}": i for i in range(vocab)}, unk_token="▁t3"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.save(str(folder / "tokenizer.json"))
    special = {
        "chat_template": CHAT_TEMPLATE,
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "▁t2",
        "unk_token": "▁t3",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(special))


def make_model(
    folder: Path, shape: Shape, dtype: torch.dtype = torch.bfloat16, seed: int = 0, device: torch.device = CPU
) -> Path:
    without_weights(folder, shape, dtype)
    save_file(dict(weights(shape, dtype, seed, device)), folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def without_weights(folder: Path, shape: Shape, dtype: torch.dtype = torch.bfloat16) -> Path:
    """Write configuration and tokenizer only, for `load_format: dummy`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config(shape, dtype), indent=1))
    (folder / "generation_config.json").write_text(json.dumps({"bos_token_id": 1, "eos_token_id": 2}))
    save_tokenizer(folder, shape.vocab)
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-40m")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="bfloat16")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="that draws the values")
    arguments = parser.parse_args()
    dtype, device = getattr(torch, arguments.dtype), torch.device(arguments.device)
    print(make_model(arguments.folder, SHAPES[arguments.shape], dtype, device=device))


if __name__ == "__main__":
    main()
