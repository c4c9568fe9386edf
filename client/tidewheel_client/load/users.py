"""Locust users that send requests and measure answers.

HTTP users send with `requests`: locust's FastHttpUser waits for a kilobyte, and httpx2 takes twice the CPU time for
an event.
"""

import argparse
import itertools
import json
from collections.abc import Iterator
from typing import Any, ClassVar

import requests
from gevent import GreenletExit
from locust import User, task

from tidewheel_client.client import Client
from tidewheel_client.errors import BY_TAG, RequestError, RequestTimeout, ServerUnavailable, from_text
from tidewheel_client.load.load_options import LoadRequest, OptionError, Reporter, Timing, Work

_INCOMPLETE = "the stream ended before its last response"


class LoadUser(User):
    """Locust user that pauses after each request, or waits for a refusal's retry time."""

    abstract = True
    kind: ClassVar[str]
    _numbers: ClassVar[Iterator[int]] = itertools.count()
    _connection: Any = None
    _retry_after_s = 0.0

    def on_start(self) -> None:
        self.options = self.environment.parsed_options
        worker = getattr(self.environment.runner, "worker_index", 0)
        try:
            self._work = Work(self.options, f"{worker} {next(self._numbers)}")
        except OptionError:  # from the web page; the log has the reason
            raise GreenletExit from None
        self._reporter = Reporter(self.environment.events.request, self.kind, self.target_model())
        self._connection = self.connect()

    def on_stop(self) -> None:
        if self._connection is not None:
            self._connection.close()

    def wait_time(self) -> float:
        return max(self._work.think_time(), self._retry_after_s)

    @task
    def ask(self) -> None:
        request, timing = self._work.next(), Timing()
        error = self._try_sending(request, timing)
        self._retry_after_s = 0.0 if error is None else (error.retry_after_ms or 0) / 1e3
        self._reporter.report(request, timing, error)

    def _try_sending(self, request: LoadRequest, timing: Timing) -> RequestError | None:
        try:
            self.send(request, timing)
        except RequestError as error:
            return error
        except requests.Timeout:
            return RequestTimeout("the time limit of the request has passed")
        except requests.RequestException as error:
            return ServerUnavailable(f"{self.host}: {error}")
        return None

    def target_model(self) -> str:
        return str(self.options.model)

    @classmethod
    def address(cls, args: argparse.Namespace, host: str | None) -> str:  # noqa: ARG003
        """Return URL or HOST:PORT. `host`: locust's option."""
        return str(host or cls.host)

    def connect(self) -> Any:
        """Return an object with `close`."""
        raise NotImplementedError

    def send(self, request: LoadRequest, timing: Timing) -> None:
        """Raise `RequestError` or `requests.RequestException` unless the answer is complete."""
        raise NotImplementedError


class GrpcStreamUser(LoadUser):
    kind = "GRPC"

    @classmethod
    def address(cls, args: argparse.Namespace, host: str | None) -> str:  # noqa: ARG003
        return str(args.grpc_url)

    def connect(self) -> Client:
        return Client(self.options.grpc_url, self.options.model, timeout_s=self.options.request_timeout)

    def send(self, request: LoadRequest, timing: Timing) -> None:
        with self._connection.stream(request.prompt, **request.parameters) as stream:
            for chunk in stream:
                timing.arrived(chunk.num_output_tokens or 0, len(chunk.text.encode()))
        if stream.finish_reason is None:
            raise ServerUnavailable(_INCOMPLETE)


class _HttpUser(LoadUser):
    abstract = True
    host = "http://127.0.0.1:8000"

    def connect(self) -> requests.Session:
        session = requests.Session()
        session.trust_env = False  # no web proxy
        return session

    def post_json(self, path: str, body: dict[str, Any], *, stream: bool = False) -> Any:
        """Return the response to a JSON body. Raise `RequestError` for a refusal."""
        url = f"{str(self.host).rstrip('/')}/{path}"
        response = self._connection.post(url, json=body, stream=stream, timeout=self.options.request_timeout)
        if response.status_code != requests.codes.ok:
            raise _error(response.text, response.headers.get("retry-after-ms"))
        return response

    def events(self, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        with self.post_json(path, {"stream": True, **body}, stream=True) as response:
            # A chunk_size of 1 is no sooner and takes 130 µs, not 3.
            for line in response.iter_lines(chunk_size=None):
                if line.startswith(b"data:") and line != b"data: [DONE]":
                    event = json.loads(line[5:])
                    if "error" in event:
                        raise _error(line[5:])
                    yield event


class HttpStreamUser(_HttpUser):
    kind = "SSE"

    def send(self, request: LoadRequest, timing: Timing) -> None:
        flags = {"return_num_output_tokens": True, "return_finish_reason": True}
        body = {"text_input": request.prompt, **flags, **request.parameters}
        finish_reason = "None"
        for event in self.events(f"v2/models/{self.target_model()}/generate_stream", body):
            finish_reason = event["finish_reason"]
            timing.arrived(event["num_output_tokens"], len(event["text_output"].encode()))
        if finish_reason == "None":
            raise ServerUnavailable(_INCOMPLETE)


class OpenAiUser(_HttpUser):
    kind = "OPENAI"
    host = "http://127.0.0.1:8080"

    def send(self, request: LoadRequest, timing: Timing) -> None:
        options = {"include_usage": True, "continuous_usage_stats": True}  # an event may hold several tokens
        body = {"model": self.target_model(), "prompt": request.prompt, "stream_options": options}
        num_tokens, is_over = 0, False
        for event in self.events("v1/completions", body | request.parameters):
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
        return self.options.infer_model or f"{self.options.model}_infer"

    def send(self, request: LoadRequest, timing: Timing) -> None:
        body: dict[str, Any] = {
            "inputs": [
                _tensor("text_input", "BYTES", request.prompt),
                _tensor("sampling_parameters", "BYTES", json.dumps(request.parameters)),
                _tensor("exclude_input_in_output", "BOOL", True),
                _tensor("return_num_output_tokens", "BOOL", True),
            ]
        }
        answer = self.post_json(f"v2/models/{self.target_model()}/infer", body).json()
        outputs = {output["name"]: output["data"][0] for output in answer["outputs"]}
        timing.arrived(outputs["num_output_tokens"], len(outputs["text_output"].encode()))


def _tensor(name: str, datatype: str, value: object) -> dict[str, object]:
    return {"name": name, "datatype": datatype, "shape": [1], "data": [value]}


def _error(body: str | bytes, retry_after_ms: str | None = None) -> RequestError:
    try:
        error = json.loads(body)["error"]
    except (ValueError, KeyError, TypeError):
        error = body[:500] or "an empty answer"
    if not isinstance(error, dict):
        return from_text(str(error))
    retry = int(retry_after_ms) if retry_after_ms else None
    return BY_TAG.get(error.get("tag", ""), RequestError)(str(error.get("message")), retry_after_ms=retry)
