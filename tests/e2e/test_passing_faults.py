"""Faults that pass under a real server, a reload that costs nothing, and a drain."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from support.triton.burst import Burst
from support.triton.serving import (
    REPOSITORY,
    Server,
    start_server,
    stop_server,
    wait_for,
    wait_ready,
)

pytestmark = pytest.mark.e2e

LIMIT_S = 120.0
PROMPT = "A tuple is"


@pytest.fixture(scope="module")
def run_dir() -> Iterator[Path]:
    """A run directory of 16 MiB, where this process may mount one."""
    path = Path(tempfile.mkdtemp(prefix="tw-"))
    is_small = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=16m,mode=0700", "tmpfs", str(path)], capture_output=True, check=False
    )
    yield path
    if is_small.returncode == 0:
        subprocess.run(["umount", "-l", str(path)], check=True)
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, run_dir: Path) -> Iterator[Server]:
    root = tmp_path_factory.mktemp("passing_faults")
    folder, log = root / "repository", root / "serve.log"
    shutil.copytree(REPOSITORY / "demo", folder / "demo")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TIDEWHEEL_RUN_DIR", str(run_dir))
        arguments = ("--model-repository", str(folder), "--model-control", "explicit", "--models", "demo")
        running = wait_ready(start_server(*arguments, "--drain-s", "4", log=log))
    yield running
    if running.process.poll() is None:
        assert stop_server(running) == 0, log.read_text()


def weights(server: Server) -> Path:
    return server.log.parent.joinpath("repository", "demo", "1", "weights", "model.safetensors")


def status(run_dir: Path) -> dict[str, Any]:
    (path,) = run_dir.glob("*/run/*/current/status.json")
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def kill_engine(server: Server) -> int:
    engine = server.engine_process()
    assert engine is not None
    engine.kill()
    return engine.pid


def test_weights_that_are_away_while_the_engine_starts_again(server: Server, run_dir: Path) -> None:
    text = server.generate(PROMPT, temperature=0)["text_output"]
    away = weights(server).with_name("away")
    weights(server).rename(away)
    kill_engine(server)

    def has_failed() -> bool:  # until it is tried again
        found = status(run_dir)
        return found["state"] == "failed" and "has no weights" in found["message"]

    wait_for(has_failed, LIMIT_S, "a load that fails")
    away.rename(weights(server))
    wait_for(lambda: text in answer(server), LIMIT_S, "the same answer")


def test_a_full_run_directory(server: Server, run_dir: Path) -> None:
    if not run_dir.is_mount():
        pytest.skip("no tmpfs can be mounted here")
    text = server.generate(PROMPT, temperature=0)["text_output"]
    filler = run_dir / "filler"
    fill(filler)
    killed = kill_engine(server)

    def is_told() -> bool:
        fill(filler)  # a few pages that a process gives back are enough for a new engine
        if text in (said := answer(server)):
            kill_engine(server)
        return "cannot be written (No space left on device): make room" in said

    wait_for(is_told, LIMIT_S, "the reason")
    filler.unlink()
    wait_for(lambda: text in answer(server), LIMIT_S, "the same answer")
    assert status(run_dir)["pid"] != killed


def fill(path: Path) -> None:
    """Take all that is free, again when called again."""
    with pytest.raises(OSError, match="No space"), path.open("ab", buffering=0) as file:
        while True:
            file.write(bytes(1024))


def answer(server: Server) -> str:
    """Return the text, or the error of an engine that is away."""
    found = server.post("demo/generate", {"text_input": PROMPT, "temperature": 0}).json()
    assert "text_output" in found or found["error"].startswith("[TW-ENGINE-DEAD retry_after_ms="), found
    return str(found.get("text_output") or found["error"])


def figures(server: Server) -> dict[str, int]:
    """Count what a reload could leave: processes, descriptors, threads, shared memory."""
    triton = server.triton_process()
    mapped = {line.path for line in triton.memory_maps() if line.path.startswith("/dev/shm/")}
    try:
        processes = server.descendants()
        num_descriptors = sum(process.num_fds() for process in processes)
    except psutil.NoSuchProcess:  # between two looks
        return {}
    return {
        "processes": len(processes),
        "descriptors": num_descriptors,
        "threads": triton.num_threads(),
        "shared memory": len(mapped),
    }


def edit(server: Server, **settings: object) -> None:
    (weights(server).parents[1] / "model.json").write_text(json.dumps(settings))


def reload(server: Server, **settings: object) -> None:
    """Load the model with these settings, and wait until one engine and one front end are left."""
    edit(server, **settings)
    server.control("reload", "demo")
    for name in ("tidewheel-eng", "triton_python"):
        wait_for(lambda name=name: num_processes(server, name) == 1, LIMIT_S, f"end of the old {name}")


def num_processes(server: Server, name: str) -> int:
    found = 0
    for process in server.descendants():
        with contextlib.suppress(psutil.NoSuchProcess):
            found += process.name().startswith(name)
    return found


def test_reloads_return_what_they_took(server: Server, run_dir: Path) -> None:
    """Each replaces the engine under a stream that began before; RELOADS says how many."""

    def turn(number: int) -> None:
        stream = threading.Thread(target=server.generate, args=(PROMPT,), kwargs={"max_tokens": 200})
        stream.start()
        reload(server, max_model_len=512 + number % 2)
        stream.join()
        server.generate(PROMPT)

    turn(0)
    before = wait_for(lambda: figures(server), LIMIT_S, "figures")
    for number in range(1, int(os.environ.get("RELOADS", "1")) + 1):
        turn(number)

    def is_back() -> bool:
        found = figures(server)
        return bool(found) and all(found[name] <= before[name] for name in before)

    wait_for(is_back, LIMIT_S, f"{before}, and not {figures(server)}")
    assert len(list(run_dir.glob("*/run/*/*/engine.log"))) <= 3  # of this engine, by two names, and of the last one


def test_a_drain_lets_streams_end_and_cuts_them_off_at_its_deadline(server: Server) -> None:
    """The last test: it ends the server."""
    burst = Burst(server)
    burst.send(PROMPT, 4)
    for _ in range(150):
        burst.send(PROMPT, 1000)
    while not burst.tokens["0"]:
        burst.receive()
    server.process.send_signal(signal.SIGTERM)
    burst.finish()
    assert len(burst.tokens["0"]) == 4
    assert len(burst.errors) > 100
    assert {error.partition("]")[0] for error in burst.errors} == {"[TW-DRAINING"}
    burst.close()
    assert server.process.wait(LIMIT_S) == 0
