"""Weights of a GGUF file. Layouts of quantised blocks: ggml-common.h of llama.cpp, and `gguf.quants`.

Q8_0 and types of 4 and 5 bits keep their codes, 5 bits in 8. Scales and minimums of K types are rounded to float16,
other types to 8 bits.
"""

import re
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import gguf.quants
import numpy as np
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from tidewheel.errors import ConfigError
from tidewheel.models.config_fields import ConfigFields
from tidewheel.models.gguf_header import TAKE_ANOTHER, GGUFTensor, read_header
from tidewheel.models.linear import GroupFormat
from tidewheel.models.shard import TensorPart
from tidewheel.models.weight_source import WeightSource, uncounted
from tidewheel.models.weight_stream import BytesRead, StoredTensor, copy_tensors, num_readers
from tidewheel.regular_files import as_config_error
from tidewheel_kernels.grouped_linear import GroupedWeights, join_outputs, quantize_groups

PIECE_BLOCKS = 1 << 18  # converted at a time
DTYPES = {
    GGMLQuantizationType.F32: torch.float32, GGMLQuantizationType.F16: torch.float16,
    GGMLQuantizationType.BF16: torch.bfloat16, GGMLQuantizationType.F64: torch.float64,
    GGMLQuantizationType.I8: torch.int8, GGMLQuantizationType.I16: torch.int16,
    GGMLQuantizationType.I32: torch.int32, GGMLQuantizationType.I64: torch.int64,
}  # fmt: skip
# Codes [num_blocks, block] uint8, scales [num_blocks, groups] float16, minimums like scales.
BlockParts = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]


def _half(blocks: torch.Tensor, begin: int) -> torch.Tensor:
    """Return the float16 at byte `begin` of each block, [num_blocks, 1]."""
    return blocks[:, begin : begin + 2].contiguous().view(torch.float16)


def _low_bits(blocks: torch.Tensor, width: int) -> torch.Tensor:
    """Return codes of 4 bits: of each `width` bytes all low halves, then all high halves."""
    packed = blocks.reshape(len(blocks), -1, width)
    return torch.cat((packed & 0x0F, packed >> 4), dim=-1).flatten(1)


def _fifth_bits(packed: torch.Tensor, dim: int) -> torch.Tensor:
    """Return bits of bytes [num_blocks, n] as 0 or 16, the lowest first along `dim`, flattened."""
    shape = (1, 8, 1) if dim == 1 else (1, 1, 8)
    bits = torch.arange(8, dtype=torch.uint8, device=packed.device).view(shape)
    return (((packed.unsqueeze(dim) >> bits) & 1) << 4).flatten(1)


