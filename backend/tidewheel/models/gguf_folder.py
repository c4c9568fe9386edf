from __future__ import annotations

import hashlib
import json
import math
import os
import re
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from tidewheel.errors import ConfigError
from tidewheel.models.config_fields import MAX_CONTEXT, ConfigFields
from tidewheel.models.gguf_header import GGUFTensor, read_header
from tidewheel.models.gguf_tokenizer import tokenizer_files
from tidewheel_process.locked_folder import FolderError, make_private

LINK = "model.gguf"  # to the file
VERSION = 2  # raised, it makes all folders anew
ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
TAKE_SAFETENSORS = "take the model's safetensors"
# Files have only the factors that follow from these (convert_hf_to_gguf.py).
_LLAMA3 = {
    "rope_type": "llama3", "original_max_position_embeddings": 8192, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
}  # fmt: skip


def derived_folder(file: Path) -> Path:
    """Return a folder in the user's cache: configuration, tokenizer and a link to the file. Raise `ConfigError`."""
    file = file.absolute()
    caches = os.environ.get("XDG_CACHE_HOME") or Path(os.environ.get("HOME") or "/", ".cache")
    remedy = "set XDG_CACHE_HOME to another folder"
    try:
        found = file.stat()
        root = make_private(Path(caches, "tidewheel", "gguf").absolute(), remedy)
        key = hashlib.sha256(repr((file, found.st_size, found.st_mtime_ns, VERSION)).encode()).hexdigest()
        folder = root / f"{re.sub(r'[^A-Za-z0-9._-]', '_', file.stem)[:80]}-{key[:16]}"
        if not folder.is_dir():
            _make(folder, file)
        return folder
    except OSError as error:
        raise ConfigError(f"{error.filename or file}: {error.strerror}; make room, or {remedy}") from None
    except FolderError as error:
        raise ConfigError(str(error)) from None


def _make(folder: Path, file: Path) -> None:
    header = read_header(file)
    fields = ConfigFields(header.metadata, str(file))
    config = model_config(fields, header.tensors)
    if (factors := header.tensors.get("rope_freqs.weight")) is not None:
        config["rope_parameters"] |= _llama3_scaling(file, factors, config)
    with tempfile.TemporaryDirectory(dir=folder.parent, ignore_cleanup_errors=True) as scratch:
        for name, value in {"config.json": config, **tokenizer_files(fields)}.items():
            Path(scratch, name).write_text(json.dumps(value, ensure_ascii=False), encoding="utf-8")
        Path(scratch, LINK).symlink_to(file)
        try:
            Path(scratch).rename(folder)
        except OSError:
            if not folder.is_dir():  # else another process has made it meanwhile
                raise


def model_config(fields: ConfigFields, tensors: dict[str, GGUFTensor]) -> dict[str, Any]:
    """Return the content of config.json. Raise `ConfigError`."""
    name = fields.text("general.architecture")
    if name not in ARCHITECTURES or fields.values.get(f"{name}.expert_count"):
        kind = f"a mixture of experts ({name})" if name in ARCHITECTURES else name
        known = ", ".join(ARCHITECTURES)
        raise ConfigError(f"{fields.where} is {kind}: GGUF files are served of {known}; {TAKE_SAFETENSORS}")
    if "token_embd.weight" not in tensors:
        raise ConfigError(f"{fields.where} lacks token_embd.weight: take the file of a whole model")
    embedding = tensors["token_embd.weight"]
    hidden_size, heads = fields.integer(f"{name}.embedding_length"), fields.integer(f"{name}.attention.head_count")
    head_dim = fields.integer(f"{name}.attention.key_length", hidden_size // heads)
    for key in (f"{name}.attention.value_length", f"{name}.rope.dimension_count"):
        if fields.integer(key, head_dim) != head_dim:
            raise fields.error(key, f"{head_dim}, like the keys of a head; {TAKE_SAFETENSORS}")
    window = fields.optional_integer(f"{name}.attention.sliding_window") if name == "llama" else None
    return {
        "architectures": ["MistralForCausalLM" if window else ARCHITECTURES[name]],
        "model_type": "mistral" if window else name,
        "vocab_size": embedding.shape[0],
        "hidden_size": hidden_size,
        "intermediate_size": fields.integer(f"{name}.feed_forward_length"),
        "num_hidden_layers": fields.integer(f"{name}.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": fields.integer(f"{name}.attention.head_count_kv", heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": fields.integer(f"{name}.context_length", high=MAX_CONTEXT),
        "rms_norm_eps": fields.number(f"{name}.attention.layer_norm_rms_epsilon"),
        "rope_parameters": _rope(fields, name),
        "sliding_window": window,
        "tie_word_embeddings": "output.weight" not in tensors,
        "attention_bias": "blk.0.attn_output.bias" in tensors,
        "mlp_bias": "blk.0.ffn_gate.bias" in tensors,
        "dtype": {"F32": "float32", "F16": "float16"}.get(embedding.kind.name, "bfloat16"),
    }


def _rope(fields: ConfigFields, name: str) -> dict[str, Any]:
    prefix = f"{name}.rope.scaling"
    kind = fields.text(f"{prefix}.type", "none")
    found = {"rope_type": "default", "rope_theta": fields.number(f"{name}.rope.freq_base", 10_000.0)}
    if kind == "none":
        return found
    if kind not in ("linear", "yarn"):
        raise fields.error(f"{prefix}.type", f"none, linear or yarn; {TAKE_SAFETENSORS}")
    factor = fields.number(f"{prefix}.factor")
    found |= {"rope_type": kind, "factor": factor}
    if kind == "yarn":
        of_attention = fields.number(f"{prefix}.attn_factor", 1.0)
        found["attention_factor"] = of_attention * (0.1 * math.log(max(factor, 1.0)) + 1.0)
        found["original_max_position_embeddings"] = fields.integer(f"{prefix}.original_context_length")
    return found


def _llama3_scaling(file: Path, tensor: GGUFTensor, config: dict[str, Any]) -> dict[str, Any]:
    """Return `rope_scaling` of Llama 3 for a file's frequency factors. Raise `ConfigError` for other factors."""
    head_dim, plain = config["head_dim"], config["rope_parameters"]
    if tensor.shape != (head_dim // 2,) or tensor.kind.name != "F32":
        raise ConfigError(f"{file}: rope_freqs.weight must be {head_dim // 2} numbers in F32; {TAKE_SAFETENSORS}")
    factors = np.fromfile(file, np.float32, head_dim // 2, offset=tensor.begin)
    if np.all(factors == 1.0):
        return {}
    from tidewheel.models.rope_table import inverse_frequencies, parse_rope  # torch, for few files

    scaling = _LLAMA3 | {"factor": float(factors.max())}
    before, after = (
        inverse_frequencies(parse_rope(ConfigFields(config | {"rope_parameters": each}, str(file))), head_dim)
        for each in (plain, plain | scaling)
    )
    if not np.allclose(before / after, factors, rtol=1e-3):
        raise ConfigError(f"{file}: rope_freqs.weight has other factors than Llama 3; {TAKE_SAFETENSORS}")
    return scaling
