"""What the server keeps from others: its shared memory, and by arguments of Triton its endpoints."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import requests
import tritonclient.grpc as grpcclient
from tritonclient.utils import InferenceServerException

from support.triton.serving import REPOSITORY, Server, grpc_inputs, start_server, stop_server, wait_ready

pytestmark = pytest.mark.e2e
KEY = {"ops-key": "secret"}


def test_shared_memory_is_closed_to_other_users(server: Server) -> None:
    regions = {
        memory.path for stub in server.stubs() for memory in stub.memory_maps() if memory.path.startswith("/dev/shm/")
    }
    assert len(regions) == 2  # of `demo` and its twin
    assert {Path(region).stat().st_mode & 0o777 for region in regions} == {0o600}


@pytest.mark.parametrize(
    "body",
    [
        '{"text_input": "a", "tenant": "acme", "parameters": {"tenant": "other"}}',
        '{"text_input": "a", "parameters": {"tenant": "other"}, "tenant": "acme"}',
        '{"text_input": "a", "tenant": "acme", "tenant": "other"}',
    ],
)
def test_a_name_that_a_proxy_has_set_is_not_replaced(server: Server, body: str) -> None:
    answer = server.post("demo/generate", body)
    assert (answer.status_code, "parameters has the key 'tenant' twice" in answer.text) == (400, True), answer.text


def test_nor_by_a_name_that_ends_with_a_nul(server: Server) -> None:
    """Triton reads names up to there."""
    with grpcclient.InferenceServerClient(server.grpc) as client:
        given = {"tenant": "acme", "tenant\0": "other"}
        with pytest.raises(InferenceServerException, match="parameters has the key 'tenant' twice"):
            client.infer("demo_infer", grpc_inputs("a"), parameters=given)


class Certificates:
    """A certificate authority, and certificates of it for server and client."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._openssl("req", "-x509", "-subj", "/CN=authority", "-keyout", "ca.key", "-out", "ca.crt", "-nodes")
        for name in ("server", "client"):
            self._openssl(
                "req", "-new", "-subj", "/CN=localhost", "-keyout", f"{name}.key", "-out", f"{name}.csr", "-nodes"
            )
            (folder / "names").write_text("subjectAltName=DNS:localhost,IP:127.0.0.1")
            signing = ("-CA", "ca.crt", "-CAkey", "ca.key", "-CAcreateserial", "-extfile", "names")
            self._openssl("x509", "-req", "-in", f"{name}.csr", "-out", f"{name}.crt", *signing)

    def path(self, name: str) -> str:
        return str(self.folder / name)

    def _openssl(self, *arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=self.folder, check=True, capture_output=True, timeout=60)


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="module")
def guarded(certificates: Certificates, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Serve gRPC to holders of a certificate alone, and statistics to holders of a key."""
    arguments = [
        "--grpc-use-ssl=true",
        "--grpc-use-ssl-mutual=true",
        f"--grpc-server-cert={certificates.path('server.crt')}",
        f"--grpc-server-key={certificates.path('server.key')}",
        f"--grpc-root-cert={certificates.path('ca.crt')}",
        "--http-restricted-api=statistics:ops-key=secret",
        "--grpc-restricted-protocol=statistics:ops-key=secret",
    ]
    log = tmp_path_factory.mktemp("guarded") / "serve.log"
    running = wait_ready(
        start_server(
            "--model-repository", str(REPOSITORY), "--models", "demo,demo_infer", "--verbose",
            *(f"--triton-arg={argument}" for argument in arguments), log=log,
        )
    )  # fmt: skip
    yield running
    assert stop_server(running) == 0, log.read_text()


def client(server: Server, certificates: Certificates, name: str = "") -> grpcclient.InferenceServerClient:
    """Make a client, without a certificate of its own for an empty name."""
    own = {"private_key": certificates.path(f"{name}.key"), "certificate_chain": certificates.path(f"{name}.crt")}
    return grpcclient.InferenceServerClient(
        server.grpc, ssl=True, root_certificates=certificates.path("ca.crt"), **(own if name else {})
    )


def test_grpc_with_a_certificate(guarded: Server, certificates: Certificates) -> None:
    with client(guarded, certificates, "client") as known:
        answer = known.infer("demo_infer", grpc_inputs("The", max_tokens=4))
    assert answer.as_numpy("text_output").size == 1


def test_grpc_without_one_is_refused(guarded: Server, certificates: Certificates) -> None:
    with client(guarded, certificates) as unknown, pytest.raises(InferenceServerException, match="UNAVAILABLE"):
        unknown.is_server_live()
    with grpcclient.InferenceServerClient(guarded.grpc) as plain, pytest.raises(InferenceServerException):
        plain.is_server_live()


def test_an_api_that_asks_for_a_key(guarded: Server, certificates: Certificates) -> None:
    url = f"{guarded.http}/v2/models/demo/stats"
    refusal = requests.get(url, timeout=60)
    assert refusal.status_code == 403
    assert "ops-key" in refusal.text
    assert requests.get(url, headers=KEY, timeout=60).status_code == 200
    with client(guarded, certificates, "client") as known:
        with pytest.raises(InferenceServerException, match="restricted"):
            known.get_inference_statistics("demo")
        headers = {f"triton-grpc-protocol-{name}": value for name, value in KEY.items()}
        assert known.get_inference_statistics("demo", headers=headers).model_stats


def test_no_text_and_no_line_of_a_client_is_logged(guarded: Server) -> None:
    guarded.generate("zebra-7261 is", max_tokens=4)
    body = {"text_input": "zebra-7262", "id": "zebra-7263\nforged line", "parameters": {"tenant\nforged line": "x"}}
    assert guarded.post("demo/generate", body).status_code == 400
    log = guarded.log.read_text()
    assert "engine package" in log  # of our front ends
    assert "zebra" not in log
    assert "forged line" not in log


def test_what_serve_closes_stays_closed(guarded: Server) -> None:
    for path in ("systemsharedmemory/region/r/register", "trace/setting", "logging"):
        assert requests.post(f"{guarded.http}/v2/{path}", data="{}", timeout=60).status_code == 403
