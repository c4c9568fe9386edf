import asyncio
import contextlib
import logging
import re
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

import msgspec
from aiohttp import web

from tidewheel import metrics
from tidewheel.gateway import answers, bodies, encoders, errors, media, messages, responses, web_pages
from tidewheel.gateway.answers import AnswerWriter
from tidewheel.gateway.api_keys import Account, ApiKeys
from tidewheel.gateway.bodies import UpstreamRequest
from tidewheel.gateway.counters import CONTENT_TYPE, WRONG_KEYS, Counts, GatewayWorker, render, series
from tidewheel.gateway.encoders import EncoderAttempt
from tidewheel.gateway.gateway_options import GatewayOptions
from tidewheel.gateway.loras import LIST_INTERVAL_S, LoraDirectory, ServedLora
from tidewheel.gateway.upstream import Task
from tidewheel.gateway.upstreams import Attempt, ProxyAttempt, Upstreams
from tidewheel.gateway.web_pages import Handler
from tidewheel_client.errors import InternalError, InvalidRequest, RequestError, RequestTimeout, Unsupported, WrongKey

BODY_S = 60.0
_LARGE = 1 << 16  # bytes of work that delay streams
_REFRESH_S = 1.0  # of keys, and of figures for other workers
_TRACEPARENT = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")
_OPEN_PATHS = ("/", "/health")
_PROXIED = "/v2/"
_ANTHROPIC = "/v1/messages"
_FRONT_PAGE = """\
Tidewheel's gateway. OpenAI's API is at /v1 (GET /v1/models lists models), readiness at /health, figures at /metrics.
The playground, a page to try models, is off: start the gateway with --playground.
"""

T = TypeVar("T")

logger = logging.getLogger(__name__)


class _Streamed(web.StreamResponse):
    _send_headers_immediately = False  # but with the first part of the body, in one packet


class _Endpoint(NamedTuple):
    read: Callable[[bodies.Fields], UpstreamRequest]
    writer: Callable[[UpstreamRequest], AnswerWriter]
    tasks: Sequence[Task] = ("generate",)
    attempt: type[Attempt] = Attempt
    is_form: bool = False  # the body; else JSON
    added_bytes: Callable[[bodies.Fields], int] = lambda _: 0  # to the body, by the gateway itself


