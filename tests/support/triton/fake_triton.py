"""`triton_python_backend_utils` as far as the adapter uses it, in plain Python: what Triton's stub process provides.

Where misuse would crash the real server, this one raises `AssertionError`.
"""

from __future__ import annotations

import json
import weakref
from collections import defaultdict
from typing import Any, ClassVar

import numpy as np

TRITONSERVER_RESPONSE_COMPLETE_FINAL = 1


class TritonModelException(Exception):
    pass


class TritonError:
    UNKNOWN, INTERNAL, NOT_FOUND, INVALID_ARG, UNAVAILABLE, UNSUPPORTED, ALREADY_EXISTS, CANCELLED = range(8)

    def __init__(self, message: str, code: int = INTERNAL) -> None:
        message.encode("utf-8")
        self._message, self._code = message, code

    def message(self) -> str:
        return self._message

    def code(self) -> int:
        return self._code


class Tensor:
    def __init__(self, name: str, array: np.ndarray[Any, Any]) -> None:
        self._name, self._array = name, array

    def name(self) -> str:
        return self._name

    def as_numpy(self) -> np.ndarray[Any, Any]:
        return self._array


class InferenceResponse:
    def __init__(self, output_tensors: list[Tensor] | None = None, error: TritonError | None = None) -> None:
        self._tensors, self._error = output_tensors or [], error

    def output_tensors(self) -> list[Tensor]:
        return self._tensors

    def has_error(self) -> bool:
        return self._error is not None

    def error(self) -> TritonError | None:
        return self._error


TRITONSERVER_MEMORY_CPU = 0


class PreferredMemory:
    def __init__(self, preferred_memory_type: int, preferred_device_id: int) -> None:
        self.place = preferred_memory_type, preferred_device_id


class InferenceResponseSender:
    def __init__(self) -> None:
        self.sent: list[tuple[InferenceResponse, int]] = []
        self.cancelled = False
        self.fail_next: Exception | None = None

    @property
    def is_over(self) -> bool:
        return any(flags & TRITONSERVER_RESPONSE_COMPLETE_FINAL for _, flags in self.sent)

    def send(self, response: InferenceResponse, flags: int = 0) -> None:
        if self.is_over:
            raise TritonModelException("Unable to send response. Response sender has been closed.")
        if self.fail_next is not None:
            error, self.fail_next = self.fail_next, None
            raise error
        self.sent.append((response, flags))

    def is_cancelled(self) -> bool:
        assert not self.is_over, "the real server crashes here"
        return self.cancelled


class InferenceTrace:
    def __init__(self, context: str | None) -> None:
        self._context = context

    def get_context(self) -> str | None:
        return self._context


class InferenceRequest:
    def __init__(
        self,
        tensors: list[Tensor],
        parameters: str = "",
        request_id: str = "",
        timeout_us: int = 0,
        trace_context: str | None = None,
    ) -> None:
        self._trace = InferenceTrace(trace_context)
        self._tensors, self._parameters, self._request_id = tensors, parameters, request_id
        self._timeout_us = timeout_us
        self.sender = InferenceResponseSender()

    def inputs(self) -> list[Tensor]:
        return self._tensors

    def parameters(self) -> str:
        return self._parameters

    def request_id(self) -> str:
        return self._request_id

    def timeout(self) -> int:
        return self._timeout_us

    def trace(self) -> InferenceTrace:
        return self._trace

    def get_response_sender(self) -> InferenceResponseSender:
        return self.sender


class ModelConfig:
    def __init__(self, entry: dict[str, Any]) -> None:
        self._entry = {"max_batch_size": 0, "input": [], "output": [], **json.loads(json.dumps(entry))}

    def as_dict(self) -> dict[str, Any]:
        return self._entry

    def set_max_batch_size(self, size: int) -> None:
        self._entry["max_batch_size"] = size

    def add_input(self, tensor: dict[str, Any]) -> None:
        assert tensor.keys() <= {"name", "data_type", "dims", "optional"}
        self._add("input", tensor)

    def add_output(self, tensor: dict[str, Any]) -> None:
        assert tensor.keys() <= {"name", "data_type", "dims"}
        self._add("output", tensor)

    def _add(self, kind: str, tensor: dict[str, Any]) -> None:
        assert tensor["name"] not in [other["name"] for other in self._entry[kind]]
        self._entry[kind].append(tensor)

    def set_model_transaction_policy(self, policy: dict[str, bool]) -> None:
        assert "model_transaction_policy" not in self._entry
        self._entry["model_transaction_policy"] = policy


class Logger:
    lines: ClassVar[list[tuple[str, str]]] = []

    @classmethod
    def log_info(cls, line: str) -> None:
        cls.lines.append(("info", line))

    @classmethod
    def log_warn(cls, line: str) -> None:
        cls.lines.append(("warn", line))

    @classmethod
    def log_error(cls, line: str) -> None:
        cls.lines.append(("error", line))


class _Metric:
    def __init__(self, name: str, labels: list[str], family: MetricFamily, buckets: list[float] | None) -> None:
        assert (buckets is not None) == (family.kind == MetricFamily.HISTOGRAM)
        self._name, self._labels, self._family, self._buckets = name, labels, weakref.ref(family), buckets
        if buckets is None:
            self._add("", 0.0)
        else:
            assert buckets == sorted(set(buckets))
            self._observe(0.0, 0)

    def _add(self, suffix: str, value: float, *labels: str) -> None:
        MetricFamily.values[(self._name + suffix, *self._labels, *labels)] += value

    def _call(self, *kinds: int) -> None:
        family = self._family()
        assert family is not None, "the 'MetricFamily' has been deleted"
        assert family.kind in kinds, "not offered by this kind of metric"
        MetricFamily.num_calls += 1

    def set(self, value: float) -> None:
        self._call(MetricFamily.GAUGE)
        MetricFamily.values[(self._name, *self._labels)] = value

    def increment(self, value: float) -> None:
        assert value >= 0, "a counter cannot go back"
        self._call(MetricFamily.COUNTER, MetricFamily.GAUGE)
        self._add("", value)

    def observe(self, value: float) -> None:
        self._call(MetricFamily.HISTOGRAM)
        self._observe(value, 1)

    def _observe(self, value: float, count: int) -> None:
        for bound in [*(self._buckets or []), float("inf")]:
            edge = "+Inf" if bound == float("inf") else f"{bound:g}"
            self._add("_bucket", count if value <= bound else 0, f"le={edge}")
        self._add("_sum", value * count)
        self._add("_count", count)


class MetricFamily:
    """Series of all front ends, as the server shows them: one value per name and labels."""

    COUNTER, GAUGE, HISTOGRAM = range(3)
    values: ClassVar[defaultdict[tuple[str, ...], float]] = defaultdict(float)
    num_calls: ClassVar[int] = 0

    def __init__(self, name: str, description: str, kind: int) -> None:
        assert name and description
        self.name, self.kind = name, kind

    def Metric(self, labels: dict[str, str], buckets: list[float] | None = None) -> _Metric:
        assert all(isinstance(value, str) for value in labels.values())
        return _Metric(self.name, [f"{key}={labels[key]}" for key in sorted(labels)], self, buckets)

    @classmethod
    def value(cls, name: str, **labels: str) -> float:
        """Sum the series of one name whose labels match."""
        wanted = {f"{key}={value}" for key, value in labels.items()}
        found = [value for key, value in cls.values.items() if key[0] == name and wanted <= set(key[1:])]
        assert found, f"no series {name} {labels}"
        return sum(found)
