"""Tensor descriptors, from which the tensor memory accelerator (TMA) of sm_90 and later copies boxes."""

# mypy: allow-untyped-calls

from __future__ import annotations

import torch
from torch.utils.weak import WeakIdKeyDictionary
from triton.tools.tensor_descriptor import TensorDescriptor

# Making a descriptor takes microseconds for every layer of every step, and KV caches stay.
_descriptors = WeakIdKeyDictionary()


def box_descriptor(tensor: torch.Tensor, box: tuple[int, ...]) -> TensorDescriptor:
    """The descriptor of `tensor` for boxes of shape `box`; elements outside the tensor read as zero.

    Kept for as long as the tensor object lives and its memory stays where it is. Needs a base address and strides
    that are multiples of 16 bytes, and a contiguous last dimension; AssertionError otherwise.
    """
    boxes: dict[tuple[int, ...], TensorDescriptor] = _descriptors.setdefault(tensor, {})
    descriptor = boxes.get(box)
    if descriptor is None or descriptor.base.data_ptr() != tensor.data_ptr():
        descriptor = TensorDescriptor.from_tensor(_alias(tensor), list(box))
        boxes[box] = descriptor
    return descriptor


def _alias(tensor: torch.Tensor) -> torch.Tensor:
    """Another tensor of the same memory. It does not keep `tensor`, as a view would, so that the entry can go."""
    empty = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return empty.set_(tensor.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())
