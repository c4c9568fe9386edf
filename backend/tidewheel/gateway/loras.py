"""LoRA adapters of the served models: which there are, and vLLM's calls that load and unload them."""

import asyncio
import math
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import Annotated, NamedTuple

import msgspec

from tidewheel.gateway.bodies import Body, Fields, UpstreamRequest, read_fields
from tidewheel.gateway.upstream import Task, Upstream
from tidewheel.gateway.upstreams import Upstreams
from tidewheel_client import AsyncClient
from tidewheel_client.errors import InvalidRequest, NotFound, ServerUnavailable

LIST_INTERVAL_S = 0.2  # at least, between two lists of all servers
MAX_LIST_AGE_S = 10.0  # a request for an adapter renews older lists in the background
ORDER_LIMIT_S = 600.0
_TOKENIZER_TASKS = ("tokenize", "detokenize")  # an adapter changes nothing in them
_Text = Annotated[str, msgspec.Meta(min_length=1)]


class UnloadLoraBody(Body, frozen=True, kw_only=True):
    lora_name: _Text


class LoadLoraBody(UnloadLoraBody, frozen=True, kw_only=True):
    lora_path: _Text
    load_inplace: bool = False


class ServedLora(NamedTuple):
    model: str
    name: str
    path: str  # folder on its servers


class LoraDirectory:
    """LoRA adapters as their servers last listed them. Clients send NAME or MODEL/NAME as the model."""

    def __init__(self, upstreams: Upstreams) -> None:
        self._upstreams = upstreams
        self._loras: dict[str, ServedLora] = {}  # by MODEL/NAME, and by NAME where no other model or adapter has it
        self._reading = asyncio.Lock()
        self._read_at = -math.inf

    async def read(self, max_age_s: float = 0.0) -> None:
        """List the adapters of all servers, unless the last list began less than `max_age_s` before this call."""
        called_at = time.monotonic()
        async with self._reading:
            if self._read_at > called_at - max_age_s:
                return
            await asyncio.sleep(self._read_at + LIST_INTERVAL_S - time.monotonic())
            self._read_at, each = time.monotonic(), self._upstreams.each
            await asyncio.gather(*(one.list_loras() for one in each))
            loras = {
                f"{model}/{name}": ServedLora(model, name, path)
                for one in each
                for model, paths in one.loras.items()
                for name, path in paths.items()
            }
            uses = Counter([*self._upstreams.models, *loras, *(lora.name for lora in loras.values())])
            self._loras = loras | {lora.name: lora for lora in loras.values() if uses[lora.name] == 1}

    @property
    def listed(self) -> dict[str, ServedLora]:
        """Return each adapter once, by NAME where possible."""
        known = self._loras
        return {name: one for name, one in known.items() if name == one.name or known.get(one.name) is not one}

    async def find(self, name: str) -> ServedLora | None:
        """Return the adapter of a name, None if it has none. Raise `InvalidRequest` if several models have one."""
        if not name or name in self._upstreams.models:
            return None
        if name not in self._loras:
            await self.read()
        elif time.monotonic() - self._read_at > MAX_LIST_AGE_S:
            self._upstreams.run(self.read())
        found = self._loras.get(name)
        if found is None and (full := sorted(each for each, one in self._loras.items() if one.name == name)):
            raise InvalidRequest(f"model is {name!r}, an adapter of several models: send {' or '.join(full)}")
        return found

    async def resolve(self, request: UpstreamRequest, name: str, tasks: Sequence[Task]) -> Task:
        """Set a request's model, and its adapter if `name` is one. Return the task. Raise `RequestError`."""
        lora = None
        try:
            request.model, task = self._upstreams.model(name, tasks)
        except NotFound:
            if "generate" not in tasks or (lora := await self.find(name)) is None:
                raise
            request.model, task = self._upstreams.model(lora.model, tasks)
        request.model_id = name or request.model
        if request.lora and f"{request.model}/{request.lora}" not in self._loras:
            await self.read(LIST_INTERVAL_S)  # which servers have it
        if lora is not None and all(prompt.get("task") not in _TOKENIZER_TASKS for prompt in request.prompts):
            given = request.params.setdefault("lora_name", lora.name)
            if given != lora.name:
                raise InvalidRequest(f"lora_name is {str(given)[:80]!r}, and model names the adapter {lora.name!r}")
        return task

    async def load(self, fields: Fields) -> str:
        """Load an adapter on all ready servers of a model. Return vLLM's answer. Raise `RequestError`."""
        body, _ = read_fields(fields, LoadLoraBody)
        name = body.lora_name
        model, _ = self._upstreams.model(body.model, ("generate",))
        await self.read()
        servers = self._servers(model)
        if not body.load_inplace and all(name in one.loras.get(model, ()) for one in servers):
            raise InvalidRequest(f"lora_name is {name!r}, which is loaded: send load_inplace true to replace it")
        await self._order(servers, model, AsyncClient.load_lora, name, body.lora_path)
        return f"Success: LoRA adapter '{name}' added successfully."

    async def unload(self, fields: Fields) -> str:
        """Unload an adapter on all ready servers that have it. Return vLLM's answer. Raise `RequestError`."""
        body, _ = read_fields(fields, UnloadLoraBody)
        await self.read()
        lora = await self.find(f"{body.model}/{body.lora_name}" if body.model else body.lora_name)
        if lora is None:
            raise NotFound(f"lora_name is {body.lora_name!r}: no served model has this adapter")
        servers = self._servers(lora.model, lora.name)
        await self._order(servers, lora.model, AsyncClient.unload_lora, lora.name)
        return f"Success: LoRA adapter '{lora.name}' removed successfully."

    async def _order(
        self, servers: Sequence[Upstream], model: str, order: Callable[..., Awaitable[None]], *names: str
    ) -> None:
        """Have servers load or unload an adapter. Raise the first error after all have answered."""
        calls = (order(one.client(model), *names, timeout_s=ORDER_LIMIT_S) for one in servers)
        results = await asyncio.gather(*calls, return_exceptions=True)
        await self.read()
        for error in filter(None, results):
            raise error

    def _servers(self, model: str, lora: str = "") -> list[Upstream]:
        """Return the ready servers of a model, or those that have an adapter of it. Raise `ServerUnavailable`."""
        ready = [one for one in self._upstreams.each if model in one.models and not one.not_ready]
        if found := [one for one in ready if not lora or lora in one.loras.get(model, ())]:
            return found
        raise ServerUnavailable(f"no server of model {model!r} is ready")
