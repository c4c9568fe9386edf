"""Replicas with a modelled device on Ray Serve, as `tidewheel cluster up` starts them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Self

import msgspec
import psutil

from cluster.servers import kill_tree, wait_known
from common.serving import HTTP, Address, free_ports
from modelled.engine import modelled
from tidewheel.metrics import UPSTREAM_READY
from tidewheel_client import Figures
from tidewheel_process import process_tree

CPUS_OF_A_REPLICA = 0.1  # so that all fit on few cores
_RUN_DIR = "TIDEWHEEL_RUN_DIR"
_PORTS_FILE = "--ports-file="
_REPLICA, _GATEWAY = "ray::ServeReplica:tidewheel:replica", "ray::ServeReplica:tidewheel:gateway"


class RayServers:
    """A cluster of its own, in a folder of its own. `ray` among its parts is what neither serves nor answers."""

    def __init__(self, folder: Path, settings: Mapping[str, object], step_s: float) -> None:
        """`folder` has the model; `settings` are those of the engine."""
        self.model = folder.name
        self._place = Path(tempfile.mkdtemp(prefix="tw-"))  # a short path, for Ray's sockets
        self._environment = {**os.environ, **modelled(step_s), _RUN_DIR: str(self._place)}
        given = ["--allow-faults", *(f"--set={key}={value}" for key, value in settings.items())]
        self.gateway = f"127.0.0.1:{free_ports(1)}"
        self._up = ["up", "--model", str(folder), "--openai-port", self.gateway.rpartition(":")[2]]
        self._up += ["--replica-cpus", str(CPUS_OF_A_REPLICA), *(f"--serve-arg={one}" for one in given)]

    def __enter__(self) -> Self:
        self._command(*self._up)
        return self

    def __exit__(self, *error: object) -> None:
        self._command("down")
        shutil.rmtree(self._place)

    def scale(self, count: int) -> None:
        self._command("scale", str(count))
        wait_known(self.gateway, count)

    def replicas(self) -> list[Address]:
        figures = Figures.parse(HTTP.get(f"http://{self.gateway}/metrics").text)
        known = {sample.labels["upstream"] for sample in figures.samples(UPSTREAM_READY.name)}
        return [one for actor in self._actors(_REPLICA) for one in self._addresses(actor) if one.grpc in known]

    def kill_one(self, *, alone: bool) -> float:
        return kill_tree(self._actors(_REPLICA)[-1].pid, alone=alone)

    def pids(self) -> Mapping[str, list[int]]:
        everything = {one.pid for one in self._ours()}
        actors = self._actors(_REPLICA)
        replicas = {one.pid for actor in actors for one in process_tree.descendants(actor.pid)}
        gateway = {one.pid for one in self._actors(_GATEWAY)}
        return {
            "replicas": sorted(replicas),
            "gateway": sorted(gateway),
            "ray": sorted(everything - replicas - gateway),
        }

    def _command(self, *arguments: str) -> None:
        """Raise RuntimeError with what it says if it fails."""
        command = [sys.executable, "-m", "tidewheel.cli.main", "cluster", *arguments]
        done = subprocess.run(command, env=self._environment, stdout=subprocess.DEVNULL, check=False)
        if done.returncode:
            raise RuntimeError(f"tidewheel cluster {arguments[0]} ended with status {done.returncode}")

    def _ours(self) -> list[psutil.Process]:
        """Return the processes of the cluster, those of its servers included."""
        return process_tree.started_with(_RUN_DIR, str(self._place))

    def _actors(self, title: str) -> list[psutil.Process]:
        return [one for one in self._ours() if process_tree.arguments(one.pid)[:1][0].startswith(title)]

    def _addresses(self, actor: psutil.Process) -> Iterator[Address]:
        """Yield where the server of an actor listens, once it has said so."""
        words = [word for child in process_tree.children(actor.pid) for word in process_tree.arguments(child.pid)]
        reports = [Path(word.removeprefix(_PORTS_FILE)) for word in words if word.startswith(_PORTS_FILE)]
        for report in filter(Path.exists, reports):
            ports = msgspec.json.decode(report.read_bytes())
            grpc, http, metrics, health = (
                f"127.0.0.1:{ports[name]}" for name in ("grpc", "http", "metrics", "health")
            )
            yield Address(grpc, http, self.model, metrics, health)
