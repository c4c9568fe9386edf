import json
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from tidewheel.bench import BenchError
from tidewheel.bench.outcome import OfferedRequest, RequestFailed, RequestOutcome, words
from tidewheel.bench.transports.declared_inputs import DeclaredInputs

PROBE_S = 5.0
_READ_BUFFER = 1 << 20  # for an SSE line


class _HttpTransport:
    can_cancel = False  # Triton's HTTP endpoints do not notice a client that leaves

    def __init__(self, url: str) -> None:
        self.url = url
        self._session: aiohttp.ClientSession | None = None

    async def open(self) -> None:
        connector = aiohttp.TCPConnector(limit=0)
        timeout = aiohttp.ClientTimeout(total=None)
        self._session = aiohttp.ClientSession(connector=connector, timeout=timeout, read_bufsize=_READ_BUFFER)
        try:
            await self._probe()
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def _probe(self) -> None:
        raise NotImplementedError

    async def _get(self, url: str) -> tuple[int, str]:
        assert self._session is not None
        try:
            async with self._session.get(url, timeout=aiohttp.ClientTimeout(total=PROBE_S)) as answer:
                return answer.status, await answer.text(errors="replace")
        except (aiohttp.ClientError, TimeoutError, OSError):
            where = urlsplit(url).netloc
            raise BenchError(f"no server answers at {where}: start one, or correct the address") from None

    async def _post(self, body: Mapping[str, Any]) -> AsyncIterator[bytes]:
        assert self._session is not None
        try:
            async with self._session.post(self.url, json=body) as answer:
                if answer.status != 200:
                    text = await answer.text(errors="replace")
                    raise RequestFailed(f"HTTP {answer.status}", _message(text))
                async for line in answer.content:
                    yield line
        except (aiohttp.ClientError, OSError) as error:
            raise RequestFailed("CONNECTION", str(error) or type(error).__name__) from None

    async def _events(self, body: Mapping[str, Any]) -> AsyncIterator[Mapping[str, Any]]:
        async for line in self._post(body):
            data = line.removeprefix(b"data:").strip()
            if line.startswith(b"data:") and data != b"[DONE]":
                yield json.loads(data)


class _TritonHttpTransport(_HttpTransport):
    async def _probe(self) -> None:
        model_url = self.url.rpartition("/")[0]
        name = model_url.rpartition("/")[2]
        for page in ("ready", "config"):
            status, text = await self._get(f"{model_url}/{page}")
            if status != 200:
                raise BenchError(
                    f"model {name!r} at {urlsplit(self.url).netloc} is not ready: wait until it is loaded"
                )
        config = json.loads(text)
        inputs = (tensor["name"] for tensor in config.get("input", ()))
        self._declared = DeclaredInputs.of(name, inputs, config.get("max_batch_size", 0), is_decoupled=False)


class GenerateStreamTransport(_TritonHttpTransport):
    async def send(self, offered: OfferedRequest, input_ids: Sequence[int], outcome: RequestOutcome) -> None:
        body: dict[str, Any] = {"stream": True, **offered.sampling, **dict([self._declared.prompt(input_ids)])}
        flags = ("return_num_output_tokens", "return_finish_reason")
        body |= {flag: True for flag in flags if flag in self._declared.inputs}
        async for event in self._events(body):
            if "error" in event:
                raise RequestFailed("ERROR", str(event["error"]))
            counted = event.get("num_output_tokens")
            outcome.add_tokens(int(bool(event.get("text_output"))) if counted is None else int(counted))
            reason = str(event.get("finish_reason", "None"))
            outcome.finish_reason = outcome.finish_reason if reason == "None" else reason


class InferTransport(_TritonHttpTransport):
    async def send(self, offered: OfferedRequest, input_ids: Sequence[int], outcome: RequestOutcome) -> None:
        outcome.streamed = False
        inputs = [
            {"name": name, "datatype": datatype, "shape": self._declared.sizes(values), "data": values}
            for name, datatype, values in self._declared.tensors(offered, input_ids)
        ]
        body = b"".join([line async for line in self._post({"inputs": inputs})])
        outputs = {tensor["name"]: tensor["data"] for tensor in json.loads(body)["outputs"]}
        outcome.add_tokens(int(outputs.get("num_output_tokens", [offered.num_output_tokens])[0]))


class OpenAiTransport(_HttpTransport):
    """Transport to `…/v1/completions` with token ids, or `…/v1/chat/completions` with text."""

    def __init__(self, url: str, model: str) -> None:
        super().__init__(url)
        self._model = model
        self._is_chat = url.endswith("/chat/completions")

    async def send(self, offered: OfferedRequest, input_ids: Sequence[int], outcome: RequestOutcome) -> None:
        body: dict[str, Any] = {"model": self._model, "stream": True, "stream_options": {"include_usage": True}}
        body |= {"max_tokens": offered.num_output_tokens, "temperature": 0, "ignore_eos": True}
        if self._is_chat:
            body["messages"] = [{"role": "user", "content": words(input_ids)}]
        else:
            body["prompt"] = list(input_ids)
        usage: Mapping[str, Any] = {}
        async for event in self._events(body):
            if "error" in event:
                raise RequestFailed("ERROR", _message(json.dumps(event)))
            usage = event.get("usage") or usage
            for choice in event.get("choices", ()):
                text = choice.get("text") or choice.get("delta", {}).get("content")
                outcome.add_tokens(1 if text else 0)
                outcome.finish_reason = choice.get("finish_reason") or outcome.finish_reason
        if "completion_tokens" in usage:  # chunks may hold several tokens or no text
            outcome.num_tokens = int(usage["completion_tokens"])

    async def _probe(self) -> None:
        base = self.url.partition("/v1/")[0]
        status, text = await self._get(f"{base}/v1/models")
        if status != 200:
            return  # models list is optional
        names = [entry["id"] for entry in json.loads(text).get("data", ())]
        if not self._model and len(names) == 1:
            self._model = names[0]
        if names and self._model not in names:
            raise BenchError(f"model {self._model!r} is not served at {base}: it has {', '.join(names)}")


def _message(text: str) -> str:
    try:
        error = json.loads(text)["error"]
    except (ValueError, KeyError, TypeError):
        error = text[:500]
    return " ".join(str(error.get("message", error) if isinstance(error, dict) else error).split())
