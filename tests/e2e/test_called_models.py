"""Models of another backend behind our scheduler: through the real server, one answer each, whatever they do."""

from __future__ import annotations

import concurrent.futures
import signal
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import requests
import tritonclient.grpc
import tritonclient.http
from tritonclient.utils import InferenceServerException

from support.triton.client_tensors import Array, make_inputs
from support.triton.serving import Server, start_server, stop_without_tensors, wait_for, wait_ready
from tidewheel.cli.main import main
from tidewheel.engine.connection import ask
from tidewheel.engine.messages import ListRequests, RequestList
from tidewheel.server import ServeError

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

THREADS = 32  # of Triton, for calls and responses of an instance
RAISES, SHAPE, NAN, SLOW, HELD, STUCK, COUNTED = -1.0, -2.0, -3.0, -4.0, -5.0, -6.0, -7.0
MODEL = """
import time
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    '''y = x + 1, or what the first number of a request asks for.'''

    def execute(self, requests):
        return [self.answer(pb_utils.get_input_tensor_by_name(request, "x").as_numpy()) for request in requests]

    def answer(self, x):
        what, y = float(x.flat[0]), x + 1
        if what == -1.0:
            return pb_utils.InferenceResponse(error=pb_utils.TritonError("a value of -1"))
        if what == -2.0:
            y = y[:, :3]
        if what == -3.0:
            y[0, 0] = np.nan
        if what == -7.0:
            self.count = y[0, 3] = getattr(self, "count", 0) + 1
        time.sleep({-4.0: 0.05, -5.0: 0.3, -6.0: 2.0}.get(what, 0.0))
        return pb_utils.InferenceResponse([pb_utils.Tensor("y", y.astype(np.float32))])
"""
TENSORS = """
input { name: "x" data_type: TYPE_FP32 dims: [ 4 ] }
output { name: "y" data_type: TYPE_FP32 dims: [ 4 ] }
"""
CALLED = 'backend: "python"\nmax_batch_size: 8\ninstance_group { count: 1 kind: KIND_CPU }' + TENSORS
QUEUE = "dynamic_batching { default_queue_policy { %s } }\n"
CALLED_MODELS = {
    "worker": CALLED + "dynamic_batching { }\n",
    "short": CALLED + QUEUE % "max_queue_size: 2",
    "impatient": CALLED + QUEUE % "timeout_action: REJECT default_timeout_microseconds: 1000",
    "doomed": CALLED,
}


def ours(model: str, more: str = "", **settings: object) -> str:
    pairs = {"adapter": "triton", "model": model, **settings}.items()
    return 'backend: "tidewheel"\n' + more + "".join(
        f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}\n' for key, value in pairs
    )  # fmt: skip


TWO = "instance_group { count: 2 kind: KIND_CPU }\n"
OURS = {
    "ordered": ours("worker"),
    "tight": ours("short", max_num_seqs=2),
    "flooded": ours("short"),
    "hasty": ours("impatient"),
    "pair": ours("worker", TWO),
    "orphan": ours("doomed"),
    "lost": ours("nowhere", "max_batch_size: 8" + TENSORS),
    "single": ours("worker", max_num_seqs=1),
}


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("repository")
    for name, config in {**CALLED_MODELS, **OURS}.items():
        (folder / name / "1").mkdir(parents=True)
        (folder / name / "config.pbtxt").write_text(config)
        if name in CALLED_MODELS:
            (folder / name / "1" / "model.py").write_text(MODEL)
    return folder


@pytest.fixture(scope="module")
def served(repository: Path) -> Iterator[Server]:
    log, names = repository.parent / "serve.log", ",".join([*CALLED_MODELS, *OURS])
    command = ("--model-repository", str(repository), "--model-control", "explicit", "--models", names)
    running = wait_ready(start_server(*command, log=log))
    yield running
    stop_without_tensors(running)


def num_running(server: Server, name: str) -> int:
    (engine,) = server.processes("--engine-dir", f"/{name}-")
    words = engine.cmdline()
    answer = ask(Path(words[words.index("--engine-dir") + 1]), ListRequests(limit=100), RequestList)
    return 0 if answer is None else sum(each.state == "running" for each in answer.rows)


def has_free_blocks(server: Server, name: str) -> bool:
    try:
        return server.metric("vllm:kv_cache_usage_perc", model=name) == 0
    except requests.ConnectionError:  # Triton opens its port of metrics last
        return False


BOTH = pytest.mark.parametrize("module", [tritonclient.http, tritonclient.grpc], ids=["http", "grpc"])


