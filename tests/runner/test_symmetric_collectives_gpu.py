"""Sums in symmetric memory on GPUs of one machine, eager and in graphs.

pytest -m gpu -s tests/runner/test_symmetric_collectives_gpu.py     # shows times, too
"""

from __future__ import annotations

import pytest
import torch

from support.runner.summing_ranks import run_ranks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]


@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_sums_are_right_and_the_same_on_all_ranks(num_ranks: int) -> None:
    if torch.cuda.device_count() < num_ranks:
        pytest.skip(f"needs {num_ranks} CUDA devices")
    reports = run_ranks(num_ranks)
    assert [report.faults for report in reports] == [[]] * num_ranks
    assert len({report.operation for report in reports}) == 1
    operation = reports[0].operation or "NCCL"
    for num_bytes, ours, nccls in reports[0].times_us:
        print(f"{num_ranks} ranks, {num_bytes} bytes: {operation} {ours:.1f} us, NCCL {nccls:.1f} us")
    if not reports[0].operation:
        pytest.skip("ranks cannot use symmetric memory here: the log says why")
