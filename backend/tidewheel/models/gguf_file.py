from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import torch
from gguf.constants import GGML_QUANT_SIZES

from tidewheel.errors import ConfigError
from tidewheel.models.config_fields import ConfigFields
from tidewheel.models.gguf_blocks import DTYPES, dequantize_rows, group_rows, matrix_format
from tidewheel.models.gguf_header import TAKE_ANOTHER, GGUFTensor, read_header
from tidewheel.models.linear import GroupFormat
from tidewheel.models.shard import TensorPart
from tidewheel.models.weight_source import WeightSource, uncounted
from tidewheel.models.weight_stream import BytesRead, StoredTensor, copy_tensors
from tidewheel.regular_files import as_config_error
from tidewheel_kernels.grouped_linear import GroupedWeights

_NAMES = {
    "token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head",
    "attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj", "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm", "ffn_norm": "post_attention_layernorm", "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}  # fmt: skip
_NAME = re.compile(r"(blk\.\d+\.|)(" + "|".join(_NAMES) + r")\.(weight|bias)")
_UNUSED = ("rope_freqs.weight",)  # read into the configuration
_HEADS = {"self_attn.q_proj": "llama.attention.head_count", "self_attn.k_proj": "llama.attention.head_count_kv"}


class GGUFFile(WeightSource):
    """Weights of a GGUF file. Raise `ConfigError`."""

    def __init__(self, path: Path) -> None:
        # Errors name the file, not a derived folder's link.
        self.path = path.parent / path.readlink() if path.is_symlink() else path
        header = read_header(self.path)
        self._fields = ConfigFields(header.metadata, str(self.path))
        used = {name: tensor for name, tensor in header.tensors.items() if name not in _UNUSED}
        self._raw = {hugging_face_name(name): tensor for name, tensor in used.items()}
        self.tensors = {
            name: StoredTensor(self.path, tensor.shape, self._kind(name, tensor), tensor.begin)
            for name, tensor in self._raw.items()
        }
        for name in self._raw:
            self._row_order(name)

    def _kind(self, name: str, tensor: GGUFTensor) -> torch.dtype | GroupFormat:
        form = matrix_format(tensor.kind)
        if form is None:
            raise ConfigError(f"{self.path}: {name} has type {tensor.kind.name}, which is not read: {TAKE_ANOTHER}")
        return torch.float32 if isinstance(form, GroupFormat) and len(tensor.shape) != 2 else form

    def take_parts(self, parts: Mapping[str, TensorPart]) -> None:
        for name, part in parts.items():
            block = GGML_QUANT_SIZES[self._raw[name].kind][0]
            if part.axis == 1 and (part.begin % block or part.end % block):
                raise ConfigError(
                    f"{self.path}: {name} has blocks of {block} inputs, which ranks with {part.end - part.begin} "
                    f"inputs split: lower tensor_parallel_size, or {TAKE_ANOTHER}"
                )
        super().take_parts(parts)

    def copy(self, destinations: Mapping[str, torch.Tensor], read: BytesRead) -> None:
        floats = {name: tensor for name, tensor in destinations.items() if self._raw[name].kind in DTYPES}
        super().copy(floats, read)
        for name, destination in destinations.items():
            if name not in floats:
                rows = self._rows(name)
                with as_config_error(f"{self.path}: {name} is damaged"):
                    dequantize_rows(rows, self._raw[name].kind, destination.view(len(rows), -1))
                read(self.tensors[name].num_bytes)
            if (order := self._row_order(name)) is not None:
                destination.copy_(destination[order.to(destination.device)])

    def matrix(self, name: str, device: torch.device) -> torch.Tensor | GroupedWeights:
        if not isinstance(self.tensors[name].kind, GroupFormat):
            return self.plain(name, device)
        rows, order = self._rows(name), self._row_order(name)
        with as_config_error(f"{self.path}: {name} is damaged"):
            return group_rows(rows if order is None else rows[order], self._raw[name].kind, device)

    def _rows(self, name: str) -> torch.Tensor:
        """Return the raw rows [num_rows, row_bytes] uint8 of a quantised tensor, or of its part."""
        raw, part = self._raw[name], self.tensors[name].part
        if part is not None and part.axis == 1:
            begin, end = (place * raw.row_bytes // raw.shape[1] for place in part[1:])
            part = TensorPart(1, begin, end)
        shape = raw.num_bytes // raw.row_bytes, raw.row_bytes
        stored = StoredTensor(self.path, shape, torch.uint8, raw.begin, part)
        rows = torch.empty(stored.part_shape, dtype=torch.uint8)
        copy_tensors({name: stored}, {name: rows}, uncounted)
        return rows

    def _row_order(self, name: str) -> torch.Tensor | None:
        """Return the file's row for each of Hugging Face's (None: the same): llama interleaves rotated halves."""
        key = _HEADS.get(".".join(name.split(".")[-3:-1]))
        if key is None or self._fields.values.get("general.architecture") != "llama":
            return None
        num_heads = self._fields.integer(key, self._fields.integer("llama.attention.head_count"))
        num_rows = self._raw[name].shape[0]
        if num_rows % (2 * num_heads):
            raise ConfigError(f"{self.path}: {name} has {num_rows} rows for {num_heads} heads: download it again")
        order = torch.arange(num_rows).view(num_heads, -1, 2).transpose(1, 2).flatten()
        part = self.tensors[name].part  # of whole heads
        return order if part is None else order[part.begin : part.end] - part.begin


def hugging_face_name(name: str) -> str:
    """Return the name for llama.cpp's, or an unknown name itself."""
    match = _NAME.fullmatch(name)
    if match is None:
        return name
    layer, part, kind = match.groups()
    return f"{layer.replace('blk', 'model.layers')}{_NAMES[part]}.{kind}"