def infer(server: Server, name: str, x: Array, module: ModuleType = tritonclient.grpc, **asked: Any) -> Array:
    url = server.grpc if module is tritonclient.grpc else f"127.0.0.1:{server.http_port}"
    with module.InferenceServerClient(url) as client:
        return client.infer(name, make_inputs(module, {"x": x}), **asked).as_numpy("y")


def row(*values: float) -> Array:
    return np.array([[*values, *[0.0] * (4 - len(values))]], np.float32)


def outcome(server: Server, name: str, x: Array, **asked: Any) -> str:
    """Return "right", or the tag of the error."""
    try:
        return "right" if (infer(server, name, x, **asked) == x + 1).all() else "wrong"
    except InferenceServerException as error:
        return next(
            (word for word in str(error).replace("]", " ").replace("[", " ").split() if "TW-" in word), str(error)
        )


def outcomes(server: Server, name: str, rows: list[Array], threads: int = 16) -> Counter[str]:
    with concurrent.futures.ThreadPoolExecutor(threads) as pool:
        return Counter(pool.map(lambda x: outcome(server, name, x), rows))


@BOTH
@pytest.mark.parametrize("name", ["ordered", "tight", "pair"])
@pytest.mark.parametrize("items", [1, 3])
def test_answers_are_those_of_the_model(served: Server, module: ModuleType, name: str, items: int) -> None:
    x = np.random.default_rng(1).random((items, 4), np.float32)
    assert (infer(served, name, x, module) == infer(served, "worker", x, module)).all()


@pytest.mark.parametrize("name", ["ordered", "pair"])
def test_many_at_once_each_get_their_own(served: Server, name: str) -> None:
    """More than run at once, also behind a slow one in the called model's own queue."""
    rows = [row(STUCK), *(row(number) for number in range(200))]
    assert outcomes(served, name, rows, 2 * THREADS) == {"right": 201}


def test_the_configuration_is_that_of_the_model(served: Server) -> None:
    config = served.session.get(f"{served.http}/v2/models/ordered/config", timeout=60).json()
    found = [
        (one["name"], one["data_type"], list(map(int, one["dims"]))) for one in config["input"] + config["output"]
    ]
    assert found == [("x", "TYPE_FP32", [-1, 4]), ("y", "TYPE_FP32", [-1, 4])]


@BOTH
@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("ordered", RAISES, ["TW-MODEL", "worker", "a value of -1"]),
        ("ordered", SHAPE, ["TW-MODEL", "[1, 3]", "FP32"]),
        ("ordered", NAN, ["TW-NUMERIC", "output y"]),
        ("lost", 0.0, ["TW-MODEL", "nowhere"]),
    ],
)
def test_one_clear_error_each(served: Server, module: ModuleType, name: str, value: float, words: list[str]) -> None:
    with pytest.raises(InferenceServerException) as error:
        infer(served, name, row(value), module)
    assert all(word in str(error.value) for word in words), error.value


def test_neighbours_of_one_that_fails_are_untouched(served: Server) -> None:
    rows = [row(RAISES if number % 4 == 0 else number) for number in range(64)]
    assert outcomes(served, "ordered", rows) == {"right": 48, "TW-MODEL": 16}


def test_a_slow_instance_with_a_short_queue_answers_all_that_it_is_sent_in_turn(served: Server) -> None:
    assert outcomes(served, "tight", [row(SLOW)] * 24, 24) == {"right": 24}


def test_what_its_queue_refuses_is_busy_and_nothing_waits_for_ever(served: Server) -> None:
    found = outcomes(served, "flooded", [row(SLOW)] * 48, 48)
    assert found.total() == 48 and found.keys() == {"right", "TW-BUSY"}, found


def test_what_its_queue_gives_up_is_busy(served: Server) -> None:
    found = outcomes(served, "hasty", [row(SLOW)] * 24, 24)
    assert found.total() == 24 and found.keys() <= {"right", "TW-BUSY"} and found["right"], found


def test_a_deadline_ends_a_request_whose_call_goes_on(served: Server) -> None:
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        late = pool.submit(outcome, served, "ordered", row(STUCK), parameters={"deadline_ms": 200})
        assert late.result() == "TW-DEADLINE"
        assert outcome(served, "ordered", row(1)) == "right"


def test_full_threads_of_calls_leave_answers_their_way(served: Server) -> None:
    """Deadlines of more stuck calls than run at once are told while the model still computes.

    It would compute for 12 s, one after another. The first may still be answered in time.
    """
    count = THREADS + 8
    with concurrent.futures.ThreadPoolExecutor(count) as pool:
        asked = {"parameters": {"deadline_ms": 300}}
        late = [pool.submit(outcome, served, "orphan", row(HELD), **asked) for _ in range(count)]
        done, _ = concurrent.futures.wait(late, 8)
        found = Counter(one.result() for one in done)
        assert found.total() == count and found.keys() <= {"right", "TW-DEADLINE"}, found


