"""Record without a GPU what triton-lang would compile: launches, by the key under which it keeps kernels.

The key is made by triton-lang's own code. Launchers run on tensors in host memory and kernels do not run, so what is
computed is meaningless; integers are zeroed where they would be left as they are found, so that token ids stay valid.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from importlib import import_module
from pkgutil import walk_packages
from typing import Any
from unittest import mock

import torch

import tidewheel_kernels
from tidewheel_kernels.choice import Choices
from tidewheel_kernels.launch_config import compile_target


class LaunchKeys:
    """Keys of all launches so far, each with its first launch in words."""

    def __init__(self, architecture: int) -> None:
        from triton.backends.compiler import GPUTarget
        from triton.compiler.compiler import make_backend

        self.first: dict[str, str] = {}
        self._seen: set[tuple[Any, ...]] = set()
        self._backend = make_backend(GPUTarget("cuda", architecture, 32))
        self._binders: dict[Any, Callable[..., Any]] = {}

    def note(self, kernel: Any, arguments: dict[str, Any]) -> None:
        _, specialization, options = self._binder(kernel)(**arguments)
        seen = (kernel.fn, *specialization, *sorted(options.items()))
        if seen in self._seen:
            return
        self._seen.add(seen)
        named = ", ".join(f"{p.name}: {kind}" for p, kind in zip(kernel.params, specialization, strict=True))
        key = f"{kernel.fn.__name__}[{sorted(options.items())}]({named})"
        self.first[key] = str({name: value for name, value in arguments.items() if isinstance(value, int | float)})

    def _binder(self, kernel: Any) -> Callable[..., Any]:
        from triton.runtime.jit import create_function_from_signature

        if kernel not in self._binders:
            self._binders[kernel] = create_function_from_signature(kernel.signature, kernel.params, self._backend)
        return self._binders[kernel]

    @property
    def all(self) -> set[str]:
        return set(self.first)


@contextmanager
def recorded_keys(architecture: int = 90, num_sms: int = 132) -> Iterator[LaunchKeys]:
    """Make every operation its kernel's launcher, as on a GPU of this architecture and size, and note launches."""
    from triton.runtime.jit import KernelInterface

    keys = LaunchKeys(architecture)

    def record(kernel: Any, grid: object) -> Callable[..., None]:
        return lambda **arguments: keys.note(kernel, arguments)

    def launcher(choices: Choices[..., Any], _: object) -> Callable[..., Any]:
        return choices.op.implementation("triton")

    target = compile_target.set(architecture)
    try:
        with ExitStack() as stack:
            stack.enter_context(mock.patch.object(KernelInterface, "__getitem__", record))
            stack.enter_context(mock.patch.object(Choices, "__getitem__", launcher))
            stack.enter_context(mock.patch.object(torch, "empty", _empty))
            stack.enter_context(_multiprocessors(num_sms))
            yield keys
    finally:
        compile_target.reset(target)


_EMPTY = torch.empty


def _empty(*size: Any, dtype: torch.dtype | None = None, **options: Any) -> torch.Tensor:
    tensor = _EMPTY(*size, dtype=dtype, **options)
    return tensor if tensor.is_floating_point() else tensor.zero_()


@contextmanager
def _multiprocessors(count: int) -> Iterator[None]:
    """Replace the function in every launcher: each imports it by name."""
    names = [module.name for module in walk_packages(tidewheel_kernels.__path__, "tidewheel_kernels.")]
    modules = [import_module(name) for name in names if name.rpartition(".")[2].startswith("triton_")]
    users = [module for module in modules if hasattr(module, "multiprocessors")]
    assert users, "no launcher asks for the number of multiprocessors"
    with ExitStack() as stack:
        for module in users:
            stack.enter_context(mock.patch.object(module, "multiprocessors", lambda device: count))
        yield
