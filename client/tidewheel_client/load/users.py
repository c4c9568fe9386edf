"""Users that send and measure requests.

HTTP users have locust's `requests`: FastHttpUser collects a kilobyte, so that a first token is late, and httpx2 takes
twice the CPU time an event.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from typing import Any, ClassVar

import requests
from gevent import GreenletExit
from locust import User, task

from tidewheel_client.client import Client
from tidewheel_client.error_translation import from_text
from tidewheel_client.errors import BY_TAG, RequestError, RequestTimeout, ServerUnavailable
from tidewheel_client.load.load_options import LoadOptions, LoadRequest, OptionError, Work
from tidewheel_client.load.locust_rows import Reporter, Timing

_INCOMPLETE = "the stream ended before its last response"


class LoadUser(User):
    """User that asks and thinks, or waits for a refusal's retry time."""

    abstract = True
    kind: ClassVar[str]
    _numbers: ClassVar[Iterator[int]] = itertools.count()
    _retry_after_s = 0.0

    def on_start(self) -> None:
        try:
            self.options = LoadOptions.from_arguments(self.environment.parsed_options)
        except OptionError:  # from the web page; the log has the reason
            raise GreenletExit from None
        worker = getattr(self.environment.runner, "worker_index", 0)
        self._work = Work(self.options, f"{worker} {next(self._numbers)}")
        self._reporter = Reporter(self.environment.events.request, self.kind, self.target_model())
        self.connect()

    def on_stop(self) -> None:
        self.disconnect()

    def wait_time(self) -> float:
        return max(self._work.think_time(), self._retry_after_s)

    @task
    def ask(self) -> None:
        ask = self._work.next()
        timing = Timing()
        self._retry_after_s = 0.0
        try:
            self.send(ask, timing)
        except RequestError as error:
            self._retry_after_s = (error.retry_after_ms or 0) / 1e3
            self._reporter.failed(ask, timing, error)
        else:
            self._reporter.succeeded(ask, timing)

    def target_model(self) -> str:
        return self.options.model

    @classmethod
    def address(cls, options: LoadOptions, host: str | None) -> str:
        """Return the server's URL or HOST:PORT; `host` is locust's option."""
        raise NotImplementedError

    def connect(self) -> None:
        raise NotImplementedError

    def disconnect(self) -> None:
        """Disconnect, also after a failed start."""
        raise NotImplementedError

    def send(self, ask: LoadRequest, timing: Timing) -> None:
        """Raise `RequestError` unless the answer is complete."""
        raise NotImplementedError


class GrpcStreamUser(LoadUser):
    kind = "GRPC"
    _client: Client | None = None

    @classmethod
    def address(cls, options: LoadOptions, host: str | None) -> str:
        del host
        return options.grpc_url

    def connect(self) -> None:
        self._client = Client(self.options.grpc_url, self.options.model, timeout_s=self.options.request_timeout_s)

    def disconnect(self) -> None:
        if self._client is not None:
            self._client.close()

    def send(self, ask: LoadRequest, timing: Timing) -> None:
        assert self._client is not None
        with self._client.stream(ask.prompt, **ask.parameters) as stream:
            for chunk in stream:
                timing.arrived(chunk.num_output_tokens or 0, len(chunk.text.encode()))
        if stream.finish_reason is None:
            raise ServerUnavailable(_INCOMPLETE)


class _HttpUser(LoadUser):
    abstract = True
    host = "http://127.0.0.1:8000"
    _session: requests.Session | None = None

    @classmethod
    def address(cls, options: LoadOptions, host: str | None) -> str:
        del options
        return host or cls.host

    def connect(self) -> None:
        self._session = requests.Session()
        self._session.trust_env = False  # never through a web proxy

    def disconnect(self) -> None:
        if self._session is not None:
            self._session.close()

    def send(self, ask: LoadRequest, timing: Timing) -> None:
        try:
            self.post(ask, timing)
        except requests.Timeout:
            raise RequestTimeout("the time limit of the request has passed") from None
        except requests.RequestException as error:
            raise ServerUnavailable(f"{self.host}: {error}") from None

    def post(self, ask: LoadRequest, timing: Timing) -> None:
        raise NotImplementedError

    def request(self, path: str, body: dict[str, Any], *, stream: bool) -> Any:
        assert self._session is not None
        url = f"{str(self.host).rstrip('/')}/{path}"
        response = self._session.post(url, json=body, stream=stream, timeout=self.options.request_timeout_s)
        if response.status_code != requests.codes.ok:
            raise _error(response.text, response.headers.get("retry-after-ms"))
        return response


