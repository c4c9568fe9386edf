"""LoRA adapters in PEFT's folders: `adapter_config.json`, and `adapter_model.safetensors` with two tensors a layer,

``base_model.model.MODULE.lora_A.weight`` [rank, in_features] and ``...lora_B.weight`` [out_features, rank].
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

import torch

from tidewheel.errors import ConfigError
from tidewheel.models.architectures import ModelConfig
from tidewheel.models.causal_lm import DTYPES
from tidewheel.models.decoder import Decoder
from tidewheel.models.file_headers import aligned
from tidewheel.models.lora_config import LoraConfig, read_lora_config
from tidewheel.models.model_folder import one_line
from tidewheel.models.safetensors_file import read_tensors
from tidewheel.models.shard import TensorPart
from tidewheel.models.weight_source import uncounted
from tidewheel.models.weight_stream import StoredTensor, copy_tensors, pinned_memory
from tidewheel_kernels.lora import LoraMatrices

WEIGHTS_NAME, PICKLE_NAME = "adapter_model.safetensors", "adapter_model.bin"
HEADER_BYTES, HEADER_BYTES_OF_LAYER = 1 << 16, 1 << 10
ALIGNMENT = 64  # bytes
_TENSOR = re.compile(r"base_model\.model\.(.+)\.lora_([AB])(?:\.default)?\.weight")


class StoredMatrices(NamedTuple):
    """Adapter's part of a linear layer in its file."""

    a: StoredTensor  # [rank, in_features]
    b: StoredTensor  # [out_features, rank]
    scale: float

    @property
    def rank(self) -> int:
        return self.a.shape[0]


@dataclass(eq=False)
class LoraWeights:
    """Adapter in host memory, for a model or one rank's part of it."""

    of: Mapping[str, Sequence[LoraMatrices | None]]  # by `Linear.name`, in the order of the layer's parts
    rank: int  # largest
    num_bytes: int


def open_lora(folder: Path, model: Decoder, max_rank: int) -> dict[str, StoredMatrices]:
    """Return an adapter's matrices by module, after all checks but those of values. Raise `ConfigError`.

    No tensor is read, and `model` may be on the device "meta".
    """
    config, path, shapes = read_lora_config(folder), folder / WEIGHTS_NAME, _whole_shapes(model.config)
    if not os.path.lexists(path):
        problem = "pickled weights only, which are never loaded" if (folder / PICKLE_NAME).exists() else "no weights"
        raise ConfigError(f"{folder} has {problem}: save the adapter with PEFT as {WEIGHTS_NAME}")
    found: dict[str, dict[str, StoredTensor]] = {}
    for name, stored in read_tensors(path, HEADER_BYTES + HEADER_BYTES_OF_LAYER * len(shapes)).items():
        match = _TENSOR.fullmatch(name)
        if match is None or match[1] not in shapes or match[2] in found.get(match[1], {}):
            raise ConfigError(f"{path}: {_why_refused(name)}")
        found.setdefault(match[1], {})[match[2]] = stored
    if not found:
        raise ConfigError(f"{path} has no tensors: save the adapter with PEFT again")
    return {
        module: _checked(path, module, halves, shapes[module], max_rank, config) for module, halves in found.items()
    }


def read_lora(folder: Path, model: Decoder, max_rank: int) -> LoraWeights:
    """Read an adapter, each matrix rounded to the model's dtype once, B after its scale. Raise `ConfigError`.

    Its memory is pinned if the model is on a GPU. A rank checks all values and keeps its part.
    """
    stored = open_lora(folder, model, max_rank)
    device, dtype = model.norm.device, model.norm.dtype
    try:
        parts = {
            module: _part(matrices, model.tensor_parts.get(f"{module}.weight"))
            for module, matrices in _loaded(stored, dtype).items()
        }
        kept, num_bytes = _together(parts, device)
    except RuntimeError as error:  # an allocator's
        raise ConfigError(f"{folder} is not loaded for lack of host memory: {one_line(error)}") from error
    layers = {
        layer.name: [kept.get(weight.removesuffix(".weight")) for weight in layer.parts]
        for layer in model.lora_linears
    }
    return LoraWeights(layers, max(matrices.rank for matrices in stored.values()), num_bytes)


