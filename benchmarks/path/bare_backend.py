"""Model of Triton's Python backend that only sends responses, and says what CPU time its process took for each."""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

TENSORS = ("text_output", "finish_reason")


def _tensor(name: str, text: bytes) -> Any:
    return pb_utils.Tensor(name, np.array([text], dtype=np.object_))


INPUTS = ("responses", "new", "kept")


class TritonPythonModel:
    def execute(self, requests: list[Any]) -> None:
        for request in requests:
            values = {name: int(pb_utils.get_input_tensor_by_name(request, name).as_numpy()[0]) for name in INPUTS}
            arguments = (request.get_response_sender(), *values.values())
            threading.Thread(target=_send, args=arguments).start()


def _send(sender: Any, num_responses: int, num_new: int, num_kept: int) -> None:
    """Send so many responses of text tensors: made anew for each, and made once."""
    kept = [_tensor(name, b"None") for name in TENSORS[num_new : num_new + num_kept]]
    before = time.process_time()
    for _ in range(num_responses):
        made = [_tensor(name, b" some text") for name in TENSORS[:num_new]]
        sender.send(pb_utils.InferenceResponse(made + kept), flags=0)
    seconds = time.process_time() - before
    last = _tensor(TENSORS[0], f"{1e6 * seconds / num_responses:.1f}".encode())
    sender.send(pb_utils.InferenceResponse([last]), flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
