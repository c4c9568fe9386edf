"""Direct launch of compiled kernels: triton-lang's own path takes 15 to 40 µs of host time.

A `KernelLauncher` has fixed numbers, so a call checks only the tensors' types and addresses.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import triton
from triton import knobs
from triton.runtime import driver

ENVIRONMENT_VARIABLE = "TIDEWHEEL_LAUNCH"  # "triton": never direct
MAX_LAUNCHES = 512  # per kernel
ALIGNMENT = 16
# Their compiled kernels take the same arguments.
FIRST_VERSION, END_VERSION = (3, 6), (3, 10)
Direct = Callable[[tuple[int, ...], tuple[Any, ...]], object]  # (grid and stream), arguments
_RUNTIME = knobs.runtime  # profilers set its hooks


def binds() -> bool:
    version = tuple(int(part) for part in triton.__version__.split(".")[:2])
    is_wanted = os.environ.get(ENVIRONMENT_VARIABLE) != "triton"
    return is_wanted and not knobs.runtime.interpret and FIRST_VERSION <= version < END_VERSION


class KernelLauncher:
    """Launcher of `kernel` with fixed last arguments (`constants`) and compiler options.

    First parameters are pointers; then come tensor descriptors, or numbers that are not specialised.
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
        # By device and dtypes, for aligned tensors.
        self._compiled: dict[tuple[Any, ...], Direct] = {}
        self._aligned: tuple[int, ...] = ()  # tensors whose alignment is compiled in

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
        compiled = self._compiled.get((device, *[tensor.dtype for tensor in tensors]))
        if compiled is None:
            self._through_triton(grid, tensors, others)
            return
        compiled((*grid, active.get_current_stream(device)), (*addresses, *others, *self._constants))

    def _through_triton(
        self, grid: tuple[int, int, int], tensors: Sequence[torch.Tensor], others: Sequence[Any]
    ) -> None:
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
            self._compiled[key] = _direct(compiled)


def _direct(compiled: Any) -> Direct:
    run, metadata, hooks = compiled.run, compiled.packed_metadata, (None, None, None)
    if run.global_scratch_size or run.profile_scratch_size or getattr(run, "gsan_enabled", False):
        return lambda place, arguments: run(*place, compiled.function, metadata, *hooks, *arguments)
    launch, kernel = run.launch, (compiled.function, run.launch_cooperative_grid, run.launch_pdl)
    no_scratch = (None, None)
    fixed: tuple[Any, ...] = (*kernel, *no_scratch, metadata, *hooks)
    if hasattr(run, "kernel_signature"):  # from 3.7: one C function for all signatures
        fixed = (*kernel, metadata, *hooks, *no_scratch, run.arg_annotations, run.kernel_signature)
        return lambda place, arguments: launch(*place, *fixed, arguments)
    return lambda place, arguments: launch(*place, *fixed, *arguments)
