import errno
import itertools
import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec
import numpy as np
import zmq

from tidewheel.batch import Int64Array, RowArray, StepOutputs
from tidewheel.engine import messages
from tidewheel.errors import InvalidRequest, TidewheelError
from tidewheel.request import FinishReason, Request
from tidewheel.sampling import TopLogprobs
from tidewheel.stats import WaitingRoom

log = logging.getLogger(__name__)

SILENCE_LIMIT_S = 5.0
MAX_UNSENT = 1 << 18  # tokens and ends until a front end counts as gone


@dataclass(slots=True, eq=False)
class FrontEnd:
    identity: bytes  # ZeroMQ's name
    name: str
    last_seen: float  # by `ListeningClock`
    is_reachable: bool = True
    request_ids: dict[int, dict[int, str]] = field(default_factory=dict)  # by key and index
    unsent: list[messages.Delta] = field(default_factory=list)
    unsent_tokens: list[messages.NewTokens] = field(default_factory=list)
    num_unsent: int = 0  # tokens among them
    to_run: list[int] = field(default_factory=list)  # keys, for the next `Deltas`
    received: list[int] = field(default_factory=list)  # keys since `room`
    room: WaitingRoom | None = None  # as sent


class _Route(NamedTuple):
    front_end: FrontEnd
    key: int
    sequence: int  # within the key
    in_columns: bool  # its tokens go in `NewTokens`: the only sequence of the key, without a delta so far
    client_id: str  # named by the client


class _Layout(NamedTuple):
    requests: list[Request]
    columns: list[tuple[FrontEnd, RowArray, Int64Array]]  # positions within the step, and keys
    others: list[int]  # positions that get a delta


_NO_LAYOUT = _Layout([], [], [])


