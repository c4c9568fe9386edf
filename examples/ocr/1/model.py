"""Texts of a picture by RapidOCR, whose three networks are entries of the same server: ocr_det, ocr_cls, ocr_rec."""

from __future__ import annotations

import base64
import binascii
from typing import Any

import numpy as np
import numpy.typing as npt
import triton_python_backend_utils as pb_utils
from rapidocr import RapidOCR

Array = npt.NDArray[Any]


class Entry:
    """Stands where RapidOCR's session of a network stands."""

    def __init__(self, name: str, session: Any) -> None:
        self._name = name
        (self._input,), (self._output,) = session.get_input_names(), session.get_output_names()

    def __call__(self, pictures: Array) -> Array:
        answer = pb_utils.InferenceRequest(
            model_name=self._name,
            requested_output_names=[self._output],
            inputs=[pb_utils.Tensor(self._input, pictures)],
        ).exec()
        if answer.has_error():
            raise RuntimeError(answer.error().message())
        output: Array = answer.output_tensors()[0].as_numpy()
        return output


class TritonPythonModel:
    def initialize(self, _: dict[str, str]) -> None:
        self._ocr = RapidOCR(params={"Global.log_level": "error"})
        for name in ("det", "cls", "rec"):
            network = getattr(self._ocr, f"_load_{name}_model")()
            network.session = Entry(f"ocr_{name}", network.session)

    def execute(self, requests: list[Any]) -> list[Any]:
        return [self._answer(request) for request in requests]

    def _answer(self, request: Any) -> Any:
        image = pb_utils.get_input_tensor_by_name(request, "image").as_numpy().item()
        try:
            found = self._ocr(_decoded(image))
        except Exception as error:  # of the library, or of an entry: their words, with their tag
            return pb_utils.InferenceResponse(error=pb_utils.TritonError(str(error)))
        texts = np.array([text.encode() for text in found.txts or ()], np.object_)
        scores = np.array(found.scores or (), np.float32)
        boxes = np.zeros((0, 4, 2)) if found.boxes is None else found.boxes
        outputs = {"texts": texts, "scores": scores, "boxes": np.asarray(boxes, np.float32)}
        return pb_utils.InferenceResponse([pb_utils.Tensor(name, array) for name, array in outputs.items()])


def _decoded(image: bytes) -> bytes:
    """Return a picture's file, which JSON holds in base64."""
    try:
        return base64.b64decode(image, validate=True)
    except binascii.Error:
        return image
