from __future__ import annotations

import asyncio
import contextlib
import time

import aiohttp
import msgspec
from tritonclient.grpc import service_pb2 as pb

from tidewheel.gateway.gateway_options import Address
from tidewheel_client import Health
from tidewheel_client.errors import RequestError
from tidewheel_client.grpc_transport import AsyncGrpcTransport

LOOK_S = 0.5
FRESH_S = 0.1  # age of a fresh look, and the wait for another
PROBE_S = 3.0


class Upstream:
    """Triton server behind the gateway."""

    def __init__(self, address: Address, name: str = "") -> None:
        """Begin to poll the server. `name`: the name that resolved to its address, if any."""
        self.address = address
        self.name = name
        self.num_open = 0  # requests
        self.not_ready = "it was not asked yet"  # reason; empty: ready
        self.models: frozenset[str] = frozenset()
        self._foreign: set[str] = set()  # models of other backends
        self.triton = AsyncGrpcTransport(address.grpc)
        self.http = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=PROBE_S))
        self._looking: asyncio.Task[None] | None = None
        self._looked_at = -FRESH_S
        self._watching = asyncio.create_task(self._watch())

    async def close(self) -> None:
        self._watching.cancel()
        if self._looking is not None:
            self._looking.cancel()
        await self.triton.close()
        await self.http.close()

    async def close_when_idle(self) -> None:
        self._watching.cancel()
        try:
            while self.num_open:
                await asyncio.sleep(LOOK_S)
        finally:
            await self.close()

    async def _watch(self) -> None:
        while True:
            await self.look()
            await asyncio.sleep(LOOK_S)

    async def look(self) -> None:
        """Poll readiness and models; concurrent calls share one poll."""
        if self._looking is None or self._looking.done():
            self._looking = asyncio.create_task(self._look())
        await asyncio.shield(self._looking)

    async def look_again(self) -> None:
        """Poll unless the last poll is fresh; wait for at most `FRESH_S`."""
        if time.monotonic() - self._looked_at >= FRESH_S:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(FRESH_S):
                    await self.look()

    async def _look(self) -> None:
        try:
            reason = await self._find_reason()
            if not reason:
                self.models = await self._list_models()
            self.not_ready = reason
        except RequestError as error:
            self.not_ready = str(error)
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError, KeyError) as error:
            self.not_ready = f"its readiness cannot be asked at {self.address.health}: {error}"
        self._looked_at = time.monotonic()

    async def _find_reason(self) -> str:
        """Return why the server is not ready; empty if ready. Triton's own readiness misses dead and hung engines."""
        if self.address.health:
            async with self.http.get(f"http://{self.address.health}/ready") as answer:
                health = msgspec.json.decode(await answer.read(), type=Health)
                return "" if health.is_ready else f"{health.state}: {health.reason}"
        reply = await self.triton.call("ServerReady", pb.ServerReadyRequest(), PROBE_S)
        return "" if reply.ready else "Triton is not ready"

    async def _list_models(self) -> frozenset[str]:
        index = await self.triton.call("RepositoryIndex", pb.RepositoryIndexRequest(ready=True), PROBE_S)
        names = {model.name for model in index.models}
        self._foreign &= names
        for name in names - self.models - self._foreign:
            if not await self._is_ours(name):
                self._foreign.add(name)
        return frozenset(names - self._foreign)

    async def _is_ours(self, model: str) -> bool:
        config = (await self.triton.call("ModelConfig", pb.ModelConfigRequest(name=model), PROBE_S)).config
        inputs = {tensor.name for tensor in config.input}
        is_plain = config.model_transaction_policy.decoupled and config.max_batch_size == 0
        return is_plain and {"messages", "sampling_parameters"} <= inputs

    async def metrics(self) -> str:
        """Return the text of `/metrics`, empty without an answer."""
        if not self.address.metrics:
            return ""
        with contextlib.suppress(aiohttp.ClientError, TimeoutError, OSError, ValueError):
            async with self.http.get(f"http://{self.address.metrics}/metrics") as answer:
                return await answer.text() if answer.ok else ""
        return ""