class FrontEnds:
    """Connected front ends, their requests and unsent deltas. The socket has ROUTER_MANDATORY."""

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self._socket = socket
        self._by_identity: dict[bytes, FrontEnd] = {}
        self._routes: dict[str, _Route] = {}  # by request id
        self._layout = _NO_LAYOUT
        self._num_opened = 0

    def __len__(self) -> int:
        return len(self._by_identity)

    def get(self, identity: bytes) -> FrontEnd | None:
        return self._by_identity.get(identity)

    def admit(self, identity: bytes, name: str, now: float) -> FrontEnd:
        return self._by_identity.setdefault(identity, FrontEnd(identity, name, now))

    def remove(self, front_end: FrontEnd) -> list[str]:
        """Forget a front end. Return the ids of its unfinished requests."""
        self._by_identity.pop(front_end.identity, None)
        self._layout = _NO_LAYOUT
        return [request_id for key in list(front_end.request_ids) for request_id in self.forget(front_end, key)]

    def find_gone(self, now: float) -> Iterator[tuple[FrontEnd, str]]:
        for front_end in list(self._by_identity.values()):
            if not front_end.is_reachable:
                yield front_end, "its connection is closed"
            elif now - front_end.last_seen > SILENCE_LIMIT_S:
                yield front_end, f"it was silent for {now - front_end.last_seen:.1f} s"
            elif (num_unsent := len(front_end.unsent) + front_end.num_unsent) > MAX_UNSENT:
                yield front_end, f"it did not read {num_unsent} tokens and ends"

    def open(self, front_end: FrontEnd, key: int, n: int, client_id: str = "") -> list[str]:
        """Register a request. Return an id per sequence. Raise `InvalidRequest`."""
        if key in front_end.request_ids:
            raise InvalidRequest(f"key {key} is in use: keys of unfinished requests are unique")
        ids = {index: str(self._num_opened + 1 + index) for index in range(n)}
        self._num_opened += n
        front_end.request_ids[key] = ids
        for index, request_id in ids.items():
            self._routes[request_id] = _Route(front_end, key, index, n == 1, client_id)
        return list(ids.values())

    def list_requests(self, unfinished: Sequence[Request], now: float, limit: int) -> list[messages.RequestRow]:
        """Return at most `limit` requests, in the order of their first sequences."""
        groups: dict[tuple[bytes, int], list[Request]] = {}
        for request in unfinished:
            route = self._routes.get(request.request_id)
            if route is None:  # of a lost front end
                continue
            groups.setdefault((route.front_end.identity, route.key), []).append(request)
            if len(groups) > limit:
                groups.popitem()
                break
        return [_row(group, self._routes[group[0].request_id].client_id, now) for group in groups.values()]

    def siblings(self, request_id: str) -> list[str]:
        """Return ids of all unfinished sequences of the same request, highest index first."""
        route = self._routes.get(request_id)
        return [] if route is None else list(reversed(route.front_end.request_ids[route.key].values()))

    def end(self, front_end: FrontEnd, key: int, outcome: FinishReason | TidewheelError, answer: str = "") -> None:
        """Queue a final delta for a key without open sequences, such as an order's or a refused request's."""
        error = messages.ErrorInfo.of(outcome) if isinstance(outcome, TidewheelError) else None
        reason = (FinishReason.ERROR if isinstance(outcome, TidewheelError) else outcome).value
        front_end.unsent.append(messages.Delta(key, [], reason, error, index=messages.WHOLE_REQUEST, answer=answer))

    def forget(self, front_end: FrontEnd, key: int) -> list[str]:
        """Forget a request; return the ids of its unfinished sequences."""
        orphans = list(front_end.request_ids.pop(key).values())
        for request_id in orphans:
            del self._routes[request_id]
        return orphans

    def deliver(self, outputs: StepOutputs) -> None:
        if outputs.requests:
            self._deliver_tokens(outputs)
        for request in outputs.finished:
            self._deliver_delta(request, [])

    def _deliver_tokens(self, outputs: StepOutputs) -> None:
        if outputs.requests is not self._layout.requests:
            self._layout = self._lay_out(outputs.requests)
        ended = [index for index, request in enumerate(outputs.requests) if request.finish_reason is not None]
        for front_end, positions, keys in self._layout.columns:
            if ended:
                goes_on = np.isin(positions, ended, invert=True)
                positions, keys = positions[goes_on], keys[goes_on]
            front_end.unsent_tokens.append(messages.NewTokens.of(keys, outputs.token_ids[positions]))
            front_end.num_unsent += len(keys)
        logprobs = outputs.logprobs or {}
        apart = sorted({*self._layout.others, *ended})
        for request, group in itertools.groupby(apart, outputs.requests.__getitem__):
            indices = list(group)
            entries = [logprobs[index] for index in indices if index in logprobs]
            self._deliver_delta(request, outputs.token_ids[indices].tolist(), entries or None)

    def _lay_out(self, requests: list[Request]) -> _Layout:
        columns: dict[bytes, tuple[FrontEnd, list[int], list[int]]] = {}
        others: list[int] = []
        for index, request in enumerate(requests):
            route = self._routes.get(request.request_id)
            if route is None:
                continue
            is_single = request not in (*requests[max(index - 1, 0) : index], *requests[index + 1 : index + 2])
            has_logprobs = (request.sampling.logprobs, request.sampling.prompt_logprobs) != (None, None)
            if not is_single:  # later tokens may not pass these
                route = self._routes[request.request_id] = route._replace(in_columns=False)
            if not route.in_columns or request.bucket or has_logprobs:
                others.append(index)
                continue
            _, positions, keys = columns.setdefault(route.front_end.identity, (route.front_end, [], []))
            positions.append(index)
            keys.append(route.key)
        arrays = [(to, np.array(at, np.intp), np.array(keys, np.int64)) for to, at, keys in columns.values()]
        return _Layout(requests, arrays, others)

    def _deliver_delta(
        self, request: Request, token_ids: list[int], logprobs: list[TopLogprobs] | None = None
    ) -> None:
        route = self._routes.get(request.request_id)
        if route is None:
            return
        if request.finish_reason is not None:
            del self._routes[request.request_id]
            siblings = route.front_end.request_ids[route.key]
            del siblings[route.sequence]
            if not siblings:
                del route.front_end.request_ids[route.key]
        route.front_end.unsent.append(messages.Delta.of(route.key, route.sequence, request, token_ids, logprobs))

    def run(self, request_ids: Iterable[str]) -> None:
        """Queue orders to run requests in their front ends."""
        for request_id in request_ids:
            if (route := self._routes.get(request_id)) is not None:
                route.front_end.to_run.append(route.key)

    def flush(self) -> None:
        """Send each front end its orders and output in one message. A full queue keeps them for the next flush."""
        for front_end in self._by_identity.values():
            if not (front_end.unsent or front_end.unsent_tokens or front_end.to_run):
                continue
            message = messages.Deltas(front_end.unsent_tokens, front_end.unsent, front_end.to_run)
            if self.send(front_end.identity, message):
                front_end.unsent, front_end.unsent_tokens, front_end.to_run = [], [], []
                front_end.num_unsent = 0

    def send_room(self, room: WaitingRoom) -> None:
        for front_end in self._by_identity.values():
            if not front_end.received and front_end.room == room:
                continue
            message = messages.Room(**msgspec.structs.asdict(room), received=front_end.received)
            if self.send(front_end.identity, message):
                front_end.received, front_end.room = [], room

    def broadcast(self, message: messages.FromEngine) -> None:
        for identity in self._by_identity:
            self.send(identity, message)

    def send(self, identity: bytes, message: messages.FromEngine) -> bool:
        """Send a message; return False if the peer is gone or its queue full."""
        try:
            self._socket.send_multipart([identity, messages.encoder.encode(message)], zmq.NOBLOCK)
        except zmq.Again:
            return False
        except zmq.ZMQError as error:
            if error.errno != errno.EHOSTUNREACH:
                raise
            if (front_end := self._by_identity.get(identity)) is not None:
                front_end.is_reachable = False
            return False
        return True


def _row(group: Sequence[Request], client_id: str, now: float) -> messages.RequestRow:
    first = group[0]
    times = [one.first_token_time for one in group if one.first_token_time is not None]
    return messages.RequestRow(
        number=int(first.request_id),
        request_id=client_id,
        tenant=first.tenant,
        priority=first.priority.name.lower(),
        state=first.state.name.lower(),
        age_s=now - first.arrival_time,
        waited_s=(now if first.first_scheduled_time is None else first.first_scheduled_time) - first.arrival_time,
        first_token_s=min(times) - first.arrival_time if times else None,
        num_sequences=len(group),
        num_prompt_tokens=first.num_prompt_tokens,
        num_output_tokens=sum(one.num_output_tokens for one in group),
        max_tokens=first.max_tokens * len(group),
        num_cached_tokens=first.num_cached_tokens,
        num_preemptions=sum(one.num_preemptions for one in group),
    )
