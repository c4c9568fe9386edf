from __future__ import annotations

import ctypes
import threading
from typing import NamedTuple

import torch

from tidewheel_kernels.lora.groups import TILE, LoraGroups
from tidewheel_kernels.lora.stacks import HostLoraStack, LoraStack
from tidewheel_kernels.native.library import LONG, POINTER, THREADS, NativeKernel, mixed_dtypes

_add_lora = NativeKernel("add_lora", *[POINTER] * 5, *[LONG] * 2, THREADS)


class GroupAddresses(ctypes.Structure):
    """C structure `LoraGroups` of lora.h."""

    _fields_ = (("rows", ctypes.c_void_p), ("slots", ctypes.c_void_p), ("num_tiles", ctypes.c_int64))


def group_addresses(groups: LoraGroups) -> GroupAddresses:
    return GroupAddresses(groups.tokens.data_ptr(), groups.slots.data_ptr(), groups.num_tiles)


def stack_address(stack: LoraStack, dtype: torch.dtype) -> int | None:
    """Return the address of a stack's C structure; None if the C kernels cannot read the stack."""
    return stack.address if isinstance(stack, HostLoraStack) and stack.dtype == dtype else None


def empty_products(groups: LoraGroups, width: int) -> torch.Tensor:
    """Allocate room for the results of `a @ x`, of up to 32 bits each, for stacks of up to this `width`."""
    return torch.empty(groups.num_tiles * TILE * width, dtype=torch.float32)


class _Bound(NamedTuple):
    """Addresses of groups, and of room for products of up to `width` ranks: the same for all layers of a step."""

    groups: LoraGroups
    addresses: GroupAddresses
    address: int
    products: torch.Tensor
    products_address: int
    width: int


class _Last(threading.local):
    """The last bound groups of a thread: two that compute one step's groups at once need a room each."""

    bound: _Bound | None = None


_last = _Last()


def _bound(groups: LoraGroups, width: int) -> _Bound:
    bound = _last.bound
    if bound is None or bound.groups is not groups or bound.width < width:
        addresses, products = group_addresses(groups), empty_products(groups, width)
        bound = _Bound(groups, addresses, ctypes.addressof(addresses), products, products.data_ptr(), width)
        _last.bound = bound
    return bound


def add_lora_native(out: torch.Tensor, x: torch.Tensor, stack: LoraStack, groups: LoraGroups) -> None:
    if not isinstance(stack, HostLoraStack):
        raise TypeError("the C kernel reads a HostLoraStack: make it while that kernel is chosen")
    if stack.dtype != x.dtype:
        raise mixed_dtypes(x.dtype, torch.empty(0, dtype=stack.dtype))
    bound = _bound(groups, stack.width)
    _add_lora[x.dtype](
        stack.address, bound.address, x.data_ptr(), out.data_ptr(), bound.products_address,
        x.stride(0), out.stride(0), torch.get_num_threads(),
    )  # fmt: skip
