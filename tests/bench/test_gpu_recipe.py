"""The GPU recipe where something breaks: what was measured arrives, and the report says what is missing."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from bench.test_gpu_benchmark import make_stage
from gpu import device_tests, kernel_archive, pack, suite
from gpu.device_tests import ROOT, FileRun, measured, run_tests
from gpu.measurements import duration
from gpu.stage import Stage
from gpu.suite import DONE, FALLBACKS, FIRST, StagePlan, StageProcess, Suite
from support.gpu.planted_faults import CAPTURE, LOST

BLOCKER = ROOT / "tests/support/gpu"
SECONDS = 400.0
ENOUGH = ("--seconds", "3000")  # for all stages on a busy machine


# --- processes of stages -----------------------------------------------------------------------------------------


def ended(program: str, seconds: float = 60.0) -> tuple[str, list[dict[str, Any]]]:
    """Run a program as a stage; its argument names the file for records."""
    process = StageProcess([sys.executable, "-c", program], dict(os.environ), None)
    try:
        outcome = process.wait(seconds)
    finally:
        process.end()
    return outcome, process.records


WRITE = "import sys; out = open(sys.argv[-1], 'a'); print('{\"type\": \"facts\"}', file=out, flush=True);"


def test_records_of_a_stage_that_dies_are_kept() -> None:
    outcome, records = ended(f"{WRITE} import os; out.write('{{\"type'); out.flush(); print('halfway'); os.abort()")
    assert (outcome, records) == ("FAILED with SIGABRT: halfway", [{"type": "facts"}])


def test_the_time_of_a_stage_begins_before_its_imports(tmp_path: Path) -> None:
    """Else one that uses all of it is stopped before it reports."""
    program = (
        f"import sys, time; sys.path[:] = {sys.path!r}; import gpu\n"
        "time.monotonic = lambda now=time.monotonic: now() + 50\n"
        "from gpu.stage import parser, run\n"
        f"sys.argv[1:1] = ['--device', 'cpu', '--seconds', '100', '--out', {str(tmp_path)!r}]\n"
        "run('late', lambda stage: stage.facts(left=stage.seconds_left), parser('').parse_args())"
    )
    outcome, records = ended(program, seconds=300.0)
    assert outcome == DONE
    assert records[-1]["left"] < 50


def test_a_stage_that_ends_with_a_status_gives_its_last_line() -> None:
    outcome, records = ended(f"{WRITE} sys.exit('no room')")
    assert (outcome, len(records)) == ("FAILED with status 1: no room", 1)
    assert ended(WRITE)[0] == DONE


def test_a_stage_that_never_ends_is_stopped_with_all_its_processes() -> None:
    program = f"{WRITE} import signal; signal.signal(2, signal.SIG_IGN); print('waits', flush=True); signal.pause()"
    outcome, _ = ended(program, seconds=0.2)
    assert outcome.startswith("stopped: it did not end within 0 s")


STARTED: list[tuple[list[str], Mapping[str, str]]] = []  # commands and environments


class PlannedProcess:
    """Stage whose end is planned by its command; it notes what it was started with."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], _log: object) -> None:
        STARTED.append((list(command), environment))
        works = "gpu.parity" not in command or environment.get("TIDEWHEEL_LAUNCH") == "triton"
        self.records = [] if works else [{"type": "failed", "what": "graphs", "error": CAPTURE}]

    def wait(self, seconds: float) -> str:
        assert seconds > 0
        return DONE

    def end(self) -> None: ...


def test_the_first_fallback_that_helps_is_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(suite, "StageProcess", PlannedProcess)
    STARTED.clear()
    saved: list[int] = []
    run = Suite(FIRST, [], tmp_path, SECONDS)
    run.run(lambda findings: saved.append(len(findings.stages)))
    eager, helping, _ = FALLBACKS
    assert run.findings.helped == helping.name
    launches = [environment.get("TIDEWHEEL_LAUNCH") for _, environment in STARTED]
    assert launches == [None] * 6 + ["triton"] * 5  # five stages, parity twice in vain, then with what helps
    assert "--eager" in STARTED[5][0] and "--eager" in eager.arguments
    assert len(saved) == len(FIRST)


