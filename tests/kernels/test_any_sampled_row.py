"""Any row of logits, with any parameters: a file of its own, as hypothesis may be missing where a GPU is."""

from __future__ import annotations

import math

import pytest
import torch

pytest.importorskip("hypothesis")

import hypothesis.strategies as st
from hypothesis import HealthCheck, given, settings

from support.kernels.sampling_rows import CHUNK, Row, little_room, possible_draws, tensors
from tidewheel_kernels.sampling import triton_kernels as kernels


@st.composite
def sampled_rows(draw: st.DrawFn) -> tuple[torch.Tensor, Row, float]:
    level = st.sampled_from([-math.inf, -1e30, -20.0, -3.0, -1.0, 0.0, 0.125, 0.25, 2.0, 1e4])
    pattern = draw(st.lists(level, min_size=1, max_size=12).filter(lambda x: max(x) > -math.inf))
    vocabulary = draw(st.integers(1, 3 * CHUNK))
    noise = draw(st.sampled_from([0.0, 0.1]))
    logits = torch.tensor((pattern * vocabulary)[:vocabulary]).clamp(max=1e4)
    logits[draw(st.integers(0, vocabulary - 1))] = max(pattern)
    logits = logits + noise * torch.randn(vocabulary, generator=torch.Generator().manual_seed(vocabulary))
    row = Row(
        temperature=draw(st.sampled_from([0.0, 0.1, 1.0, 7.0])),
        top_k=draw(st.sampled_from([0, 1, 2, 50, 1000])),
        top_p=draw(st.sampled_from([1.0, 0.999, 0.7, 0.01])),
        min_p=draw(st.sampled_from([0.0, 0.01, 0.6])),
    )
    return logits, row, draw(st.sampled_from([0.0, 0.123, 0.5, 0.77, 1 - 2.0**-24]))


@given(case=sampled_rows(), passes=st.booleans())
@settings(
    max_examples=40, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_any_row_gives_a_token_that_an_exact_sampler_could_draw(
    device: str, case: tuple[torch.Tensor, Row, float], passes: bool
) -> None:
    logits, row, u = case
    uniform = torch.tensor([u])
    args = logits.unsqueeze(0).to(device), tensors([row], device), uniform.to(device)
    if passes:
        with little_room():
            got = kernels.sample(*args)
    else:
        got = kernels.sample(*args)
    assert got.item() in possible_draws(logits, row, u)
