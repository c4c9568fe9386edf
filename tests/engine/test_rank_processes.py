"""Engines whose ranks are processes: their tokens, and the end and return of all when one fails."""

from __future__ import annotations

import gc
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import NoReturn
from unittest import mock

import numpy as np
import psutil
import pytest

from support.engine.engine_clients import Client
from support.engine.faulty_engine import prompt_bytes
from support.models.tiny_models import llama, prompts, save, save_byte_llama, transformers_tokens
from tidewheel import LLM, Grammar, RequestOptions, SamplingParams
from tidewheel.config import EngineConfig
from tidewheel.engine.launcher import engine_command
from tidewheel.engine.messages import AddRequest
from tidewheel.errors import ConfigError, InternalError
from tidewheel.llm import GenerationResult
from tidewheel.models.causal_lm import Progress, no_progress
from tidewheel.runner import device, model_runner, rank_group
from tidewheel.runner.rank_group import load_group
from tidewheel_process.child import ProcessHandle

LIMIT_S = 120.0
MAX_TOKENS = 200


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llama")
    save(lambda: llama(max_position_embeddings=1024), path)
    return path


def config_of(folder: Path, **settings: object) -> EngineConfig:
    given = {"model": str(folder), "dtype": "float32", "num_blocks": 64, "device": "cpu", "tensor_parallel_size": 2}
    return EngineConfig.from_settings(given | settings)


@pytest.fixture
def start(folder: Path) -> Iterator[Callable[[EngineConfig], Client]]:
    clients = []

    def started(config: EngineConfig) -> Client:
        clients.append(Client(folder, config=config, command=engine_command()))
        clients[-1].start(LIMIT_S)
        return clients[-1]

    yield started
    for client in clients:
        client.close()


def ranks_of(client: Client) -> list[ProcessHandle]:
    """Return handles of all processes of the engine."""
    pid = client.info.pid
    return [ProcessHandle(each) for each in (pid, *(child.pid for child in psutil.Process(pid).children()))]


def long_request(key: int) -> AddRequest:
    return AddRequest(key, prompt_bytes(1, 2, 3), SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS))


def check_serves(client: Client, key: int) -> None:
    client.add(long_request(key))
    client.recorder.wait_ended(key, limit_s=LIMIT_S)
    assert len(client.recorder.tokens[key]) == MAX_TOKENS


def test_two_processes_give_the_tokens_of_transformers(
    tmp_path: Path, start: Callable[[EngineConfig], Client]
) -> None:
    given = prompts(4, 5, 40)
    expected = transformers_tokens(save(llama, tmp_path), given, 8)
    client = start(config_of(tmp_path))
    assert client.info.device.endswith(", 2 ranks")
    assert len(ranks_of(client)) == 2
    for key, prompt in enumerate(given):
        client.add(AddRequest(key, prompt_bytes(*prompt.tolist()), SamplingParams(temperature=0.0, max_tokens=8)))
    client.recorder.wait_ended(*range(4), limit_s=LIMIT_S)
    assert [client.recorder.tokens[key] for key in range(4)] == expected


TOLD = {
    (0, signal.SIGKILL): "the engine process ended; it is being started again",
    (1, signal.SIGKILL): "a step failed: rank 1 ended with signal 9, Killed, and the log may say why",
    (1, signal.SIGSTOP): r"a step failed: rank 1 did not answer for 1\.5 s",
}


@pytest.mark.parametrize(("victim", "number"), TOLD)
def test_a_rank_that_dies_or_hangs_ends_all_and_all_come_back(
    model: Path, start: Callable[[EngineConfig], Client], victim: int, number: signal.Signals
) -> None:
    client = start(config_of(model))
    ranks = ranks_of(client)
    client.add(long_request(1))
    client.recorder.wait_started(1)
    os.kill(ranks[victim].pid, number)
    client.recorder.wait_ended(1, limit_s=LIMIT_S)
    assert client.recorder.endings[1] == "TW-ENGINE-DEAD"
    assert re.fullmatch(TOLD[victim, number], client.recorder.errors[1])
    assert all(rank.wait(LIMIT_S) for rank in ranks)
    check_serves(client, 2)


def test_a_rank_that_dies_while_idle_ends_all(model: Path, start: Callable[[EngineConfig], Client]) -> None:
    client = start(config_of(model))
    ranks = ranks_of(client)
    os.kill(ranks[1].pid, signal.SIGKILL)
    assert all(rank.wait(LIMIT_S) for rank in ranks)
    client.recorder.wait(lambda: client.recorder.num_losses, "the engine's end", LIMIT_S)
    check_serves(client, 2)


