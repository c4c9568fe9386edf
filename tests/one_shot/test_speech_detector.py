"""silero-vad over the windows of a stream: its ONNX file, TorchScript and a program exported here agree.

The package's safetensors hold other weights than its other files: their program is compared with torch alone.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from support.one_shot.loading import load, refusal

pytest.importorskip("onnxruntime")
Array = np.ndarray
Step = Callable[[Array, Array], tuple[Array, Array]]  # window [batch, 576], state [2, batch, 128] → speech, state


class Detector(torch.nn.Module):
    """The network of the safetensors file, for 16 kHz."""

    def __init__(self) -> None:
        super().__init__()
        self.stft_conv = torch.nn.Conv1d(1, 258, 256, stride=128, bias=False)
        self.conv1 = torch.nn.Conv1d(129, 128, 3, padding=1)
        self.conv2 = torch.nn.Conv1d(128, 64, 3, stride=2, padding=1)
        self.conv3 = torch.nn.Conv1d(64, 64, 3, stride=2, padding=1)
        self.conv4 = torch.nn.Conv1d(64, 128, 3, padding=1)
        self.lstm_cell = torch.nn.LSTMCell(128, 128)
        self.final_conv = torch.nn.Conv1d(128, 1, 1)

    def forward(self, x: torch.Tensor, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.nn.functional.pad(x[:, None], (0, 64), "reflect")
        real, imaginary = self.stft_conv(x).chunk(2, dim=1)
        x = (real.square() + imaginary.square()).sqrt()
        for convolution in (self.conv1, self.conv2, self.conv3, self.conv4):
            x = convolution(x).relu()
        hidden, cell = self.lstm_cell(x.squeeze(2), (state[0], state[1]))
        speech = self.final_conv(hidden[:, :, None].relu()).sigmoid().mean(dim=2)
        return speech, torch.stack([hidden, cell])


@pytest.fixture(scope="module")
def data() -> Path:
    found = importlib.util.find_spec("silero_vad")
    if found is None or found.origin is None:
        pytest.skip("pip install --no-deps silero-vad")
    return Path(found.origin).parent / "data"


def onnx(data: Path, folder: Path) -> Step:
    adapter, _ = load(data / "silero_vad.onnx")
    rate = np.array(16000)

    def step(window: Array, state: Array) -> tuple[Array, Array]:
        found = adapter.run({"input": window, "state": state, "sr": rate})
        return found["output"], found["stateN"]

    return step


def script(data: Path, folder: Path) -> Step:
    path = folder / "model.pt"
    torch.jit.load(data / "silero_vad.jit")._model.save(path)  # its part for 16 kHz, without state
    state = "FP32", [2, "batch", 128]
    tensors = {
        "inputs": [["x", "FP32", ["batch", 576]], ["state", *state]],
        "outputs": [["speech", "FP32", ["batch", 1]], ["stateN", *state]],
    }
    return stepped(path, tensors, {"x": 0, "state": 1, "speech": 0, "stateN": 1})


def scripted_weights(data: Path) -> dict[str, torch.Tensor]:
    """Return the weights of the TorchScript by the names of `Detector`."""
    weights = torch.jit.load(data / "silero_vad.jit")._model.state_dict()
    names = {f"encoder.{index}.reparam_conv": f"conv{index + 1}" for index in range(4)}
    names |= {"decoder.rnn": "lstm_cell", "decoder.decoder.2": "final_conv"}
    found = {f"{new}.{kind}": weights[key] for old, new in names.items() for key in weights
             if (kind := key.removeprefix(f"{old}.")) != key}  # fmt: skip
    return {"stft_conv.weight": weights["stft.forward_basis_buffer"], **found}


def exported(data: Path, folder: Path) -> Step:
    return export(scripted_weights(data), folder)[1]


def export(weights: dict[str, torch.Tensor], folder: Path) -> tuple[Detector, Step]:
    model = Detector().eval()
    model.load_state_dict(weights)
    batch, path = torch.export.Dim("batch"), folder / "model.pt2"
    example = torch.ones(2, 576), torch.ones(2, 2, 128)
    torch.export.save(torch.export.export(model, example, dynamic_shapes=({0: batch}, {1: batch})), path)
    return model, stepped(path, {}, {"x": 0, "state": 1})


def stepped(path: Path, options: dict, axes: dict[str, int]) -> Step:
    adapter, _ = load(path, options)
    outputs = [spec.name for spec in adapter.signature.outputs]
    _, signature = load(path, options, batch_axes=axes | dict(zip(outputs, (0, 1), strict=True)))
    assert signature.is_batched

    def step(window: Array, state: Array) -> tuple[Array, Array]:
        found = adapter.run({"x": window, "state": state})
        return found[outputs[0]], found[outputs[1]]

    return step


@pytest.mark.parametrize("other", [script, exported])
def test_formats_agree_over_a_stream(other: Callable[[Path, Path], Step], data: Path, tmp_path: Path) -> None:
    first, second = onnx(data, tmp_path), other(data, tmp_path)
    one = two = np.zeros((2, 3, 128), np.float32)
    windows = np.random.default_rng(0).normal(0, 0.3, (20, 3, 576)).astype(np.float32)
    for window in windows:
        wanted, one = first(window, one)
        found, two = second(window, two)
        np.testing.assert_allclose(found, wanted, atol=1e-4)
    np.testing.assert_allclose(two, one, atol=1e-3)


def test_a_program_of_the_safetensors_is_the_network_alone(data: Path, tmp_path: Path) -> None:
    model, step = export(load_file(data / "silero_vad_16k.safetensors"), tmp_path)
    window = np.random.default_rng(1).normal(0, 0.3, (3, 576)).astype(np.float32)
    state = np.zeros((2, 3, 128), np.float32)
    with torch.no_grad():
        wanted = model(torch.tensor(window), torch.tensor(state))
    for found, tensor in zip(step(window, state), wanted, strict=True):
        np.testing.assert_allclose(found, tensor.numpy(), rtol=1e-5, atol=1e-6)


def test_the_whole_torchscript_keeps_its_state(data: Path) -> None:
    assert "context" in refusal(data / "silero_vad.jit", adapter="torch_script")
