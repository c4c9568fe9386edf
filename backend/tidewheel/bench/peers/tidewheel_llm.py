"""Tidewheel's step loop, without processes and sockets."""

from __future__ import annotations

import time
from typing import Any

# An offline batch comes at once, so waiting must not be limited.
WAITING = {"max_waiting_requests": 1 << 20, "max_waiting_tokens": 1 << 30}


def make(options: dict[str, Any]) -> TidewheelLlm:
    return TidewheelLlm(options)


class TidewheelLlm:
    streams = True

    def __init__(self, options: dict[str, Any]) -> None:
        import torch

        from tidewheel import __version__
        from tidewheel.batch import StepOutputs
        from tidewheel.config import EngineConfig
        from tidewheel.engine.build import build_scheduler, engine_info, load_model_runner
        from tidewheel.engine.core import EngineCore

        settings = WAITING | {key: value for key, value in options.items() if key != "threads"}
        if options.get("threads"):
            settings["num_threads"] = int(options["threads"])
        config = EngineConfig.from_settings(settings)
        runner = load_model_runner(config)
        scheduler = build_scheduler(config, engine_info(runner.info, config))
        self._events: dict[int, tuple[int, bool]] = {}  # request → new tokens, done
        self.versions = {"tidewheel": __version__, "torch": torch.__version__}

        def deliver(outputs: StepOutputs) -> None:
            for request in outputs.requests:
                key = int(request.request_id)
                self._events[key] = (self._events.get(key, (0, False))[0] + 1, False)
            for request in outputs.finished:
                if request.error is not None:
                    raise request.error
                key = int(request.request_id)
                self._events[key] = (self._events.get(key, (0, False))[0], True)

        self._core = EngineCore(scheduler, runner, deliver)

    def add(self, request_id: int, input_ids: list[int], max_tokens: int) -> None:
        import numpy as np

        from tidewheel.request import Request
        from tidewheel.sampling import SamplingParams

        sampling = SamplingParams(temperature=0.0, ignore_eos=True)
        prompt = np.array(input_ids, dtype=np.int32)
        now = time.monotonic()
        self._core.add(Request(str(request_id), prompt, sampling, max_tokens=max_tokens, arrival_time=now))

    def step(self) -> list[tuple[int, int, bool]]:
        self._events = {}
        self._core.step()
        return [(key, count, done) for key, (count, done) in self._events.items()]