@lru_cache(maxsize=1)
def _whole_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return the shapes [out_features, in_features] of the layers of all ranks that adapters may have, by module."""
    whole = Decoder(config, max_model_len=1, dtype=torch.float32, device=torch.device("meta"))
    weights = [name for layer in whole.lora_linears for name in layer.parts]
    return {name.removesuffix(".weight"): whole.shapes[name] for name in weights}


def _why_refused(name: str) -> str:
    if "embed_tokens" in name or "lm_head" in name:
        return f"{name} is refused: adapters change no embedding and no output matrix; train without lm_head"
    return f"{name} is no lora_A or lora_B of a linear layer of this model, or its second: is it of another base?"


def _checked(
    path: Path, module: str, halves: Mapping[str, StoredTensor], shape: tuple[int, ...], max_rank: int,
    config: LoraConfig,
) -> StoredMatrices:  # fmt: skip
    """Return the matrices of a module with a weight of `shape`. Raise `ConfigError`."""

    def refused(half: str, problem: str) -> ConfigError:
        return ConfigError(f"{path}: lora_{half} of {module} {problem}")

    for half in "AB":
        if half not in halves:
            raise refused(half, "is missing: save the adapter with PEFT again")
        if (kind := halves[half].kind) not in DTYPES.values():
            raise refused(half, f"has dtype {kind}, it must be {' or '.join(DTYPES)}")
    (outputs, inputs), (a, b) = shape, (halves["A"], halves["B"])
    rank = a.shape[0] if a.shape else 0
    for half, found, wanted in (("A", a, (rank, inputs)), ("B", b, (outputs, rank))):
        if found.shape != wanted:
            raise refused(half, f"has shape {list(found.shape)}, this base needs {list(wanted)}: take its adapter")
    if not 0 < rank <= max_rank:
        raise refused("A", f"has rank {rank}, it must be from 1 to max_lora_rank, which is {max_rank}")
    if rank not in config.ranks:
        raise refused("A", f"has rank {rank}, {config.where} has {' or '.join(map(str, sorted(config.ranks)))}")
    return StoredMatrices(a, b, config.scale(module, rank))


def _loaded(stored: Mapping[str, StoredMatrices], dtype: torch.dtype) -> dict[str, LoraMatrices]:
    """Return whole matrices by module in a model's dtype. Raise `ConfigError` for values that are not finite."""
    tensors = {f"{half} of {module}": getattr(each, half) for module, each in stored.items() for half in "ab"}
    # The scale is applied before B is rounded.
    read = {
        name: torch.empty(tensor.shape, dtype=dtype if name[0] == "a" else torch.float32)
        for name, tensor in tensors.items()
    }
    copy_tensors(tensors, read, uncounted)
    found = {}
    for module, (a, _, scale) in stored.items():
        matrices = LoraMatrices(read.pop(f"a of {module}"), read.pop(f"b of {module}").mul_(scale).to(dtype))
        for half, matrix in zip("AB", matrices, strict=True):
            if not matrix.isfinite().all():
                raise ConfigError(f"{a.file}: lora_{half} of {module} has values that are NaN or infinite as {dtype}")
        found[module] = matrices
    return found


def _part(matrices: LoraMatrices, part: TensorPart | None) -> LoraMatrices:
    """Return what a rank with this part of the weight needs: some outputs of B, or some inputs of A."""
    if part is None:
        return matrices
    size = part.end - part.begin
    if part.axis == 0:
        return matrices._replace(b=matrices.b.narrow(0, part.begin, size))
    return matrices._replace(a=matrices.a.narrow(1, part.begin, size))


def _together(parts: Mapping[str, LoraMatrices], device: torch.device) -> tuple[dict[str, LoraMatrices], int]:
    """Return matrices by module in one piece of memory, and its bytes. On a CPU, B is transposed for its kernel."""
    is_gpu = device.type == "cuda"
    tensors = [tensor for a, b in parts.values() for tensor in (a, b if is_gpu else b.t())]
    begins = list(accumulate((aligned(tensor.nbytes, ALIGNMENT) for tensor in tensors), initial=0))
    memory = pinned_memory(begins[-1], device) if is_gpu else torch.empty(begins[-1], dtype=torch.uint8)
    kept = [
        memory[begin : begin + tensor.nbytes].view(tensor.dtype).view(tensor.shape).copy_(tensor)
        for begin, tensor in zip(begins, tensors, strict=False)
    ]
    pairs = zip(kept[::2], kept[1::2], strict=True)
    return {
        module: LoraMatrices(a, b if is_gpu else b.t()) for module, (a, b) in zip(parts, pairs, strict=True)
    }, begins[-1]
