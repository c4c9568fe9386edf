"""CPU time that Triton's own Python backend takes for a response, in its stub: the floor of the stream path.

    python benchmarks response_cost --save

`bare_backend.py` sends responses of text tensors, made anew or kept, to one client that reads them.
"""

from __future__ import annotations

import queue
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tritonclient import grpc

from common.serving import free_ports, serving_repository
from common.study import ROOT, Study, in_turns, show, summary

LIMIT_S = 60.0
CONFIG = """backend: "python"
model_transaction_policy { decoupled: true }
input [ { name: "responses" data_type: TYPE_INT32 dims: 1 }, { name: "new" data_type: TYPE_INT32 dims: 1 },
        { name: "kept" data_type: TYPE_INT32 dims: 1 } ]
output [ { name: "text_output" data_type: TYPE_STRING dims: 1 },
         { name: "finish_reason" data_type: TYPE_STRING dims: 1 } ]
"""


class Case(NamedTuple):
    new: int  # tensors made for each response
    kept: int  # tensors made once


CASES = {
    "one tensor, kept": Case(0, 1),
    "one tensor": Case(1, 0),
    "two tensors, one kept": Case(1, 1),
    "two tensors": Case(2, 0),
}


@contextmanager
def serving(folder: Path) -> Iterator[str]:
    """Serve the bare model, and return the authority of gRPC."""
    version = folder / "bare" / "1"
    version.mkdir(parents=True)
    (folder / "bare" / "config.pbtxt").write_text(CONFIG)
    shutil.copy(ROOT / "benchmarks" / "bare_backend.py", version / "model.py")
    with serving_repository(folder, "bare", ports=free_ports(4)) as address:
        yield address.grpc


class Client:
    def __init__(self, url: str) -> None:
        self._client = grpc.InferenceServerClient(url)
        self._answers: queue.Queue[tuple[Any, Any]] = queue.Queue()
        self._client.start_stream(lambda result, error: self._answers.put((result, error)))

    def cpu_us(self, num_responses: int, case: Case) -> float:
        """Return the CPU time of the stub for each response."""
        inputs = []
        for name, value in zip(("responses", "new", "kept"), (num_responses, *case), strict=True):
            inputs.append(grpc.InferInput(name, [1], "INT32"))
            inputs[-1].set_data_from_numpy(np.array([value], np.int32))
        self._client.async_stream_infer("bare", inputs, enable_empty_final_response=True)
        while True:
            result, error = self._answers.get(timeout=LIMIT_S)
            if error is not None:
                raise RuntimeError(f"the bare model failed: {error}")
            if result.get_response().parameters["triton_final_response"].bool_param:
                return float(result.as_numpy("text_output")[0])

    def close(self) -> None:
        self._client.stop_stream()
        self._client.close()


def main() -> None:
    study = Study("response_cost", __doc__, "tritonclient", "nvidia-pytriton")
    study.add_argument("--responses", type=int, default=5000)
    study.add_argument("--rounds", type=int, default=5)
    options = study.begin()
    with tempfile.TemporaryDirectory() as folder, serving(Path(folder)) as url:
        client = Client(url)
        runs = {name: lambda case=case: client.cpu_us(options.responses, case) for name, case in CASES.items()}
        found = {name: summary(samples) for name, samples in in_turns(runs, options.rounds).items()}
        client.close()
    show({"response": name, "cpu_us": figures["median"]} for name, figures in found.items())
    study.save({"responses": options.responses, "cpu_us": found})


if __name__ == "__main__":
    main()
