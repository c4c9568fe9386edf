from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from tidewheel.errors import InvalidRequest


class StepOptions(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Parameters of a request to a model that takes many steps."""

    steps: int | None = None  # none: the model's default
    size: Annotated[str, msgspec.Meta(max_length=32)] = ""  # height x width; empty: the first that the model offers
    guidance_scale: Annotated[float, msgspec.Meta(ge=0, le=100)] | None = None  # up to 1: no guidance
    seed: Annotated[int, msgspec.Meta(ge=0)] | None = None
    preview_every: Annotated[int, msgspec.Meta(ge=0)] = 0  # steps; 0: no previews
    on_deadline: Literal["error", "preview"] = "error"
    format: Literal["raw", "png", "png_base64"] = "raw"


class StepOffer(msgspec.Struct, frozen=True, array_like=True):
    """Steps and sizes that a model allows."""

    sizes: tuple[str, ...]  # such as "64x64", height first
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
        return msgspec.structs.replace(options, steps=steps, size=size, guidance_scale=guidance)