def _k_scales(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return scales and minimums [num_blocks, 8], products of a float16 and 6 bits."""
    scales, minimums, high = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = torch.cat((scales & 0x3F, (high & 0x0F) | ((scales >> 2) & 0x30)), dim=1)
    minimums = torch.cat((minimums & 0x3F, (high >> 4) | ((minimums >> 2) & 0x30)), dim=1)
    return (_half(blocks, 0).float() * scales).half(), (-_half(blocks, 2).float() * minimums).half()


FORMATS: dict[GGMLQuantizationType, tuple[GroupFormat, Callable[[torch.Tensor], BlockParts]]] = {
    GGMLQuantizationType.Q8_0: (GroupFormat(8), lambda raw: (raw[:, 2:] ^ 0x80, _half(raw, 0), None)),
    GGMLQuantizationType.Q4_0: (GroupFormat(4), lambda raw: (_low_bits(raw[:, 2:], 16), _half(raw, 0), None)),
    GGMLQuantizationType.Q4_1: (
        GroupFormat(4, has_minimums=True),
        lambda raw: (_low_bits(raw[:, 4:], 16), _half(raw, 0), _half(raw, 2)),
    ),
    GGMLQuantizationType.Q5_0: (
        GroupFormat(8),
        lambda raw: ((_low_bits(raw[:, 6:], 16) | _fifth_bits(raw[:, 2:6], 2)) + (128 - 16), _half(raw, 0), None),
    ),
    GGMLQuantizationType.Q5_1: (
        GroupFormat(8, has_minimums=True),
        lambda raw: (_low_bits(raw[:, 8:], 16) | _fifth_bits(raw[:, 4:8], 2), _half(raw, 0), _half(raw, 2)),
    ),
    GGMLQuantizationType.Q4_K: (
        GroupFormat(4, has_minimums=True),
        lambda raw: (_low_bits(raw[:, 16:], 32), *_k_scales(raw)),
    ),
    GGMLQuantizationType.Q5_K: (
        GroupFormat(8, has_minimums=True),
        lambda raw: (_low_bits(raw[:, 48:], 32) | _fifth_bits(raw[:, 16:48], 1), *_k_scales(raw)),
    ),
}


def _rows_of_a_piece(rows: torch.Tensor, kind: GGMLQuantizationType) -> int:
    return max(PIECE_BLOCKS * GGML_QUANT_SIZES[kind][1] // rows.shape[1], 1)


def dequantize_rows(rows: torch.Tensor, kind: GGMLQuantizationType, destination: torch.Tensor) -> None:
    """Write raw rows [num_rows, row_bytes] uint8 as floats [num_rows, in_features]. Raise `ValueError` for NaN."""
    size = _rows_of_a_piece(rows, kind)

    def convert(raw: torch.Tensor, piece: torch.Tensor) -> None:
        piece.copy_(_floats(raw, kind))

    with ThreadPoolExecutor(num_readers(), thread_name_prefix="dequantize") as pool:
        list(pool.map(convert, torch.split(rows, size), torch.split(destination, size)))


def _floats(rows: torch.Tensor, kind: GGMLQuantizationType) -> torch.Tensor:
    with np.errstate(all="ignore"):
        return _finite(torch.from_numpy(gguf.quants.dequantize(rows.numpy(), kind)))


def _group(rows: torch.Tensor, kind: GGMLQuantizationType, device: torch.device) -> GroupedWeights:
    """Return the matrix of raw rows [num_rows, row_bytes] uint8 on `device`. Raise `ValueError` for NaN."""
    if kind not in FORMATS:
        return quantize_groups(_floats(rows, kind).to(device), 8)
    form, read = FORMATS[kind]
    codes, scales, minimums = read(rows.to(device).view(-1, GGML_QUANT_SIZES[kind][1]))
    codes = codes.reshape(len(rows), -1)
    if form.bits == 4:
        codes = codes[:, 0::2] | codes[:, 1::2] << 4
    minimums = None if minimums is None else _finite(minimums).view(len(rows), -1)
    return GroupedWeights(codes, _finite(scales).view(len(rows), -1), minimums, form.bits)


def _finite(values: torch.Tensor) -> torch.Tensor:
    """Return the values. Raise `ValueError` for NaN or infinity."""
    if not values.isfinite().all():
        raise ValueError("it has scales that are not finite")
    return values


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
        """Return the format in which a tensor is loaded. Raise `ConfigError` if `gguf.quants` lacks its type."""
        kind = tensor.kind
        if kind in DTYPES:
            return DTYPES[kind]
        try:
            gguf.quants.dequantize(np.zeros((1, GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
        except NotImplementedError:
            unread = f"{name} has type {kind.name}, which is not read: {TAKE_ANOTHER}"
            raise ConfigError(f"{self.path}: {unread}") from None
        if len(tensor.shape) != 2:
            return torch.float32
        return FORMATS[kind][0] if kind in FORMATS else GroupFormat(8)

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
        rows, order, kind = self._rows(name), self._row_order(name), self._raw[name].kind
        with as_config_error(f"{self.path}: {name} is damaged"):
            pieces = torch.split(rows if order is None else rows[order], _rows_of_a_piece(rows, kind))
            return join_outputs([_group(piece, kind, device) for piece in pieces])

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
