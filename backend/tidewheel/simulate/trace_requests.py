import math

from tidewheel.batch import Int32Array
from tidewheel.fleet.router import RouteRequest, chunk_hashes
from tidewheel.record.recorded_events import STOP_TOKEN
from tidewheel.request import Priority, Request
from tidewheel.sampling import SamplingParams
from tidewheel.workload.traces import TokenContents, Trace

CHUNK_TOKENS = 256  # hashed for the router
_SAMPLING = SamplingParams()


class TraceRequests:
    def __init__(
        self, trace: Trace, *, max_model_len: int, session_ttl_s: float, max_tokens: int | None, has_contents: bool
    ) -> None:
        """Give every request `max_tokens` (None: the trace's longest output), and tokens if `has_contents`."""
        self.trace = trace
        self._max_model_len = max_model_len
        self._session_ttl_s = session_ttl_s
        self._max_tokens = max_tokens or int(trace.output_tokens.max())
        self._contents = TokenContents(trace) if has_contents else None

    @property
    def contents(self) -> TokenContents:
        assert self._contents is not None
        return self._contents

    @property
    def pool(self) -> Int32Array:
        return self.contents.pool

    def num_output_tokens(self, index: int) -> int:
        return min(int(self.trace.output_tokens[index]), self.max_tokens(index))

    def max_tokens(self, index: int) -> int:
        if self.trace.bucket(index):  # the number of steps is known
            return int(self.trace.output_tokens[index])
        return min(self._max_tokens, max(self._max_model_len - int(self.trace.prompt_tokens[index]), 1))

    def route(self, index: int) -> RouteRequest:
        trace, tenant = self.trace, self.trace.tenant(index)
        chunks: tuple[int, ...] = ()
        if self._contents is not None:
            prompt = self._contents.prompt(index)
            chunks = chunk_hashes(prompt.tobytes(), CHUNK_TOKENS * prompt.itemsize, tenant)
        session = trace.session(index)
        return RouteRequest(
            session=f"{tenant}\0{session}" if session else "",
            priority=Priority(int(trace.priorities[index])),
            num_tokens=int(trace.prompt_tokens[index]),
            chunks=chunks,
            chunk_tokens=CHUNK_TOKENS,
            due=float(trace.arrivals[index] + trace.deadlines[index]),
        )

    def request(self, index: int, now: float) -> Request:
        trace = self.trace
        deadline = now + float(trace.deadlines[index])
        return Request(
            str(index),
            self.contents.prompt(index),
            _SAMPLING,
            max_tokens=self.max_tokens(index),
            arrival_time=now,
            priority=Priority(int(trace.priorities[index])),
            stop_token_ids=(STOP_TOKEN,),
            cache_salt=trace.lora(index),
            tenant=trace.tenant(index),
            deadline=deadline if deadline < math.inf else None,
            objective=trace.objective(index),
            session_id=trace.session(index),
            session_ttl=self._session_ttl_s,
            bucket=trace.bucket(index),
            encoder_tokens=int(trace.encoder_tokens[index]),
        )
