"""How late `/ready` and `tidewheel_ready` tell of a server that cannot serve, and that it can again; the demo model.

python benchmarks fault_notice --save

killed        SIGKILL to the engine
away          the same, and its weights are away for five seconds
stopped       SIGSTOP to the engine, continued when it is told
hung          a step of the engine that does not end
front end     SIGKILL to the process of the front end
tritonserver  SIGKILL to it
draining      SIGTERM to `tidewheel serve`, with streams that run
given up      SIGKILL to five engines as soon as each is ready

Delays are in seconds. They count from the detection: the death, the signal, or the silence that is a hang; and from
the first answer of a server that serves again.
"""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx2
import psutil

from common.serving import HTTP, Address, metric, served
from common.study import BUILD, ROOT, Study, show
from tidewheel.engine.heartbeat import HangWatch

REPEATS = {"hung": 2, "given up": 2}  # others: 3; five deaths in a minute are a crash loop
ENGINE = "--engine-dir"  # in its command
LIMIT_S = 120.0
AWAY_S = 5.0
HANGS = [4003, 5]  # prompt that tests/support/faults/planted.py never ends
SETTINGS = {"dtype": "float32", "num_threads": 1}
PLANTED = ("TIDEWHEEL_FAULTS", "support.faults.planted")

Delays = dict[str, float]


class Watched:
    """Changes of a value that a thread reads again and again."""

    def __init__(self, read: Callable[[], object], interval_s: float) -> None:
        self._read = read
        self._interval_s = interval_s
        self._changes: list[tuple[float, object]] = []
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._stopped.wait(self._interval_s):
            value: object = None
            with suppress(httpx2.HTTPError):
                value = self._read()
            if not self._changes or self._changes[-1][1] != value:
                self._changes.append((time.monotonic(), value))

    def close(self) -> None:
        self._stopped.set()
        self._thread.join()

    def is_since(self, since: float, holds: Callable[[object], bool]) -> float:
        """Wait until the value holds at or after a moment, and return when."""
        found: list[float] = []

        def look() -> bool:
            before = [(at, value) for at, value in self._changes if at <= since][-1:]
            after = [(at, value) for at, value in self._changes if at > since]
            found[:] = [max(at, since) for at, value in (*before, *after) if holds(value)][:1]
            return bool(found)

        until(look)
        return found[0]


class Server:
    """A server, and what its clients see."""

    def __init__(self, address: Address, folder: Path) -> None:
        self.address = address
        self.folder = folder
        self._ready = Watched(lambda: HTTP.get(f"http://{address.health}/ready", timeout=5).status_code, 0.005)
        self.live = Watched(lambda: HTTP.get(f"http://{address.health}/live", timeout=5).status_code, 0.02)
        self._metric = Watched(lambda: metric(address.health, "tidewheel_ready"), 0.005)
        self._answers = Watched(lambda: time.monotonic() if self.ask() else None, 0.005)

    def ask(self) -> bool:
        body = {"text_input": "The server", "max_tokens": 1}
        return HTTP.post(f"{self._url}/generate", json=body, timeout=LIMIT_S).is_success

    def send(self, **body: Any) -> None:
        """Send a request for a stream, and read its first bytes."""
        url, body = f"{self._url}/generate_stream", {"stream": True, **body}
        sent = HTTP.send(HTTP.build_request("POST", url, json=body, timeout=LIMIT_S), stream=True)

        def read() -> None:
            with suppress(httpx2.HTTPError):
                list(sent.iter_raw())

        threading.Thread(target=read, daemon=True).start()

    @property
    def _url(self) -> str:
        return f"http://{self.address.http}/v2/models/{self.address.model}"

    def wait_serving(self) -> None:
        now = time.monotonic()
        self._ready.is_since(now, lambda value: value == 200)
        self._metric.is_since(now, lambda value: value == 1)
        self._answers.is_since(now, lambda value: value is not None)

    def told(self, since: float) -> Delays:
        return {
            "not_ready": self._ready.is_since(since, lambda value: value != 200) - since,
            "metric_0": self._metric.is_since(since, lambda value: value != 1) - since,
        }

    def back(self, since: float) -> Delays:
        """Return how late the return is told, and how long it took."""
        first = self._answers.is_since(since, lambda value: isinstance(value, float) and value > since)
        return {
            "ready_again": self._ready.is_since(since, lambda value: value == 200) - first,
            "metric_1": self._metric.is_since(since, lambda value: value == 1) - first,
            "served_again": first - since,
        }

    def close(self) -> None:
        for watched in (self._ready, self.live, self._metric, self._answers):
            watched.close()


