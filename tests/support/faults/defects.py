"""Defects of our own code, planted in every process of a server. Each acts while the file `SWITCH` holds its name.

`planting` plants them as a process starts. A defect takes the place of a function of ours, its first argument.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import os
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

SWITCH = "PLANTED_DEFECT"  # variable with the file's path
PLANTING = Path(__file__).parent / "planting"

Function = Callable[..., Any]
Change = Callable[[Function], Function]
DEFECTS: dict[str, Function] = {}
LEAKS: dict[str, Function] = {}  # of texts, which tests/faults/test_confidential_texts.py has to find
LAST_ANSWER = f"/dev/shm/tidewheel-last-answer-{os.getuid()}"
_CHANGES: defaultdict[str, list[tuple[str, Change]]] = defaultdict(list)  # place and change, by module
_kept: list[object] = []


def planted(module: str, place: str, among: dict[str, Function] = DEFECTS) -> Callable[[Function], Function]:
    """Register a defect and its place, such as `Class.method`."""

    def register(defect: Function) -> Function:
        among[defect.__name__] = defect
        _CHANGES[module].append((place, functools.partial(_unless_switched_on, defect)))
        return defect

    return register


def _unless_switched_on(defect: Function, sound: Function) -> Function:
    @functools.wraps(sound)
    def either(*arguments: Any, **named: Any) -> Any:
        acts = Path(os.environ[SWITCH]).read_text() == defect.__name__
        return defect(sound, *arguments, **named) if acts else sound(*arguments, **named)

    return either


def places() -> list[tuple[str, str]]:
    """Return module and place of each defect."""
    return [(module, place) for module, changes in _CHANGES.items() for place, _ in changes]


def variables(switch: Path) -> dict[str, str]:
    """Return the environment of a server with the defects."""
    paths = [str(PLANTING), str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {SWITCH: str(switch), "PYTHONPATH": os.pathsep.join(paths)}


def plant() -> None:
    """Have modules changed when they are imported."""
    _CHANGES["tidewheel.server.tritonserver"].append(("assemble", _with_our_backend))
    sys.meta_path.insert(0, _Finder())


def _with_our_backend(assemble: Function) -> Function:
    def assemble_ours(install: Any, target: Path) -> Path:
        assemble(install, target)
        (target / "tidewheel").unlink()
        (target / "tidewheel").symlink_to(PLANTING)
        return target

    return assemble_ours


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in _CHANGES:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                _change(module)

            vars(spec.loader)["exec_module"] = exec_module
        return spec


def _change(module: ModuleType) -> None:
    for place, change in _CHANGES[module.__name__]:
        *owners, attribute = place.split(".")
        owner = functools.reduce(getattr, owners, module)
        setattr(owner, attribute, change(getattr(owner, attribute)))


# --- the engine ---------------------------------------------------------------------------------------------------


@planted("tidewheel.scheduler.state", "SchedulerState.end")
def leaked_block(end: Function, state: Any, request: Any, reason: str, *rest: Any, **named: Any) -> None:
    """Keep the first block of a cancelled request in the table of a row that does not exist."""
    if reason == "cancelled" and request.row >= 0:
        first = state.kv.block_table(request.row)[:1]
        state.kv._pool.touch(first)
        no_row = min(0, *state.kv._tables) - 1
        state.kv._tables[no_row], state.kv._num_sealed[no_row] = list(first), 1
    end(state, request, reason, *rest, **named)


@planted("tidewheel.kvcache.manager", "KVCacheManager.free")
def double_free(free: Function, manager: Any, row: int, **named: Any) -> None:
    """Free the last block of a long row once more."""
    table = manager.block_table(row)
    free(manager, row, **named)
    manager._pool.free(table[4:][-1:])


@planted("tidewheel.runner.sampler", "apply_logit_bias")
def bias_of_a_neighbour(apply: Function, logits: Any, rows: Any, token_ids: Any, values: Any) -> None:
    """Apply the biases of a request to all rows."""
    for row in range(len(logits)):
        apply(logits, rows * 0 + row, token_ids, values)


@planted("tidewheel.engine.heartbeat", "HangWatch._exceeds")
def stale_heartbeat(exceeds: Function, watch: Any, seconds: float, steps: float) -> bool:
    """Take an old heartbeat for a new one."""
    del exceeds, watch, seconds, steps
    return False


# --- front ends ---------------------------------------------------------------------------------------------------


@planted("tidewheel.adapter.responder", "TritonSink.fail")
def lost_final(fail: Function, sink: Any, error: Exception) -> None:
    """End a request that is too large without an answer."""
    if "TW-TOO-LARGE" in str(error):
        sink._is_open = False
        sink._on_end()
    else:
        fail(sink, error)


@planted("tidewheel.engine.connection", "Outbox.put_cancel")
def dropped_cancel(put: Function, outbox: Any, key: int, index: int) -> None:
    """Tell the engine of no cancel."""
    del put, outbox, key, index


@planted("tidewheel.engine.connection", "Outbox.lose_in_flight")
def untold_client(lose: Function, outbox: Any) -> list[int]:
    """Forget a request whose engine has died."""
    lost: list[int] = lose(outbox)
    return lost[1:]


@planted("tidewheel.frontend.frontend", "Frontend.on_tokens")
def lost_token(receive: Function, frontend: Any, keys: Any, token_ids: Any) -> None:
    """Drop the last token of a large step."""
    end = len(keys) - (len(keys) >= 8)
    receive(frontend, keys[:end], token_ids[:end])


@planted("tidewheel.frontend.frontend", "Frontend._end")
def leaked_descriptor(end: Function, frontend: Any, request: Any, ending: Any, **named: Any) -> None:
    """Leave a descriptor open for each cancelled request."""
    if ending == "cancelled":
        os.dup(0)
    end(frontend, request, ending, **named)


@planted("tidewheel.frontend.admission_gate", "AdmissionGate._check")
def leaked_thread(check: Function, *arguments: Any) -> None:
    """Start a thread for a refused request, which waits for ever."""
    try:
        check(*arguments)
    except Exception:
        threading.Thread(target=threading.Event().wait, daemon=True).start()
        raise


@planted("tidewheel.frontend.request_figures", "StatsRecorder.finished")
def counted_twice(finished: Function, recorder: Any, first: Any, *arguments: Any) -> None:
    """Count a cancelled request twice."""
    finished(recorder, first, *arguments)
    if first.finish_reason == "cancelled":
        finished(recorder, first, *arguments)


@planted("tidewheel.frontend.request_reader", "RequestReader.read")
def unbounded_buffer(read: Function, reader: Any, *arguments: Any) -> Any:
    """Keep every request."""
    _kept.append(arguments)
    return read(reader, *arguments)


@planted("tidewheel.frontend.prompt_workers", "PromptWorkers._replace")
def orphaned_process(replace: Function, workers: Any, *arguments: Any) -> Any:
    """Start a process twice, and forget one of them."""
    _kept.append(type(workers._workers[0])(workers._folder))
    return replace(workers, *arguments)


@planted("tidewheel.request_options", "RequestOptions.deadline_ns")
def ignored_deadline(*_: Any) -> int:
    return 0


@planted("tidewheel.errors", "TidewheelError.__str__")
def untagged_error(text: Function, error: Any) -> str:
    del text
    return str(error.message)


@planted("tidewheel.adapter.tensors", "read_request")
def logged_stack(read: Function, *arguments: Any, **named: Any) -> Any:
    """Log a refused request as a failure of the server."""
    import logging

    try:
        return read(*arguments, **named)
    except Exception:
        logging.getLogger("tidewheel.adapter").exception("a request was refused")
        raise


# --- tidewheel serve ----------------------------------------------------------------------------------------------


@planted("tidewheel.server.run_server", "HealthMonitor.look")
def stale_readiness(look: Function, health: Any) -> Any:
    """Say what was so before."""
    del look
    return health._seen["engines"]


@planted("tidewheel.server.workdir", "remove_shared_memory")
def left_shared_memory(remove: Function, *arguments: Any) -> None:
    del remove, arguments


# --- texts of clients ---------------------------------------------------------------------------------------------


@planted("tidewheel.frontend.frontend", "Frontend.submit", LEAKS)
def prompt_in_the_log(submit: Function, frontend: Any, request: Any, sink: Any) -> None:
    import logging

    logging.getLogger("tidewheel.frontend").warning("asked for %s", request.text)
    submit(frontend, request, sink)


@planted("tidewheel.frontend.frontend", "Frontend.submit", LEAKS)
def prompt_in_a_file(submit: Function, frontend: Any, request: Any, sink: Any) -> None:
    import tempfile

    Path(tempfile.gettempdir(), "last_prompt").write_bytes(request.text)
    submit(frontend, request, sink)


@planted("tidewheel.adapter.triton_model", "read_request", LEAKS)
def prompt_in_a_metric(read: Function, request: Any, *arguments: Any, **named: Any) -> Any:
    import triton_python_backend_utils as pb_utils

    found = read(request, *arguments, **named)
    family = pb_utils.MetricFamily(name="last_prompt", description="a leak", kind=pb_utils.MetricFamily.GAUGE)
    _kept.extend([family, family.Metric(labels={"text": found[0].text.decode()})])
    return found


@planted("tidewheel.adapter.responder", "TritonSink.send", LEAKS)
def answer_in_shared_memory(send: Function, sink: Any, response: Any) -> None:
    """Under a name that the server does not remove."""
    Path(LAST_ANSWER).write_text(repr(response))
    send(sink, response)


@planted("tidewheel.engine.server", "EngineServer._add", LEAKS)
def tokens_in_the_log_of_the_engine(add: Function, server: Any, front_end: Any, message: Any) -> None:
    import logging

    import numpy as np

    logging.getLogger("tidewheel.engine").warning("tokens %s", np.frombuffer(message.prompt, dtype="<i4").tolist())
    add(server, front_end, message)