@pytest.mark.parametrize(("progress", "codes"), [(no_progress, [1]), (None, [])])
def test_a_load_or_loop_that_waits_for_a_dead_rank_is_ended(
    model: Path, monkeypatch: pytest.MonkeyPatch, progress: Progress | None, codes: list[int]
) -> None:
    """A wait for a GPU without the other rank's operation returns never; a program of a user is not ended."""
    exits = list[int]()
    monkeypatch.setattr(rank_group, "AFTER_RANK_S", 0.0)
    monkeypatch.setattr(rank_group.os, "_exit", exits.append)

    def joined(*_: object) -> NoReturn:
        """Lose the other rank where this one would wait for it."""
        psutil.Process().children()[0].kill()
        for thread in threading.enumerate():
            if thread.name.startswith("rank"):
                thread.join(LIMIT_S)
        assert exits == codes
        raise RuntimeError

    monkeypatch.setattr(rank_group, "join_group", joined)
    with pytest.raises(ConfigError, match="rank 1 ended with signal 9"):
        load_group(config_of(model), progress)
    assert exits == codes


@pytest.mark.parametrize(
    ("interval_s", "used_s", "is_armed", "is_killed"),
    [
        (0.02, 0.0, True, True),
        (0.02, 0.001, True, False),  # it computes: its processor time moves on
        (0.02, 0.0, False, False),
        (2 * rank_group.GAP_S, 0.0, True, False),  # these are waits of their own
    ],
)
def test_a_rank_kills_an_engine_that_hangs(
    monkeypatch: pytest.MonkeyPatch, interval_s: float, used_s: float, is_armed: bool, is_killed: bool
) -> None:
    clock, kill = mock.Mock(), mock.Mock()
    monkeypatch.setattr(rank_group, "time", clock)
    monkeypatch.setattr(os, "kill", kill)
    watch = rank_group.LeaderWatch()
    watch.is_armed = is_armed
    for look in range(1000, 1000 + int(rank_group.LEADER_HANG_S / 0.02) + 2):
        kill.assert_not_called()
        clock.monotonic.return_value, clock.clock_gettime.return_value = look * interval_s, look * used_s
        assert watch() == ""
    monkeypatch.undo()
    assert kill.mock_calls == [mock.call(os.getppid(), signal.SIGKILL)] * is_killed


def test_the_processor_time_of_another_process_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getppid", os.getpid)
    watch = rank_group.LeaderWatch()
    assert 0.0 < time.process_time() <= time.clock_gettime(watch._clock) <= time.process_time()


