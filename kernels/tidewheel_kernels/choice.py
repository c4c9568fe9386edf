"""Choice of an implementation for each operation, device type and dtype, made once.

The environment variable ``TIDEWHEEL_KERNELS`` is one of:

``auto``       (default) On CUDA the triton-lang kernel. Elsewhere the first available of the C kernel (float32 and
               bfloat16, with a C compiler), torch operations for a CPU, and the reference.
``torch``      The same without C kernels.
``reference``  The reference.
``triton``     The triton-lang kernel. Off the GPU, set ``TRITON_INTERPRET=1`` before triton is imported.
``flash``      `paged_attention` only: prompts by FlashAttention-3, or an error that says why not.

``operation=kind`` sets one operation; commas separate settings: ``torch,rms_norm=reference``.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
from collections.abc import Callable
from typing import Generic, Literal, ParamSpec, TypeVar, cast, get_args

import torch

from tidewheel_kernels.native.library import native_library
from tidewheel_kernels.switches import KernelUnavailable, is_on

Kind = Literal["triton", "flash", "native", "cpu", "reference"]
Preference = Literal["auto", "torch", "reference", "triton", "flash"]

ENVIRONMENT_VARIABLE = "TIDEWHEEL_KERNELS"
logger = logging.getLogger(__name__)

P = ParamSpec("P")
R = TypeVar("R")


_operations: set[str] = set()


def add_operation(name: str) -> None:
    """Let `TIDEWHEEL_KERNELS` name an operation."""
    _operations.add(name)


def preferences() -> dict[str, Preference]:
    """Parse `TIDEWHEEL_KERNELS`: preferences by operation, "" for others. Raise `KernelUnavailable`."""
    value = os.environ.get(ENVIRONMENT_VARIABLE, "")
    found: dict[str, Preference] = {"": "auto"}
    for item in filter(None, value.split(",")):
        name, separator, kind = item.rpartition("=")
        if kind not in get_args(Preference):
            choices = ", ".join(get_args(Preference))
            raise KernelUnavailable(f"{ENVIRONMENT_VARIABLE}={value!r}: {kind!r} is not known; use one of: {choices}")
        if separator and name not in _operations:
            names = ", ".join(sorted(_operations))
            raise KernelUnavailable(f"{ENVIRONMENT_VARIABLE}={value!r}: no operation is {name!r}; there are: {names}")
        found[name] = cast(Preference, kind)
    return found


def preference_for(operation: str) -> Preference:
    found = preferences()
    return found.get(operation, found[""])


def interpreter_enabled() -> bool:
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "yes", "y")


def triton_installed() -> bool:
    return importlib.util.find_spec("triton") is not None


def choose(device_type: str, preference: Preference, *, has_cpu: bool) -> Kind:
    if preference == "reference":
        return "reference"
    on_gpu = device_type == "cuda"
    if preference in ("auto", "torch") and not on_gpu:
        return "cpu" if has_cpu else "reference"
    if not triton_installed():
        raise KernelUnavailable(
            f"triton-lang is needed for {device_type} tensors and is not installed; "
            f"install 'triton', or set {ENVIRONMENT_VARIABLE}=reference"
        )
    if not on_gpu and not interpreter_enabled():
        raise KernelUnavailable(
            f"{ENVIRONMENT_VARIABLE}={preference} needs CUDA tensors, got {device_type}; "
            f"move the tensors, unset {ENVIRONMENT_VARIABLE}, or set TRITON_INTERPRET=1 to interpret the kernels"
        )
    return "flash" if preference == "flash" else "triton"


def runs_triton(device_type: str) -> bool:
    """Return whether this device uses triton-lang kernels alone."""
    return all(choose(device_type, kind, has_cpu=False) == "triton" for kind in preferences().values())


class Choices(dict[tuple[torch.device, torch.dtype], Callable[P, R]]):
    """Table from (device, dtype) to the implementation of an operation, chosen at first use."""

    def __init__(self, op: Op[P, R]) -> None:
        super().__init__()
        self.op = op

    def __missing__(self, key: tuple[torch.device, torch.dtype]) -> Callable[P, R]:
        chosen = self[key] = self.op.choose(*key)
        return chosen


class Op(Generic[P, R]):
    """Operation on tensors, with its implementations.

    `triton_kernels` of `package` has a launcher called `name`; with `has_flash`, `triton_flash` has one too.
    `chosen[tensor.device, tensor.dtype]` is the implementation for a tensor, or raises `KernelUnavailable`.
    """

    def __init__(
        self,
        name: str,
        package: str,
        *,
        reference: Callable[P, R],
        cpu: Callable[P, R] | None = None,
        native: Callable[P, R] | None = None,
        has_flash: bool = False,
    ) -> None:
        self.name = name
        self._package = package
        self._reference = reference
        self._cpu = cpu
        self._native = native
        self._has_flash = has_flash
        add_operation(name)
        self.chosen = Choices(self)

    def choose(self, device: torch.device, dtype: torch.dtype) -> Callable[P, R]:
        kind = self._kind(device.type, dtype)
        logger.info("%s on %s in %s: %s", self.name, device.type, dtype, kind)
        return self.implementation(kind)

    def _kind(self, device_type: str, dtype: torch.dtype) -> Kind:
        preference = preference_for(self.name)
        kind = choose(device_type, preference, has_cpu=self._cpu is not None)
        if kind == "flash" and not self._has_flash:
            raise KernelUnavailable(f"{self.name} has no implementation flash; set {ENVIRONMENT_VARIABLE} without it")
        if self._has_flash and is_on("flash_prompts") and kind == "triton" and preference == "auto":
            return "flash"
        prefers_native = kind == "cpu" and preference == "auto" and self._native is not None
        return "native" if prefers_native and native_library(dtype) is not None else kind

    def implementation(self, kind: Kind) -> Callable[P, R]:
        if kind in ("triton", "flash"):
            module = "triton_kernels" if kind == "triton" else "triton_flash"
            launchers = importlib.import_module(f"{self._package}.{module}")
            return cast("Callable[P, R]", getattr(launchers, self.name))
        if kind == "native" and self._native is not None:
            return self._native
        if kind == "cpu" and self._cpu is not None:
            return self._cpu
        return self._reference
