"""One engine process and its front ends, for real: sockets, locks, signals. Only the device is a fake one."""

from __future__ import annotations

import dataclasses
import os
import shutil
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import zmq

from support.engine.engine_clients import COMMAND, CONFIG, LIMIT_S, Client, endless, request
from support.engine.fake_runner import naive_output
from support.engine.faulty_engine import CRASHES_AT_LOAD, DIES, FAILS_TO_LOAD, HANGS, LOADS_FOREVER, RAISES
from support.scheduler.scheduling import make_request
from support.triton.serving import wait_for
from tidewheel.config import EngineConfig
from tidewheel.engine import connection, heartbeat
from tidewheel.engine.connection import ANSWER_S, drain_all
from tidewheel.engine.folder import LOG, Status, read_status, socket_address
from tidewheel.engine.launcher import stop_engine
from tidewheel.engine.messages import (
    PROTOCOL,
    AddRequest,
    Disconnection,
    Goodbye,
    Hello,
    Ping,
    encoder,
    from_engine_decoder,
)
from tidewheel.errors import Busy, ConfigError, Draining, EngineDead
from tidewheel.sampling import SamplingParams
from tidewheel_process.child import ProcessHandle, RestartPolicy

Connect = Callable[..., Client]
LEAVING = (*COMMAND[:-1], "5")  # seconds without a front end after which the engine ends


def expected(*token_ids: int, max_tokens: int = 8) -> list[int]:
    return naive_output(make_request(prompt=token_ids, max_tokens=max_tokens))[0]


def wait_gone(status: Status) -> None:
    handle = ProcessHandle(status.pid, status.start_ticks)
    try:
        assert handle.wait(LIMIT_S), "the engine did not end"
    finally:
        handle.close()


class RawPeer:
    """Says whatever it likes to an engine."""

    def __init__(self, folder: Path) -> None:
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.DEALER)
        self.socket.set(zmq.LINGER, 0)
        self.socket.connect(socket_address(folder))

    def __enter__(self) -> RawPeer:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()
        self.context.term()

    def receive(self) -> object:
        assert self.socket.poll(LIMIT_S * 1000), "no answer"
        return from_engine_decoder.decode(self.socket.recv())


def test_two_clients_share_one_engine(connect: Connect) -> None:
    first, second = connect(), connect()
    assert (first.is_owner, second.is_owner) == (True, False)
    assert first.info == second.info and first.info.pid == first.status.pid
    first.add(request(7, 1, 2, 3))
    second.add(request(7, 4, 5, 6))
    first.recorder.wait_ended(7)
    second.recorder.wait_ended(7)
    assert first.recorder.tokens[7] == expected(1, 2, 3)
    assert second.recorder.tokens[7] == expected(4, 5, 6)
    assert first.recorder.endings[7] == "length"


def test_the_log_says_what_fits(connect: Connect, folder: Path) -> None:
    connect()
    log = (folder / LOG).read_text()
    assert "memory: weights 1 MiB" in log
    assert "KV cache size: 16,384 tokens" in log
    assert "Maximum concurrency for 4,096 tokens per request: 4.00x" in log


def test_front_ends_are_told_how_full_the_waiting_set_is(connect: Connect) -> None:
    config = dataclasses.replace(CONFIG, max_num_seqs=1, max_waiting_requests=2)
    first, second = connect(config=config), connect(config=config)
    first.add(endless(1))
    first.recorder.wait_started(1)
    first.add(endless(2))
    first.add(endless(3))

    def is_full(client: Client) -> bool:
        last = client.recorder.rooms[-1] if client.recorder.rooms else None
        return last is not None and (last.num_requests, last.max_requests) == (2, 2)

    for client in (first, second):
        client.recorder.wait(lambda client=client: is_full(client), "the waiting set is full")
    assert sorted(key for room in first.recorder.rooms for key in room.received) == [1, 2, 3]
    assert not any(room.received for room in second.recorder.rooms)


