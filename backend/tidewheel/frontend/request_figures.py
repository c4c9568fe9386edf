import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial

from tidewheel.batch import Float64Array
from tidewheel.engine.messages import RequestStats
from tidewheel.errors import TidewheelError
from tidewheel.frontend.output import OutputChunk
from tidewheel.request import FinishReason, Priority
from tidewheel.stats import Histogram, Objective

# Upper bounds, as in vLLM's metrics; in seconds.
TTFT_BOUNDS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75,
    1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0,
)  # fmt: skip
INTER_TOKEN_BOUNDS = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
)  # fmt: skip
REQUEST_BOUNDS = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0,
    1920.0, 7680.0,
)  # fmt: skip
SEQUENCE_BOUNDS = (1, 2, 5, 10, 20)
REFUSAL_BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)

# Refusals before any computation.
REJECTION_TAGS = frozenset((
    "TW-INPUT", "TW-TOO-LARGE", "TW-UNSUPPORTED", "TW-NOT-FOUND", "TW-BUSY", "TW-KV-FULL", "TW-DEADLINE",
    "TW-DRAINING",
))  # fmt: skip


def token_bounds(limit: int) -> tuple[int, ...]:
    """Return bucket bounds 1, 2, 5, 10, 20, 50 … up to the limit."""
    powers = (10**exponent for exponent in range(len(str(limit))))
    return tuple(bound for power in powers for bound in (power, 2 * power, 5 * power) if bound <= limit)


@dataclass(slots=True)
class FrontendStats:
    """Counters and histograms. ``num_received`` is the sum of live, finished, rejected and failed requests."""

    num_received: int = 0
    finished: Counter[str] = field(default_factory=Counter)  # by finish reason
    rejected: Counter[str] = field(default_factory=Counter)
    failed: Counter[str] = field(default_factory=Counter)  # by error tag
    answered: Counter[str] = field(default_factory=Counter)  # with tokens and their own end, by class
    in_time: Counter[str] = field(default_factory=Counter)  # of these, within the objective
    num_prompt_tokens: int = 0  # of requests with tokens
    num_generation_tokens: int = 0
    time_to_first_token: Histogram = field(default_factory=partial(Histogram, TTFT_BOUNDS))  # from arrival
    inter_token_latency: Histogram = field(default_factory=partial(Histogram, INTER_TOKEN_BOUNDS))
    e2e_latency: Histogram = field(default_factory=partial(Histogram, REQUEST_BOUNDS))  # from arrival, as queue_time
    queue_time: Histogram = field(default_factory=partial(Histogram, REQUEST_BOUNDS))
    inference_time: Histogram = field(default_factory=partial(Histogram, REQUEST_BOUNDS))  # from the first step
    prefill_time: Histogram = field(default_factory=partial(Histogram, REQUEST_BOUNDS))
    decode_time: Histogram = field(default_factory=partial(Histogram, REQUEST_BOUNDS))
    refusal_time: Histogram = field(default_factory=partial(Histogram, REFUSAL_BOUNDS))
    prompt_tokens: Histogram = field(default_factory=partial(Histogram, ()))
    output_tokens: Histogram = field(default_factory=partial(Histogram, ()))  # of each sequence
    num_sequences: Histogram = field(default_factory=partial(Histogram, SEQUENCE_BOUNDS))


class StatsRecorder:
    def __init__(self, max_model_len: int, objective: Objective | None = None) -> None:
        self._objective = objective or Objective()
        self._lock = threading.Lock()
        bounds = token_bounds(max_model_len)
        self._stats = FrontendStats(prompt_tokens=Histogram(bounds), output_tokens=Histogram(bounds))

    def received(self) -> None:
        with self._lock:
            self._stats.num_received += 1

    def single_tokens(self, seconds: Float64Array) -> None:
        """Count deltas of one token each, `seconds` [num_tokens] after the previous tokens."""
        with self._lock:
            self._stats.num_generation_tokens += len(seconds)
            self._stats.inter_token_latency.observe_all(seconds)

    def tokens(self, num_tokens: int, seconds: float | None, num_prompt_tokens: int = 0) -> None:
        """Count tokens that came together, `seconds` after the sequence's previous token (None: its first).

        A request's first tokens come with `num_prompt_tokens`, `seconds` after arrival.
        """
        with self._lock:
            self._stats.num_generation_tokens += num_tokens
            self._stats.num_prompt_tokens += num_prompt_tokens
            if num_prompt_tokens and seconds is not None:
                self._stats.time_to_first_token.observe(seconds)
            elif seconds is not None:
                self._stats.inter_token_latency.observe(seconds / num_tokens, num_tokens)

    def finished(
        self, first: OutputChunk, seconds: float, num_output_tokens: Sequence[int], priority: int = Priority.NORMAL
    ) -> None:
        """Count a finished request. `first`: last chunk of the first sequence; `seconds`: since arrival."""
        with self._lock:
            self._stats.finished[first.finish_reason or ""] += 1
            if first.stats is not None and first.stats.first_scheduled_ns:
                self._observe_stages(first.stats)
            if first.finish_reason == FinishReason.CANCELLED:
                return
            self._stats.e2e_latency.observe(seconds)
            if not num_output_tokens:
                return
            self._stats.prompt_tokens.observe(first.num_input_tokens)
            self._stats.num_sequences.observe(len(num_output_tokens))
            for num_tokens in num_output_tokens:
                self._stats.output_tokens.observe(num_tokens)
            if first.finish_reason in (FinishReason.STOP, FinishReason.LENGTH):
                is_in_time = seconds <= self._objective.whole_answer_s(max(num_output_tokens))
                name = Priority(priority).name.lower()
                self._stats.answered[name] += 1
                self._stats.in_time[name] += is_in_time

    def failed(self, error: TidewheelError, *, had_output: bool, refused_after: float | None = None) -> None:
        """Count a failed or rejected request. `refused_after`: seconds from arrival to a refusal."""
        with self._lock:
            is_rejection = error.tag in REJECTION_TAGS and not had_output
            (self._stats.rejected if is_rejection else self._stats.failed)[error.tag] += 1
            if refused_after is not None:
                self._stats.refusal_time.observe(refused_after)

    def snapshot(self) -> FrontendStats:
        with self._lock:
            values = ((part.name, getattr(self._stats, part.name)) for part in fields(self._stats))
            return replace(self._stats, **{name: one.copy() for name, one in values if not isinstance(one, int)})

    def _observe_stages(self, times: RequestStats) -> None:
        start_ns = times.first_scheduled_ns
        first_ns = max(times.first_token_ns, start_ns)
        last_ns = max(times.last_token_ns, first_ns)
        self._stats.queue_time.observe(max(start_ns - times.arrival_ns, 0) * 1e-9)
        self._stats.prefill_time.observe((first_ns - start_ns) * 1e-9)
        self._stats.decode_time.observe((last_ns - first_ns) * 1e-9)
        self._stats.inference_time.observe((last_ns - start_ns) * 1e-9)
