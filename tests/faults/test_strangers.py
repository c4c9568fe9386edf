"""Attacks of another user of the machine, and of a web page, on APIs of Triton that change a server or show memory.

Where root runs them they are another user's, elsewhere those of the same user, who may do no more over the ports.
"""

from __future__ import annotations

import base64
import json
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tritonclient.grpc import service_pb2 as pb

from support.faults.nothing_lost import Recorded, assert_serves, nothing_lost, record
from support.faults.service import serving
from support.faults.stranger import Call, attack
from support.triton.serving import Server

pytestmark = pytest.mark.e2e

SHARED_MEMORY = Path("/dev/shm")
OWN_KEY = "statistics:ops-key=secret"  # of the operator: a header that clients can send


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    keyed = [f"--triton-arg={flag}={OWN_KEY}" for flag in ("--http-restricted-api", "--grpc-restricted-protocol")]
    with serving(tmp_path_factory.mktemp("strangers"), "--model-control", "explicit", *keyed) as running:
        yield running


@pytest.fixture(scope="module")
def recorded(server: Server) -> Recorded:
    return record(server)


def regions(server: Server) -> list[str]:
    """Return the names of the front ends' shared memory, as all users see them."""
    prefixes = [word for stub in server.stubs() for word in stub.cmdline() if word.startswith("tidewheel_")]
    return sorted(path.name for path in SHARED_MEMORY.iterdir() if path.name in prefixes)


def http_calls(region: str) -> list[Call]:
    place = json.dumps({"key": f"/{region}", "offset": 0, "byte_size": 4096}).encode()
    return [
        Call("/v2/systemsharedmemory/region/stolen/register", place),
        Call("/v2/systemsharedmemory/unregister", b""),
        Call("/v2/systemsharedmemory/status", b"", "GET"),
        Call("/v2/cudasharedmemory/status", b"", "GET"),
        Call("/v2/trace/setting", b"", "GET"),
        Call("/v2/models/demo/trace/setting", b'{"trace_file": "/tmp/stolen"}'),
        Call("/v2/logging", b'{"log_verbose_level": 1}'),
    ]


def grpc_calls(region: str) -> list[Call]:
    requests: dict[str, Any] = {
        "SystemSharedMemoryRegister": pb.SystemSharedMemoryRegisterRequest(
            name="stolen", key=f"/{region}", byte_size=4096
        ),
        "SystemSharedMemoryUnregister": pb.SystemSharedMemoryUnregisterRequest(),
        "SystemSharedMemoryStatus": pb.SystemSharedMemoryStatusRequest(),
        "CudaSharedMemoryStatus": pb.CudaSharedMemoryStatusRequest(),
        "TraceSetting": pb.TraceSettingRequest(),
        "LogSettings": pb.LogSettingsRequest(),
    }
    return [Call(method, request.SerializeToString()) for method, request in requests.items()]


def test_the_key_in_the_arguments_opens_no_shared_memory(server: Server, recorded: Recorded) -> None:
    """A region's name is in /dev/shm and in a stub's arguments, and what the restriction asks for in Triton's."""
    names = regions(server)
    assert len(names) == 2
    http, grpc = http_calls(names[0]), grpc_calls(names[0])
    with nothing_lost(server, recorded):
        assert attack(server, "shared-memory", http, grpc) == {call.path: [] for call in (*http, *grpc)}


def model_that_runs(code: str) -> tuple[str, bytes]:
    """Return configuration and `model.py` of a model whose load runs the code."""
    config = {"name": "stolen", "backend": "python", "input": [], "output": []}
    return json.dumps(config), f"{code}\nclass TritonPythonModel:\n    pass\n".encode()


def test_nobody_loads_models_over_the_ports(server: Server, recorded: Recorded, tmp_path: Path) -> None:
    """Files in a load are code. A web page may send the same from the browser of the server's user."""
    ran = tmp_path / "ran"
    config, code = model_that_runs(f"import pathlib; pathlib.Path({str(ran)!r}).touch()")
    files = {"config": config, "file:1/model.py": base64.b64encode(code).decode()}
    models = "/v2/repository/models"
    http = [
        Call(f"{models}/stolen/load", json.dumps({"parameters": files}).encode()),
        Call(f"{models}/demo/load", b""),
        Call(f"{models}/demo/unload", b""),
    ]
    load = pb.RepositoryModelLoadRequest(model_name="stolen")
    load.parameters["config"].string_param = config
    load.parameters["file:1/model.py"].bytes_param = code
    grpc = [
        Call("RepositoryModelLoad", load.SerializeToString()),
        Call("RepositoryModelUnload", pb.RepositoryModelUnloadRequest(model_name="demo").SerializeToString()),
    ]
    with nothing_lost(server, recorded):
        assert attack(server, "shared-memory", http, grpc) == {call.path: [] for call in (*http, *grpc)}
    assert not ran.exists()


def test_only_the_servers_user_reaches_the_socket_that_loads_models(server: Server, recorded: Recorded) -> None:
    control = server.work.control
    assert stat.S_IMODE(control.stat().st_mode) == 0o600
    assert stat.S_IMODE(control.parent.stat().st_mode) == 0o700
    server.control("reload", "demo_infer")
    assert_serves(server, recorded)


def test_the_same_requests_open_what_an_operator_gave_a_key(server: Server) -> None:
    """Otherwise the attacks might only be wrong."""
    http, grpc = Call("/v2/models/demo/stats", b"", "GET"), Call("ModelStatistics", b"")
    opened = attack(server, "statistics", [http], [grpc])
    assert (opened[http.path][0], opened[grpc.path][0]) == ("as it is", "as it is, plain")
