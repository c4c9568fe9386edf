"""Launch compiled kernels directly: triton-lang's own path takes 15 to 40 µs of the host for each launch.

triton-lang compiles a kernel for types, for addresses and numbers that are multiples of 16, and for numbers equal to
1. A `Launch` fixes all numbers that it would look at, so only types and addresses of tensors are left to check.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import triton
from triton import knobs
from triton.runtime import driver

ENVIRONMENT_VARIABLE = "TIDEWHEEL_LAUNCH"  # "triton": only triton-lang's own path
MAX_LAUNCHES = 512  # kept for each kernel
ALIGNMENT = 16
# Versions whose compiled kernels run with the same arguments; the tests have the oldest and the newest.
FIRST_VERSION, END_VERSION = (3, 6), (3, 10)
_RUNTIME = knobs.runtime  # whose hooks profilers set


def binds() -> bool:
    """Return whether compiled kernels may be launched directly here."""
    version = tuple(int(part) for part in triton.__version__.split(".")[:2])
    is_wanted = os.environ.get(ENVIRONMENT_VARIABLE) != "triton"
    return is_wanted and not knobs.runtime.interpret and FIRST_VERSION <= version < END_VERSION


class Launch:
    """Launches of `kernel` with these last arguments, the `constants`, and options of the compiler.

    The kernel's first parameters are pointers. Between are tensor descriptors, or numbers that are not specialised.
    """

    def __init__(self, kernel: Any, constants: Mapping[str, Any], **options: int) -> None:
        first = len(kernel.arg_names) - len(constants)
        if list(constants) != kernel.arg_names[first:]:
            raise TypeError(f"{kernel.fn.__name__} ends in {kernel.arg_names[first:]}, not in {list(constants)}")
        self._kernel = kernel
        self._names = kernel.arg_names[:first]
        self._constants = tuple(constants.values())
        self._named = {**constants, **options}
        self._binds = binds()
        # Compiled kernel and its `run`, by device and dtypes, for tensors that are aligned.
        self._compiled: dict[tuple[Any, ...], tuple[Any, Any]] = {}
        self._aligned: tuple[int, ...] = ()  # indices of tensors whose alignment is compiled in

    def __call__(self, grid: tuple[int, int, int], tensors: Sequence[torch.Tensor], *others: Any) -> None:
        addresses = [tensor.data_ptr() for tensor in tensors]
        bits = 0
        for index in self._aligned:
            bits |= addresses[index]
        if not self._compiled or bits % ALIGNMENT or _RUNTIME.launch_enter_hook.calls:
            self._through_triton(grid, tensors, others)
            return
        active = driver.active
        device = active.get_current_device()
        found = self._compiled.get((device, *[tensor.dtype for tensor in tensors]))
        if found is None:
            self._through_triton(grid, tensors, others)
            return
        compiled, run = found
        # Without metadata and hooks, for nothing listens.
        run(
            *grid, active.get_current_stream(device), compiled.function, compiled.packed_metadata, None, None, None,
            *addresses, *others, *self._constants,
        )  # fmt: skip

    def _through_triton(
        self, grid: tuple[int, int, int], tensors: Sequence[torch.Tensor], others: Sequence[Any]
    ) -> None:
        """Launch, and keep the kernel that triton-lang chose if all addresses are aligned."""
        arguments = dict(zip(self._names, (*tensors, *others), strict=True))
        compiled = self._kernel[grid](**arguments, **self._named)
        if compiled is None or not self._binds:
            return
        parameters = self._kernel.params[: len(self._names)]
        for parameter, other in zip(parameters[len(tensors) :], others, strict=True):
            if isinstance(other, int) and not parameter.do_not_specialize:
                raise TypeError(f"{self._kernel.fn.__name__} is specialised on {parameter.name}; make it a constant")
        pointers = enumerate(parameters[: len(tensors)])
        self._aligned = tuple(i for i, pointer in pointers if not pointer.do_not_specialize_on_alignment)
        if not any(tensors[i].data_ptr() % ALIGNMENT for i in self._aligned):
            key = driver.active.get_current_device(), *[tensor.dtype for tensor in tensors]
            self._compiled[key] = compiled, compiled.run
