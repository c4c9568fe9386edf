"""Folder of a Hugging Face model for a GGUF file.

Pre-tokenizers have llama.cpp's names (`llama-vocab.cpp`), and the regular expressions of the models' own files.
"""

import hashlib
import json
import math
import os
import re
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from gguf.constants import TokenType
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from tidewheel.errors import ConfigError
from tidewheel.models.config_fields import MAX_CONTEXT, ConfigFields
from tidewheel.models.gguf_header import GGUFTensor, read_header
from tidewheel_process.locked_folder import FolderError, make_private

LINK = "model.gguf"  # to the file
VERSION = 2  # raised, it makes all folders anew
ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
TAKE_SAFETENSORS = "take the model's safetensors"
# Files have only the factors that follow from these (convert_hf_to_gguf.py).
_LLAMA3_ROPE = {
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
    from tidewheel.models.architectures import inverse_frequencies, parse_rope  # torch, for few files

    scaling = _LLAMA3_ROPE | {"factor": float(factors.max())}
    before, after = (
        inverse_frequencies(parse_rope(ConfigFields(config | {"rope_parameters": each}, str(file))), head_dim)
        for each in (plain, plain | scaling)
    )
    if not np.allclose(before / after, factors, rtol=1e-3):
        raise ConfigError(f"{file}: rope_freqs.weight has other factors than Llama 3; {TAKE_SAFETENSORS}")
    return scaling


class PreTokenizer(NamedTuple):
    patterns: tuple[str, ...] = ()  # each splits what the previous ones left
    ignores_merges: bool = False  # for a word that is a token
    adds_bos: bool = False
    normalizes: bool = False  # to NFC


_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
_LLAMA3 = PreTokenizer((rf"{_WORDS}|\p{{N}}{{1,3}}|{_REST}",), ignores_merges=True, adds_bos=True)
_QWEN2 = PreTokenizer((rf"{_WORDS}|\p{{N}}|{_REST}",), normalizes=True)
_DIGITS = PreTokenizer((r"\p{N}", _GPT2))
PRE_TOKENIZERS = {
    "default": PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
    "gpt-2": PreTokenizer((_GPT2,)), "olmo": PreTokenizer((_GPT2,)),
    "smollm": _DIGITS, "starcoder": _DIGITS, "refact": _DIGITS,
    "llama3": _LLAMA3, "llama-v3": _LLAMA3, "llama-bpe": _LLAMA3, "falcon3": _LLAMA3,
    "qwen2": _QWEN2, "deepseek-r1-qwen": _QWEN2,
    "tekken": PreTokenizer(
        (_CASED + r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",), ignores_merges=True, adds_bos=True
    ),
}  # fmt: skip
_SENTENCEPIECE = PreTokenizer(adds_bos=True)
_SPACE = "\u2581"  # of sentencepiece
MAX_MERGED_CHARS = 1024  # the search for pairs takes the square
# Metadata names only one end token (llama.cpp has the same list).
END_TEXTS = ("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|eom_id|>", "<EOT>")
_PLAIN = (TokenType.NORMAL, TokenType.BYTE, TokenType.UNUSED)
_BESIDE = "else serve a folder with the file and its model's config.json and tokenizer.json"


def tokenizer_files(fields: ConfigFields) -> dict[str, dict[str, Any]]:
    """Return tokenizer.json, tokenizer_config.json and generation_config.json. Raise `ConfigError`."""
    vocabulary = _Vocabulary(fields)
    try:
        tokenizer = json.loads(vocabulary.tokenizer().to_str())
    except BaseException as error:  # the library's panics are no `Exception`
        if isinstance(error, KeyboardInterrupt | MemoryError | ConfigError):
            raise
        raise ConfigError(f"{fields.where} has a damaged tokenizer ({error}): download it again") from None
    names = {f"{role}_token": vocabulary.tokens[token] for role, token in vocabulary.ids.items() if token is not None}
    template = fields.text("tokenizer.chat_template", "")
    return {
        "tokenizer.json": tokenizer,
        "tokenizer_config.json": {**names, **({"chat_template": template} if template else {})},
        "generation_config.json": {"bos_token_id": vocabulary.ids["bos"], "eos_token_id": vocabulary.end_ids},
    }


class _Vocabulary:
    def __init__(self, fields: ConfigFields) -> None:
        if not fields.values.get("tokenizer.ggml.tokens"):
            raise ConfigError(f"{fields.where} has no tokenizer: take another file, {_BESIDE}")
        self._fields = fields
        self.tokens = fields.texts("tokenizer.ggml.tokens")
        types = self._numbers("token_type", TokenType.NORMAL)
        self._typed = list(zip(range(len(types)), self.tokens, types, strict=True))
        model, pre = fields.text("tokenizer.ggml.model"), fields.text("tokenizer.ggml.pre", "default")
        if model not in ("gpt2", "llama"):
            raise fields.error("tokenizer.ggml.model", f"gpt2 or llama; {_BESIDE}")
        self._is_sentencepiece = model == "llama"
        if not self._is_sentencepiece and pre not in PRE_TOKENIZERS:
            raise fields.error("tokenizer.ggml.pre", f"one of {', '.join(PRE_TOKENIZERS)}; {_BESIDE}")
        self._pre = _SENTENCEPIECE if self._is_sentencepiece else PRE_TOKENIZERS[pre]
        defaults = {"unk": 0, "bos": 1, "eos": 2} if self._is_sentencepiece else {}
        keys = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
        self.ids = {role: self._id(key, defaults.get(role)) for role, key in keys.items()}
        named = {self.ids["eos"], self._id("eot"), self._id("eom")} - {None}
        self.end_ids = sorted({*named, *(i for i, token in enumerate(self.tokens) if token in END_TEXTS)})  # type: ignore[type-var]

    def _id(self, key: str, default: int | None = None) -> int | None:
        key = f"tokenizer.ggml.{key}_token_id"
        if self._fields.values.get(key, default) is None:
            return None
        return self._fields.integer(key, default, low=0, high=len(self.tokens) - 1)

    def _numbers(self, name: str, default: float) -> list[float]:
        """Return the numbers `tokenizer.ggml.NAME`, one for each token. Raise `ConfigError`."""
        key = f"tokenizer.ggml.{name}"
        values = self._fields.values.get(key, [default] * len(self.tokens))
        if not isinstance(values, list) or len(values) != len(self.tokens) or isinstance(values[0], str):
            raise ConfigError(f"{self._fields.where}: {key} must be {len(self.tokens)} numbers: download it again")
        return values

    def tokenizer(self) -> Tokenizer:
        special = {self.ids["bos"], *self.end_ids}
        ids = {
            token: token_id
            for token_id, token, kind in self._typed
            if kind != TokenType.UNUSED or token_id in special
        }
        backend = self._sentencepiece(ids) if self._is_sentencepiece else self._byte_level(ids)
        backend.add_tokens(
            [
                AddedToken(token, normalized=False, special=kind != TokenType.USER_DEFINED or token_id in special)
                for token_id, token, kind in self._typed
                if kind not in _PLAIN or token_id in special
            ]
        )
        backend.post_processor = self._post_processor()
        return backend

    def _post_processor(self) -> processors.PostProcessor:
        adds = {
            "bos": self._fields.flag("tokenizer.ggml.add_bos_token", self._pre.adds_bos),
            "eos": self._fields.flag("tokenizer.ggml.add_eos_token", False),
        }
        ids = {role: token_id for role in adds if adds[role] and (token_id := self.ids[role]) is not None}
        first, last = ([role] if role in ids else [] for role in adds)
        special = [{"id": role, "ids": [token], "tokens": [self.tokens[token]]} for role, token in ids.items()]
        return processors.TemplateProcessing(single=[*first, "$A", *last], special_tokens=special)

    def _byte_level(self, ids: dict[str, int]) -> Tokenizer:
        merges = [merge.partition(" ")[::2] for merge in self._fields.texts("tokenizer.ggml.merges")]
        backend = Tokenizer(models.BPE(ids, merges, ignore_merges=self._pre.ignores_merges))
        backend.normalizer = normalizers.NFC() if self._pre.normalizes else None
        splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in self._pre.patterns]
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        backend.pre_tokenizer = pre_tokenizers.Sequence([*splits, byte_level])
        backend.decoder = decoders.ByteLevel()
        return backend

    def _sentencepiece(self, ids: dict[str, int]) -> Tokenizer:
        unknown = self.tokens[self.ids["unk"] or 0]
        backend = Tokenizer(models.BPE(ids, self._merges(ids), unk_token=unknown, fuse_unk=True, byte_fallback=True))
        has_prefix = self._fields.flag("tokenizer.ggml.add_space_prefix", True)
        prepend = [normalizers.Prepend(_SPACE)] if has_prefix else []
        strip = [decoders.Strip(" ", 1, 0)] if has_prefix else []
        backend.normalizer = normalizers.Sequence([*prepend, normalizers.Replace(" ", _SPACE)])
        to_text = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
        backend.decoder = decoders.Sequence([*to_text, *strip])
        return backend

    def _merges(self, ids: dict[str, int]) -> list[tuple[str, str]]:
        """Return the merges, pairs of tokens that together spell a token, best score first."""
        scores = self._numbers("scores", 0.0)
        pairs = [
            (-scores[token_id], ids[token[:cut]], ids[token[cut:]], (token[:cut], token[cut:]))
            for token_id, token, kind in self._typed
            if kind == TokenType.NORMAL and len(token) <= MAX_MERGED_CHARS
            for cut in range(1, len(token))
            if token[:cut] in ids and token[cut:] in ids
        ]
        return [pair for *_, pair in sorted(pairs)]
