"""Command line and environment of tritonserver."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tidewheel.server import ServeError
from tidewheel.server.endpoints import Endpoints
from tidewheel.server.run_server import ServeOptions
from tidewheel.server.tritonserver import (
    ClosedApi,
    ControlMode,
    TritonInstall,
    command,
    control_flags,
    environment,
    known_flags,
)
from tidewheel.server.workdir import WorkDir

ENDPOINTS = Endpoints(http=1, grpc=2, metrics=3)


@pytest.fixture
def install(tmp_path: Path) -> TritonInstall:
    binary = tmp_path / "tritonserver"
    return TritonInstall(
        binary=binary, backends=tmp_path, stub=tmp_path, libraries=(Path("/lib/one"),), origin="test"
    )


def flags_of(line: list[str]) -> dict[str, str]:
    return dict(flag.split("=", 1) for flag in line[1:])


def test_binds_where_it_is_told_and_closes_what_it_can(install: TritonInstall, tmp_path: Path) -> None:
    pool = "--grpc-max-response-pool-size"
    known = frozenset({"--allow-client-shm", "--http-restricted-api", "--allow-gpu-metrics", pool})
    extra = [*control_flags("none"), "--id=x"]
    line = command(install, tmp_path, ENDPOINTS, WorkDir(tmp_path), drain_s=2.5, flags=known, extra=extra)
    flags = flags_of(line)
    assert line[0] == str(install.binary)
    assert line[-1] == "--id=x"
    for endpoint in ("http", "grpc", "metrics"):
        assert flags[f"--{endpoint}-address"] == "127.0.0.1"
    assert flags["--model-control-mode"] == "none"
    assert flags["--allow-client-shm"] == "false"
    assert flags[pool] == "1024"
    assert flags["--http-restricted-api"].startswith("shared-memory,trace,logging,model-repository:")
    assert "--grpc-restricted-protocol" not in flags
    assert "--allow-sagemaker" not in flags
    assert int(flags["--exit-timeout-secs"]) > 2.5


@pytest.mark.parametrize(
    ("opened", "allowed", "closed"),
    [
        (("shared-memory", "model-repository"), "true", "trace,logging"),
        (("trace",), "false", "shared-memory,logging,model-repository"),
        (("trace", "logging", "shared-memory", "model-repository"), "true", ""),
    ],
)
def test_opened_apis(
    install: TritonInstall, tmp_path: Path, opened: tuple[ClosedApi, ...], allowed: str, closed: str
) -> None:
    known = frozenset({"--allow-client-shm", "--http-restricted-api", "--grpc-restricted-protocol"})
    line = command(install, tmp_path, ENDPOINTS, WorkDir(tmp_path), drain_s=0, flags=known, opened=opened)
    flags = flags_of(line)
    assert flags["--allow-client-shm"] == allowed
    for flag in ("--http-restricted-api", "--grpc-restricted-protocol"):
        assert flags.get(flag, "").partition(":")[0] == closed


@pytest.mark.parametrize(
    ("mode", "models", "poll_s", "flags"),
    [
        ("none", ("a",), None, []),
        ("explicit", (), None, ["--load-model=*"]),
        ("explicit", ("a", "b"), None, ["--load-model=a", "--load-model=b"]),
        ("poll", ("a",), None, []),
        ("poll", (), 3, ["--repository-poll-secs=3"]),
    ],
)
def test_control_flags(mode: ControlMode, models: tuple[str, ...], poll_s: int | None, flags: list[str]) -> None:
    assert control_flags(mode, models, poll_s) == [f"--model-control-mode={mode}", *flags]


@pytest.mark.parametrize(
    ("mode", "host", "opened", "words"),
    [
        ("explicit", "0.0.0.0", (), []),
        ("explicit", "127.0.0.1", ("model-repository",), ["run code as this user"]),
        ("poll", "0.0.0.0", ("trace",), []),
        ("none", "127.0.0.1", ("shared-memory",), ["change the requests of others"]),
    ],
)
def test_what_is_open_is_warned_of(
    mode: ControlMode, host: str, opened: tuple[ClosedApi, ...], words: list[str]
) -> None:
    options = ServeOptions(settings={}, endpoints=Endpoints(host=host), model_control=mode, open_apis=opened)
    warnings = options.warnings
    assert len(warnings) == len(words)
    assert all(word in warning for word, warning in zip(words, warnings, strict=True))


def test_closed_apis_ask_for_a_header_that_cannot_be_sent(install: TritonInstall, tmp_path: Path) -> None:
    """HTTP ends a name at a colon; HTTP/2 has no capitals in one, and gRPC neither colons nor spaces."""
    flags = ("--http-restricted-api", "--grpc-restricted-protocol")
    work = WorkDir(tmp_path)
    lines = [command(install, tmp_path, ENDPOINTS, work, drain_s=0, flags=frozenset(flags)) for _ in range(2)]
    first, second = (flags_of(line) for line in lines)
    for flag in flags:
        name, equals, value = first[flag].partition(":")[2].partition("=")
        assert ":" in name[1:]
        assert " " in name
        assert name.lower() != name
        assert equals
        assert value != second[flag].rpartition("=")[2]


@pytest.mark.parametrize(
    ("argument", "opened", "is_open"),
    [
        ("--log-verbose=1", (), True),  # Triton refuses loads itself, and lists its models
        ("--model-control-mode=explicit", (), False),
        ("--model-control-mode=explicit", ("model-repository",), True),
    ],
)
def test_an_explicit_triton_is_closed_unless_it_is_opened(
    argument: str, opened: tuple[ClosedApi, ...], is_open: bool
) -> None:
    options = ServeOptions(settings={}, endpoints=Endpoints(), triton_arguments=(argument,), open_apis=opened)
    assert ("model-repository" in options.opened_apis) is is_open


def test_environment(install: TritonInstall, tmp_path: Path) -> None:
    base = {"PATH": "/usr/bin", "LD_LIBRARY_PATH": "/mine", "OPENBLAS_NUM_THREADS": "3", "HOME": "/h"}
    env = environment(install, WorkDir(tmp_path), base)
    assert env["TIDEWHEEL_RUN_DIR"] == str(tmp_path / "run")
    assert env["LD_LIBRARY_PATH"] == "/lib/one:/mine"
    assert env["PATH"].split(os.pathsep)[0] == str(Path(sys.executable).parent)
    assert env["PATH"].endswith(":/usr/bin")
    assert env["OPENBLAS_NUM_THREADS"] == "3"
    assert env["HOME"] == "/h"
    assert "PYTHONPATH" not in base


def test_known_flags(install: TritonInstall) -> None:
    install.binary.write_text(
        "#!/bin/sh\nprintf '  --model-repository <string>\\n\\ttext --not-this\\n  --id <x>\\n'\n"
    )
    install.binary.chmod(0o755)
    assert known_flags(install, {}) == {"--model-repository", "--id"}


@pytest.mark.parametrize("script", ["#!/bin/sh\necho 'libx.so: cannot open' >&2\nexit 127\n", "not a program"])
def test_a_server_that_does_not_run(install: TritonInstall, script: str) -> None:
    install.binary.write_text(script)
    install.binary.chmod(0o755)
    with pytest.raises(ServeError, match="does not run"):
        known_flags(install, {})