def test_a_client_that_leaves_costs_the_others_nothing(served: Server) -> None:
    ended = threading.Event()
    with tritonclient.grpc.InferenceServerClient(served.grpc) as client:
        inputs = make_inputs(tritonclient.grpc, {"x": row(STUCK)})
        call = client.async_infer("single", inputs, lambda **_: ended.set())
        wait_for(lambda: num_running(served, "single") == 1, 30, "its start")
        call.cancel()
        assert ended.wait(30)
    assert outcome(served, "single", row(1)) == "right"


@pytest.mark.parametrize("others", [0, 4])
def test_a_killed_front_end_costs_its_requests_one_error(served: Server, others: int) -> None:
    """Triton starts no stub again and never ends the threads of its calls, so the server starts again."""
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        neighbours = [pool.submit(outcome, served, "ordered", row(STUCK)) for _ in range(others)]
        wait_for(lambda: num_running(served, "ordered") == others, 30, "the start of neighbours")
        running = [pool.submit(outcome, served, "single", row(STUCK)) for _ in range(2)]
        wait_for(lambda: num_running(served, "single") == 1, 30, "the start")
        served.stubs("single")[0].kill()
        assert all("StatusCode" in one.result(180) for one in running)
        assert Counter(one.result() for one in neighbours) == Counter({"right": others} if others else {})
    wait_for(lambda: outcome(served, "single", row(1)) == "right", 120, "the server's restart")
    wait_for(lambda: has_free_blocks(served, "single"), 30, "free blocks")
    assert outcomes(served, "pair", [row(number) for number in range(8)]) == {"right": 8}


def test_urgent_requests_are_called_first(served: Server) -> None:
    def number_of_call(priority: int) -> tuple[float, int]:
        return infer(served, "single", row(COUNTED), parameters={"qos_class": priority})[0, 3], priority

    with concurrent.futures.ThreadPoolExecutor(9) as pool:
        first = pool.submit(infer, served, "single", row(STUCK))
        wait_for(lambda: num_running(served, "single") == 1, 30, "the first")
        rest = [pool.submit(number_of_call, priority) for priority in (4, 4, 4, 4, 1, 1)]
        first.result()
        calls = sorted(one.result() for one in rest)
    assert [priority for _, priority in calls] == [1, 1, 4, 4, 4, 4]


def test_a_model_that_is_unloaded_is_an_error_of_its_requests(served: Server, repository: Path) -> None:
    assert outcome(served, "orphan", row(1)) == "right"
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        running = [pool.submit(outcome, served, "orphan", row(SLOW)) for _ in range(8)]
        served.control("unload", "doomed")
        assert {one.result() for one in running} <= {"right", "TW-MODEL", "TW-BUSY"}
    wait_for(lambda: outcome(served, "orphan", row(1)) in ("TW-MODEL", "TW-BUSY"), 30, "the unload")
    model = repository / "doomed" / "1" / "model.py"
    model.write_text("raise ValueError")
    with pytest.raises(ServeError, match="doomed"):
        served.control("load", "doomed")
    assert outcome(served, "orphan", row(1)) in ("TW-MODEL", "TW-BUSY")
    model.write_text(MODEL)
    served.control("load", "doomed")
    wait_for(lambda: outcome(served, "orphan", row(1)) == "right", 60, "the load")


def test_an_engine_killed_while_calls_run_costs_its_requests_one_error(served: Server) -> None:
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        running = [pool.submit(outcome, served, "pair", row(STUCK)) for _ in range(4)]
        wait_for(lambda: num_running(served, "pair") == 4, 30, "their start")
        (engine,) = served.processes("--engine-dir", "pair")
        engine.send_signal(signal.SIGKILL)
        found = Counter(one.result() for one in running)  # two run at once, and a kill that is late finds two of them
        assert found["TW-ENGINE-DEAD"] >= 2 and found.keys() <= {"right", "TW-ENGINE-DEAD"}
        assert outcome(served, "ordered", row(1)) == "right"
    wait_for(lambda: outcome(served, "pair", row(1)) == "right", 60, "the engine's restart")


def test_check_knows_called_models(repository: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", str(repository)]) == 0, capsys.readouterr().out
    (tmp_path / "itself" / "1").mkdir(parents=True)
    (tmp_path / "itself" / "config.pbtxt").write_text(ours("itself"))
    assert main(["check", str(tmp_path)]) != 0
    assert "this entry itself" in capsys.readouterr().out
