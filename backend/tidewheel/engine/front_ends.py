from __future__ import annotations

import errno
import logging
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec
import zmq

from tidewheel.batch import StepOutputs, TopLogprobs
from tidewheel.engine.messages import Delta, Deltas, FromEngine, Room, encoder
from tidewheel.errors import InvalidRequest, TidewheelError
from tidewheel.request import FinishReason, Request
from tidewheel.stats import WaitingRoom

log = logging.getLogger(__name__)

SILENCE_LIMIT_S = 5.0
_NO_LOGPROBS: dict[int, TopLogprobs] = {}
MAX_UNSENT_DELTAS = 1 << 18  # per front end, which then counts as gone


@dataclass(slots=True, eq=False)
class FrontEnd:
    identity: bytes  # ZeroMQ's name
    name: str
    last_seen: float  # by the ListeningClock
    request_ids: dict[int, dict[int, str]] = field(default_factory=dict)  # unfinished, by key and index
    unsent: list[Delta] = field(default_factory=list)
    received: list[int] = field(default_factory=list)  # keys since `room`
    room: WaitingRoom | None = None  # as sent


class _Route(NamedTuple):
    front_end: FrontEnd
    key: int
    sequence: int  # within the key


class FrontEnds:
    """Front ends, their requests and unsent deltas. The socket has ROUTER_MANDATORY: a gone peer is an error."""

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self._socket = socket
        self._by_identity: dict[bytes, FrontEnd] = {}
        self._routes: dict[str, _Route] = {}  # by request id
        self._unreachable: list[FrontEnd] = []
        self._num_opened = 0

    def __len__(self) -> int:
        return len(self._by_identity)

    def get(self, identity: bytes) -> FrontEnd | None:
        return self._by_identity.get(identity)

    def admit(self, identity: bytes, name: str, now: float) -> FrontEnd:
        """Add a front end, or keep the one of this identity."""
        front_end = self._by_identity.setdefault(identity, FrontEnd(identity, name, now))
        front_end.last_seen = now
        return front_end

    def remove(self, front_end: FrontEnd) -> list[str]:
        """Return the ids of its unfinished requests."""
        self._by_identity.pop(front_end.identity, None)
        orphans = [request_id for ids in front_end.request_ids.values() for request_id in ids.values()]
        for request_id in orphans:
            del self._routes[request_id]
        front_end.request_ids.clear()
        return orphans

    def find_gone(self, now: float) -> list[tuple[FrontEnd, str]]:
        """Return front ends to remove, with the reason."""
        gone = [(front_end, "its connection is closed") for front_end in self._unreachable]
        self._unreachable = []
        for front_end in self._by_identity.values():
            if now - front_end.last_seen > SILENCE_LIMIT_S:
                gone.append((front_end, f"it was silent for {now - front_end.last_seen:.1f} s"))
            elif len(front_end.unsent) > MAX_UNSENT_DELTAS:
                gone.append((front_end, f"it did not read {len(front_end.unsent)} deltas"))
        return gone

    # --- requests ---------------------------------------------------------------------------------------------

    def open(self, front_end: FrontEnd, key: int, n: int) -> list[str]:
        """Return an id per sequence. Raise `InvalidRequest` if the key is in use."""
        if key in front_end.request_ids:
            raise InvalidRequest(f"key {key} is in use: keys of unfinished requests are unique")
        ids = {index: str(self._num_opened + 1 + index) for index in range(n)}
        self._num_opened += n
        front_end.request_ids[key] = ids
        for index, request_id in ids.items():
            self._routes[request_id] = _Route(front_end, key, index)
        return list(ids.values())

    def refuse(self, front_end: FrontEnd, key: int, error: TidewheelError) -> None:
        """Answer a request that is not open."""
        front_end.unsent.append(Delta.whole(key, FinishReason.ERROR, error))

    def confirm(self, front_end: FrontEnd, key: int) -> None:
        """Answer a message that asks for no tokens."""
        front_end.unsent.append(Delta.whole(key, FinishReason.STOP))

    def close(self, front_end: FrontEnd, key: int, error: TidewheelError) -> None:
        """End an open request that the scheduler does not know."""
        for request_id in front_end.request_ids.pop(key).values():
            del self._routes[request_id]
        self.refuse(front_end, key, error)

    def deliver(self, outputs: StepOutputs) -> None:
        routes, logprobs = self._routes, outputs.logprobs or _NO_LOGPROBS
        for index, (request, token_id) in enumerate(zip(outputs.requests, outputs.token_ids, strict=True)):
            if request.finish_reason is not None:
                self._finish(request, [token_id], logprobs.get(index))
            elif route := routes.get(request.request_id):
                front_end, key, sequence = route
                wire = [logprobs[index]] if index in logprobs else None
                front_end.unsent.append(Delta(key, [token_id], "", None, wire, None, sequence))
        for request in outputs.finished:
            self._finish(request, [])

    def _finish(self, request: Request, token_ids: list[int], logprobs: TopLogprobs | None = None) -> None:
        route = self._routes.pop(request.request_id, None)
        if route is None:
            return
        siblings = route.front_end.request_ids[route.key]
        del siblings[route.sequence]
        if not siblings:
            del route.front_end.request_ids[route.key]
        route.front_end.unsent.append(Delta.last(route.key, route.sequence, request, token_ids, logprobs))

    # --- sending ----------------------------------------------------------------------------------------------

    def flush(self) -> None:
        """Send each front end one message. A full queue delays it to the next flush."""
        for front_end in self._by_identity.values():
            if front_end.unsent and self.send(front_end.identity, Deltas(front_end.unsent)):
                front_end.unsent = []

    def tell_room(self, room: WaitingRoom) -> None:
        """Send the room if it has changed or requests came."""
        for front_end in self._by_identity.values():
            if not front_end.received and front_end.room == room:
                continue
            if self.send(front_end.identity, Room(**msgspec.structs.asdict(room), received=front_end.received)):
                front_end.received, front_end.room = [], room

    def broadcast(self, message: FromEngine) -> None:
        for identity in self._by_identity:
            self.send(identity, message)

    def send(self, identity: bytes, message: FromEngine) -> bool:
        """Send to any peer. Return False if it is gone or does not read."""
        try:
            self._socket.send_multipart([identity, encoder.encode(message)], zmq.NOBLOCK)
        except zmq.Again:
            return False
        except zmq.ZMQError as error:
            if error.errno != errno.EHOSTUNREACH:
                raise
            front_end = self._by_identity.get(identity)
            if front_end is not None and front_end not in self._unreachable:
                self._unreachable.append(front_end)
            return False
        return True
