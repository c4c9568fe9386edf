"""Requests of one-shot models: one item of given tensors, or of random numbers."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from tritonclient.grpc import model_config_pb2
from tritonclient.grpc import service_pb2 as pb
from tritonclient.utils import serialize_byte_tensor, triton_to_np_dtype

from tidewheel.bench import BenchError
from tidewheel.one_shot.signature import Array, Arrays, dtype_name

SEED = 0


class OneShotModel(NamedTuple):
    served_name: str
    inputs: Arrays  # by name; random numbers for those that are not given


def tensor_request(model: OneShotModel, config: Any) -> pb.ModelInferRequest:
    """Return a request for the tensors that Triton's `ModelConfig` declares. Raise `BenchError` for texts."""
    request = pb.ModelInferRequest(model_name=model.served_name)
    rng = np.random.default_rng(SEED)
    for tensor in config.input:
        array = model.inputs.get(tensor.name)
        if array is None and tensor.optional:
            continue
        if array is None:
            array = _random(model.served_name, tensor, rng, has_batch=config.max_batch_size > 0)
        dtype = dtype_name(array)
        request.inputs.add(name=tensor.name, datatype=dtype, shape=array.shape)
        content = serialize_byte_tensor(array).item() if dtype == "BYTES" else np.ascontiguousarray(array).tobytes()
        request.raw_input_contents.append(content)
    return request


def with_class(request: pb.ModelInferRequest, parameters: Mapping[str, Any]) -> pb.ModelInferRequest:
    """Return a copy with a class by its other name: Triton keeps `priority` for itself."""
    sent = pb.ModelInferRequest()
    sent.CopyFrom(request)
    if "priority" in parameters:
        sent.parameters["qos_class"].int64_param = parameters["priority"]
    return sent


def _random(model: str, tensor: Any, rng: np.random.Generator, *, has_batch: bool) -> Array:
    """Return numbers from 0 to 1 in the declared shape, with 1 for each dynamic dimension."""
    name = model_config_pb2.DataType.Name(tensor.data_type).removeprefix("TYPE_")
    kind = triton_to_np_dtype(name)
    if kind is None or kind is np.object_:
        raise BenchError(f"input {tensor.name} of {model} takes {name}: give --one-shot inputs=FILE.npz")
    return rng.random([1] * has_batch + [max(dim, 1) for dim in tensor.dims]).astype(kind)