def test_a_cancelled_request_ends_once(connect: Connect) -> None:
    client = connect()
    client.add(endless(1))
    client.recorder.wait_started(1)
    client.cancel(1)
    client.recorder.wait_ended(1)
    client.cancel(1)
    client.cancel(99)
    client.add(request(2, 1))
    client.recorder.wait_ended(2)
    assert client.recorder.endings == {1: "cancelled", 2: "length"}
    assert client.recorder.tokens[1] == expected(1, 2, 3, max_tokens=4000)[: len(client.recorder.tokens[1])]


def test_killed_engine_ends_every_request_and_comes_back(connect: Connect) -> None:
    owner, other = connect(), connect()
    for client in (owner, other):
        for key in range(8):
            client.add(endless(key))
        client.recorder.wait_started(*range(8))
    old = owner.info.pid
    os.kill(old, signal.SIGKILL)
    for client in (owner, other):
        client.recorder.wait_ended(*range(8))
        assert set(client.recorder.endings.values()) == {"TW-ENGINE-DEAD"}
    for client in (owner, other):
        client.add(request(100, 1, 2, 3))
        client.recorder.wait_ended(100)
        assert client.recorder.tokens[100] == expected(1, 2, 3)
        assert client.info.pid != old
        assert set(client.recorder.num_endings.values()) == {1}
        assert client.num_restarts == 1


@pytest.mark.parametrize("fault", [DIES, RAISES])
def test_a_fault_in_a_step_ends_all_requests(connect: Connect, fault: int) -> None:
    client = connect()
    for key in range(4):
        client.add(endless(key))
    client.recorder.wait_started(*range(4))
    client.add(request(4, fault))
    client.recorder.wait_ended(*range(5))
    assert set(client.recorder.endings.values()) == {"TW-ENGINE-DEAD"}
    client.add(request(5, 1))
    client.recorder.wait_ended(5)
    assert client.recorder.endings[5] == "length"


def test_the_step_that_failed_is_named(connect: Connect, folder: Path) -> None:
    client = connect()
    client.add(request(1, RAISES))
    client.recorder.wait_ended(1)
    assert client.recorder.errors[1] == "a step failed: RuntimeError"
    assert "engine died: RuntimeError: the device fell over" in (folder / LOG).read_text()


