from __future__ import annotations

import numpy as np
import numpy.typing as npt

from tidewheel.errors import InternalError
from tidewheel.request import FinishReason, Request
from tidewheel.workload.arrival_times import FloatArray
from tidewheel.workload.traces import Trace

UNKNOWN, FINISHED, REFUSED, DEADLINE, FAILED = range(5)
_ENDS = {
    FinishReason.STOP: FINISHED,
    FinishReason.LENGTH: FINISHED,
    FinishReason.DEADLINE: DEADLINE,
    FinishReason.ERROR: REFUSED,  # evicted while waiting, or hopeless
    None: REFUSED,
}


class Outcomes:
    """Outcomes of a trace as columns; times in seconds of the trace, NaN if never reached."""

    def __init__(self, trace: Trace) -> None:
        count = len(trace)
        self.trace = trace
        self.ends: npt.NDArray[np.int8] = np.full(count, UNKNOWN, dtype=np.int8)
        self.replicas: npt.NDArray[np.int32] = np.full(count, -1, dtype=np.int32)
        self.first_scheduled: FloatArray = np.full(count, np.nan)
        self.first_token: FloatArray = np.full(count, np.nan)
        self.last_token: FloatArray = np.full(count, np.nan)
        self.output_tokens: npt.NDArray[np.int32] = np.zeros(count, dtype=np.int32)
        self.cached_tokens: npt.NDArray[np.int32] = np.zeros(count, dtype=np.int32)
        self.preemptions: npt.NDArray[np.int32] = np.zeros(count, dtype=np.int32)

    def record(self, index: int, replica: int, request: Request) -> None:
        """Record the end of a request; raise `InternalError` for a second one."""
        if self.ends[index] != UNKNOWN:
            raise InternalError(f"request {index} ended twice")
        self.ends[index] = _ENDS.get(request.finish_reason, FAILED)
        self.replicas[index] = replica
        num_output_tokens = len(request.output_token_ids)
        if request.first_scheduled_time is not None:
            self.first_scheduled[index] = request.first_scheduled_time
            self.cached_tokens[index] = request.num_cached_tokens
            self.preemptions[index] = request.num_preemptions
        if request.first_token_time is not None and request.last_token_time is not None:
            self.first_token[index] = request.first_token_time
            self.last_token[index] = request.last_token_time
            self.output_tokens[index] = num_output_tokens

    def check_complete(self) -> None:
        missing = int(np.count_nonzero(self.ends == UNKNOWN))
        if missing:
            raise InternalError(f"{missing} requests never ended")

    @property
    def finished(self) -> npt.NDArray[np.bool_]:
        return np.asarray(self.ends == FINISHED)

    @property
    def ttft(self) -> FloatArray:
        return self.first_token - self.trace.arrivals

    @property
    def latency(self) -> FloatArray:
        """Seconds from arrival to last token."""
        return self.last_token - self.trace.arrivals

    @property
    def queue_time(self) -> FloatArray:
        return self.first_scheduled - self.trace.arrivals

    @property
    def tpot(self) -> FloatArray:
        """Seconds per output token after the first; NaN with fewer than two."""
        with np.errstate(invalid="ignore", divide="ignore"):
            tokens = np.where(self.output_tokens > 1, self.output_tokens - 1, np.nan)
            return np.asarray((self.last_token - self.first_token) / tokens)

    @property
    def span(self) -> float:
        """Seconds from first arrival to last token."""
        if not np.isfinite(self.last_token).any():
            return 0.0
        return float(np.nanmax(self.last_token) - self.trace.arrivals[0])
