"""Keys: who is let in, as which tenant, and how often."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from support.gateway.running_gateway import RunningGateway, entry, gateway_to, say
from support.triton.grpc_triton import Answer, Asked, FakeTriton, running
from support.triton.serving import wait_for
from tidewheel.cli.main import _parser
from tidewheel.errors import ConfigError
from tidewheel.gateway.api_keys import MAX_FILE_BYTES, Account, ApiKey, ApiKeys, Ledger
from tidewheel.server import ServeError
from tidewheel.server.endpoints import check_keys
from tidewheel_client.errors import Busy


def bearer(secret: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {secret}"}


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    path = tmp_path / "keys.toml"
    path.write_text(entry("alice", tenant="acme", max_priority=2) + entry("bob", max_concurrent=1))
    with path.open("a") as file:
        file.write(entry("carol", max_priority="low"))
    return path


@pytest.fixture
def triton() -> Iterator[FakeTriton]:
    with running(FakeTriton(answer=say, models=("demo",))) as fake:
        yield fake


@pytest.fixture
def gateway(triton: FakeTriton, keys: Path) -> Iterator[RunningGateway]:
    with gateway_to(triton.port, keys=keys) as one:
        yield one


def test_only_known_keys_are_let_in(gateway: RunningGateway, triton: FakeTriton) -> None:
    for headers in ({}, bearer("eve"), bearer(""), {"Authorization": "Basic alice"}, bearer("ÿ")):
        for answer in (
            gateway.complete(headers=None),
            gateway.post("completions", {"prompt": "x"}, headers=headers),
            gateway.get("/v1/models", headers=headers),
            gateway.get("/metrics", headers=headers),
        ):
            assert answer.status_code == 401
            assert answer.json()["error"]["code"] == "invalid_api_key"
            assert answer.json()["error"]["tag"] == "TW-KEY"
            assert answer.headers["WWW-Authenticate"] == "Bearer"
    assert triton.asked == []
    assert gateway.get("/health").ok
    assert gateway.post("completions", {"prompt": "x"}, headers=bearer("alice")).ok
    figures = gateway.get("/metrics", headers=bearer("alice")).text
    assert 'tidewheel_gateway_errors_total{tag="TW-KEY"} 20.0\n' in figures


def test_wrong_keys_are_logged_together(gateway: RunningGateway, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(5):
        gateway.get("/v1/models", headers=bearer("eve"))
    wait_for(lambda: sum(record.args[1] for record in caplog.records if record.args) == 5, 60, "a line")
    assert all(record.getMessage().startswith("[TW-KEY] ") for record in caplog.records if record.args)
    assert "eve" not in caplog.text


@pytest.mark.parametrize(
    ("key", "asked", "tenant", "granted"),
    [
        ("alice", None, "acme", 3),
        ("alice", 0, "acme", 3),
        ("alice", 1, "acme", 2),
        ("alice", 4, "acme", 4),
        ("bob", 1, "bob", 1),
        ("bob", "High", "bob", 2),
        ("alice", "critical", "acme", 2),
        ("carol", "normal", "carol", 4),
    ],
)
def test_tenant_and_class_follow_from_the_key(
    gateway: RunningGateway, triton: FakeTriton, key: str, asked: int | str | None, tenant: str, granted: int
) -> None:
    assert gateway.post("completions", {"prompt": "x", "priority": asked}, headers=bearer(key)).ok
    (seen,) = triton.asked
    assert (seen.sampling["tenant"], seen.sampling["priority"]) == (tenant, granted)


@pytest.mark.parametrize("field", [{"tenant": "other"}, {"priority": 9}, {"priority": "best"}, {"priority": [1]}])
def test_no_request_names_its_tenant_or_an_unknown_class(gateway: RunningGateway, field: dict[str, object]) -> None:
    answer = gateway.post("completions", {"prompt": "x", **field}, headers=bearer("alice"))
    assert answer.status_code == 400
    assert [answer.json()["error"]["param"]] == list(field)


def test_requests_at_once(gateway: RunningGateway, triton: FakeTriton) -> None:
    release = threading.Event()

    def wait(asked: Asked) -> Answer:
        release.wait(30)
        yield from say(asked)

    triton.answer = wait
    with ThreadPoolExecutor(1) as pool:
        try:
            first = pool.submit(gateway.post, "completions", {"prompt": "x"}, headers=bearer("bob"))
            wait_for(lambda: triton.asked, 60, "request")
            refused = gateway.post("completions", {"prompt": "x"}, headers=bearer("bob"))
            assert (refused.status_code, refused.headers["Retry-After"]) == (429, "1")
            assert "'bob' has 1 of 1 requests open" in refused.json()["error"]["message"]
        finally:
            release.set()
        assert first.result().ok


def test_requests_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    ledger, key = Ledger(), ApiKey(name="a", sha256="0" * 64, requests_per_minute=2)
    account = Account(key, ledger, *ledger.rows([key.sha256]))
    for _ in range(2):
        with account.admit():
            pass
    with pytest.raises(Busy) as refused, account.admit():
        pass
    assert refused.value.retry_after_ms is not None
    assert 30_000 <= refused.value.retry_after_ms <= 30_001
    now[0] = 30.0
    with account.admit():
        pass
    now[0] = 600.0  # what was saved up is one minute's
    for _ in range(2):
        with account.admit():
            pass
    with pytest.raises(Busy), account.admit():
        pass


def test_limits_hold_for_all_workers_together(tmp_path: Path) -> None:
    (tmp_path / "keys.toml").write_text(entry("a", max_concurrent=2) + entry("b", requests_per_minute=3))
    one, other = (ApiKeys(tmp_path / "keys.toml", Ledger(tmp_path / "ledger", number)) for number in range(2))
    with one.account("Bearer a").admit():
        with other.account("Bearer a").admit(), pytest.raises(Busy, match="has 2 of 2 requests open"):
            one.account("Bearer a").admit().__enter__()
        with other.account("Bearer a").admit():
            pass
        # Another process takes the place of a worker that died with an open request.
        again = ApiKeys(tmp_path / "keys.toml", Ledger(tmp_path / "ledger", 0))
        with again.account("Bearer a").admit(), other.account("Bearer a").admit():
            pass
    for keys in (one, other, one):
        with keys.account("Bearer b").admit():
            pass
    with pytest.raises(Busy, match="3 requests a minute"):
        other.account("Bearer b").admit().__enter__()


def test_a_changed_file_is_read_again(keys: Path) -> None:
    known = ApiKeys(keys)
    with known.account("Bearer bob").admit():
        keys.write_text(entry("bob", max_concurrent=2) + entry("carol"))
        os.utime(keys, ns=(1, 1))
        known.refresh()
        assert known.account("Bearer carol").key is not None
        with known.account("Bearer bob").admit(), pytest.raises(Busy, match="2 of 2"):
            known.account("Bearer bob").admit().__enter__()
    keys.write_text("[[keys]]")
    known.refresh()
    assert known.account("Bearer carol").key is not None, "a broken file changes nothing"
    keys.unlink()
    known.refresh()
    assert known.account("Bearer carol").key is not None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "keys"),
        ("keys = []", "length >= 1"),
        ("[[keys]]\nname = 'a'", "sha256"),
        ("[[keys]]\nname = 'a'\nsha256 = 'secret'", "regex"),
        (entry("a", tenants="x"), "unknown field `tenants`"),
        (entry("a", max_priority=5), "<= 4"),
        (entry("a", max_priority="best"), "Invalid enum value 'best'"),
        (entry("a") + 'tenant = "b\\u0000"', r"the tenant of a key holds the control character U\+0000"),
        (entry("a", max_concurrent=0), ">= 1"),
        (entry("a") * 2, "two keys have the same sha256"),
        ("=", "keys.toml"),
    ],
)
def test_files_that_are_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "keys.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        ApiKeys(path)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        ApiKeys(tmp_path / "none.toml")


@pytest.mark.timeout(30)
def test_a_file_without_an_end_and_one_that_is_too_big(tmp_path: Path) -> None:
    """A pipe would be waited for. Of a big file, no more than the limit is read."""
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError, match="it is not a regular file"):
        ApiKeys(tmp_path / "pipe")
    with (tmp_path / "big").open("wb") as file:
        file.truncate(MAX_FILE_BYTES + 1)
    with pytest.raises(ConfigError, match=f"at most {MAX_FILE_BYTES} are read"):
        ApiKeys(tmp_path / "big")


def test_a_network_needs_keys(tmp_path: Path) -> None:
    check_keys("127.0.0.1", None)
    check_keys("0.0.0.0", tmp_path)
    with pytest.raises(ServeError, match=r"--host is '0.0.0.0', and there is no --api-keys"):
        check_keys("0.0.0.0", None)


@pytest.mark.parametrize("command", ["gateway", "serve", "cluster up"])
def test_an_empty_name_of_the_file_is_refused(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    """As of a variable that is not set: the gateway would let in everyone on the machine."""
    arguments = [*command.split(), "--api-keys="]
    with pytest.raises(SystemExit, match="2"):
        _parser(arguments[0]).parse_args(arguments)
    assert "--api-keys: the name of the file is empty" in capsys.readouterr().err


def test_metrics_may_need_no_key(triton: FakeTriton, keys: Path) -> None:
    with gateway_to(triton.port, keys=keys) as closed, gateway_to(triton.port, keys=keys, open_metrics=True) as open_:
        assert closed.get("/metrics").status_code == 401
        assert "tidewheel_gateway_requests_total" in open_.get("/metrics").text
        assert [one.get("/v1/models").status_code for one in (closed, open_)] == [401, 401]
