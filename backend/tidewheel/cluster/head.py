"""Process that runs a cluster on this machine: Ray is below it, and ends with it.

Its standard output tells the one who started it how the start goes, a line of JSON each.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from tidewheel.cluster import ClusterError, ray_start
from tidewheel.cluster.cluster_place import ClusterPlace
from tidewheel.cluster.cluster_settings import ClusterSettings, read_settings
from tidewheel.cluster.ray_watch import RayWatch
from tidewheel.errors import ConfigError
from tidewheel.private_dir import RUN_DIR
from tidewheel.server.model_control import ControlSocket
from tidewheel.server.workdir import WorkDir, guarded
from tidewheel_process import process_tree
from tidewheel_process.child import wait_until
from tidewheel_process.current_process import StopSignals

Tell = Callable[[dict[str, object]], None]
_LOOK_S = 0.2
_END_S = 8.0  # for servers to end after Ray


def main() -> int:
    settings, place = read_settings(msgspec.json.decode(sys.argv[1])), ClusterPlace.here()
    with os.fdopen(os.dup(sys.stdout.fileno()), "wb") as news:
        tell = partial(_tell, news)
        try:
            with place.held() as work, _output_to(place.log), guarded(work.root):
                return _run(settings, place, work, tell)
        except (ClusterError, ConfigError) as error:
            tell({"error": str(error)})
        except Exception as error:
            tell({"error": f"{type(error).__name__}: {ray_start.first_line(error)}"})
            raise
    return 2


@contextlib.contextmanager
def _output_to(path: Path) -> Iterator[None]:
    """Let this process and all below it write there, so that none keeps what the starter waits for."""
    with path.open("wb") as log:
        for stream in (sys.stdout, sys.stderr):
            os.dup2(log.fileno(), stream.fileno())
    yield


def _run(settings: ClusterSettings, place: ClusterPlace, work: WorkDir, tell: Tell) -> int:
    tell({"stage": "starting Ray"})
    ray_start.prepare(place)
    ray_start.start(place, len(os.sched_getaffinity(0)))
    # Ray is imported here for the first time: it reads the environment at its import.
    from tidewheel.cluster.served_cluster import ServedCluster

    watch = RayWatch()
    try:
        with StopSignals() as signals:  # in place of Ray's own
            cluster = ServedCluster(settings)
            first = settings.first_replicas
            tell({"stage": f"starting {first} replica{'s' * (first > 1)} and the gateway"})
            cluster.deploy()
            while not signals.count and not cluster.is_ready():
                signals.wait(_LOOK_S)
            with ControlSocket(place.control, partial(_handle, cluster, watch), ClusterError):
                if not signals.count:
                    tell({"ready": cluster.status().port})
                _stay(signals, watch, place)
            if watch.has_died:
                os._exit(1)  # the guard ends the rest; Ray would wait for what has died
            cluster.end()
    finally:
        _end_ray(work)
    return 0


def _stay(signals: StopSignals, watch: RayWatch, place: ClusterPlace) -> None:
    """Return when asked to stop, or when Ray has ended everything. Ray may end this process before."""
    while not signals.count and not watch.has_ended_all:
        signals.wait(_LOOK_S)
        if watch.look():
            place.last_words.write_text(watch.reason, encoding="utf-8")


def _handle(cluster: Any, watch: RayWatch, command: dict[str, Any]) -> dict[str, Any]:
    """Raise `ClusterError` for an unknown command, or if Ray has died."""
    from tidewheel.cluster.served_cluster import told

    watch.check()
    match command:
        case {"do": "status"}:
            return told(cluster.status())
        case {"do": "scale", "replicas": int(replicas)}:
            cluster.scale(replicas)
            return told(cluster.status())
    raise ClusterError(f"unknown command {command!r}")


def _end_ray(work: WorkDir) -> None:
    """End Ray, and wait for the servers, which end when their replicas do. The guard ends what is left."""
    import ray

    ray.shutdown()
    wait_until(lambda: not process_tree.started_with(RUN_DIR, str(work.run)), _END_S)


def _tell(output: BinaryIO, news: dict[str, object]) -> None:
    with contextlib.suppress(BrokenPipeError):
        output.write(msgspec.json.encode(news) + b"\n")
        output.flush()


if __name__ == "__main__":
    sys.exit(main())
