"""Small GGUF files written by the library of llama.cpp, in llama.cpp's names and order of rows."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import gguf
import numpy as np
import tokenizers
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType, TokenType
from transformers import PreTrainedModel

from tidewheel.models.gguf_file import _NAMES

F32 = GGMLQuantizationType.F32
Raw = tuple[np.ndarray, GGMLQuantizationType]  # floats, or rows of bytes
# Bytes of a block that hold float16 scales, of types whose blocks `gguf.quants` cannot make.
HALVES = {
    GGMLQuantizationType.Q4_K: (0, 2), GGMLQuantizationType.Q5_K: (0, 2), GGMLQuantizationType.Q6_K: (208,),
    GGMLQuantizationType.Q2_K: (80, 82), GGMLQuantizationType.Q3_K: (108,), GGMLQuantizationType.IQ4_XS: (0,),
}  # fmt: skip


def write_gguf(path: Path, metadata: Mapping[str, object], tensors: Mapping[str, Raw], alignment: int = 0) -> Path:
    """Write a file; the metadata has `general.architecture`, and lists of texts or numbers."""
    writer = gguf.GGUFWriter(path, str(metadata.get("general.architecture", "llama")))
    if alignment:
        writer.add_custom_alignment(alignment)
    for key, value in metadata.items():
        match value:
            case bool():
                writer.add_bool(key, value)
            case int():
                writer.add_uint32(key, value)
            case float():
                writer.add_float32(key, value)
            case str() if key != "general.architecture":
                writer.add_string(key, value)
            case list():
                writer.add_array(key, value)
    for name, (values, kind) in tensors.items():
        writer.add_tensor(name, np.ascontiguousarray(values), raw_dtype=None if values.dtype != np.uint8 else kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def blocks(kind: GGMLQuantizationType, num_rows: int, columns: int, seed: int = 0) -> np.ndarray:
    """Return random rows of bytes of a quantised type."""
    rng = np.random.default_rng(seed)
    if kind not in HALVES:
        return gguf.quants.quantize(rng.standard_normal((num_rows, columns), dtype=np.float32), kind)
    block, block_bytes = GGML_QUANT_SIZES[kind]
    raw = rng.integers(0, 256, (num_rows * columns // block, block_bytes), dtype=np.uint8)
    for begin in HALVES[kind]:
        raw[:, begin : begin + 2] = rng.uniform(0.001, 0.1, (len(raw), 1)).astype(np.float16).view(np.uint8)
    return raw.reshape(num_rows, -1)


def permuted(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Return rows in the order that convert_hf_to_gguf.py gives q and k of a Llama."""
    halves = weight.reshape(num_heads, 2, weight.shape[0] // num_heads // 2, *weight.shape[1:])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def gguf_name(name: str) -> str:
    stem, kind = name.rsplit(".", 1)
    back = {theirs: ours for ours, theirs in _NAMES.items()}
    if stem in back:
        return f"{back[stem]}.{kind}"
    _, _, layer, part = stem.split(".", 3)
    return f"blk.{layer}.{back[part]}.{kind}"


def write_model(path: Path, model: PreTrainedModel, kind: GGMLQuantizationType = F32, **changes: object) -> Path:
    """Write a model with a tokenizer of bytes, and matrices of type `kind`. A change of metadata to None removes."""
    config, name = model.config, str(model.config.model_type).replace("mistral", "llama")
    tensors: dict[str, Raw] = {}
    for their_name, tensor in model.state_dict().items():
        if their_name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        values = tensor.float().numpy()
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(
            their_name.split(".")[-2]
        )
        if name == "llama" and heads is not None:
            values = permuted(values, heads)
        is_quantised = kind != F32 and values.ndim == 2 and values.shape[1] % GGML_QUANT_SIZES[kind][0] == 0
        tensors[gguf_name(their_name)] = (gguf.quants.quantize(values, kind), kind) if is_quantised else (values, F32)
    metadata = {
        "general.architecture": name,
        f"{name}.block_count": config.num_hidden_layers,
        f"{name}.context_length": config.max_position_embeddings,
        f"{name}.embedding_length": config.hidden_size,
        f"{name}.feed_forward_length": config.intermediate_size,
        f"{name}.attention.head_count": config.num_attention_heads,
        f"{name}.attention.head_count_kv": config.num_key_value_heads,
        f"{name}.attention.key_length": getattr(config, "head_dim", None)
        or config.hidden_size // config.num_attention_heads,
        f"{name}.attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        f"{name}.rope.freq_base": float(config.rope_parameters["rope_theta"]),
        f"{name}.attention.sliding_window": config.sliding_window if config.model_type == "mistral" else None,
        **byte_vocabulary(config.vocab_size),
        **changes,
    }
    return write_gguf(path, {key: value for key, value in metadata.items() if value is not None}, tensors)


def byte_vocabulary(size: int) -> dict[str, object]:
    """Return metadata of a tokenizer of bytes: 256 bytes, an end token, and padding."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    tokens = [*alphabet, "<|im_end|>", "he", *(f"[PAD{token_id}]" for token_id in range(258, size))]
    types = [TokenType.NORMAL] * 256 + [TokenType.CONTROL, TokenType.NORMAL] + [TokenType.UNUSED] * (size - 258)
    return {
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "qwen2", "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [int(kind) for kind in types], "tokenizer.ggml.merges": ["h e"],
        "tokenizer.ggml.eos_token_id": 256,
        "tokenizer.chat_template": "{% for m in messages %}{{ m.content }}{% endfor %}",
    }  # fmt: skip


def vocabulary_of(backend: tokenizers.Tokenizer, model: str, special: list[str], **more: object) -> dict[str, object]:
    """Return metadata of a trained BPE tokenizer."""
    state = json.loads(backend.to_str())["model"]
    tokens = sorted(state["vocab"], key=state["vocab"].get)
    ranks = {"".join(pair): -float(rank) for rank, pair in enumerate(map(tuple, state["merges"]))}
    kinds = dict.fromkeys(special, TokenType.CONTROL)
    byte = TokenType.BYTE if model == "llama" else TokenType.NORMAL
    types = [kinds.get(token, byte if token.startswith("<0x") else TokenType.NORMAL) for token in tokens]
    found: dict[str, object] = {
        "tokenizer.ggml.model": model, "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [int(kind) for kind in types],
    }  # fmt: skip
    if model == "gpt2":
        found["tokenizer.ggml.merges"] = [" ".join(pair) for pair in state["merges"]]
    else:
        found["tokenizer.ggml.scores"] = [ranks.get(token, -1e6) for token in tokens]
    return found | more


def tensors_of(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    tied = model.config.tie_word_embeddings
    return {name: tensor for name, tensor in model.state_dict().items() if name != "lm_head.weight" or not tied}
