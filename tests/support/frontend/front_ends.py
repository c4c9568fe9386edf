"""A front end over a scripted engine."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec
import numpy as np

from support.engine.fake_engine import FakeEngine, RecordingSink, make_info, write_model_folder
from support.engine.request_ledger import check_all_over
from support.frontend.local_encoder import LocalEncoder
from tidewheel.engine.messages import AddRequest, Delta, ErrorInfo, RequestStats
from tidewheel.frontend.admission_gate import AdmissionGate
from tidewheel.frontend.coercion import ParameterSource
from tidewheel.frontend.ended_requests import EndedRequest
from tidewheel.frontend.frontend import Frontend
from tidewheel.frontend.prompt_workers import TokenizerFolder
from tidewheel.frontend.request_parameters import GenerateRequest
from tidewheel.frontend.request_reader import RequestReader
from tidewheel.frontend.settings import FrontendSettings, GenerationDefaults
from tidewheel.frontend.tokenizer import Tokenizer
from tidewheel.sampling import TopLogprobs


class Submitted(NamedTuple):
    key: int
    sink: RecordingSink


class FrontendHarness:
    """A front end; `submit` waits until the engine has the request, and the test delivers its deltas."""

    def __init__(
        self,
        folder: Path,
        *,
        num_senders: int = 2,
        stream_interval_ms: float = 20.0,
        max_prompt_bytes: int = 4096,
        gate: AdmissionGate | None = None,
        default_max_tokens: int | Literal["context"] = "context",
        poll_interval_s: float = 0.001,
        on_ended: Sequence[Callable[[EndedRequest], None]] = (),
        max_audio_samples: int = 0,
        **files: object,
    ) -> None:
        vocab_size = write_model_folder(folder, **files)  # type: ignore[arg-type]
        self.engine = FakeEngine()
        info = make_info(folder, vocab_size=vocab_size)
        self.info = msgspec.structs.replace(info, max_audio_samples=max_audio_samples)
        self.tokenizer = Tokenizer.load(folder, vocab_size=vocab_size)
        settings = FrontendSettings(
            num_sender_threads=num_senders,
            stream_interval_ms=stream_interval_ms,
            default_max_tokens=default_max_tokens,
            objective_ttft_ms=1e9,  # on a busy machine too
            objective_tpot_ms=1e9,
        )
        encoder = LocalEncoder(TokenizerFolder(folder, vocab_size, max_prompt_bytes))
        defaults = GenerationDefaults.load(Path(self.info.model))
        reader = RequestReader(
            self.info, self.tokenizer, encoder, settings, max_prompt_bytes=max_prompt_bytes, defaults=defaults
        )
        self.frontend = Frontend(
            settings, gate or AdmissionGate(), poll_interval_s=poll_interval_s, on_ended=on_ended
        )
        self.frontend.start(self.info, reader, self.engine)
        self._sinks: list[RecordingSink] = []
        self._arrivals = itertools.count(time.monotonic_ns())

    def submit(self, text: str = "Hello", sink: RecordingSink | None = None, **asked: object) -> Submitted:
        sink = sink or RecordingSink()
        arrival_ns = next(self._arrivals)  # names the request in what the engine gets
        parameters = asked.pop("parameters", {})
        sources = (ParameterSource(origin="sampling_parameters", values=parameters),)  # type: ignore[arg-type]
        prompt = {} if {"input_ids", "messages"} & asked.keys() else {"text": text}
        request = GenerateRequest(arrival_ns=arrival_ns, parameters=sources, **prompt, **asked)  # type: ignore[arg-type]
        num_added = len(self.engine.added)
        self._send(request, sink)
        self.engine.wait_added(num_added + 1)
        (key,) = (key for key, message in self.engine.added.items() if message.arrival_ns == arrival_ns)
        return Submitted(key, sink)

    def submit_at_now(self, **asked: object) -> RecordingSink:
        """Submit and return at once: an answer may come without the engine."""
        sink = RecordingSink()
        parameters = asked.pop("parameters", {})
        sources = (ParameterSource(origin="sampling_parameters", values=parameters),)  # type: ignore[arg-type]
        self._send(GenerateRequest(parameters=sources, **{"text": "Hello", **asked}), sink)  # type: ignore[arg-type]
        return sink

    def refuse(self, **asked: object) -> str:
        """Submit and return the error that the request is answered with."""
        sink = RecordingSink()
        parameters = (ParameterSource(origin="sampling_parameters", values=asked.pop("parameters", {})),)  # type: ignore[arg-type]
        self._send(GenerateRequest(parameters=parameters, **asked), sink)  # type: ignore[arg-type]
        sink.wait_end()
        assert sink.error is not None
        return str(sink.error)

    def _send(self, request: GenerateRequest, sink: RecordingSink) -> None:
        self.frontend.submit(request, sink)
        self._sinks.append(sink)

    def close(self) -> None:
        """Close the front end, which ends all requests."""
        self.frontend.close()
        for sink in self._sinks:
            sink.wait_end()
        check_all_over({id(sink): sink.num_ends for sink in self._sinks}, len(self.frontend._live))

    def message(self, key: int) -> AddRequest:
        return self.engine.added[key]

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False).tolist()  # type: ignore[no-any-return]

    def deliver(self, key: int, token_ids: Sequence[int] = (), finish_reason: str = "", **fields: object) -> None:
        self.frontend.on_deltas([delta(key, token_ids, finish_reason, **fields)])

    def deliver_tokens(self, tokens: Mapping[int, int]) -> None:
        """Deliver a step: a token by key."""
        self.frontend.on_tokens(np.array(list(tokens), np.int64), np.array(list(tokens.values()), np.int32))

    def finish(self, submitted: Submitted, text: str, finish_reason: str = "length") -> RecordingSink:
        """Deliver the whole output in one delta, and wait for the end."""
        self.deliver(submitted.key, self.encode(text), finish_reason)
        submitted.sink.wait_end()
        return submitted.sink


def delta(key: int, token_ids: Sequence[int] = (), finish_reason: str = "", **fields: object) -> Delta:
    return Delta(key=key, token_ids=list(token_ids), finish_reason=finish_reason, **fields)  # type: ignore[arg-type]


def error_info(tag: str = "TW-NUMERIC", message: str = "logits are not finite") -> ErrorInfo:
    return ErrorInfo(tag, message)


def stats(first_scheduled_ns: int = 5) -> RequestStats:
    return RequestStats(
        first_scheduled_ns=first_scheduled_ns, first_token_ns=7, last_token_ns=9, num_cached_tokens=0,
        num_reused_blocks=3, num_new_blocks=4, num_preemptions=0, priority=2,
    )  # fmt: skip


def logprobs(token_id: int, others: Sequence[int]) -> TopLogprobs:
    return TopLogprobs(-1.5, 2, (*others, token_id), tuple(-0.5 * (i + 1) for i in range(len(others) + 1)))


def prompt_ids(message: AddRequest) -> list[int]:
    return np.frombuffer(message.prompt, dtype="<i4").tolist()  # type: ignore[no-any-return]
