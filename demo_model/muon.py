from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch


def orthogonalized(update: torch.Tensor, steps: int = 5) -> torch.Tensor:
    """Return near-orthogonal matrices [count, rows, columns], by a quintic Newton–Schulz iteration.

    Singular values end between 0.6 and 1.3, unless nearly zero before. Coefficients are from
    https://kellerjordan.github.io/posts/muon/; float32 is faster on CPUs without bf16 units.
    """
    tall = update.shape[-2] > update.shape[-1]
    x: torch.Tensor = update.mT if tall else update
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = 3.4445 * x + (2.0315 * gram @ gram - 4.7750 * gram) @ x
    return x.mT if tall else x


class Muon(torch.optim.Optimizer):
    """Orthogonalised Nesterov momentum; matrices of one shape are updated together."""

    def __init__(self, params: Iterable[torch.nn.Parameter], lr: float, weight_decay: float) -> None:
        super().__init__(params, {"lr": lr, "momentum": 0.95, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[torch.nn.Parameter]] = defaultdict(list)
            for param in group["params"]:
                by_shape[param.shape].append(param)
            for params in by_shape.values():
                self._step_shape(params, group)

    def _step_shape(self, params: list[torch.nn.Parameter], group: dict[str, Any]) -> None:
        updates = []
        for param in params:
            assert param.grad is not None
            state = self.state[param]
            if not state:
                state["momentum"] = torch.zeros_like(param)
            momentum = state["momentum"].lerp_(param.grad, 1 - group["momentum"])
            updates.append(param.grad.lerp(momentum, group["momentum"]))
        rows, columns = params[0].shape
        scale = group["lr"] * math.sqrt(max(1.0, rows / columns))
        for param, update in zip(params, orthogonalized(torch.stack(updates)), strict=True):
            param.mul_(1 - group["lr"] * group["weight_decay"]).sub_(update, alpha=scale)
