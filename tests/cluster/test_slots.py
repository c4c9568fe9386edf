"""Slots of replicas: one for all requests of a replica, kept for a moment, and given back when the replica goes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from tidewheel.cluster.slots import Slots

FOR_EVER_S = 1e6


class Asked:
    """What Ray was asked for, and whether it has it back."""

    def __init__(self, replica: str) -> None:
        self.replica = replica
        self.has_failed = False
        self.is_released = False

    async def wait(self, is_there: Callable[[], bool]) -> None:
        assert is_there()

    async def release(self) -> None:
        assert not self.is_released
        self.is_released = True


class Asking:
    """Slots, and all that they asked for."""

    def __init__(self, linger_s: float = FOR_EVER_S) -> None:
        self.all: list[Asked] = []
        self.slots = Slots(self._reserve, linger_s)

    def _reserve(self, replica: str) -> Asked:
        self.all.append(Asked(replica))
        return self.all[-1]

    @property
    def kept(self) -> list[str]:
        return [one.replica for one in self.all if not one.is_released]


async def settle() -> None:
    """Let releases run."""
    for _ in range(3):
        await asyncio.sleep(0)


def test_requests_of_a_replica_share_one() -> None:
    async def run() -> None:
        asking = Asking()
        slots = asking.slots
        first, second, other = slots.take("a"), slots.take("a"), slots.take("b")
        assert first is second
        slots.give_back(first)
        slots.give_back(other)
        slots.give_back(second)
        assert slots.take("a") is first, "the next one finds it"
        await settle()
        assert [one.replica for one in asking.all] == ["a", "b"], "Ray was asked once for each replica"
        assert asking.kept == ["a", "b"]
        await slots.close()
        assert asking.kept == []

    asyncio.run(run())


def test_one_without_requests_is_given_back() -> None:
    async def run() -> None:
        asking = Asking(linger_s=0.0)
        slots = asking.slots
        held, idle = slots.take("a"), slots.take("b")
        slots.give_back(idle)
        async with asyncio.timeout(10):
            while asking.kept != ["a"]:
                await asyncio.sleep(0)
        assert slots.take("b") is not idle
        assert slots.take("a") is held
        assert [one.replica for one in asking.all] == ["a", "b", "b"]
        await slots.close()

    asyncio.run(run())


def test_a_replica_that_goes_keeps_it_until_its_last_request_ends() -> None:
    async def run() -> None:
        asking = Asking()
        slots = asking.slots
        first, second, idle = slots.take("a"), slots.take("a"), slots.take("b")
        slots.give_back(idle)
        slots.keep_only({"c"})
        await settle()
        assert asking.kept == ["a"], "nothing uses b, which would only wait"
        slots.give_back(first)
        await settle()
        assert asking.kept == ["a"]
        slots.give_back(second)
        await settle()
        assert asking.kept == [], "it does not linger"

    asyncio.run(run())


def test_one_that_ray_refused_is_asked_for_again() -> None:
    async def run() -> None:
        asking = Asking()
        slots = asking.slots
        failed = slots.take("a")
        asking.all[0].has_failed = True
        again = slots.take("a")
        assert again is not failed
        slots.give_back(failed)
        slots.give_back(again)
        await settle()
        assert [one.is_released for one in asking.all] == [True, False]
        assert slots.take("a") is again
        await slots.close()

    asyncio.run(run())
