"""Chooses, once per operation and device type, which implementation of an operation runs.

``auto``       (default) CUDA tensors: the triton-lang kernel; others: the CPU implementation, else the reference.
``reference``  the plain torch reference everywhere.
``triton``     the kernel everywhere; on tensors that are not on a GPU this needs triton-lang's interpreter
               (``TRITON_INTERPRET=1``, set before triton is imported).

The environment variable ``TIDEWHEEL_KERNELS`` selects one of the three; a choice that cannot be honoured is an error.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
from collections.abc import Callable
from typing import Generic, Literal, ParamSpec, TypeVar, cast, get_args

import torch

Kind = Literal["triton", "cpu", "reference"]
Preference = Literal["auto", "reference", "triton"]

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
    """Pure rule behind `Op`: which kind of implementation runs for tensors on `device_type`."""
    if preference == "reference":
        return "reference"
    on_gpu = device_type == "cuda"
    if preference == "auto" and not on_gpu:
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
    """One operation with its implementations: reference, optional CPU path, and kernel.

    `kernel` is ``"module:function"`` inside this package. It is imported on first use, so a machine without
    triton-lang can import the package and use the other implementations.
    """

    def __init__(
        self, name: str, *, reference: Callable[P, R], kernel: str, cpu: Callable[P, R] | None = None
    ) -> None:
        self.name = name
        self._reference = reference
        self._kernel = kernel
        self._cpu = cpu
        self._chosen: dict[str, Callable[P, R]] = {}

    def on(self, device: torch.device) -> Callable[P, R]:
        """The implementation for tensors on `device`; chosen on the first call and kept."""
        chosen = self._chosen.get(device.type)
        if chosen is None:
            kind = choose(device.type, preference_from_environment(), has_cpu=self._cpu is not None)
            logger.info("%s on %s: %s", self.name, device.type, kind)
            chosen = self._chosen[device.type] = self.implementation(kind)
        return chosen

    def implementation(self, kind: Kind) -> Callable[P, R]:
        """One implementation by kind, whatever the environment says."""
        if kind == "triton":
            module, function = self._kernel.split(":")
            launcher = getattr(importlib.import_module(f"tidewheel_kernels.{module}"), function)
            return cast("Callable[P, R]", launcher)
        if kind == "cpu" and self._cpu is not None:
            return self._cpu
        return self._reference
