from __future__ import annotations

from functools import partial
from typing import Annotated

import msgspec

from tidewheel.errors import InvalidRequest
from tidewheel.parameters import Parameter, at_least, check_fields
from tidewheel.sampling import MAX_SEED

_choice = partial(Parameter, "one of a few words", max_chars=32)


class StepOptions(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Parameters of a request to a model that takes many steps. Raise `InvalidRequest`."""

    steps: Annotated[int | None, Parameter("steps; not given: the model's `default_steps`")] = None
    size: Annotated[str, Parameter("width x height; empty: the model's first", max_chars=32)] = ""
    guidance_scale: Annotated[float | None, Parameter("guidance; up to 1: none", low=0, high=100)] = None
    seed: Annotated[int | None, Parameter("seed of the noise", low=0, high=MAX_SEED)] = None
    preview_every: Annotated[int, at_least(0, "steps between previews; 0: none")] = 0
    partial_images: Annotated[int, at_least(0, "previews at most, if preview_every is 0")] = 0
    on_deadline: Annotated[str, _choice(choices=("error", "preview"))] = "error"
    format: Annotated[str, _choice(choices=("raw", "png", "png_base64"))] = "raw"

    def __post_init__(self) -> None:
        check_fields(self)


class StepOffer(msgspec.Struct, frozen=True, array_like=True):
    """Steps and sizes that a model allows."""

    sizes: tuple[str, ...]  # such as "64x64", width first
    max_steps: int
    default_steps: int
    default_guidance: float = 0.0  # 0: the model knows no guidance

    def completed(self, options: StepOptions) -> StepOptions:
        """Return the options with the model's defaults. Raise `InvalidRequest` for what is not offered."""
        steps = self.default_steps if options.steps is None else options.steps
        if not 1 <= steps <= self.max_steps:
            raise InvalidRequest(f"steps is {steps}: it must be 1 to {self.max_steps} (max_steps)")
        size = options.size or self.sizes[0]
        if size not in self.sizes:
            raise InvalidRequest(f"size is {size!r}: the model offers {', '.join(self.sizes)}")
        guidance = self.default_guidance if options.guidance_scale is None else options.guidance_scale
        if guidance > 1.0 and not self.default_guidance:
            raise InvalidRequest(f"guidance_scale is {guidance:g}: the model was made without guidance")
        every = options.preview_every
        if options.partial_images and not every:
            every = -(-steps // (options.partial_images + 1))
        return msgspec.structs.replace(options, steps=steps, size=size, guidance_scale=guidance, preview_every=every)