@pytest.mark.parametrize("num_stops", [1, 2])
def test_an_engine_that_only_took_too_long_is_tried_again_as_it_is(
    num_stops: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Its kernels are compiled by then."""

    class SlowAtFirst(PlannedProcess):
        def wait(self, seconds: float) -> str:
            self.records = []
            is_late = sum("gpu.parity" in command for command, _ in STARTED) <= num_stops
            return "stopped: it did not end" if is_late and "gpu.parity" in STARTED[-1][0] else DONE

    monkeypatch.setattr(suite, "StageProcess", SlowAtFirst)
    STARTED.clear()
    run = Suite([suite.ALONE["parity"], suite.ALONE["latency"]], [], tmp_path, SECONDS)
    run.run(lambda _: None)
    assert run.findings.helped == (suite.AGAIN if num_stops == 1 else FALLBACKS[0]).name
    assert ("--eager" in STARTED[-1][0]) == (num_stops == 2)
    assert run.findings.stages[-1]["name"] == "latency" + f" {FALLBACKS[0].name}" * (num_stops == 2)


def test_a_stage_alone_has_all_the_time_and_others_their_shares(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(suite, "StageProcess", PlannedProcess)
    STARTED.clear()
    Suite([StagePlan("smoke", 10.0)], [], tmp_path, 300.0).run(lambda _: None)
    Suite([StagePlan("smoke", 200.0), StagePlan("kernels", 100.0)], [], tmp_path, 300.0).run(lambda _: None)
    Suite([StagePlan("smoke", 200.0), StagePlan("kernels", 500.0)], [], tmp_path, 210.0).run(lambda _: None)
    seconds = [float(command[command.index("--seconds") + 1]) for command, _ in STARTED]
    share = [value + 2 * suite.END_S for value in seconds]
    assert share == pytest.approx([300, 200, 300, 200, 210], abs=5)  # what one leaves, the next has


def test_switches_run_a_stage_in_an_environment_and_name_its_figures(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(suite, "StageProcess", PlannedProcess)
    STARTED.clear()
    run = Suite([suite.ALONE["dependent_launch"]], [], tmp_path, SECONDS)
    run.run(lambda _: None)
    ((command, environment),) = STARTED
    assert "gpu.latency" in command and environment["TIDEWHEEL_TRY"] == "dependent_launch"
    assert run.findings.stages[0]["name"] == "latency --goals TIDEWHEEL_TRY=dependent_launch"
    monkeypatch.setenv("TIDEWHEEL_TRY", "dependent_launch")
    stage = make_stage(tmp_path)
    stage.result(duration("decode step", "tiny", [0.1], None))
    assert json.loads(stage.records.getvalue())["who"] == "tidewheel, dependent_launch"  # type: ignore[union-attr]


def test_the_shares_of_the_recipe_fit_into_its_time() -> None:
    from gpu.__main__ import SECONDS as WHOLE

    assert sum(plan.seconds for plan in FIRST) <= WHOLE - 15  # to import torch for the first time
    assert WHOLE + 2 * suite.END_S <= 480 - 5  # plots and the archive


# --- tests on the device -----------------------------------------------------------------------------------------

DYING = """
import os
import pytest

@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_passes(dtype): ...

def test_fails():
    assert 1 == 2

@pytest.mark.skip
def test_is_skipped(): ...

def test_dies():
    os.abort()

def test_never_runs(): ...
"""


def test_counts_of_a_file_that_dies_are_kept(tmp_path: Path) -> None:
    (tmp_path / "test_dying.py").write_text(DYING)
    run = run_tests(str(tmp_path / "test_dying.py"), make_stage(tmp_path))
    names = [test["test"].rpartition("::")[2] for test in run.tests]
    assert names == ["test_passes[bfloat16]", "test_passes[float32]", "test_fails", "test_is_skipped"]
    assert run.stopped.startswith("ended with status -6")
    found = measured("tests of the kernels", [run])
    assert (found.value, found.unit, found.details["errors"]) == (2.0, "of 3 passed", 1)
    assert "assert 1 == 2" in found.details["failed"][0]["message"]
    with pytest.raises(RuntimeError, match="status -6"):
        run.check()


@pytest.mark.parametrize(("order", "expected"), [("", ["024", "13"]), (" in order", ["01", "234"])])
def test_shards_run_all_tests_once(order: str, expected: list[str], tmp_path: Path) -> None:
    (tmp_path / "test_many.py").write_text("".join(f"def test_{number}(): ...\n\n" for number in range(5)))
    runs = [run_tests(str(tmp_path / "test_many.py"), make_stage(tmp_path), shard=f"{i}/2{order}") for i in range(2)]
    assert ["".join(test["test"][-1] for test in run.tests) for run in runs] == expected


def test_tests_of_graphs_have_time_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However long those of the kernels take."""
    ends: dict[str, float] = {}

    def run(path: str, stage: Stage, options: Sequence[str], shard: str, end: float) -> FileRun:
        ends[f"{Path(path).name} {shard}"] = stage.end - end
        return FileRun(path, [], "")

    monkeypatch.setattr(device_tests, "run_tests", run)
    stage = make_stage(tmp_path)
    stage.is_dry = False
    device_tests.body(stage)
    assert ends["test_norm.py 0/1"] > 100.0
    assert all(ends[f"test_decode_graphs_gpu.py {i}/4 in order"] < 1.0 for i in range(4))


@pytest.mark.slow
def test_counts_of_a_file_that_never_ends_are_kept(tmp_path: Path) -> None:
    waiting = "def test_passes(): ...\n\ndef test_waits():\n    __import__('threading').Event().wait()\n"
    (tmp_path / "test_waiting.py").write_text(waiting)
    stage = make_stage(tmp_path)
    stage.end -= 270.0  # 30 s are left
    run = run_tests(str(tmp_path / "test_waiting.py"), stage)
    assert [test["outcome"] for test in run.tests] == ["passed"]
    assert run.stopped.startswith("stopped after")


def test_a_run_without_failures_has_nothing_to_raise() -> None:
    FileRun("file", [{"test": "a", "outcome": "passed", "message": ""}], "").check()


# --- folders -----------------------------------------------------------------------------------------------------

KERNEL = """
import sys, triton, triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

@triton.jit
def add_one(x_ptr):
    tl.store(x_ptr, tl.load(x_ptr) + 1)

hits = []
triton.knobs.compilation.listener = lambda *, cache_hit, **_: hits.append(cache_hit)
triton.compile(ASTSource(add_one, {"x_ptr": "*fp32"}), target=GPUTarget("cuda", 90, 32))
print(hits[0])
"""


def compiled(folder: Path, cache: Path) -> bool:
    """Compile a kernel for a device that is not here; return whether it came from the cache."""
    program = folder / "kernel.py"
    program.write_text(KERNEL)
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(cache)
    done = subprocess.run([sys.executable, str(program)], env=environment, capture_output=True, text=True, check=True)
    return done.stdout.strip() == "True"


def test_compiled_kernels_are_found_in_another_folder(tmp_path: Path) -> None:
    first, second, out = tmp_path / "first", tmp_path / "second", tmp_path / "out"
    out.mkdir()
    assert kernel_archive.pack(first, out) == 0
    assert not compiled(tmp_path, first)
    assert kernel_archive.pack(first, out) == 1
    shutil.rmtree(first)
    with tarfile.open(out / kernel_archive.NAME) as archive:
        assert {Path(name).suffix for name in archive.getnames()} == {".cubin", ".json"}
    assert kernel_archive.unpack(out / kernel_archive.NAME, second) == 1
    assert compiled(tmp_path, second)


def test_a_folder_for_the_machine_has_source_without_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pack, "fetch_packages", lambda target, python: target.mkdir())
    size = pack.pack(tmp_path / "folder", "3.12", None)
    assert size < pack.MAX_BYTES
    assert (tmp_path / "folder/source/benchmarks/gpu/__main__.py").is_file()
    assert not (tmp_path / "folder/source/benchmarks/results").exists()
    for arguments in ([], ["--device", "cpu"]):
        refused = subprocess.run(["bash", tmp_path / "folder/run.sh", *arguments], capture_output=True, text=True)
        assert (refused.returncode, "OUT is missing" in refused.stderr) == (2, True)
    monkeypatch.setattr(pack, "MAX_BYTES", size - 1)
    with pytest.raises(SystemExit, match="may have"):
        pack.pack(tmp_path / "folder", "3.12", None)


