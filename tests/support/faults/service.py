"""A server for faults: small limits, checked invariants, and an engine in which faults can be planted."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from support.triton.serving import REPOSITORY, ROOT, WEIGHTS, Server, start_server, stop_server, wait_for, wait_ready

PLANTED = "support.faults.planted"
NUM_BLOCKS = 160
BLOCK_SIZE = 16
MAX_WAITING = 100
MAX_WAITING_TOKENS = 20_000
MAX_RUNNING = 32
SETTINGS: Mapping[str, str] = {
    "model": str(WEIGHTS),
    "dtype": "float32",
    "generation_config": "auto",
    "debug_invariants": "true",
    "block_size": str(BLOCK_SIZE),
    "num_blocks": str(NUM_BLOCKS),
    "max_num_seqs": str(MAX_RUNNING),
    "max_waiting_requests": str(MAX_WAITING),
    "max_waiting_tokens": str(MAX_WAITING_TOKENS),
    "admit_by_growth": "false",  # more preemptions
}


def make_repository(folder: Path, settings: Mapping[str, str] = SETTINGS) -> Path:
    """Make the demo model with these settings, and its twin."""
    shutil.copytree(REPOSITORY / "demo_infer", folder / "repository" / "demo_infer")
    (folder / "repository" / "demo" / "1").mkdir(parents=True)
    parameters = "".join(
        f'parameters {{ key: "{key}" value: {{ string_value: "{value}" }} }}\n' for key, value in settings.items()
    )
    (folder / "repository" / "demo" / "config.pbtxt").write_text(f'backend: "tidewheel"\n{parameters}')
    return folder / "repository"


@contextmanager
def serving(
    folder: Path,
    *arguments: str,
    settings: Mapping[str, str] = SETTINGS,
    prefix: Sequence[str] = (),
    variables: Mapping[str, str] | None = None,
) -> Iterator[Server]:
    """Serve them, with faults to plant. A server that has not been ended must end cleanly."""
    python_path = os.pathsep.join([str(ROOT / "tests"), *filter(None, [os.environ.get("PYTHONPATH")])])
    server = start_server(
        *("--model-repository", str(make_repository(folder, settings)), "--allow-faults"),
        *("--log-file", str(folder / "triton.log"), *arguments),
        log=folder / "serve.log",
        prefix=prefix,
        variables={"TIDEWHEEL_FAULTS": PLANTED, "PYTHONPATH": python_path, **(variables or {})},
    )
    try:
        yield wait_ready(server)
    finally:
        if server.process.poll() is None:
            assert stop_server(server) == 0, server.log.read_text()


@contextmanager
def all_at_once(server: Server, count: int) -> Iterator[None]:
    """Pause the engine until `count` requests have arrived: it receives all of them within a few steps."""
    engine = server.engine_process()
    assert engine is not None
    before = server.metric("tidewheel_requests_received_total")
    engine.suspend()
    try:
        yield
        wait_for(lambda: server.metric("tidewheel_requests_received_total") >= before + count, 180, "all requests")
    finally:
        engine.resume()
