"""Weights in pages of 2 MB: with pages of 4 KB, a read of memory waits for the page table as well."""

from __future__ import annotations

import ctypes
import itertools
import sys
import threading

import torch

PAGE, LINE, SEGMENT = 2 << 20, 64, 64 << 20  # bytes; a segment's unused pages take no memory
WAY = 128 << 10  # bytes of a way of second caches of 1 or 2 MB: memory so far apart shares a set
STEP = 1239 * LINE  # the beginnings of up to 64 are spread evenly over a way
MADV_HUGEPAGE, MADV_COLLAPSE = 14, 25  # linux/mman.h; the second since Linux 6.1

_num_made = itertools.count()
_lock = threading.Lock()
_free = torch.empty(0, dtype=torch.uint8)  # rest of the last segment


def in_huge_pages(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous copy of a tensor, in memory next to the copies made before."""
    global _free
    rounded = -(-tensor.nbytes // LINE) * LINE
    with _lock:
        if rounded > len(_free):
            _free = empty_in_huge_pages(max(rounded, SEGMENT), torch.uint8)
        room, _free = _free[: tensor.nbytes], _free[rounded:]
    return room.view(tensor.dtype).view(tensor.shape).copy_(tensor)


def empty_in_huge_pages(num_elements: int, dtype: torch.dtype) -> torch.Tensor:
    """Allocate memory in pages of 2 MB; what is left after the last whole one has pages of 4 KB.

    It begins at a different place in its first page with each call. If all began with a page, the same matrices of
    several adapters would share a few sets of the processor's caches, which cannot hold them together.
    """
    nbytes = num_elements * dtype.itemsize
    memory = torch.empty(nbytes + PAGE + WAY, dtype=torch.uint8)
    page, offset = -memory.data_ptr() % PAGE, next(_num_made) * STEP % WAY
    advise(memory.data_ptr() + page, offset + nbytes, MADV_HUGEPAGE)
    return memory[page + offset :][:nbytes].view(dtype)


def advise(address: int, nbytes: int, advice: int) -> None:
    """Call `madvise` for the whole pages of 2 MB in a range of memory; the system may decline."""
    begin, end = -(-address // PAGE) * PAGE, (address + nbytes) // PAGE * PAGE
    if sys.platform == "linux" and begin < end:
        ctypes.CDLL(None).madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), advice)
