from __future__ import annotations

import re
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from tidewheel.errors import ConfigError
from tidewheel.models.config_fields import ConfigFields
from tidewheel.models.gguf_blocks import (
    DTYPES,
    dequantize_rows,
    group_format,
    group_rows,
    is_readable,
    rows_of_a_piece,
)
from tidewheel.models.gguf_header import TAKE_ANOTHER, GGUFTensor, read_header
from tidewheel.models.safetensors_file import TensorEntry, plan_chunks
from tidewheel.models.weight_source import BytesRead, StoredTensor, uncounted
from tidewheel.models.weight_stream import SLOT_BYTES, num_readers, sink_on, stream_chunks
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


class GGUFFile:
    """`WeightSource` of a GGUF file, by Hugging Face's names. Raise `ConfigError` for a damaged file."""

    def __init__(self, path: Path) -> None:
        # A folder made of the file has a link to it: errors name the file.
        self.path = path.parent / path.readlink() if path.is_symlink() else path
        header = read_header(self.path)
        self.data_start = header.data_start
        self.entries: dict[str, TensorEntry] = {}  # quantised tensors as rows of bytes
        self.tensors: dict[str, StoredTensor] = {}
        used = {name: tensor for name, tensor in header.tensors.items() if name not in _UNUSED}
        self._stored = {hugging_face_name(name): tensor for name, tensor in used.items()}
        self._fields = ConfigFields(header.metadata, str(self.path))
        for name, tensor in self._stored.items():
            self._add(name, tensor)
            self._row_order(name)

    def _add(self, name: str, tensor: GGUFTensor) -> None:
        if not is_readable(tensor.kind):
            raise ConfigError(f"{self.path}: {name} has type {tensor.kind.name}, which is not read: {TAKE_ANOTHER}")
        dtype = DTYPES.get(tensor.kind)
        shape = (*tensor.shape[:-1], tensor.row_bytes) if dtype is None else tensor.shape
        self.entries[name] = TensorEntry(dtype or torch.uint8, shape, tensor.begin, tensor.end)
        form = dtype or (group_format(tensor.kind) if len(tensor.shape) == 2 else torch.float32)
        self.tensors[name] = StoredTensor(self.path, tensor.shape, form)

    def copy(self, destinations: Mapping[str, torch.Tensor], read: BytesRead) -> None:
        """Copy tensors, converted to the dtype of their destinations; quantised ones are dequantised."""
        floats = {name: tensor for name, tensor in destinations.items() if self._stored[name].kind in DTYPES}
        device = next(iter(destinations.values())).device
        stream_chunks(plan_chunks([self], floats, SLOT_BYTES), sink_on(device), lambda chunk: read(chunk.size))
        for name, destination in destinations.items():
            if name not in floats:
                self._dequantize(name, destination)
                read(self.tensors[name].num_bytes)
            if (order := self._row_order(name)) is not None:
                destination.copy_(destination[order.to(device)])

    def matrix(self, name: str, device: torch.device) -> torch.Tensor | GroupedWeights:
        stored = self.tensors[name]
        if isinstance(stored.kind, torch.dtype):
            matrix = torch.empty(stored.shape, dtype=stored.kind, device=device)
            self.copy({name: matrix}, uncounted)
            return matrix
        try:
            found = group_rows(self._rows(name), self._stored[name].kind, device)
        except ValueError as error:
            raise self._damaged(name, error) from None
        if (order := self._row_order(name)) is None:
            return found
        order = order.to(device)
        minimums = None if found.minimums is None else found.minimums[order]
        return GroupedWeights(found.codes[order], found.scales[order], minimums, found.bits)

    def _rows(self, name: str) -> torch.Tensor:
        """Return a quantised tensor's raw rows [num_rows, row_bytes] uint8."""
        rows = torch.empty(self.entries[name].shape, dtype=torch.uint8)
        stream_chunks(plan_chunks([self], {name: rows}, SLOT_BYTES), sink_on(rows.device), lambda _chunk: None)
        return rows.view(-1, rows.shape[-1])

    def _dequantize(self, name: str, destination: torch.Tensor) -> None:
        rows, kind = self._rows(name), self._stored[name].kind
        size = rows_of_a_piece(rows, kind)
        pieces = (torch.split(tensor, size) for tensor in (rows, destination.view(len(rows), -1)))

        def convert(raw: torch.Tensor, piece: torch.Tensor) -> None:
            piece.copy_(dequantize_rows(raw, kind))

        with ThreadPoolExecutor(num_readers(), thread_name_prefix="dequantize") as pool:
            try:
                list(pool.map(convert, *pieces))
            except ValueError as error:
                raise self._damaged(name, error) from None

    def _row_order(self, name: str) -> torch.Tensor | None:
        """Return the file's row for each row of Hugging Face's tensor; None if they are the same.

        For the architecture llama, a head has the rows of its two rotated halves in turns.
        """
        key = _HEADS.get(".".join(name.split(".")[-3:-1]))
        if key is None or self._fields.values.get("general.architecture") != "llama":
            return None
        num_heads = self._fields.integer(key, self._fields.integer("llama.attention.head_count"))
        num_rows = self._stored[name].shape[0]
        if num_rows % (2 * num_heads):
            raise ConfigError(f"{self.path}: {name} has {num_rows} rows for {num_heads} heads: download it again")
        return torch.arange(num_rows).view(num_heads, -1, 2).transpose(1, 2).flatten()

    def _damaged(self, name: str, error: ValueError) -> ConfigError:
        return ConfigError(f"{self.path}: {name} is damaged: {error}; download it again")


def hugging_face_name(name: str) -> str:
    """Return the name for one of llama.cpp's; an unknown name is returned as it is."""
    match = _NAME.fullmatch(name)
    if match is None:
        return name
    layer, part, kind = match.groups()
    return f"{layer.replace('blk', 'model.layers')}{_NAMES[part]}.{kind}"
