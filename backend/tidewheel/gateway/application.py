"""The gateway's HTTP application."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar

import msgspec
from aiohttp import web
from tritonclient.grpc import service_pb2 as pb

from tidewheel.fleet.router import RouteRequest
from tidewheel.gateway import bodies, embeddings, openai_errors, passing, playground_pages, tokenizing
from tidewheel.gateway.answering import Answer
from tidewheel.gateway.api_keys import Account, ApiKeys
from tidewheel.gateway.bodies import Ask
from tidewheel.gateway.counters import CONTENT_TYPE, add, merge
from tidewheel.gateway.gateway_options import GatewayOptions
from tidewheel.gateway.http_messages import id_of, json_answer, of_http, read_body, refusal, traceparent
from tidewheel.gateway.merging import merged
from tidewheel.gateway.order import GrpcOrder, HttpOrder
from tidewheel.gateway.routing import route_request
from tidewheel.gateway.upstreams import Upstreams
from tidewheel.gateway.worker_place import WorkerPlace
from tidewheel_client import Chunk
from tidewheel_client.errors import InternalError, RequestError, WrongKey

_LARGE = 1 << 16  # bytes, whose work is noticed by streams
_REFRESH_S = 1.0  # between two looks at the file of keys, and two reports to other workers
_STREAM_HEADERS = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}
_JSON_HEADERS = {"Content-Type": "application/json"}
_OPEN_PATHS = ("/", "/health")
_FRONT_PAGE = """\
Tidewheel's gateway. OpenAI's API is at /v1 (GET /v1/models lists models), readiness at /health, figures at /metrics.
The playground, a page to try models, is off: start the gateway with --playground.
"""

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
_Answering = Callable[[web.Request, Ask], Awaitable[web.StreamResponse]]

T = TypeVar("T")
logger = logging.getLogger(__name__)


async def _front_page(_: web.Request) -> web.Response:
    return web.Response(text=_FRONT_PAGE)


class _Streamed(web.StreamResponse):
    _send_headers_immediately = False  # but with the first part of the body, in one packet


class Gateway:
    def __init__(
        self,
        upstreams: Upstreams,
        keys: ApiKeys,
        options: GatewayOptions = GatewayOptions(),  # noqa: B008 - frozen
        place: WorkerPlace | None = None,
    ) -> None:
        self._upstreams = upstreams
        self._keys = keys
        self._max_body_bytes = options.max_body_bytes
        self._reasoning = options.reasoning
        self._playground = options.playground
        self._open_paths = (*_OPEN_PATHS, "/metrics") if options.open_metrics else _OPEN_PATHS
        self._place = place or WorkerPlace()
        self._counters = self._place.before()
        self._num_wrong_told = self._counters.errors.get(WrongKey.tag, 0)
        self._started = int(time.time())
        self._large = asyncio.Lock()

    def application(self) -> web.Application:
        application = web.Application(middlewares=[self._answer], client_max_size=self._max_body_bytes)
        application.cleanup_ctx.append(self._live)
        application.add_routes(
            [
                web.get("/health", self._health),
                web.get("/metrics", self._metrics),
                web.get("/v1/models", self._list_models),
                web.get("/v1/models/{model:.+}", self._show_model),
                web.post("/v1/chat/completions", self._answering(bodies.read_chat, self._generate)),
                web.post("/v1/completions", self._answering(bodies.read_completion, self._generate)),
                web.post("/v1/embeddings", self._answering(embeddings.read_embeddings, self._embed)),
                web.post("/v2/models/{model}/generate", self._answering(passing.read_generate, self._pass)),
                web.post("/v2/models/{model}/generate_stream", self._answering(passing.read_stream, self._pass)),
                web.post("/tokenize", self._answering(tokenizing.read_tokenize, self._tokenize)),
                web.post("/detokenize", self._answering(tokenizing.read_detokenize, self._detokenize)),
            ]
        )
        application.add_routes(playground_pages.routes() if self._playground else [web.get("/", _front_page)])
        return application

    async def _live(self, _: web.Application) -> AsyncIterator[None]:
        async with self._upstreams:
            refresh = asyncio.create_task(self._refresh())
            yield
            refresh.cancel()
            self.publish()

    async def _refresh(self) -> None:
        while True:
            await asyncio.sleep(_REFRESH_S)
            self._keys.refresh()
            self.publish()
            self._tell_wrong_keys()

    def _tell_wrong_keys(self) -> None:
        """Log once a second at most, however many there are."""
        num_wrong = self._counters.errors.get(WrongKey.tag, 0)
        if num_wrong > self._num_wrong_told:
            logger.warning("[%s] %d requests without a known API key", WrongKey.tag, num_wrong - self._num_wrong_told)
            self._num_wrong_told = num_wrong

    def publish(self) -> None:
        """Tell the other workers the own figures."""
        self._place.publish(self._counters.with_upstreams(self._upstreams))

    @web.middleware
    async def _answer(self, request: web.Request, handler: Any) -> web.StreamResponse:
        """Check the key, turn errors into answers, and count."""
        self._counters.num_open += 1
        try:
            if not self._is_open(request.path):
                request["account"] = self._keys.account(request.headers.get("Authorization", ""))
            if self._upstreams.not_ready:  # as it was, which the next look may change
                await self._upstreams.look_again()
            response: web.StreamResponse = await handler(request)
        except RequestError as error:
            response = self._refuse(request, error)
        except web.HTTPException as error:
            response = self._refuse(request, of_http(request, error))
        except asyncio.CancelledError:
            self._counters.num_hang_ups += 1
            raise
        except ConnectionError:  # the client is gone, and reads no answer
            self._counters.num_hang_ups += 1
            response = refusal(request, InternalError("the connection was lost"))
        except Exception:
            logger.exception("a request to %s failed", request.path)
            response = self._refuse(request, InternalError("the gateway failed; its log says why"))
        finally:
            self._counters.num_open -= 1
        resource = request.match_info.route.resource
        path = "other" if resource is None else resource.canonical
        self._counters.count(path, response.status)
        return response

    def _is_open(self, path: str) -> bool:
        """Return whether the path needs no key."""
        return path in self._open_paths or (self._playground and playground_pages.is_open(path))

    def _refuse(self, request: web.Request, error: RequestError) -> web.Response:
        self._counters.count_error(error)
        return refusal(request, error)

    async def _health(self, _: web.Request) -> web.Response:
        await self._upstreams.look_again()
        reason = self._upstreams.not_ready
        body = msgspec.json.encode({"ready": not reason, "reason": reason})
        return json_answer(body, status=503 if reason else 200)

    async def _metrics(self, _: web.Request) -> web.Response:
        each = self._upstreams.each
        texts = await asyncio.gather(*(one.metrics() for one in each))
        theirs = merge(dict(zip((one.address.grpc for one in each), texts, strict=True)))
        self.publish()  # what is told once is never taken back
        own = self._counters.with_upstreams(self._upstreams)
        text = theirs + add([own, *self._place.others()]).render(self._upstreams)
        return web.Response(body=text.encode(), headers={"Content-Type": CONTENT_TYPE})

    async def _list_models(self, _: web.Request) -> web.Response:
        data = [self._card(name) for name in self._upstreams.models]
        return json_answer(msgspec.json.encode({"object": "list", "data": data}))

    async def _show_model(self, request: web.Request) -> web.Response:
        return json_answer(msgspec.json.encode(self._card(self._upstreams.model(request.match_info["model"]))))

    def _card(self, name: str) -> dict[str, object]:
        return {"id": name, "object": "model", "created": self._started, "owned_by": "tidewheel"}

    def _answering(self, read: Callable[[dict[str, Any]], Ask], answer: _Answering) -> Handler:
        """Return the handler of a body that `read` understands."""

        async def handle(request: web.Request) -> web.StreamResponse:
            account: Account = request["account"]
            with account.admit():
                body = await read_body(request)

                def understand() -> Ask:
                    request["fields"] = fields = bodies.parse(body)
                    return account.label(read(fields))

                ask = await self._beside(len(body), understand)
                request["schema_name"] = ask.schema_name
                model = self._upstreams.model(request.match_info.get("model", ask.model))
                return await answer(request, ask._replace(model=model, traceparent=traceparent(request)))

        return handle

    async def _beside(self, size: int, work: Callable[[], T]) -> T:
        """Do work on so many bytes here, or beside the loop if they are many: one at a time, as it holds the GIL."""
        if size <= _LARGE:
            return work()
        async with self._large:
            return await asyncio.to_thread(work)

    async def _generate(self, request: web.Request, ask: Ask) -> web.StreamResponse:
        return await (self._stream(request, ask) if ask.stream else self._whole(request, ask))

    async def _embed(self, request: web.Request, ask: Ask) -> web.StreamResponse:
        chunks: list[tuple[int, Chunk]] = []
        async with contextlib.aclosing(self._ask(ask, id_of(request, ask))) as responses:
            async for number, news in responses:
                chunks += [(number, chunk) for chunk in news]
        return json_answer(embeddings.embeddings(request["fields"], ask.model, chunks))

    async def _tokenize(self, request: web.Request, ask: Ask) -> web.StreamResponse:
        return json_answer(tokenizing.tokenized(await self._text(request, ask)))

    async def _detokenize(self, request: web.Request, ask: Ask) -> web.StreamResponse:
        return json_answer(tokenizing.detokenized(await self._text(request, ask)))

    async def _text(self, request: web.Request, ask: Ask) -> str:
        """Return the text of all answers."""
        if not ask.prompts:
            return ""
        async with contextlib.aclosing(self._ask(ask, id_of(request, ask))) as responses:
            return "".join([chunk.text async for _, news in responses for chunk in news])

    async def _whole(self, request: web.Request, ask: Ask) -> web.Response:
        request_id = id_of(request, ask)
        chunks: list[tuple[int, Chunk]] = []
        async with contextlib.aclosing(self._ask(ask, request_id)) as responses:
            async for number, news in responses:
                chunks += [(number, chunk) for chunk in news]
        return json_answer(
            Answer(ask, request_id, self._reasoning).whole(chunks), headers={"x-request-id": request_id}
        )

    async def _stream(self, request: web.Request, ask: Ask) -> web.StreamResponse:
        """Answer with events from the first output on. An error before it is an answer of its own."""
        request_id = id_of(request, ask)
        answer = Answer(ask, request_id, self._reasoning)
        response = _Streamed(headers=_STREAM_HEADERS | {"x-request-id": request_id})
        try:
            async with contextlib.aclosing(self._ask(ask, request_id)) as responses:
                async for number, news in responses:
                    if not response.prepared:
                        await response.prepare(request)
                    if events := answer.events(number, news):
                        await response.write(events)
            await response.write(answer.end())
        except RequestError as error:
            if not response.prepared:
                raise
            self._counters.count_error(error)
            await response.write(b"data: " + openai_errors.body_of(error) + b"\n\n")
        await response.write_eof()
        return response

    async def _pass(self, request: web.Request, ask: Ask) -> web.StreamResponse:
        """Answer as Triton does, from the first byte on. An error before it is an answer of its own."""
        order = HttpOrder(ask, "", ask.prompts[0])
        prepared = await self._beside(ask.size, lambda: (route_request(ask, order.prompt), order.encode()))
        response = _Streamed(headers=_STREAM_HEADERS if ask.stream else _JSON_HEADERS)
        try:
            async with contextlib.aclosing(self._upstreams.generate(order, *prepared)) as parts:
                async for part in parts:
                    if not response.prepared:
                        await response.prepare(request)
                    await response.write(part)
        except RequestError as error:
            if not response.prepared:
                raise
            self._counters.count_error(error)
            await response.write(b"data: " + passing.error_body(error) + b"\n\n")
        if not response.prepared:
            await response.prepare(request)
        await response.write_eof()
        return response

    async def _ask(self, ask: Ask, request_id: str) -> AsyncGenerator[tuple[int, list[Chunk]]]:
        """Yield the news of all prompts, each with the number of its prompt."""
        ids = [request_id] if len(ask.prompts) == 1 else [f"{request_id}-{i}" for i in range(len(ask.prompts))]
        orders = [GrpcOrder(ask, one_id, prompt) for one_id, prompt in zip(ids, ask.prompts, strict=True)]

        def prepare() -> list[tuple[RouteRequest, pb.ModelInferRequest]]:
            return [(route_request(ask, order.prompt), order.encode()) for order in orders]

        prepared = await self._beside(ask.size, prepare)
        streams = [self._upstreams.stream(order, *each) for order, each in zip(orders, prepared, strict=True)]
        if len(streams) == 1:
            async with contextlib.aclosing(streams[0]) as responses:
                async for news in responses:
                    yield 0, news
            return
        async with contextlib.aclosing(merged(streams)) as news_of_all:
            async for item in news_of_all:
                yield item
