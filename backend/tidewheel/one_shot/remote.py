"""Models that another backend of the server runs: the engine orders their batches, front ends call them."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from tidewheel.batch import SampledTokens, ScheduledBatch
from tidewheel.config import EngineConfig
from tidewheel.errors import ConfigError
from tidewheel.one_shot.adapters import Adapter, converted
from tidewheel.one_shot.runner import OneShotRunner
from tidewheel.one_shot.signature import Signature, TensorSpec
from tidewheel.request import Request


class Options(msgspec.Struct, forbid_unknown_fields=True):
    """Tensors of the called model, which the backend takes from `config.pbtxt`."""

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]


def load(_: Path, config: EngineConfig) -> Adapter:
    """Return the signature of a model that is not loaded here."""
    if config.buckets != "{}":
        raise ConfigError(f"buckets is {config.buckets}: adapter {config.adapter} pads no tensors, leave it out")
    if config.adapter_options == "{}":
        raise ConfigError(f"model is {config.model!r}, whose config.pbtxt lacks input or output: declare both here")
    options = converted(config.adapter_options, "adapter_options", Options)
    return Adapter(Signature(options.inputs, options.outputs), "another backend", 0, dict)


class RemoteBatch(NamedTuple):
    """Requests that front ends run. Each ends by its report, or by a cancel."""

    step_id: int
    requests: list[Request]

    @property
    def is_done(self) -> bool:
        return all(one.is_finished for one in self.requests)

    def wait(self) -> SampledTokens:
        return SampledTokens(self.step_id, np.zeros(len(self.requests), np.int32))


class RemoteRunner(OneShotRunner):
    """Runner of batches in front ends, any number at a time."""

    run: Callable[[Iterable[str]], None]  # by ids of requests; set by the engine's server

    def launch(self, batch: ScheduledBatch) -> RemoteBatch:  # type: ignore[override]
        requests = [new.request for new in batch.new_rows]
        self.run(one.request_id for one in requests)
        return RemoteBatch(batch.step_id, requests)
