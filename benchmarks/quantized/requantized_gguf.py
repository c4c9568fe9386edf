"""The weights of a GGUF file in another type, for servers that read such files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter, LlamaFileType
from gguf.quants import dequantize, quantize

OWN_FIELDS = ("GGUF.version", "GGUF.tensor_count", "GGUF.kv_count", "general.architecture", "general.file_type")


def as_q8_0(source: Path, destination: Path) -> Path:
    """Write the file with its matrices as Q8_0, and return its path."""
    reader = GGUFReader(source)
    architecture = reader.get_field("general.architecture")
    assert architecture is not None
    writer = GGUFWriter(destination, architecture.contents())
    for name, field in reader.fields.items():
        if name not in OWN_FIELDS:
            kind = field.types[0]
            writer.add_key_value(
                name, field.contents(), kind, field.types[-1] if kind == GGUFValueType.ARRAY else None
            )
    writer.add_file_type(LlamaFileType.MOSTLY_Q8_0)
    for tensor in reader.tensors:
        kind, values = tensor.tensor_type, tensor.data
        if len(tensor.shape) == 2 and kind != GGMLQuantizationType.Q8_0:
            kind = GGMLQuantizationType.Q8_0
            values = quantize(dequantize(tensor.data, tensor.tensor_type), kind)
        writer.add_tensor(tensor.name, np.ascontiguousarray(values), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return destination


def weight_bytes(file: Path) -> int:
    return sum(int(tensor.n_bytes) for tensor in GGUFReader(file).tensors)
