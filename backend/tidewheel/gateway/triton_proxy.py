"""Triton's HTTP calls `generate` and `generate_stream`, passed on to a server."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping

import aiohttp
import msgspec

from tidewheel.gateway.bodies import Fields, UpstreamRequest, check_parameters
from tidewheel.gateway.upstream import PROBE_S, Upstream
from tidewheel.gateway.upstreams import Attempt
from tidewheel_client.error_translation import from_http
from tidewheel_client.errors import InvalidRequest, ServerUnavailable, Unsupported

_PROMPTS = ("text_input", "input_ids", "messages")  # a router reads them
_HEADERS = {"Content-Type": "application/json"}
_NO_LIMIT = aiohttp.ClientTimeout(total=None, connect=PROBE_S)


class ProxyAttempt(Attempt):
    """Attempt over Triton's HTTP; each response is a list of parts of the body."""

    def encode(self, params: Mapping[str, object]) -> None:
        self.message = msgspec.json.encode({**self.request.prompts[0], **params})

    async def send(self, upstream: Upstream) -> AsyncGenerator[list[bytes]]:
        authority, model = upstream.address.http, self.request.model
        if not authority:
            raise Unsupported(f"the HTTP port of {upstream.address.grpc} is not known here: name it, with http=PORT")
        method = "generate_stream" if self.request.stream else "generate"
        url = f"http://{authority}/v2/models/{model}/{method}"
        try:
            async with upstream.http.post(url, data=self.message, timeout=_NO_LIMIT, headers=_HEADERS) as answer:
                if not answer.ok:
                    raise from_http(answer.status, await answer.text(errors="replace"))
                async for data in answer.content.iter_any():
                    yield [data]
        except (aiohttp.ClientError, OSError) as error:
            raise ServerUnavailable(f"the connection to {authority} was lost ({error})") from None


def read(fields: Fields, *, stream: bool = False) -> UpstreamRequest:
    """Return the request, with `parameters` moved to the top level for API keys to check. Raise `InvalidRequest`."""
    nested = fields.pop("parameters", {})
    if not isinstance(nested, dict):
        raise InvalidRequest("parameters must be an object of parameters")
    if twice := sorted(nested.keys() & fields.keys()):
        raise InvalidRequest(f"{twice[0]} stands in parameters and beside it: give it once")
    params = fields | nested
    prompt = {name: params.pop(name) for name in _PROMPTS if name in params}
    check_parameters(params)
    return UpstreamRequest(prompts=[prompt], params=params, stream=stream)
