"""The same outputs with `async_scheduling` on and off: in-process, behind a socket and in a process of its own."""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import zmq

from support.engine.engine_clients import CONFIG, Client, Recorder, request
from support.engine.fake_engine import make_info
from support.engine.fake_runner import VOCAB_SIZE, FakeRunner, naive_output
from support.models.tiny_models import save_byte_llama
from support.scheduler.invariants import check_invariants
from support.scheduler.scheduling import make_request
from tidewheel import LLM, RequestOptions, SamplingParams
from tidewheel.config import EngineConfig
from tidewheel.engine.build import build_scheduler
from tidewheel.engine.messages import (
    PROTOCOL,
    WHOLE_REQUEST,
    AddRequest,
    Cancel,
    Deltas,
    Hello,
    Ping,
    encoder,
    from_engine_decoder,
)
from tidewheel.engine.server import EngineServer
from tidewheel.llm import GenerationResult
from tidewheel.simulate.replay import Recording, replay, scheduler_of

# --- a real model -------------------------------------------------------------------------------------------------

LETTERS = "abcdefghijklmnopqrstuvwxyz "


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its token ids are bytes."""
    folder = tmp_path_factory.mktemp("bytes")
    save_byte_llama(folder)
    return folder


def any_sampling(chance: random.Random) -> SamplingParams:
    """Every stage of sampling and every way to stop, mixed."""

    def maybe(value: object, otherwise: object) -> object:
        return value if chance.random() < 0.3 else otherwise

    return SamplingParams(
        max_tokens=chance.randint(1, 24),
        temperature=chance.choice([0.0, 0.0, 1.0]),
        seed=chance.randrange(1 << 32),
        top_k=maybe(20, 0),
        top_p=maybe(0.9, 1.0),
        min_p=maybe(0.02, 0.0),
        repetition_penalty=maybe(1.3, 1.0),
        presence_penalty=maybe(0.5, 0.0),
        frequency_penalty=maybe(0.7, 0.0),
        logprobs=maybe(2, None),
        min_tokens=maybe(1, 0),
        stop_token_ids=maybe(tuple(chance.sample(range(256), 30)), ()),
        stop=maybe(tuple(chance.sample(LETTERS, 5)), ()),
        bad_words=maybe(tuple(chance.sample(LETTERS, 5)), ()),
        logit_bias=maybe({chance.randrange(256): 3.0}, {}),
    )


Workload = list[tuple[str, SamplingParams, RequestOptions]]


def any_workload(seed: int) -> Workload:
    chance = random.Random(seed)
    prompts = ["The sea is " * chance.randint(0, 3) + "".join(chance.choices(LETTERS, k=9)) for _ in range(16)]
    options = [RequestOptions(n=2), RequestOptions(session_id="s"), *[RequestOptions()] * 3]
    return [(prompt, any_sampling(chance), chance.choice(options)) for prompt in prompts]


def comparable(result: GenerationResult) -> GenerationResult:
    """Without what depends on who ran beside whom."""
    logprobs = result.logprobs and [(entry.rank, entry.top_ids) for entry in result.logprobs]
    return dataclasses.replace(result, num_cached_tokens=0, cumulative_logprob=None, logprobs=logprobs)


@pytest.mark.parametrize(
    "settings",
    [
        {"num_blocks": 64},
        {"num_blocks": 8, "max_num_batched_tokens": 24},
        {"num_blocks": 8, "preemption_mode": "swap", "swap_space": 0.01},
        {"num_blocks": 16, "max_num_seqs": 3, "enable_prefix_caching": False},
    ],
    ids=["roomy", "recompute", "swap", "uncached"],
)
def test_generate_is_the_same(model: Path, tmp_path: Path, settings: dict[str, object]) -> None:
    workload = any_workload(len(settings))
    if not settings.get("enable_prefix_caching", True):
        workload = [(prompt, sampling, RequestOptions(n=options.n)) for prompt, sampling, options in workload]
    answers = []
    for is_on in (False, True):
        folder = tmp_path / str(is_on)
        folder.mkdir()
        common = {"dtype": "float32", "num_threads": 1, "max_model_len": 96, "record": str(folder)}
        common["admit_by_growth"] = False  # so that blocks run out
        with LLM(model, async_scheduling=is_on, **common, **settings) as llm:
            assert llm.info.async_scheduling is is_on
            results = llm.generate(*map(list, zip(*workload, strict=True)), use_tqdm=False)
            answers.append([comparable(result) for result in results])
            stats = llm.stats()
            check_invariants(llm._scheduler)
            assert not llm._open_core().has_unfinished
            assert bool(stats.num_preemptions) == (settings["num_blocks"] == 8)
        (path,) = folder.glob("*.jsonl")
        replayed = replay(Recording(path), scheduler_of(Recording(path).header))
        assert replayed.difference == "" and replayed.num_steps == stats.num_steps
    assert answers[0] == answers[1]
    assert {"stop", "length"} <= {result.finish_reason for result in answers[0]}


# --- behind a socket ----------------------------------------------------------------------------------------------


class Peer:
    """A front end on the thread of its engine: it acts whenever the engine asks whether it must stop."""

    def __init__(self, context: zmq.Context, script: list[AddRequest | Cancel]) -> None:
        self.recorder = Recorder()
        self._keys = {message.key for message in script if isinstance(message, AddRequest)}
        self._script = script
        self._socket = context.socket(zmq.DEALER)
        self._socket.connect("inproc://engine")
        self._socket.send(encoder.encode(Hello(PROTOCOL, "peer", "")))

    def act(self) -> str:
        while self._socket.poll(0):
            message = from_engine_decoder.decode(self._socket.recv())
            if isinstance(message, Deltas):
                for tokens in message.tokens:
                    self.recorder.on_tokens(*tokens.arrays())
                self.recorder.on_deltas(message.deltas)
        self._socket.send(encoder.encode(self._script.pop(0) if self._script else Ping()))
        return "all have ended" if self._keys <= self.recorder.endings.keys() else ""

    def close(self) -> None:
        self._socket.close(0)


def any_script(seed: int, num_requests: int = 24) -> list[AddRequest | Cancel]:
    """Requests, and cancels of some of them at random moments."""
    chance = random.Random(seed)
    script: list[AddRequest | Cancel] = []
    for key in range(num_requests):
        prompt = [7] * chance.choice([0, 20]) + chance.choices(range(1, 30), k=chance.randint(1, 12))
        stop_ids = tuple(chance.sample(range(VOCAB_SIZE), 4))
        script.append(request(key, *prompt, max_tokens=chance.randint(1, 40), stop_token_ids=stop_ids))
        if chance.random() < 0.3:
            script.append(Cancel([(chance.randint(0, key), WHOLE_REQUEST)]))
    return script


def check(recorder: Recorder, script: list[AddRequest | Cancel]) -> None:
    """One end each, with the tokens of a request that is alone; a prefix of them for those that were cancelled."""
    requests = [message for message in script if isinstance(message, AddRequest)]
    cancelled = {key for message in script if isinstance(message, Cancel) for key, _ in message.sequences}
    assert set(recorder.num_endings.values()) == {1}
    for message in requests:
        prompt = memoryview(message.prompt).cast("i").tolist()
        max_tokens = message.sampling.max_tokens or 0
        output, reason = naive_output(
            make_request(prompt=prompt, max_tokens=max_tokens, stop_token_ids=message.stop_token_ids)
        )
        delivered = recorder.tokens[message.key]
        if recorder.endings[message.key] == "cancelled":
            assert message.key in cancelled and delivered == output[: len(delivered)]
        else:
            assert (delivered, recorder.endings[message.key]) == (output, str(reason))


@pytest.mark.parametrize("is_on", [False, True], ids=["off", "on"])
@pytest.mark.parametrize("seed", range(3))
def test_what_a_socket_carries_is_the_same(tmp_path: Path, seed: int, is_on: bool) -> None:
    num_blocks = (64, 8, 6)[seed]
    info = make_info(tmp_path, vocab_size=VOCAB_SIZE, max_model_len=90, num_blocks=num_blocks)
    info = msgspec.structs.replace(info, async_scheduling=is_on)
    config = EngineConfig(model="m", admit_by_growth=False)
    scheduler = build_scheduler(config, info)
    runner = FakeRunner(num_rows=8, num_blocks=num_blocks, block_size=16, token_budget=64)
    script = any_script(seed)
    ticks = itertools.count()
    with zmq.Context() as context, context.socket(zmq.ROUTER) as socket:
        socket.set(zmq.ROUTER_MANDATORY, 1)
        socket.set(zmq.LINGER, 0)
        socket.bind("inproc://engine")
        peer = Peer(context, list(script))
        server = EngineServer(
            socket, scheduler, runner, info,
            config=config, clock=lambda: 0.2 * next(ticks),
        )  # fmt: skip
        server.linger_s = 1e9
        assert server.serve(peer.act) == "all have ended"
        peer.close()
    check(peer.recorder, script)
    assert scheduler.max_inflight_steps == 1 + is_on
    stats = scheduler.stats()
    assert bool(stats.num_preemptions) == (seed > 0)


# --- a process of its own -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_on", [False, True], ids=["off", "on"])
def test_what_a_process_answers_is_the_same(connect: Callable[..., Client], is_on: bool) -> None:
    client = connect(config=dataclasses.replace(CONFIG, async_scheduling=is_on, num_blocks=16))
    assert client.info.async_scheduling is is_on
    script = any_script(7)
    for message in script:
        if isinstance(message, Cancel):
            ((key, _),) = message.sequences
            client.recorder.wait_started(key)
            client.cancel(key)
        else:
            client.add(message)
    client.recorder.wait_ended(*(message.key for message in script if isinstance(message, AddRequest)))
    check(client.recorder, script)
    client.recorder.wait(
        lambda: client.recorder.stats[-1].num_free_blocks == client.recorder.stats[-1].num_blocks > 0, "all blocks"
    )
