"""Each operation once on the device beside its reference, in a process each, so that one that dies hides no other."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor

from gpu.device_tests import ROOT, WORKERS, measured, run_tests
from gpu.stage import Stage, parser, run

TESTS = ROOT / "tests/kernels/test_smoke.py"


def checks() -> list[str]:
    """Return the names of the tests, in their order."""
    return re.findall(r"^def (test_\w+)", TESTS.read_text(encoding="utf-8"), re.MULTILINE)


def body(stage: Stage) -> None:
    with ThreadPoolExecutor(WORKERS) as pool:
        done = list(pool.map(lambda name: run_tests(f"{TESTS}::{name}", stage), checks()))
    stage.result(measured("smoke", done))
    for one in done:
        with stage.part(one.name):
            one.check()


if __name__ == "__main__":
    run("smoke", body, parser(__doc__).parse_args())
