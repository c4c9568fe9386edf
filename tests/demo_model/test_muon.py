"""Muon: what its update looks like, and that it descends."""

from __future__ import annotations

import pytest
import torch

from muon import Muon, orthogonalized


@pytest.mark.parametrize("shape", [(3, 24, 24), (2, 64, 24), (2, 24, 64)], ids=["square", "tall", "wide"])
def test_update_is_near_orthogonal_and_keeps_its_directions(shape: tuple[int, int, int]) -> None:
    noise = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    left, _, right = torch.linalg.svd(noise, full_matrices=False)
    update = left @ torch.diag(torch.linspace(0.1, 5.0, min(shape[1:]))) @ right
    result = orthogonalized(update)
    inner = left.mT @ result @ right.mT  # diagonal when the singular vectors are those of the update
    values = torch.linalg.svdvals(result)
    assert result.shape == update.shape
    assert values.min() > 0.6 and values.max() < 1.3
    assert torch.allclose(inner, torch.diag_embed(inner.diagonal(dim1=-2, dim2=-1)), atol=1e-3)


def test_least_squares_is_solved_and_parameters_of_one_shape_do_not_mix() -> None:
    generator = torch.Generator().manual_seed(1)
    targets = [torch.randn(6, 10, generator=generator) for _ in range(2)]
    params = [torch.nn.Parameter(torch.zeros(6, 10)) for _ in targets]
    optimizer = Muon(params, lr=0.05, weight_decay=0.0)

    def step() -> list[float]:
        losses = [(param - target).square().sum() for param, target in zip(params, targets, strict=True)]
        sum(losses, torch.zeros(())).backward()
        optimizer.step()
        optimizer.zero_grad()
        return [float(loss) for loss in losses]

    first = step()
    last = [step() for _ in range(150)][-1]
    assert all(end < 0.02 * start for start, end in zip(first, last, strict=True))
