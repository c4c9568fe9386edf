"""Engine whose ranks fail at a named point of a step or a load, as a file orders: ``-m support.faults.rank_faults``.

The same module runs rank 0, the engine, and rank 1, whose process it takes the place of.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec

from tidewheel_process.child import Child

ORDER = "TIDEWHEEL_RANK_FAULT"  # variable with the path of the order
RANK = int(sys.argv[1:2] != [] and sys.argv[1].startswith("{"))
PEER_LATE_S, INSIDE_S = 0.1, 0.05

Kind = Literal["kill", "stop", "memory"]
SWAPPED = "blocks swapped"
LOAD_POINTS = ("before joining", "joined", "weights loaded")
# Of one rank, or of both; rank 0 prepares a step before it sends it, rank 1 afterwards.
STEP_POINTS = {
    "message sent": (0,),
    "message received": (1,),
    "prepared": (0, 1),
    SWAPPED: (0, 1),
    "before a collective": (0, 1),
    "inside a collective": (0, 1),
    "after a collective": (0, 1),
    "launched": (0, 1),
    "sampled": (0, 1),
    "results read": (0, 1),
}
# Here rank 1 waits for no operation of rank 0, whose silence the engine's heartbeat tells.
UNHEARD = frozenset({"prepared", SWAPPED, "sampled", "launched", "results read"})


class Order(msgspec.Struct):
    rank: int
    point: str
    kind: Kind
    num_passes: int = 3


class Fired(NamedTuple):
    at: float  # monotonic seconds
    pid: int


def variables(order: Path) -> dict[str, str]:
    paths = [str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {ORDER: str(order), "PYTHONPATH": os.pathsep.join(paths)}


def give(path: Path, order: Order) -> None:
    fired_path(path).unlink(missing_ok=True)
    temporary = path.with_suffix(".new")
    temporary.write_bytes(msgspec.json.encode(order))
    temporary.replace(path)


def fired_path(path: Path) -> Path:
    return path.with_suffix(".fired")


def fired(path: Path) -> Fired:
    return msgspec.json.decode(fired_path(path).read_bytes(), type=Fired)


class _Points:
    """Counter of this rank's passes of the ordered point."""

    def __init__(self) -> None:
        self._path = Path(os.environ[ORDER])
        self._num_passes = 0

    def order(self, *points: str) -> Order | None:
        try:
            order = msgspec.json.decode(self._path.read_bytes(), type=Order)
        except FileNotFoundError:  # none, or the other rank has just carried it out
            return None
        return order if order.point in points else None

    def passes(self, point: str) -> Order | None:
        """Return the order if it is for this rank and this pass."""
        order = self.order(point)
        if order is None or order.rank != RANK:
            return None
        self._num_passes += 1
        return order if point in LOAD_POINTS or self._num_passes >= order.num_passes else None

    def reach(self, point: str) -> None:
        if (order := self.passes(point)) is not None:
            self.fire(order.kind)

    def fire(self, kind: Kind) -> None:
        self._path.unlink()
        self._num_passes = 0
        fired_path(self._path).write_bytes(msgspec.json.encode(Fired(time.monotonic(), os.getpid())))
        if kind == "memory":
            raise MemoryError("a fault was planted")
        os.kill(os.getpid(), signal.SIGKILL if kind == "kill" else signal.SIGSTOP)


_points: _Points


class _Collectives:
    """Collectives with points around each all-reduce."""

    def __init__(self, collectives: Any) -> None:
        self._collectives = collectives

    def __getattr__(self, name: str) -> Any:
        return getattr(self._collectives, name)

    def all_reduce(self, x: Any) -> None:
        _points.reach("before a collective")
        inside = _points.order("inside a collective")
        if inside is not None and inside.rank != RANK:
            time.sleep(PEER_LATE_S)  # so that the other waits inside
        elif (order := _points.passes("inside a collective")) is not None:
            threading.Timer(INSIDE_S, _points.fire, [order.kind]).start()
        self._collectives.all_reduce(x)
        _points.reach("after a collective")


def _after(point: str, owner: object, name: str) -> None:
    original: Callable[..., Any] = getattr(owner, name)

    def wrapped(*arguments: Any, **named: Any) -> Any:
        result = original(*arguments, **named)
        _points.reach(point)
        return result

    setattr(owner, name, wrapped)


def _plant() -> None:
    from tidewheel.runner import host_tier, model_runner, rank_group, sampler

    join = rank_group.join_group

    def join_group(*arguments: Any) -> Any:
        _points.reach("before joining")
        collectives = _Collectives(join(*arguments))
        _points.reach("joined")
        return collectives

    def start(command: list[str], **options: Any) -> Child:
        return Child([__spec__.name if part == rank_group.__name__ else part for part in command], **options)

    vars(rank_group).update(join_group=join_group, Child=start)
    _after("weights loaded", model_runner, "load_parts")
    _after("message sent", rank_group.LeaderRunner, "_announce")
    _after("message received", rank_group, "decode_step")
    _after("prepared", model_runner.ModelRunner, "prepare")
    _after(SWAPPED, host_tier.BlockTransfers, "_swap")
    _after("launched", model_runner.ModelRunner, "_launch")
    _after("sampled", model_runner, "sample_part")
    _after("results read", sampler.PendingStep, "wait")


def main() -> None:
    global _points
    _points = _Points()
    _plant()
    if RANK:
        from tidewheel.runner import rank_group

        rank_group.main()
    else:
        from tidewheel.engine import process

        process.exit_now(process.main())


if __name__ == "__main__":
    main()
