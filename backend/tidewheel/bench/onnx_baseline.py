"""Triton model that runs ONNX files by ONNX Runtime: each `execute` is one batch of Triton's dynamic batcher."""

import itertools
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnxruntime

from tidewheel.adapter.one_shot import complete
from tidewheel.config import EngineConfig
from tidewheel.one_shot.adapters import DEFAULTS, load_adapter, with_kind
from tidewheel.one_shot.signature import Arrays


class OnnxBaseline:
    triton: Any  # module triton_python_backend_utils

    @staticmethod
    def auto_complete_config(config: Any) -> Any:
        """Declare the file's tensors, and batches as large as the engine's where requests can be joined."""
        settings = EngineConfig.from_settings(with_kind({"model": _parameter(config.as_dict(), "model")}))
        _, signature = load_adapter(settings)
        if signature.is_batched:
            config.set_max_batch_size(DEFAULTS["max_num_batched_tokens"])
            config.set_dynamic_batching()
        return complete(config, signature)

    def initialize(self, args: Mapping[str, str]) -> None:
        config = json.loads(args["model_config"])
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = int(_parameter(config, "num_threads"))
        self._session = onnxruntime.InferenceSession(_parameter(config, "model"), options, ["CPUExecutionProvider"])
        self._scalars = {tensor.name for tensor in self._session.get_inputs() if not tensor.shape}
        self._outputs = [tensor.name for tensor in self._session.get_outputs()]

    def execute(self, requests: Sequence[Any]) -> list[Any]:
        inputs = [{tensor.name(): tensor.as_numpy() for tensor in request.inputs()} for request in requests]
        if len(inputs) == 1:
            return [self._response(self.run(inputs[0]))]
        outputs = self.run({name: np.concatenate([one[name] for one in inputs]) for name in inputs[0]})
        ends = list(itertools.accumulate(len(next(iter(one.values()))) for one in inputs))
        spans = zip([0, *ends], ends, strict=False)
        return [self._response({name: array[begin:end] for name, array in outputs.items()}) for begin, end in spans]

    def run(self, inputs: Arrays) -> Arrays:
        """Scalars have one element: Triton has none."""
        feeds = {name: array.reshape(()) if name in self._scalars else array for name, array in inputs.items()}
        outputs = self._session.run(self._outputs, feeds)
        return {name: np.atleast_1d(array) for name, array in zip(self._outputs, outputs, strict=True)}

    def _response(self, outputs: Arrays) -> Any:
        return self.triton.InferenceResponse([self.triton.Tensor(name, array) for name, array in outputs.items()])


def _parameter(config: Mapping[str, Any], name: str) -> str:
    return str(config["parameters"][name]["string_value"])