class Gateway:
    def __init__(
        self,
        upstreams: Upstreams,
        keys: ApiKeys,
        options: GatewayOptions = GatewayOptions(),  # noqa: B008 - frozen
        worker: GatewayWorker | None = None,
    ) -> None:
        self._upstreams = upstreams
        self._loras = LoraDirectory(upstreams)
        self._keys = keys
        self._options = options
        self._open_paths = (*_OPEN_PATHS, "/metrics") if options.open_metrics else _OPEN_PATHS
        self._worker = worker or GatewayWorker()
        self._counts = self._worker.before()
        self._started = int(time.time())
        self._large = asyncio.Lock()
        # Connections go to any worker, so several store none.
        self._responses = responses.ResponseStore(*([0] if self._worker.num_workers > 1 else []))

    def application(self) -> web.Application:
        speech = partial(_Endpoint, writer=media.TranscriptWriter, is_form=True)
        proxied = partial(_Endpoint, writer=AnswerWriter, tasks=("generate", "draw"), attempt=ProxyAttempt)
        endpoints = {
            "/v1/chat/completions": _Endpoint(bodies.read_chat, answers.TextWriter),
            "/v1/completions": _Endpoint(bodies.read_completion, answers.TextWriter),
            _ANTHROPIC: _Endpoint(messages.read_messages, messages.MessageWriter),
            f"{_ANTHROPIC}/count_tokens": _Endpoint(messages.read_count, messages.CountWriter),
            "/v1/embeddings": _Endpoint(encoders.read_embeddings, encoders.EmbeddingWriter, ("generate", "embed")),
            "/v1/rerank": _Endpoint(encoders.read_rerank, encoders.PairWriter, ("rerank",)),
            "/v1/score": _Endpoint(encoders.read_score, encoders.PairWriter, ("rerank",)),
            "/v1/audio/transcriptions": speech(media.read_speech),
            "/v1/audio/translations": speech(partial(media.read_speech, translate=True)),
            "/v1/images/generations": _Endpoint(
                media.read_images, media.PictureWriter, ("draw",), media.ImageAttempt
            ),
            "/tokenize": _Endpoint(bodies.read_tokenize, answers.TokenizeWriter),
            "/detokenize": _Endpoint(bodies.read_detokenize, answers.DetokenizeWriter),
            "/v2/models/{model}/generate": proxied(bodies.read_triton),
            "/v2/models/{model}/generate_stream": proxied(partial(bodies.read_triton, stream=True)),
        }
        application = web.Application(middlewares=[self._guard], client_max_size=self._options.max_body_bytes)
        web_pages.allow_origins(application, self._options.cors_origin)
        application.cleanup_ctx.append(self._run)
        application.add_routes(
            [
                *(web.post(path, partial(self._serve, endpoint)) for path, endpoint in endpoints.items()),
                *(web_pages.playground_routes() if self._options.playground else [web.get("/", _front_page)]),
                web.post("/v1/responses", self._respond),
                web.get("/v1/responses/{id}", self._stored_response),
                web.delete("/v1/responses/{id}", self._stored_response),
                web.post("/v1/load_lora_adapter", partial(self._order_lora, self._loras.load)),
                web.post("/v1/unload_lora_adapter", partial(self._order_lora, self._loras.unload)),
                web.get("/health", self._health),
                web.get("/metrics", self._metrics),
                web.get("/v1/models", self._list_models),
                web.get("/v1/models/{model:.+}", self._show_model),
            ]
        )
        return application

    async def _serve(self, endpoint: _Endpoint, http: web.Request) -> web.StreamResponse:
        account: Account = http["account"]
        with account.admit():
            body = await _read_body(http, is_form=endpoint.is_form)
            size = len(body) if isinstance(body, bytes) else sum(map(len, body.values()))
            fields = await self._beside(size, lambda: _parse(http, body))
            size += endpoint.added_bytes(fields)
            request = await self._beside(size, lambda: account.label(endpoint.read(fields)))
            if isinstance(request.body, bodies.GenerateBody):
                bodies.add_objectives(request.params, fields, http.headers)
            name = http.match_info.get("model", request.body.model)
            task = await self._loras.resolve(request, name, endpoint.tasks)
            attempt = EncoderAttempt if task in ("embed", "rerank") else endpoint.attempt
            request.request_id, request.traceparent = _request_id(http, request), _traceparent(http)
            request.reasoning = self._options.reasoning
            indices = range(len(request.prompts))
            attempts = await self._beside(size * len(indices), lambda: [attempt(request, index) for index in indices])
            writer = endpoint.writer(request)
            headers = {"x-request-id": request.request_id} if request.request_id else {}
            async with contextlib.aclosing(self._upstreams.deliver_all(attempts)) as responses:
                if request.stream:
                    answer = await self._stream(http, headers | answers.STREAM_HEADERS, responses, writer)
                else:
                    chunks = [(index, chunk) async for index, response in responses for chunk in response]
                    headers["Content-Type"] = writer.content_type
                    answer = web.Response(body=writer.whole(chunks), headers=headers)
            if writer.called:
                self._upstreams.pause_session(attempts[0], writer.called)
            return answer

    async def _respond(self, http: web.Request) -> web.StreamResponse:
        turn = responses.ResponseTurn(self._responses, http["account"].tenant)
        writer = partial(responses.ResponseWriter, turn=turn)
        endpoint = _Endpoint(turn.read, writer, added_bytes=turn.num_previous_bytes)
        return await self._serve(endpoint, http)

    async def _stored_response(self, http: web.Request) -> web.Response:
        is_delete, response_id = http.method == "DELETE", http.match_info["id"]
        take = self._responses.remove if is_delete else self._responses.get
        stored = take(http["account"].tenant, response_id)
        if stored is None:
            raise errors.UnknownUrl(f"{response_id[:80]!r} {responses.MISSING}")
        deleted = {"id": response_id, "object": "response", "deleted": True}
        return _json_response(msgspec.json.encode(deleted) if is_delete else stored.answer)

    async def _order_lora(self, order: Callable[[bodies.Fields], Awaitable[str]], http: web.Request) -> web.Response:
        account: Account = http["account"]
        with account.admit():
            account.check_admin()
            body = await _read_body(http, is_form=False)
            return web.Response(text=await order(await self._beside(len(body), lambda: _parse(http, body))))

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        self._counts[series(metrics.GATEWAY_OPEN)] += 1
        is_page = self._options.playground and web_pages.is_playground(request.path)
        try:
            if request.path not in self._open_paths and not is_page:
                request["account"] = self._keys.account(_authorization(request))
            if self._upstreams.not_ready:
                await self._upstreams.look_again()
            response = await handler(request)
            if is_page:
                response.headers.update(web_pages.HEADERS)
        except RequestError as error:
            response = self._refuse(request, error)
        except web.HTTPException as error:
            response = self._refuse(request, errors.from_aiohttp(request, error))
        except asyncio.CancelledError:
            self._counts[series(metrics.GATEWAY_HANG_UPS)] += 1
            raise
        except ConnectionError:  # the client is gone
            self._counts[series(metrics.GATEWAY_HANG_UPS)] += 1
            response = _error_response(request, InternalError("the connection was lost"))
        except Exception:
            logger.exception("a request to %s failed", request.path)
            response = self._refuse(request, InternalError("the gateway failed; its log says why"))
        finally:
            self._counts[series(metrics.GATEWAY_OPEN)] -= 1
        resource = request.match_info.route.resource
        path = "other" if resource is None else resource.canonical
        self._counts[series(metrics.GATEWAY_REQUESTS, path, str(response.status))] += 1
        return response

    def _refuse(self, http: web.Request, error: RequestError) -> web.Response:
        self._counts[series(metrics.GATEWAY_ERRORS, error.label)] += 1
        return _error_response(http, error)

    async def _beside(self, size: int, work: Callable[[], T]) -> T:
        """Call `work`; beyond `_LARGE` bytes in a thread, one call at a time, because `work` holds the GIL."""
        if size <= _LARGE:
            return work()
        async with self._large:
            return await asyncio.to_thread(work)

    async def _stream(
        self,
        http: web.Request,
        headers: Mapping[str, str],
        responses: AsyncIterator[tuple[int, Any]],
        writer: AnswerWriter,
    ) -> web.StreamResponse:
        """Stream the answer. Raise `RequestError` only before the first response, send later ones in the stream."""
        answer = _Streamed(headers=headers)
        try:
            async for index, response in responses:
                if not answer.prepared:
                    await answer.prepare(http)
                if part := writer.events(index, response):
                    await answer.write(part)
            last = writer.end()
        except RequestError as error:
            if not answer.prepared:
                raise
            body = self._refuse(http, error).body
            assert isinstance(body, bytes)
            last = writer.failed(body)
        await answer.prepare(http)  # once
        await answer.write_eof(last)
        return answer

    async def _run(self, _: web.Application) -> AsyncIterator[None]:
        async with self._upstreams:
            refresh = asyncio.create_task(self._refresh())
            yield
            refresh.cancel()
            self.publish()

    async def _refresh(self) -> None:
        while True:
            num_before = self._counts[WRONG_KEYS]
            await asyncio.sleep(_REFRESH_S)
            self._keys.refresh()
            self.publish()
            self._responses.expire(time.monotonic())
            if num_new := self._counts[WRONG_KEYS] - num_before:  # one line for all
                logger.warning("[%s] %d requests without a known API key", WrongKey.tag, num_new)

    def publish(self) -> None:
        self._worker.publish(self._current_counts())

    def _current_counts(self) -> Counts:
        counts = self._counts.copy()
        counts[series(metrics.GATEWAY_MOVED)] += self._upstreams.num_moved  # before a restart, and since
        for one in self._upstreams.each:
            counts[series(metrics.UPSTREAM_OPEN, one.address.grpc)] = one.num_open
            counts[series(metrics.UPSTREAM_SENT, one.address.grpc)] += one.num_sent
        return counts

    async def _metrics(self, _: web.Request) -> web.Response:
        each = self._upstreams.each
        of_server = await each[0].metrics() if len(each) == 1 else ""  # an endpoint picker reads them here
        self.publish()  # or counts go back at a restart
        counts = self._current_counts()
        for others in self._worker.others():
            counts.update(others)
        for one in each:
            counts[series(metrics.UPSTREAM_READY, one.address.grpc)] = not one.not_ready
        return web.Response(body=(of_server + render(counts)).encode(), headers={"Content-Type": CONTENT_TYPE})

    async def _health(self, _: web.Request) -> web.Response:
        await self._upstreams.look_again()
        reason = self._upstreams.not_ready
        body = msgspec.json.encode({"ready": not reason, "reason": reason})
        return _json_response(body, status=503 if reason else 200)

    async def _list_models(self, _: web.Request) -> web.Response:
        await self._loras.read(LIST_INTERVAL_S)
        data = [self._card(*model) for model in self._upstreams.models.items()]
        data += [self._lora_card(*lora) for lora in sorted(self._loras.listed.items())]
        return _json_response(msgspec.json.encode({"object": "list", "data": data}))

    async def _show_model(self, http: web.Request) -> web.Response:
        name = http.match_info["model"]
        lora = await self._loras.find(name)
        card = self._card(*self._upstreams.model(name)) if lora is None else self._lora_card(name, lora)
        return _json_response(msgspec.json.encode(card))

    def _lora_card(self, name: str, lora: ServedLora) -> dict[str, object]:
        return self._card(name, "generate") | {"root": lora.path, "parent": lora.model}

    def _card(self, name: str, task: Task) -> dict[str, object]:
        return {"id": name, "object": "model", "created": self._started, "owned_by": "tidewheel", "task": task}