def killed(server: Server) -> Delays:
    began = kill(ENGINE)
    told = server.told(began)
    return told | server.back(began + max(told.values()))


def away(server: Server) -> Delays:
    hidden = server.folder.with_name("hidden")
    server.folder.rename(hidden)
    told = server.told(kill(ENGINE))
    time.sleep(AWAY_S)
    hidden.rename(server.folder)
    return told | server.back(time.monotonic())


def stopped(server: Server) -> Delays:
    engine, watch = find(ENGINE), hang_watch()
    engine.suspend()
    told = server.told(detected(watch))
    engine.resume()
    return told | server.back(time.monotonic())


def hung(server: Server) -> Delays:
    engine, watch = find(ENGINE), hang_watch()
    server.send(input_ids=HANGS, max_tokens=100, ignore_eos=True)
    told = server.told(detected(watch))
    until(lambda: not engine.is_running())
    return told | server.back(time.monotonic())


def front_end(server: Server) -> Delays:
    began = kill(f"/{server.address.model}/1/model.py")
    told = server.told(began)
    return told | server.back(began + max(told.values()))


def tritonserver(server: Server) -> Delays:
    began = kill("tritonserver")
    told = server.told(began)
    return told | server.back(began + max(told.values()))


def draining(server: Server) -> Delays:
    for _ in range(16):
        server.send(text_input="A long story", max_tokens=900, ignore_eos=True)
    find("tidewheel.cli.main").send_signal(signal.SIGTERM)
    return server.told(time.monotonic())


def given_up(server: Server) -> Delays:
    for _ in range(4):
        server.wait_serving()
        server.told(kill(ENGINE))
    server.wait_serving()
    began = kill(ENGINE)
    return server.told(began) | {"not_live": server.live.is_since(began, lambda value: value != 200) - began}


WAYS: Mapping[str, Callable[[Server], Delays]] = {
    "killed": killed, "away": away, "stopped": stopped, "hung": hung, "front end": front_end,
    "tritonserver": tritonserver, "draining": draining, "given up": given_up,
}  # fmt: skip


def find(word: str) -> psutil.Process:
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            if any(word in part for part in process.cmdline()[:5]):
                return process
    raise RuntimeError(f"no process has {word} in its command")


def kill(word: str) -> float:
    find(word).kill()
    return time.monotonic()


def hang_watch() -> HangWatch:
    command = find(ENGINE).cmdline()
    return HangWatch(Path(command[command.index("--engine-dir") + 1]))


def detected(watch: HangWatch) -> float:
    """Wait until the silence is a hang, and return when."""

    def look() -> bool:
        watch.look()
        return watch.is_hung

    until(look)
    return time.monotonic()


def until(condition: Callable[[], bool]) -> None:
    """Raise RuntimeError if the condition does not come true."""
    end = time.monotonic() + LIMIT_S
    while not condition():
        if time.monotonic() > end:
            raise RuntimeError(f"not within {LIMIT_S:g} s")
        time.sleep(0.005)


def measure(name: str, way: Callable[[Server], Delays]) -> list[Delays]:
    """Return the delays of each repeat; one that ends the server has a server of its own."""
    found: list[Delays] = []
    is_last = name in ("draining", "given up")
    with tempfile.TemporaryDirectory(dir=BUILD) as parent:
        folder = Path(parent) / "demo"
        shutil.copytree(ROOT / "model_repository" / "demo" / "1" / "weights", folder)
        repeats = REPEATS.get(name, 3)
        for _ in range(repeats if is_last else 1):
            with served(folder, SETTINGS, arguments=("--allow-faults",)) as address:
                server = Server(address, folder)
                try:
                    for _ in range(1 if is_last else repeats):
                        server.wait_serving()
                        found.append(way(server))
                finally:
                    server.close()
    return found


def main() -> None:
    study = Study("fault_notice", __doc__, "torch")
    study.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    options = study.begin()
    paths = filter(None, [str(ROOT / "tests"), os.environ.get("PYTHONPATH")])
    os.environ.update([PLANTED, ("PYTHONPATH", os.pathsep.join(paths))])
    results: dict[str, dict[str, list[float]]] = {}
    loads = []
    for name in options.ways:
        loads.append(os.getloadavg()[0])
        delays = measure(name, WAYS[name])
        results[name] = {field: [round(one[field], 3) for one in delays] for field in delays[0]}
        show(
            [
                {
                    "way": name,
                    **{field: " ".join(f"{one:.2f}" for one in each) for field, each in results[name].items()},
                }
            ]
        )
        study.save({"settings": SETTINGS, "load_averages": loads, "delays_s": results})


if __name__ == "__main__":
    main()
