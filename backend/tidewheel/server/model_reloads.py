import threading
import time
from collections.abc import Callable, Collection, Mapping
from typing import NamedTuple

from tidewheel.settings import shown_bytes
from tidewheel_process.child import RestartPolicy

MAX_SHARED_BYTES = 128 << 20  # of a front end's tensors
GIVE_BACK_S = 60.0  # at least, between two replacements
KEPT_S = 3600.0  # the same, while Triton keeps a replaced front end

Load = Callable[[str], None]  # loads a model again, or raises OSError


class StubId(NamedTuple):
    """Process of Triton's Python backend ("stub"), which runs one front end."""

    pid: int
    start_ticks: int


Serving = Mapping[StubId, str]  # model of each stub that serves


class Reload(NamedTuple):
    model: str
    before: Collection[StubId]  # that served at its start: it is over when another serves the model
    since: float
    cancelled: threading.Event
    while_it_serves: bool

    def has_ended(self, serving: Serving) -> bool:
        return any(model == self.model and stub not in self.before for stub, model in serving.items())


class PendingReloads:
    """Reloads, each retried on a thread until the load succeeds."""

    def __init__(self, note: Callable[[str], None]) -> None:
        self._note = note
        self._pending: list[Reload] = []

    def start(
        self, model: str, serving: Serving, load: Load, delay_s: float = 0.0, *, while_it_serves: bool = False
    ) -> None:
        reload = Reload(model, set(serving), time.monotonic(), threading.Event(), while_it_serves)
        self._pending.append(reload)
        name = f"reload of {model}"
        threading.Thread(target=self._run, args=(reload, load, delay_s), name=name, daemon=True).start()

    def _run(self, reload: Reload, load: Load, delay_s: float) -> None:
        num_failures = 0
        while not reload.cancelled.wait(delay_s):
            try:
                load(reload.model)
                return
            except OSError as error:
                num_failures += 1
                delay_s = RestartPolicy().delay_s(num_failures)
                if not reload.cancelled.is_set():
                    self._note(f"model {reload.model!r} cannot be loaded again, and is tried again: {error}")

    def look(self, serving: Serving) -> str:
        """Remove ended reloads. Return a model that waits for its front end; empty: none."""
        self._pending = [reload for reload in self._pending if not reload.cancelled.is_set()]
        for reload in [one for one in self._pending if one.has_ended(serving)]:
            self._pending.remove(reload)
            self._note(f"model {reload.model!r} is loaded again after {time.monotonic() - reload.since:.1f} s")
        return next((reload.model for reload in self._pending if not reload.while_it_serves), "")

    def cancel(self, model: str = "") -> None:
        """Cancel the reloads of `model`; empty: of all models. Thread-safe."""
        for reload in list(self._pending):
            if model in ("", reload.model):
                reload.cancelled.set()


class SharedMemoryRelief:
    """Replacement of front ends whose shared memory has grown: Triton never shrinks it.

    One at a time: Triton keeps the old front end while a gRPC stream that used it is open, and for ever after Triton
    refused one of its requests or cancelled one as it ended.
    """

    def __init__(self, shared_bytes: Callable[[int], int], note: Callable[[str], None]) -> None:
        self._shared_bytes = shared_bytes
        self._note = note
        self._replaced: set[StubId] = set()
        self._next = 0.0  # monotonic seconds

    def look(self, serving: Serving, reloads: PendingReloads, load: Load) -> None:
        """Replace one front end whose shared memory is large."""
        now = time.monotonic()
        sizes = {stub: self._shared_bytes(stub.pid) for stub in serving if now >= self._next}
        grown = next((stub for stub, size in sizes.items() if size > MAX_SHARED_BYTES), None)
        if grown is None:
            return
        model, size = serving[grown], shown_bytes(sizes[grown])
        if not self._replaced.isdisjoint(serving):
            self._next = now + KEPT_S
            self._note(f"{size} of shared memory of model {model!r} stay: Triton keeps a front end that was replaced")
            return
        self._next = now + GIVE_BACK_S
        self._note(f"a front end of model {model!r} holds {size} of shared memory; loading it again")
        self._replaced.add(grown)
        reloads.start(model, serving, load, while_it_serves=True)
