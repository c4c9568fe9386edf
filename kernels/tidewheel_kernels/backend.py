"""Choice of an implementation, once per operation, device type and dtype.

``auto``       (default) CUDA tensors: the triton-lang kernel; others: the first available of the native kernel
               (float32 and bfloat16, with a C compiler), the fast torch operations and the reference.
``torch``      the same without native kernels.
``reference``  the plain torch reference everywhere.
``triton``     the kernel everywhere; off the GPU this needs triton-lang's interpreter (``TRITON_INTERPRET=1``, set
               before triton is imported).

The environment variable ``TIDEWHEEL_KERNELS`` selects one of them. A choice that cannot be honoured is an error.
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

Kind = Literal["triton", "native", "cpu", "reference"]
Preference = Literal["auto", "torch", "reference", "triton"]

ENVIRONMENT_VARIABLE = "TIDEWHEEL_KERNELS"
logger = logging.getLogger(__name__)

P = ParamSpec("P")
R = TypeVar("R")


class KernelUnavailable(RuntimeError):
    """The chosen implementation cannot run here; the message says what to change."""


def preference_from_environment() -> Preference:
    value = os.environ.get(ENVIRONMENT_VARIABLE, "auto") or "auto"
    if value not in get_args(Preference):
        choices = ", ".join(get_args(Preference))
        raise KernelUnavailable(f"{ENVIRONMENT_VARIABLE}={value!r} is not known; use one of: {choices}")
    return cast(Preference, value)


def interpreter_enabled() -> bool:
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "yes", "y")


def triton_installed() -> bool:
    return importlib.util.find_spec("triton") is not None


def choose(device_type: str, preference: Preference, *, has_cpu: bool) -> Kind:
    """Return the kind of implementation for tensors on `device_type`."""
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
            f"{ENVIRONMENT_VARIABLE}=triton needs CUDA tensors, got {device_type}; "
            f"move the tensors, unset {ENVIRONMENT_VARIABLE}, or set TRITON_INTERPRET=1 to interpret the kernels"
        )
    return "triton"


class Op(Generic[P, R]):
    """One operation with its reference, kernel, and for a CPU torch and native implementations.

    `kernel` and `native` are ``"module:function"`` inside this package, imported on first use: triton-lang and a C
    compiler are optional.
    """

    def __init__(
        self,
        name: str,
        *,
        reference: Callable[P, R],
        kernel: str,
        cpu: Callable[P, R] | None = None,
        native: str | None = None,
    ) -> None:
        self.name = name
        self._reference = reference
        self._kernel = kernel
        self._cpu = cpu
        self._native = native
        self._chosen: dict[tuple[str, torch.dtype], Callable[P, R]] = {}

    def on(self, tensor: torch.Tensor) -> Callable[P, R]:
        """Return the implementation for such tensors, chosen on the first call."""
        key = tensor.device.type, tensor.dtype
        chosen = self._chosen.get(key)
        if chosen is None:
            kind = self._kind(*key)
            logger.info("%s on %s in %s: %s", self.name, *key, kind)
            chosen = self._chosen[key] = self.implementation(kind)
        return chosen

    def _kind(self, device_type: str, dtype: torch.dtype) -> Kind:
        preference = preference_from_environment()
        kind = choose(device_type, preference, has_cpu=self._cpu is not None)
        prefers_native = kind == "cpu" and preference == "auto" and self._native is not None
        return "native" if prefers_native and native_library(dtype) is not None else kind

    def implementation(self, kind: Kind) -> Callable[P, R]:
        """Return the implementation of a kind, ignoring the environment."""
        if kind == "triton":
            return self._imported(self._kernel)
        if kind == "native" and self._native is not None:
            return self._imported(self._native)
        if kind == "cpu" and self._cpu is not None:
            return self._cpu
        return self._reference

    def _imported(self, name: str) -> Callable[P, R]:
        module, function = name.split(":")
        launcher = getattr(importlib.import_module(f"tidewheel_kernels.{module}"), function)
        return cast("Callable[P, R]", launcher)
