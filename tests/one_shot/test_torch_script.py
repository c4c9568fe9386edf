"""TorchScript against the program itself."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from support.one_shot.loading import load, refusal

X, TIMES = ["x", "FP32", ["batch", 4]], ["times", "INT64", [1]]
OUTPUTS = [["y", "FP32", ["batch", 2]], ["n", "INT64", ["batch"]]]
TENSORS = {"inputs": [X, TIMES], "outputs": OUTPUTS}


class Scorer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 2)

    def forward(self, x: torch.Tensor, times: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x.mul_(times)
        return self.linear(x), (x > 0).sum(1)


class Keeper(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.last = torch.zeros(1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        before, self.last = self.last, x
        return before


class Writer(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch.save(x, "stolen")
        return x


class Counter(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.calls.add_(1)


def save(model: torch.nn.Module, folder: Path) -> Path:
    torch.jit.script(model.eval()).save(folder / "model.pt")
    return folder / "model.pt"


def test_outputs_are_those_of_the_program(tmp_path: Path) -> None:
    torch.manual_seed(0)
    path = save(Scorer(), tmp_path)
    adapter, signature = load(path, TENSORS, batch_axes='{"x": 0, "times": null, "y": 0, "n": 0}')
    assert signature.is_batched and [spec.name for spec in signature.inputs] == ["x", "times"]
    x = np.random.default_rng(0).random((3, 4), np.float32)
    wanted, count = torch.jit.load(path)(torch.tensor(x), torch.tensor([3]))
    x.flags.writeable = False
    found = adapter.run({"x": x, "times": np.array([3])})
    assert (found["y"] == wanted.detach().numpy()).all() and (found["n"] == count.numpy()).all()


def test_a_file_without_shapes_asks_for_them(tmp_path: Path) -> None:
    message = refusal(save(Scorer(), tmp_path))
    assert "adapter_options" in message and "x, times" in message
    assert "x, times" in refusal(tmp_path / "model.pt", {**TENSORS, "inputs": [X]})
    assert "matching regex" in refusal(tmp_path / "model.pt", {"inputs": [["x", "FP31", [4]]]})
    assert "unknown field `input`" in refusal(tmp_path / "model.pt", {"input": {}})


@pytest.mark.parametrize(("model", "word"), [(Keeper(), "keeps last"), (Writer(), "torch.save")])
def test_programs_that_are_not_served(model: torch.nn.Module, word: str, tmp_path: Path) -> None:
    assert word in refusal(save(model, tmp_path), TENSORS)


def test_a_program_that_changes_its_buffers_raises(tmp_path: Path) -> None:
    adapter, _ = load(save(Counter(), tmp_path), {"inputs": [X], "outputs": OUTPUTS[:1]})
    with pytest.raises(ValueError, match="changes its buffers"):
        adapter.run({"x": np.zeros((1, 4), np.float32)})


def test_a_file_that_is_no_program_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    for content in (b"", b"not a model"):
        path.write_bytes(content)
        message = refusal(path, TENSORS)
        assert "model.pt cannot be loaded by torch_script" in message and "whole" in message
    torch.save({"w": torch.ones(1)}, path)
    assert "model.pt cannot be loaded" in refusal(path, TENSORS)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_missing_gpu_is_named(tmp_path: Path) -> None:
    assert "device" in refusal(save(Scorer(), tmp_path), TENSORS, device="cuda")