def test_hung_engine_is_killed(connect: Connect, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    client = connect()
    client.add(request(0, 1))
    client.recorder.wait_ended(0)  # from now on the length of a step is known
    with monkeypatch.context() as patched:  # the next engine has its usual time
        patched.setattr(heartbeat, "HUNG_S", 0.5)
        patched.setattr(heartbeat, "END_S", 2.0)
        client.add(request(1, HANGS))
        wait_for(lambda: client.readiness.state == "hung", LIMIT_S, "the hang is seen")
        assert "in a step" in client.readiness.reason
        client.recorder.wait_ended(1)
    assert client.recorder.endings[1] == "TW-ENGINE-DEAD"
    assert "hung" in client.recorder.errors[1]
    client.add(request(2, 1))
    client.recorder.wait_ended(2)
    assert client.recorder.endings[2] == "length"
    assert client.readiness.is_ready
    assert "Current thread" in (folder / LOG).read_text()  # the stacks


def test_crash_loop_is_permanent(connect: Connect) -> None:
    policy = RestartPolicy(first_delay_s=0.01, window_s=3600.0)  # however long a start takes
    owner, other = connect(restart=policy), connect(restart=policy)
    for attempt in range(5):
        owner.add(request(attempt, DIES))
        owner.recorder.wait_ended(attempt)
    for client in (owner, other):
        with pytest.raises(EngineDead, match=r"died 5 times within 3600 s.*its log ends with"):
            add_until_refused(client)
    assert owner.status.state == "failed"


def add_until_refused(client: Client) -> None:
    """What is added while nobody knows better is held, and lost when they do."""
    for key in range(1000, 1100):
        client.add(request(key, 1))
        client.recorder.wait_ended(key)
        assert client.recorder.endings[key] == "TW-ENGINE-DEAD"


def test_load_failure_is_one_line(connect: Connect) -> None:
    client = connect(start=False, config=EngineConfig(model=FAILS_TO_LOAD))
    with pytest.raises(ConfigError, match=r"^model.safetensors is missing: download it$"):
        client.start(LIMIT_S)
    with pytest.raises(EngineDead, match="is missing"):
        client.add(request(1, 1))


def test_crash_at_load_names_the_end_of_the_log(connect: Connect) -> None:
    client = connect(start=False, config=EngineConfig(model=CRASHES_AT_LOAD))
    with pytest.raises(
        ConfigError, match=r"ended while it loaded \(exit code 1\): .*RuntimeError: the loader fell over$"
    ):
        client.start(LIMIT_S)


def test_all_who_wait_for_a_load_learn_that_it_failed(connect: Connect) -> None:
    clients = [connect(start=False, config=EngineConfig(model=FAILS_TO_LOAD)) for _ in range(3)]
    messages: list[str] = []

    def start(client: Client) -> None:
        with pytest.raises(ConfigError) as error:
            client.start(LIMIT_S)
        messages.append(str(error.value))

    threads = [threading.Thread(target=start, args=(client,)) for client in clients]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
    assert messages == ["model.safetensors is missing: download it"] * 3


def test_start_gives_up_and_ends_the_engine(connect: Connect) -> None:
    client = connect(start=False, config=EngineConfig(model=LOADS_FOREVER))
    with pytest.raises(ConfigError, match=r"not ready within 5 s .*raise engine_start_timeout_s"):
        client.start(5.0)  # in which an engine says that it loads
    client.close()
    assert not client.status.is_alive


def test_requests_of_a_vanished_front_end_are_cancelled(connect: Connect, folder: Path) -> None:
    client = connect()
    with RawPeer(folder) as peer:
        peer.socket.send(encoder.encode(Hello(PROTOCOL, "vanishes", "")))
        peer.receive()
        peer.socket.send(encoder.encode(endless(1)))
        client.recorder.wait(lambda: client.recorder.stats[-1].num_running == 1, "the request runs")
    client.recorder.wait(lambda: client.recorder.stats[-1].num_running == 0, "its end")
    assert client.recorder.stats[-1].num_free_blocks == client.info.num_blocks
    assert "vanishes is gone (its connection is closed): 1 requests end" in (folder / LOG).read_text()


def test_a_silent_front_end_is_dropped(connect: Connect, folder: Path) -> None:
    client = connect()
    with RawPeer(folder) as peer:
        peer.socket.send(encoder.encode(Hello(PROTOCOL, "falls silent", "")))
        peer.socket.send(encoder.encode(endless(1)))
        while not isinstance(answer := peer.receive(), Disconnection):
            pass
        assert "silent for " in answer.error.message
        peer.socket.send(encoder.encode(Ping()))
        while not isinstance(answer := peer.receive(), Disconnection):
            pass
        assert "does not know" in answer.error.message
    client.add(request(1, 1))
    client.recorder.wait_ended(1)


def test_engine_ends_after_its_last_front_end(connect: Connect) -> None:
    first, second = connect(command=LEAVING), connect(command=LEAVING)
    status = first.status
    first.close()
    second.add(request(1, 1))
    second.recorder.wait_ended(1)
    assert second.status.is_alive
    second.close()
    wait_gone(status)
    assert (second.status.state, second.status.message) == ("stopped", "the last front end is gone")


def test_ownership_passes_on(connect: Connect) -> None:
    first, second = connect(), connect(ping_interval_s=0.05)
    first.close()
    second.recorder.wait(lambda: second.is_owner, "the lock")
    os.kill(second.info.pid, signal.SIGKILL)
    wait_gone(second.status)
    second.add(request(1, 1))
    second.recorder.wait_ended(1)
    while second.recorder.endings[1] != "length":  # sent to the dead engine: ended, and safe to send again
        second.recorder.endings.clear()
        second.add(request(1, 1))
        second.recorder.wait_ended(1)
    assert second.status.pid == second.info.pid


def test_closing_ends_what_is_in_flight(connect: Connect) -> None:
    client = connect()
    client.add(endless(1))
    client.recorder.wait_started(1)
    client.close()
    assert client.recorder.endings == {1: "TW-DRAINING"}
    with pytest.raises(Draining):
        client.add(request(2, 1))


def test_drain_refuses_new_requests_and_lets_the_others_end(connect: Connect, folder: Path) -> None:
    client = connect()
    client.add(request(1, 1, 2, max_tokens=200))
    client.recorder.wait_started(1)
    assert drain_all([folder], ANSWER_S) in (0, 1)
    client.add(request(2, 1))
    client.recorder.wait_ended(1, 2)
    assert client.recorder.endings == {1: "length", 2: "TW-DRAINING"}
    assert client.status.is_draining
    client.recorder.wait(lambda: client.recorder.num_drains == 1, "the front end hears of it")
    assert client.readiness.state == "draining"


def test_a_drained_engine_is_not_started_again(connect: Connect, folder: Path) -> None:
    client = connect()
    client.add(endless(1))
    client.recorder.wait_started(1)
    drain_all([folder], ANSWER_S)
    stop_engine(folder)
    client.recorder.wait_ended(1)
    assert client.recorder.endings[1] == "TW-DRAINING"
    with pytest.raises(Draining, match="shutting down"):
        for key in range(2, 100):
            client.add(request(key, 1))
            client.recorder.wait_ended(key)
    status = read_status(folder)
    assert status is None or not status.is_alive


def test_sigterm_answers_before_the_end(connect: Connect) -> None:
    client = connect()
    client.add(endless(1))
    client.recorder.wait_started(1)
    os.kill(client.info.pid, signal.SIGTERM)
    client.recorder.wait_ended(1)
    assert (client.recorder.endings[1], client.recorder.errors[1]) == ("TW-DRAINING", "the engine was stopped")
    client.add(request(2, 1))
    client.recorder.wait_ended(2)


def test_malformed_messages_harm_nobody(connect: Connect, folder: Path) -> None:
    client = connect()
    with RawPeer(folder) as peer:
        for payload in (b"", b"\xc1", b"\x93\x01\x02", os.urandom(200), encoder.encode(["Nonsense", 1])):
            peer.socket.send(payload)
        peer.socket.send_multipart([b"two", b"parts"])
        peer.socket.send(encoder.encode(Goodbye()))
        client.add(request(1, 1, 2))
        client.recorder.wait_ended(1)
        peer.socket.send(encoder.encode(endless(5)))
        assert isinstance(peer.receive(), Disconnection)
    assert client.recorder.tokens[1] == expected(1, 2)
    assert "malformed message of 200 bytes" in (folder / LOG).read_text()


def test_a_malformed_request_with_a_key_is_answered(connect: Connect) -> None:
    client = connect()
    good = encoder.encode(request(1, 1))
    client._outbox.put(
        1, good.replace(b"temperature", b"temperatvre").replace(b"\xaamax_tokens\x08", b"\xaamax_tokens\xd0\x9c")
    )
    client.recorder.wait_ended(1)
    assert client.recorder.endings[1] == "TW-INPUT"
    assert "max_tokens is -100" in client.recorder.errors[1]


@pytest.mark.parametrize(
    ("message", "tag", "text"),
    [
        (AddRequest(1, b"", SamplingParams()), "TW-INPUT", "empty"),
        (AddRequest(1, b"12345", SamplingParams()), "TW-INTERNAL", "could not be added: ValueError"),
        (request(1, 40), "TW-INPUT", "token id 40 at position 0: the model's ids are 0 to 39"),
        (request(1, *[1] * 4096), "TW-TOO-LARGE", "4096 tokens"),
        (request(1, 1, max_tokens=4096), "TW-INPUT", "leaves room for 4095"),
    ],
    ids=["empty", "odd", "out-of-vocabulary", "too-long", "max-tokens"],
)
def test_bad_requests_end_with_an_error(connect: Connect, message: AddRequest, tag: str, text: str) -> None:
    client = connect()
    client.add(message)
    client.recorder.wait_ended(1)
    assert client.recorder.endings[1] == tag
    assert text in client.recorder.errors[1]


def abandon(client: Client) -> None:
    """Close a client as its process would be killed, without a word to the engine."""
    assert client._connection is not None
    client._connection.send = lambda message: True  # type: ignore[method-assign,assignment]
    client.close()


def test_an_engine_left_over_with_other_settings_is_replaced(connect: Connect) -> None:
    first = connect()
    left_over = first.status
    abandon(first)
    second = connect(config=EngineConfig(model="ok", max_num_seqs=8))
    assert second.info.pid != left_over.pid and second.info.max_num_seqs == 8
    assert not left_over.is_alive


def test_an_engine_left_over_with_equal_settings_is_joined(connect: Connect) -> None:
    first = connect()
    abandon(first)
    second = connect()
    assert second.is_owner and second.info.pid == first.info.pid


def test_an_engine_ends_at_once_with_the_last_goodbye(connect: Connect) -> None:
    client = connect()
    status = client.status
    client.close()
    wait_gone(status)


def test_engine_ends_when_its_folder_vanishes(connect: Connect, folder: Path) -> None:
    client = connect()
    status, elsewhere = client.status, folder.with_name(f"{folder.name}-moved")
    folder.rename(elsewhere)
    wait_gone(status)
    client.recorder.wait(lambda: client.info.pid != status.pid, "an engine in a new folder")
    assert folder.stat().st_mode & 0o777 == 0o700
    shutil.rmtree(elsewhere)


def test_requests_are_held_while_the_engine_loads(connect: Connect) -> None:
    client = connect()
    os.kill(client.info.pid, signal.SIGSTOP)  # dead to the world, and not yet gone
    client.add(request(1, 1))
    os.kill(client.info.pid, signal.SIGKILL)
    client.recorder.wait_ended(1)
    client.add(request(2, 1, 2, 3))
    client.recorder.wait_ended(2)
    assert client.recorder.tokens[2] == expected(1, 2, 3)


def test_a_client_with_nothing_in_flight_hears_of_the_end_too(connect: Connect) -> None:
    """What it knows of the engine's waiting set is void."""
    client = connect()
    os.kill(client.info.pid, signal.SIGKILL)
    client.recorder.wait(lambda: client.recorder.num_losses, "the end of the engine")
    assert not client.recorder.endings


def test_held_requests_are_bounded_in_number_and_time(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "MAX_HELD", 3)
    client = Client(folder, hold_s=0.2)
    for key in range(3):
        client.add(request(key, 1))
    with pytest.raises(Busy, match="3 requests wait"):
        client.add(request(3, 1))
    client.cancel(0)
    client.close()
    assert client.recorder.endings == {1: "TW-DRAINING", 2: "TW-DRAINING"}


def test_stats_keep_coming(connect: Connect) -> None:
    client = connect()
    client.recorder.wait(lambda: len(client.recorder.stats) >= 4, "statistics")
    client.add(request(1, 1, max_tokens=20))
    client.recorder.wait_ended(1)
    client.recorder.wait(lambda: client.recorder.stats[-1].num_steps == 20, "statistics of these steps")
    assert client.recorder.stats[-1].step_seconds > 0