def test_collections_of_a_rank_skip_what_loading_made(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = mock.Mock()
    for owner, name in ((rank_group, "join_group"), (rank_group, "follow"), (gc, "freeze")):
        monkeypatch.setattr(owner, name, getattr(calls, name))
    monkeypatch.setattr(rank_group.ModelRunner, "load", calls.load)
    start = rank_group.RankStart(1, config_of(model).to_settings(), 0, 0, 0, ends_engine=False)
    assert rank_group.run(start, mock.Mock()) == ""
    assert [call[0] for call in calls.mock_calls] == ["join_group", "load", "freeze", "follow"]


def test_ranks_leave_their_end_to_the_engine(model: Path, start: Callable[[EngineConfig], Client]) -> None:
    """A service manager sends SIGTERM to all processes; the engine answers its requests before all end."""
    client = start(config_of(model))
    rank = ranks_of(client)[1]
    for number in (signal.SIGTERM, signal.SIGINT):
        os.kill(rank.pid, number)
    check_serves(client, 1)
    assert ranks_of(client)[1].pid == rank.pid


def test_a_message_that_a_stopped_rank_does_not_take(model: Path) -> None:
    """Long prompts do not fit the socket's buffer; rank 0 must not wait for room for ever."""
    runner = load_group(config_of(model), None)
    assert runner.group is not None
    try:
        psutil.Process().children()[0].suspend()
        with pytest.raises(OSError, match="unavailable"):
            runner.group.send(bytes(1 << 22))
    finally:
        runner.close()
    assert not psutil.Process().children()


@pytest.mark.parametrize(
    ("owner", "name", "error", "raised"),
    [
        (rank_group.RankGroup, "failure", KeyboardInterrupt(), KeyboardInterrupt),
        (rank_group.RankProcess, "__init__", OSError("no memory"), ConfigError),
    ],
)
def test_a_start_that_fails_leaves_no_process(
    model: Path,
    monkeypatch: pytest.MonkeyPatch,
    owner: type[object],
    name: str,
    error: BaseException,
    raised: type[BaseException],
) -> None:
    monkeypatch.setattr(device, "num_cores", lambda: 4)
    original = getattr(owner, name)

    def failing(process: object, rank: int = 2, *others: object, **options: bool) -> None:
        if rank == 2:
            raise error
        original(process, rank, *others, **options)

    monkeypatch.setattr(owner, name, failing)
    with pytest.raises(raised):
        load_group(config_of(model, tensor_parallel_size=4), None)
    assert not psutil.Process().children()


IN_PROCESS = {"dtype": "float32", "num_blocks": 64, "device": "cpu", "num_threads": 1, "tensor_parallel_size": 2}
THREE = {"input_ids": [1, 2, 3]}


def test_an_llm_that_cannot_begin_leaves_no_process(model: Path) -> None:
    with pytest.raises(ConfigError, match=r"no tokenizer\.json"):
        LLM(model, **IN_PROCESS)
    assert not psutil.Process().children()


def test_an_llm_that_is_dropped_ends_its_ranks(model: Path) -> None:
    llm = LLM(model, skip_tokenizer_init=True, **IN_PROCESS)
    assert len(psutil.Process().children()) == 1
    del llm
    gc.collect()
    assert not psutil.Process().children()


def test_ranks_outlive_the_thread_that_started_them(model: Path) -> None:
    with ThreadPoolExecutor(1) as pool:
        llm = pool.submit(partial(LLM, model, skip_tokenizer_init=True, **IN_PROCESS)).result()
    with llm:
        assert len(llm.generate(THREE, SamplingParams(max_tokens=4), use_tqdm=False)[0].token_ids) == 4


def test_an_interrupted_step_ends_the_group(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other ranks are inside the step: what they do next would not be what rank 0 does."""
    with LLM(model, skip_tokenizer_init=True, **IN_PROCESS) as llm:
        with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
            patched.setattr(model_runner, "sample_part", mock.Mock(side_effect=KeyboardInterrupt))
            llm.generate(THREE, use_tqdm=False)
        with pytest.raises(InternalError, match=r"rank 1 ended with signal 9|another did not answer"):
            llm.generate(THREE, use_tqdm=False)


def test_a_rank_that_does_not_answer_is_named_and_leaves_no_memory(model: Path) -> None:
    maps = Path("/proc/self/maps")
    with LLM(model, skip_tokenizer_init=True, **IN_PROCESS) as llm:
        assert "memfd:tidewheel-ranks" in maps.read_text(encoding="utf-8")
        psutil.Process().children()[0].suspend()
        with pytest.raises(InternalError, match=r"rank 1 did not answer for 1\.5 s"):
            llm.generate(THREE, use_tqdm=False)
    del llm
    gc.collect()
    assert "memfd:tidewheel-ranks" not in maps.read_text(encoding="utf-8")


def test_everything_that_a_request_asks_for(tmp_path: Path) -> None:
    """Structured output, log-probabilities, several sequences, draws and sessions."""
    save_byte_llama(tmp_path)
    settings = {"dtype": "float32", "num_blocks": 64, "device": "cpu", "num_threads": 1}
    sampling = [
        SamplingParams(temperature=1.0, seed=1, max_tokens=40, grammar=Grammar.regex(r"[a-c]{2,4}-\d{3,9}")),
        SamplingParams(temperature=0.8, seed=2, max_tokens=12, logprobs=3, prompt_logprobs=1),
        SamplingParams(temperature=0.0, max_tokens=12, presence_penalty=0.5, logit_bias={7: 2.0}),
    ]

    def answers(num_ranks: int) -> list[GenerationResult]:
        with LLM(tmp_path, **settings, tensor_parallel_size=num_ranks) as llm:
            prompts = [{"input_ids": list(range(i, i + 30))} for i in range(3)]
            options = [RequestOptions(), RequestOptions(n=2), RequestOptions(session_id="s")]
            first = llm.generate(prompts, sampling, options, use_tqdm=False)
            turn = {"input_ids": [*range(2, 32), *first[-1].token_ids, 5]}
            return first + llm.generate([turn], sampling[2], options[2], use_tqdm=False)

    one, two = answers(1), answers(2)
    assert [result.token_ids for result in one] == [result.token_ids for result in two]
    assert len(one) == 5
    scores = [[entry.logprob for entry in result.logprobs] for answer in (one, two) for result in answer[1:3]]
    assert np.allclose(scores[:2], scores[2:], atol=1e-4)
    assert not psutil.Process().children(recursive=True)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"tensor_parallel_size": 3},
            "tensor_parallel_size is 3: the model's num_attention_heads is 4, no multiple of it",
        ),
        ({"tensor_parallel_size": 8}, "each rank needs a core of its own, and there are 4; set it to at most 4"),
    ],
)
def test_sizes_that_do_not_fit_are_one_line(
    model: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, int], message: str
) -> None:
    monkeypatch.setattr(device, "num_cores", lambda: 4)
    with pytest.raises(ConfigError, match=message) as error:
        load_group(config_of(model, **settings), None)
    assert "\n" not in str(error.value)