async def _front_page(_: web.Request) -> web.Response:
    return web.Response(text=_FRONT_PAGE)


async def _read_body(http: web.Request, *, is_form: bool) -> bytes | bodies.Fields:
    kind = "multipart/form-data" if is_form else "application/json"
    if http.content_type != kind:
        raise Unsupported(f"Content-Type is {http.content_type}: send {kind}")
    if http.headers.get("Content-Encoding", "identity").lower() != "identity":
        raise Unsupported("Content-Encoding is set: send the body as it is")
    if (http.content_length or 0) > http.client_max_size:
        raise web.HTTPRequestEntityTooLarge(http.client_max_size, http.content_length or 0)
    try:
        async with asyncio.timeout(BODY_S):
            return await (media.read_form(http) if is_form else http.read())
    except TimeoutError:
        raise RequestTimeout(f"the body did not arrive within {BODY_S:g} s") from None


def _parse(http: web.Request, body: bytes | bodies.Fields) -> bodies.Fields:
    fields = bodies.parse(body) if isinstance(body, bytes) else body
    http["fields"] = fields  # for errors that name a field
    return fields


def _authorization(http: web.Request) -> str:
    key = http.headers.get("x-api-key")  # as Anthropic's clients send it
    return http.headers.get("Authorization", f"Bearer {key}" if key else "")


def _request_id(http: web.Request, request: UpstreamRequest) -> str:
    if http.path.startswith(_PROXIED):
        return ""
    given = request.request_id or http.headers.get("X-Request-Id", "")
    if len(given) > bodies.MAX_REQUEST_ID_CHARS or not given.isprintable():
        raise InvalidRequest(f"X-Request-Id has more than {bodies.MAX_REQUEST_ID_CHARS} printable characters")
    return given or uuid.uuid4().hex


def _traceparent(http: web.Request) -> str:
    header = http.headers.get("traceparent", "").strip()
    return header if _TRACEPARENT.fullmatch(header) else ""


def _error_response(http: web.Request, error: RequestError) -> web.Response:
    status = errors.meaning_of(error).status
    if http.path.startswith(_PROXIED):
        body = msgspec.json.encode({"error": str(error)})
    else:
        body = errors.openai_body(error, http.get("fields", ()))
    if http.path.startswith(_ANTHROPIC):
        body = errors.anthropic_body(body, status)
    return _json_response(body, status=status, headers=errors.headers_of(error))


def _json_response(body: bytes, *, status: int = 200, headers: Mapping[str, str] | None = None) -> web.Response:
    return web.Response(body=body, status=status, content_type="application/json", headers=headers)
