"""Tensor descriptors, from which the tensor memory accelerator (TMA) of sm_90 and later copies boxes."""

# mypy: allow-untyped-calls

from __future__ import annotations

import torch
from torch.utils.weak import WeakIdKeyDictionary
from triton.tools.tensor_descriptor import TensorDescriptor

# Creation takes microseconds for every layer and step, and KV caches stay.
_descriptors = WeakIdKeyDictionary()


def box_descriptor(tensor: torch.Tensor, box: tuple[int, ...]) -> TensorDescriptor:
    """Return `tensor`'s descriptor for boxes of shape `box`; elements outside the tensor read as zero.

    It is cached while the tensor lives and does not move. The base address and strides must be multiples of 16 bytes,
    and the last dimension contiguous; AssertionError otherwise.
    """
    boxes: dict[tuple[int, ...], TensorDescriptor] = _descriptors.setdefault(tensor, {})
    descriptor = boxes.get(box)
    if descriptor is None or descriptor.base.data_ptr() != tensor.data_ptr():
        descriptor = TensorDescriptor.from_tensor(_alias(tensor), list(box))
        boxes[box] = descriptor
    return descriptor


def _alias(tensor: torch.Tensor) -> torch.Tensor:
    """Return another tensor of the same memory. Unlike a view, it does not keep `tensor` alive."""
    empty = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return empty.set_(tensor.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())