class HttpStreamUser(_HttpUser):
    kind = "SSE"

    def post(self, ask: LoadRequest, timing: Timing) -> None:
        body = {
            "text_input": ask.prompt,
            "stream": True,
            "return_num_output_tokens": True,
            "return_finish_reason": True,
            **ask.parameters,
        }
        finish_reason = "None"
        with self.request(f"v2/models/{self.target_model()}/generate_stream", body, stream=True) as response:
            for event in _events(response):
                if "error" in event:
                    raise from_text(event["error"])
                finish_reason = event["finish_reason"]
                timing.arrived(event["num_output_tokens"], len(event["text_output"].encode()))
        if finish_reason == "None":
            raise ServerUnavailable(_INCOMPLETE)


class OpenAiUser(_HttpUser):
    kind = "OPENAI"
    host = "http://127.0.0.1:8080"

    def post(self, ask: LoadRequest, timing: Timing) -> None:
        options = {"include_usage": True, "continuous_usage_stats": True}  # an event may hold several tokens
        body = {"model": self.target_model(), "prompt": ask.prompt, "stream": True, "stream_options": options}
        num_tokens, is_over = 0, False
        with self.request("v1/completions", {**body, **ask.parameters}, stream=True) as response:
            for event in _events(response):
                if "error" in event:
                    raise _error(json.dumps(event), None)
                for choice in event["choices"]:
                    is_over = choice["finish_reason"] is not None
                    counted = event["usage"]["completion_tokens"]
                    timing.arrived(counted - num_tokens, len(choice["text"].encode()))
                    num_tokens = counted
        if not is_over:
            raise ServerUnavailable(_INCOMPLETE)


class HttpInferUser(_HttpUser):
    kind = "INFER"

    def target_model(self) -> str:
        return self.options.infer_model

    def post(self, ask: LoadRequest, timing: Timing) -> None:
        body: dict[str, Any] = {
            "inputs": [
                _tensor("text_input", "BYTES", ask.prompt),
                _tensor("sampling_parameters", "BYTES", json.dumps(ask.parameters)),
                _tensor("exclude_input_in_output", "BOOL", True),
                _tensor("return_num_output_tokens", "BOOL", True),
            ]
        }
        answer = self.request(f"v2/models/{self.target_model()}/infer", body, stream=False).json()
        outputs = {output["name"]: output["data"][0] for output in answer["outputs"]}
        timing.arrived(outputs["num_output_tokens"], len(outputs["text_output"].encode()))


def _tensor(name: str, datatype: str, value: object) -> dict[str, object]:
    return {"name": name, "datatype": datatype, "shape": [1], "data": [value]}


def _events(response: Any) -> Iterator[dict[str, Any]]:
    for line in response.iter_lines(chunk_size=None):  # a chunk_size of 1 is no sooner and takes 130 µs, not 3
        if line.startswith(b"data:") and line != b"data: [DONE]":
            yield json.loads(line[5:])


def _error(body: str, retry_after_ms: str | None) -> RequestError:
    try:
        error = json.loads(body)["error"]
    except (ValueError, KeyError, TypeError):
        error = body[:500] or "an empty answer"
    if not isinstance(error, dict):
        return from_text(str(error))
    retry = int(retry_after_ms) if retry_after_ms else None
    return BY_TAG.get(error.get("tag", ""), RequestError)(str(error.get("message")), retry_after_ms=retry)