# --- the whole recipe, where only its machine's packages can be imported -----------------------------------------


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("machine")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pack, "fetch_packages", lambda target, python: target.mkdir())
        pack.pack(folder, "3.12", None)
    script = folder / "run.sh"  # the packages of wheels.txt are those of this Python
    script.write_text(script.read_text().replace("$here/site", str(BLOCKER)))
    return folder


def run_recipe(machine: Path, out: Path, *options: str, planted: str = "") -> tuple[int, str, dict[str, Any]]:
    """Return exit status, output and results."""
    lists = [str(machine / "source/benchmarks/gpu" / name) for name in ("machine.txt", "wheels.txt")]
    environment = {
        "PATH": os.environ["PATH"], "HOME": str(out), "PYTHON": sys.executable, "OMP_NUM_THREADS": "1",
        "BARE_MACHINE": os.pathsep.join(lists), "PLANTED": planted,
    }  # fmt: skip
    command = ["bash", str(machine / "run.sh"), str(out), "--device", "cpu", *options]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    results = {}
    with contextlib.suppress(FileNotFoundError):
        results = json.loads((out / "results.json").read_text())
    return done.returncode, done.stdout, results


def figures(results: dict[str, Any]) -> set[str]:
    return {record["stage"] for record in results["records"] if record["type"] == "result"}


