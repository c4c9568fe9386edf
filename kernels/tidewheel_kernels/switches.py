"""Options not yet measured on a GPU, so off: the environment variable ``TIDEWHEEL_TRY=NAME,NAME`` turns them on.

dependent_launch     norms, rotation and SiLU start while the previous kernel ends (sm_90 and newer)
fast_accumulation    products of 8-bit floats are summed in the tensor cores alone
flash_prompts        prompts go to FlashAttention-3 where it takes them
"""

from __future__ import annotations

import os
from contextvars import ContextVar
from functools import cache
from typing import Literal, get_args

Switch = Literal["dependent_launch", "fast_accumulation", "flash_prompts"]

ENVIRONMENT_VARIABLE = "TIDEWHEEL_TRY"
# Replaces the environment, for ahead-of-time compilation and tests.
tried: ContextVar[frozenset[Switch] | None] = ContextVar("tried", default=None)


class KernelUnavailable(RuntimeError):
    pass


def is_on(switch: Switch) -> bool:
    names = tried.get()
    return switch in (_from_environment() if names is None else names)


@cache
def _from_environment() -> frozenset[str]:
    value = os.environ.get(ENVIRONMENT_VARIABLE, "")
    names = frozenset(filter(None, value.split(",")))
    if unknown := names.difference(get_args(Switch)):
        raise KernelUnavailable(
            f"{ENVIRONMENT_VARIABLE}={value!r} has {', '.join(sorted(unknown))}, which is not known; "
            f"use some of: {', '.join(get_args(Switch))}"
        )
    return names
