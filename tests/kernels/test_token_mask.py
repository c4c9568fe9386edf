from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from tidewheel_kernels import apply_token_mask
from tidewheel_kernels.token_mask.cpu import apply_token_mask_cpu
from tidewheel_kernels.token_mask.reference import apply_token_mask_reference
from tidewheel_kernels.token_mask.triton_kernels import apply_token_mask as apply_triton

INF = float("inf")


@pytest.fixture(params=["triton", "cpu", "reference"])
def apply(request: pytest.FixtureRequest) -> Callable[..., None]:
    return {"triton": apply_triton, "cpu": apply_token_mask_cpu, "reference": apply_token_mask_reference}[
        request.param
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("vocabulary", [1, 31, 32, 97, 1024, 2500])
@pytest.mark.parametrize("rows", [[4, 0, 2], [0, 1, 2, 3, 4], [1, 0, 2, 3, 4]], ids=str)
def test_only_allowed_tokens_of_its_rows_stay(
    apply: Callable[..., None], device: str, rows: list[int], vocabulary: int, dtype: torch.dtype
) -> None:
    draw = np.random.default_rng(vocabulary)
    is_allowed = draw.random((len(rows), 32 * (vocabulary // 32 + 2))) < 0.3
    packed = np.packbits(is_allowed, axis=1, bitorder="little").view("<i4")
    memory = torch.randn(5, 3 * vocabulary, generator=torch.Generator().manual_seed(0)).to(device, dtype)
    expected = memory.clone()
    for row, allowed in zip(rows, is_allowed[:, :vocabulary], strict=True):
        expected[row, vocabulary : 2 * vocabulary][torch.from_numpy(~allowed).to(device)] = -INF
    row_ids = torch.tensor(rows, dtype=torch.int32, device=device)
    apply(memory[:, vocabulary : 2 * vocabulary], row_ids, torch.from_numpy(packed).to(device))
    assert torch.equal(memory, expected)


def test_masks_that_are_too_short_are_refused() -> None:
    with pytest.raises(ValueError, match="1 words of 32 bits are too few for 33 tokens"):
        apply_token_mask(torch.zeros(1, 33), torch.zeros(1, dtype=torch.int32), torch.zeros(1, 1, dtype=torch.int32))


def test_no_rows() -> None:
    logits = torch.ones(2, 5)
    apply_token_mask(logits, torch.zeros(0, dtype=torch.int32), torch.zeros(0, 1, dtype=torch.int32))
    assert torch.equal(logits, torch.ones(2, 5))