def outcomes(results: dict[str, Any]) -> dict[str, str]:
    return {stage["name"].partition(" ")[0]: stage["outcome"] for stage in results["stages"]}


@pytest.mark.slow
def test_every_stage_ends_with_figures_on_a_bare_machine(machine: Path, tmp_path: Path) -> None:
    status, output, results = run_recipe(machine, tmp_path, *ENOUGH)
    assert status == 0, output
    assert set(outcomes(results).values()) == {DONE}
    assert figures(results) == {plan.name for plan in FIRST}
    assert not [record for record in results["records"] if record["type"] == "failed"]
    written = [path for path in tmp_path.iterdir() if path.is_file()]
    assert len(written) <= 7
    assert all(path.stat().st_size < 16 << 20 for path in written)


Check = Callable[[dict[str, Any]], object]
ENGINE = {"parity", "latency", "engine", "profile"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("planted", "stages", "missing", "said"),
    [
        (",".join(f"{name}=import" for name in ("machine_check", *ENGINE)), "", {*ENGINE}, "tidewheel.llm"),
        ("smoke=hangs", "smoke,parity", {"smoke"}, "waits for the device"),
        ("latency=lost", "parity,latency,engine", {"latency"}, LOST),
    ],
    ids=["import", "hang", "device lost"],
)
def test_the_rest_of_the_figures_arrives(
    machine: Path, tmp_path: Path, planted: str, stages: str, missing: set[str], said: str
) -> None:
    seconds = ("--seconds", "300") if "hangs" in planted else ENOUGH  # it takes what the stages after it do not need
    options = ["--stages", stages] if stages else []
    status, _, results = run_recipe(machine, tmp_path, *seconds, *options, planted=planted)
    wanted = {"ceilings", *stages.split(",")} if stages else {plan.name for plan in FIRST}
    assert figures(results) == wanted - missing
    assert status == 1
    assert said in (tmp_path / "results.md").read_text()


@pytest.mark.slow
def test_an_engine_whose_captures_fail_is_measured_without_graphs(machine: Path, tmp_path: Path) -> None:
    planted = ",".join(f"{name}=capture" for name in ENGINE)
    _, _, results = run_recipe(machine, tmp_path, *ENOUGH, "--stages", "parity,latency", planted=planted)
    assert figures(results) == {"ceilings", "parity", "latency"}
    assert results["fallback"] == FALLBACKS[0].name
    page = (tmp_path / "results.md").read_text()
    assert FALLBACKS[0].name in page and CAPTURE in page


@pytest.mark.slow
def test_figures_go_to_the_terminal_where_the_disk_is_full(machine: Path, tmp_path: Path) -> None:
    status, output, results = run_recipe(machine, tmp_path, *ENOUGH, "--stages", "parity", planted="gpu=disk")
    assert (status, results) == (1, {})
    assert "results cannot be written: [Errno 28]" in output
    assert "| parity with transformers |" in output
