"""Tests on the device: each file, or a part of a large one, in a process of its own. Tests count as they end."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from gpu.line_reports import PREFIX, SHARD
from gpu.measurements import Measurement
from gpu.stage import Stage, parser, run

ROOT = Path(__file__).parents[2]
CONFIGURATION = Path(__file__).with_name("pytest.ini")
KERNELS, GRAPHS = "tests of the kernels", "tests marked gpu"
# Of tests/kernels all but these: compilation without a device, and checks that `smoke` ran.
NOT_RUN = ("test_aot.py", "test_smoke.py")
MARKED = (  # elsewhere
    "runner/test_decode_graphs_gpu.py", "runner/test_deterministic.py", "runner/test_warm_up.py",
    "runner/test_symmetric_collectives_gpu.py", "models/test_weight_stream.py", "models/test_bf16_parity.py",
)  # fmt: skip
SHARDS = {
    "test_attention.py": 10,
    "test_sampling_kernel.py": 2,
    "test_sampling_operation.py": 2,
    "test_decode_graphs_gpu.py": 4,
    "test_bf16_parity.py": 2,
}  # which compile longest
IN_ORDER = ("test_decode_graphs_gpu.py", "test_bf16_parity.py")  # whose neighbours share what they load
SHARES = {KERNELS: 0.6, GRAPHS: 1.0}  # of the time that is left, so that graphs have some
WORKERS = max(2, (os.cpu_count() or 4) - 2)  # processes at once, which mostly compile
OF_THE_DEVICE = "not cpu and not native"  # implementations
MOST_REPORTED = 50  # failures
TAIL_CHARS = 600
NORMAL_ENDS = (0, 1, 5)  # of pytest: passed, failed, no test chosen


class FileRun(NamedTuple):
    """Ended tests of one process, and why it ended before its time, if it did."""

    name: str
    tests: list[dict[str, str]]  # test, outcome, message
    stopped: str

    def check(self) -> None:
        """Raise RuntimeError with the first failure."""
        messages = [test["message"] for test in self.tests if test["outcome"] == "failed"]
        if self.stopped or messages:
            raise RuntimeError(self.stopped or messages[0])


def files_to_run(is_dry: bool) -> dict[str, list[Path]]:
    kernels = [path for path in sorted((ROOT / "tests/kernels").glob("test_*.py")) if path.name not in NOT_RUN]
    if is_dry:  # `make test-kernels` runs the others
        return {KERNELS: [path for path in kernels if path.name in ("test_norm.py", "test_kv_cache.py")]}
    return {KERNELS: kernels, GRAPHS: [ROOT / "tests" / name for name in MARKED]}


def body(stage: Stage) -> None:
    for name, paths in files_to_run(stage.is_dry).items():
        with stage.part(name):
            stage.check_time(5.0)
            options = ("-m", "gpu") if name == GRAPHS else ("-m", "not slow", "-k", OF_THE_DEVICE)
            end = time.monotonic() + SHARES[name] * stage.seconds_left
            shards = [(str(path), shard) for path in paths for shard in shards_of(path.name)]
            with ThreadPoolExecutor(WORKERS) as pool:
                runs = [pool.submit(run_tests, path, stage, options, shard, end) for path, shard in shards]
                stage.result(measured(name, [run.result() for run in runs]))


def shards_of(name: str) -> list[str]:
    count, order = SHARDS.get(name, 1), " in order" if name in IN_ORDER else ""
    return [f"{index}/{count}{order}" for index in range(count)]


def run_tests(
    chosen: str, stage: Stage, options: Sequence[str] = (), shard: str = "0/1", end: float = math.inf
) -> FileRun:
    """Run a test file, one shard of it or one test, and return the tests that ended.

    A run is stopped at `end` (time.monotonic) or at the end of the stage.
    """
    name = Path(chosen).name if shard == "0/1" else f"{Path(chosen).name} {shard}"
    seconds = max(min(stage.end, end) - time.monotonic(), 1.0)
    command = [
        sys.executable, "-P", "-m", "pytest", "-q", "-c", str(CONFIGURATION), "--rootdir", str(ROOT),
        "-p", "no:cacheprovider", "-p", "gpu.line_reports", *options, chosen,
    ]  # fmt: skip
    # References on the host take one thread, as there are many processes.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", SHARD: shard}
    if not stage.is_cuda:
        environment["TRITON_INTERPRET"] = "1"
    try:
        done = subprocess.run(
            command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=seconds,
            check=False,
        )  # fmt: skip
        status, output = done.returncode, done.stdout
        stopped = "" if status in NORMAL_ENDS else f"ended with status {status}"
    except subprocess.TimeoutExpired as late:
        output, stopped = late.stdout or b"", f"stopped after {seconds:.0f} s"
    text = output.decode("utf-8", "replace")
    return FileRun(name, ended_tests(text.splitlines()), stopped and f"{stopped}: {text[-TAIL_CHARS:]}")


def ended_tests(lines: Iterable[str]) -> list[dict[str, str]]:
    return [json.loads(line.removeprefix(PREFIX)) for line in lines if line.startswith(PREFIX) and line.endswith("}")]


def measured(name: str, runs: Sequence[FileRun]) -> Measurement:
    """Count tests that passed. A run that was stopped is an error beside its failures."""
    tests = [test for run in runs for test in run.tests]
    counts = Counter(test["outcome"] for test in tests)
    stopped = {run.name: run.stopped for run in runs if run.stopped}
    failed = [test for test in tests if test["outcome"] == "failed"]
    return Measurement(
        name=name,
        case=f"{counts['skipped']} skipped" + "".join(f", {run} unfinished" for run in stopped),
        value=float(counts["passed"]),
        unit=f"of {counts['passed'] + counts['failed']} passed",
        samples=[],
        sample_unit="",
        details={
            "failures": counts["failed"],
            "errors": len(stopped),
            "failed": failed[:MOST_REPORTED],
            "stopped": stopped,
            "by_file": {run.name: dict(Counter(test["outcome"] for test in run.tests)) for run in runs},
        },
    )


if __name__ == "__main__":
    run("device_tests", body, parser(__doc__).parse_args())
