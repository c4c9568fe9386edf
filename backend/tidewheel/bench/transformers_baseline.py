"""Triton model of the transformers baseline. Each `execute` computes one batch of Triton's batcher."""

import json
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tidewheel.adapter.responder import error_response
from tidewheel.adapter.stub_process import Presence
from tidewheel.adapter.tensors import scalar
from tidewheel.adapter.triton_model import route_logging
from tidewheel.bench.batch_generator import Generator, Row, RowOutput
from tidewheel.config import EngineConfig
from tidewheel.errors import ConfigError, InternalError, InvalidRequest, TidewheelError
from tidewheel.frontend.coercion import to_text

SETTINGS = ("model", "dtype", "device", "num_threads")


class TransformersBaseline:
    triton: Any  # module triton_python_backend_utils

    def initialize(self, args: Mapping[str, str]) -> None:
        route_logging()
        if args["model_instance_kind"] == "GPU":
            torch.cuda.set_device(int(args["model_instance_device_id"]))
        try:
            self._generator = Generator.load(_settings(args))
        except (ConfigError, TidewheelError) as error:
            raise self.triton.TritonModelException(str(error)) from None
        self._presence = Presence(args["model_name"])

    def finalize(self) -> None:
        self._presence.remove()

    def execute(self, requests: Sequence[Any]) -> list[Any]:
        items = [self._read(request) for request in requests]
        outputs = iter(self._generate([item for item in items if isinstance(item, Row)]))
        return [self._response(next(outputs) if isinstance(item, Row) else item) for item in items]

    def _read(self, request: Any) -> Row | TidewheelError:
        try:
            row = self._row(request)
            self._generator.check(row)
        except TidewheelError as error:
            return error
        return row

    def _row(self, request: Any) -> Row:
        parameters = json.loads(request.parameters() or "{}")
        unknown = sorted(parameters.keys() - {"id"})  # of `/generate`
        if unknown:
            raise InvalidRequest(f"{unknown[0]} is unknown to a baseline: it takes max_tokens and ignore_eos")
        inputs = {tensor.name(): tensor for tensor in request.inputs()}
        for name, tensor in inputs.items():
            if (num_rows := tensor.as_numpy().shape[0]) != 1:
                raise InvalidRequest(f"{name} has {num_rows} rows: send a request for each prompt")
        prompts = inputs.keys() & {"text_input", "input_ids"}
        if len(prompts) != 1:
            raise InvalidRequest("the prompt must be just one of text_input and input_ids")
        if "input_ids" in prompts:
            token_ids = inputs["input_ids"].as_numpy()[0].tolist()
        else:
            token_ids = self._generator.encode(to_text("text_input", scalar(inputs["text_input"])))
        return Row(
            token_ids=token_ids,
            max_tokens=int(scalar(inputs["max_tokens"])),
            ignore_eos="ignore_eos" in inputs and bool(scalar(inputs["ignore_eos"])),
        )

    def _generate(self, rows: list[Row]) -> Sequence[RowOutput | TidewheelError]:
        try:
            return self._generator.generate(rows)
        except Exception:
            self.triton.Logger.log_error(f"a batch of {len(rows)} failed: {traceback.format_exc()}")
            return [InternalError("the batch of this request failed; the server's log says why")] * len(rows)

    def _response(self, output: RowOutput | TidewheelError) -> Any:
        if isinstance(output, TidewheelError):
            return error_response(output)
        tensors = {
            "text_output": np.array([[output.text.encode()]], dtype=np.object_),
            "finish_reason": np.array([[output.finish_reason.encode()]], dtype=np.object_),
            "num_input_tokens": np.array([[output.num_input_tokens]], dtype=np.uint32),
            "num_output_tokens": np.array([[len(output.token_ids)]], dtype=np.uint32),
            "token_ids": np.array([output.token_ids], dtype=np.int32),
        }
        return self.triton.InferenceResponse([self.triton.Tensor(name, array) for name, array in tensors.items()])


def _settings(args: Mapping[str, str]) -> EngineConfig:
    parameters = json.loads(args["model_config"]).get("parameters", {})
    # Triton's own are in capitals.
    settings = {key: value.get("string_value", "") for key, value in parameters.items() if not key.isupper()}
    unknown = sorted(settings.keys() - set(SETTINGS))
    if unknown:
        raise ConfigError(f"{unknown[0]} is no setting of a baseline: use {', '.join(SETTINGS)}")
    return EngineConfig.from_settings(settings, base_dir=Path(args["model_repository"]) / args["model_version"])
