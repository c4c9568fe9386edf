"""Header of a safetensors file (https://huggingface.co/docs/safetensors).

Layout: 8 bytes little endian length n, n bytes of JSON, data that the tensors tile exactly.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import msgspec
import torch

from tidewheel.models.file_headers import MAX_HEADER_BYTES, HeaderError, as_config_error, tiled_bytes
from tidewheel.models.weight_stream import StoredTensor
from tidewheel.regular_files import open_regular

_Size = Annotated[int, msgspec.Meta(ge=0, le=2**62)]
_DTYPES = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "I16": torch.int16, "I32": torch.int32,
    "I64": torch.int64, "F8_E4M3": torch.float8_e4m3fn, "F16": torch.float16, "BF16": torch.bfloat16,
    "F32": torch.float32, "F64": torch.float64,
}  # fmt: skip


class _Entry(msgspec.Struct, forbid_unknown_fields=True):
    dtype: str
    shape: Annotated[tuple[_Size, ...], msgspec.Meta(max_length=8)]
    data_offsets: tuple[_Size, _Size]


def read_tensors(path: Path, max_header_bytes: int = MAX_HEADER_BYTES) -> dict[str, StoredTensor]:
    """Return the tensors of a file in their order. Raise `ConfigError`."""
    with as_config_error(path, "safetensors"), open_regular(path) as file:
        file_size, prefix = os.fstat(file.fileno()).st_size, file.read(8)
        if len(prefix) < 8:
            raise HeaderError(f"it has {len(prefix)} bytes, fewer than the length of a header")
        size, left = int.from_bytes(prefix, "little"), file_size - 8
        if size > min(left, max_header_bytes):
            raise HeaderError(f"its header claims {size} bytes of {left}, and at most {max_header_bytes} are read")
        return parse_header(path, file.read(size), file_size)


def parse_header(path: Path, header: bytes, file_size: int) -> dict[str, StoredTensor]:
    start = 8 + len(header)
    try:
        entries = msgspec.json.decode(header, type=dict[str, msgspec.Raw])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise HeaderError(f"its header is not JSON as it should be ({error})") from None
    tensors = [(name, _stored(path, name, entry, start)) for name, entry in entries.items() if name != "__metadata__"]
    tensors.sort(key=lambda item: (item[1].begin, item[1].num_bytes))
    size = tiled_bytes((name, tensor.begin - start, tensor.num_bytes) for name, tensor in tensors)
    if size != file_size - start:
        raise HeaderError(f"its tensors need {size} bytes of data, the file has {file_size - start}")
    return dict(tensors)


def _stored(path: Path, name: str, raw: msgspec.Raw, start: int) -> StoredTensor:
    try:
        entry = msgspec.json.decode(raw, type=_Entry)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise HeaderError(f"{name!r}: {error}") from None
    if entry.dtype not in _DTYPES:
        raise HeaderError(f"{name!r} has dtype {entry.dtype!r}, known are {', '.join(_DTYPES)}")
    begin, end = entry.data_offsets
    tensor = StoredTensor(path, entry.shape, _DTYPES[entry.dtype], start + begin)
    if end - begin != tensor.num_bytes:
        raise HeaderError(f"{name!r} of {tensor.num_bytes} bytes has data_offsets {[begin, end]}")
    return tensor
