from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch

from support.kernels.kernel_harness import NAN, RATIO, assert_close, drawn_scales, needs_compiler
from tidewheel_kernels import FP8, rope_and_cache
from tidewheel_kernels.rope import rope_and_cache_native
from tidewheel_kernels.rope.cpu import rope_and_cache_cpu
from tidewheel_kernels.rope.reference import rope_and_cache_reference
from tidewheel_kernels.rope.triton_kernels import rope_and_cache as rope_triton


class Case(NamedTuple):
    tokens: int
    q_heads: int
    kv_heads: int
    head_dim: int
    rotary_dim: int
    norm: bool
    dtype: torch.dtype = torch.float32
    fp8: bool = False

    def __str__(self) -> str:
        heads = f"{self.tokens}-tokens-{self.q_heads}-{self.kv_heads}-heads"
        return (
            f"{heads}-dim-{self.head_dim}-rotary-{self.rotary_dim}-norm-{self.norm}-{self.dtype}{'-fp8' * self.fp8}"
        )


CASES = [
    Case(1, 1, 1, 8, 8, norm=False),
    Case(63, 6, 2, 64, 64, norm=False),
    Case(5, 16, 8, 128, 128, norm=True),
    Case(3, 9, 3, 80, 32, norm=False),
    Case(3, 9, 3, 80, 32, norm=True),
    Case(2, 4, 4, 96, 48, norm=True),
    Case(2, 2, 1, 256, 256, norm=True),
    Case(7, 4, 2, 32, 32, norm=True, dtype=torch.bfloat16),
    Case(7, 4, 2, 32, 16, norm=False, dtype=torch.float16),
    Case(0, 4, 2, 32, 32, norm=False),
    Case(63, 6, 2, 64, 64, norm=False, fp8=True),
    Case(3, 9, 3, 80, 32, norm=True, fp8=True),
    Case(7, 4, 2, 32, 16, norm=False, dtype=torch.bfloat16, fp8=True),
]
IMPLEMENTATIONS = {"triton": rope_triton, "cpu": rope_and_cache_cpu, "native": rope_and_cache_native}


class Inputs:
    """Views into one fused QKV tensor, and poisoned caches."""

    def __init__(self, case: Case, device: str) -> None:
        torch.manual_seed(0)
        heads = case.q_heads + 2 * case.kv_heads
        self.qkv = torch.randn(case.tokens, heads * case.head_dim, device=device).to(case.dtype)
        of_cache = FP8 if case.fp8 else case.dtype
        self.caches = torch.full((2, 4, 16, case.kv_heads, case.head_dim), NAN, device=device).to(of_cache)
        self.scales = drawn_scales(case.kv_heads, device) if case.fp8 else None
        angles = torch.rand(100, case.rotary_dim // 2, device=device) * 6
        self.cos_sin = torch.cat((angles.cos(), angles.sin()), dim=-1)
        self.positions = torch.randint(0, 100, (case.tokens,), device=device)
        self.slots = torch.randperm(64, device=device)[: case.tokens]
        self.slots[1:2] = -1
        self.weights = [torch.rand(case.head_dim, device=device).to(case.dtype) + 0.5 if case.norm else None] * 2
        self._sizes = [case.q_heads, case.kv_heads, case.kv_heads]
        self._head_dim = case.head_dim

    def run(self, function: Callable[..., None]) -> tuple[torch.Tensor, torch.Tensor]:
        qkv, caches = self.qkv.clone(), self.caches.clone()
        q, k, v = qkv.view(qkv.shape[0], sum(self._sizes), self._head_dim).split(self._sizes, dim=1)
        function(
            q, k, v, self.cos_sin, self.positions, self.slots, caches[0], caches[1],
            q_norm_weight=self.weights[0], k_norm_weight=self.weights[1], eps=1e-5, scales=self.scales,
        )  # fmt: skip
        return qkv, caches


@pytest.mark.parametrize(
    ("implementation", "case"),
    [
        pytest.param(function, case, id=f"{name}-{case}", marks=needs_compiler if name == "native" else ())
        for name, function in IMPLEMENTATIONS.items()
        for case in CASES
        if not (name == "native" and case.dtype == torch.float16)
    ],
)
def test_equals_reference(device: str, implementation: Callable[..., None], case: Case) -> None:
    inputs = Inputs(case, device)
    (qkv, caches), (ref_qkv, ref_caches) = inputs.run(implementation), inputs.run(rope_and_cache_reference)
    assert_close("qkv", ref_qkv, qkv, RATIO[case.dtype])
    caches, ref_caches = caches.float(), ref_caches.float()
    assert torch.equal(caches.isnan(), ref_caches.isnan())
    # A last bit of the input decides a rounding step of the cache, an eighth, now and then.
    ratio = 5e-3 if case.fp8 else RATIO[case.dtype]
    assert_close("caches", ref_caches.nan_to_num(0.0), caches.nan_to_num(0.0), ratio)


def test_values_and_elements_behind_the_rotation_stay(device: str) -> None:
    case = Case(3, 4, 2, 16, 8, norm=False)
    inputs = Inputs(case, device)
    qkv, _ = inputs.run(rope_triton)
    before, after = inputs.qkv.view(3, 8, 16), qkv.view(3, 8, 16)
    assert torch.equal(before[:, 6:], after[:, 6:])
    assert torch.equal(before[..., 8:], after[..., 8:])
    assert not torch.equal(before[:, :6, :8], after[:, :6, :8])


def test_reference_rotates_pairs_as_complex_numbers() -> None:
    inputs = Inputs(Case(6, 2, 1, 16, 16, norm=False), "cpu")
    qkv, _ = inputs.run(rope_and_cache)
    before, after = inputs.qkv.view(6, 4, 2, 8), qkv.view(6, 4, 2, 8)
    cos, sin = inputs.cos_sin[inputs.positions].unsqueeze(1).chunk(2, dim=-1)
    rotated = torch.complex(before[:, :3, 0], before[:, :3, 1]) * torch.complex(cos, sin)
    assert torch.allclose(after[:, :3], torch.stack((rotated.real, rotated.imag), dim=2), atol=1e-6)


def test_bad_arguments_are_refused() -> None:
    q = torch.zeros(1, 1, 8)
    cache = torch.zeros(1, 16, 1, 8)
    ids = torch.zeros(1, dtype=torch.int64)
    with pytest.raises(ValueError, match="or neither"):
        rope_and_cache(q, q, q, torch.zeros(1, 8), ids, ids, cache, cache, q_norm_weight=torch.ones(8))
    with pytest.raises(ValueError, match="rotary_dim"):
        rope_and_cache(q, q, q, torch.zeros(1, 16), ids, ids, cache, cache)
