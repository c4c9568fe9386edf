"""The engine process of a slow device, as `TIDEWHEEL_FAULTS` may name it: ``-m support.faults.slowed``.

Each step takes so many seconds longer as the file says that `SECONDS_FILE` names.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from tidewheel.batch import SampledTokens, ScheduledBatch
from tidewheel.config import EngineConfig
from tidewheel.engine.build import LoadedRunner, Progress, load_model_runner
from tidewheel.engine.core import PendingTokens
from tidewheel.engine.process import exit_now, main

SECONDS_FILE = "TIDEWHEEL_SLOWED_BY"


def pace_of(log: Path) -> Path:
    """Return the file with the pace of a server, beside its log."""
    return log.with_name("pace")


def slow_down(file: Path, seconds: float) -> None:
    """Tell the engine, which reads the file at each step, at once."""
    new = file.with_suffix(".new")
    new.write_text(f"{seconds}")
    new.replace(file)


def slowed_by(seconds: float, file: Path) -> dict[str, str]:
    """Return the variables of a server, started with `--allow-faults`, whose steps take so much longer."""
    slow_down(file, seconds)
    paths = [str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        "TIDEWHEEL_FAULTS": "support.faults.slowed",
        SECONDS_FILE: str(file),
        "PYTHONPATH": os.pathsep.join(paths),
    }


class SlowTokens:
    is_done = None

    def __init__(self, pending: PendingTokens, seconds: float) -> None:
        self._pending, self._seconds = pending, seconds

    def wait(self) -> SampledTokens:
        tokens = self._pending.wait()
        time.sleep(self._seconds)
        return tokens


class SlowedRunner:
    def __init__(self, runner: LoadedRunner, seconds: Path) -> None:
        self._runner, self._seconds = runner, seconds
        self.info = runner.info

    def launch(self, batch: ScheduledBatch) -> PendingTokens:
        return SlowTokens(self._runner.launch(batch), float(self._seconds.read_text()))


def load(config: EngineConfig, progress: Progress) -> SlowedRunner:
    return SlowedRunner(load_model_runner(config, progress), Path(os.environ[SECONDS_FILE]))


if __name__ == "__main__":
    exit_now(main(load=load))
