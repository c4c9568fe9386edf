"""Rules about instances, and about Triton's own schedulers in front of the engine.

What Triton refuses is in `ValidateModelConfig` and `ValidateInstanceGroup` of its core (`src/model_config_utils.cc`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tritonclient.grpc import model_config_pb2

from tidewheel.config import EngineConfig
from tidewheel.entries.entry import Entry, Machine
from tidewheel.entries.finding import Problem, error, warning

_USUAL_WAITING = EngineConfig.__dataclass_fields__["max_waiting_requests"].default
_LOOK_INTERVAL_US = 500_000  # Triton looks at its queue that seldom


def instances(entry: Entry) -> Iterator[Problem]:
    for index, group in enumerate(entry.config.instance_group):
        path = f"instance_group.{index}"
        yield from _devices(group, path, entry.machine)
        if group.passive:
            yield error(f"{path}.passive", "passive is true: no request reaches the instance; remove it")
        if entry.machine is not None and group.count > entry.machine.num_cores:
            yield warning(
                f"{path}.count",
                f"count is {group.count}, and this machine has {entry.machine.num_cores} cores: each instance is a "
                "process that prepares text; one is enough for most",
            )


def _devices(group: Any, path: str, machine: Machine | None) -> Iterator[Problem]:
    kind, gpus = model_config_pb2.ModelInstanceGroup.Kind.Name(group.kind), list(group.gpus)
    last = max(gpus, default=0)
    if kind != "KIND_GPU" and not (kind == "KIND_AUTO" and gpus):
        if gpus:
            yield error(f"{path}.gpus", f"gpus is {gpus} with {kind}, which Triton refuses: remove gpus")
    elif machine is not None and machine.num_gpus <= last:
        yield error(
            f"{path}.kind",
            f"kind is {kind} for GPU {last}, and this machine has {machine.num_gpus}: write KIND_CPU; the setting "
            "device is for the engine",
        )
    elif gpus not in ([], [0]):
        yield warning(
            f"{path}.gpus",
            f"gpus is {gpus}, and the engine takes the first GPU that it sees: write KIND_CPU, and set "
            "CUDA_VISIBLE_DEVICES for the server",
        )


def native_queue(entry: Entry) -> Iterator[Problem]:
    if not entry.config.HasField("dynamic_batching"):
        return
    queue, path = entry.config.dynamic_batching, "dynamic_batching"
    sizes, largest = list(queue.preferred_batch_size), entry.config.max_batch_size
    if sizes:
        advice = "remove it, for the engine makes the batches"
        make = error if max(sizes) > largest else warning
        yield make(
            f"{path}.preferred_batch_size",
            f"preferred_batch_size is {sizes}, and max_batch_size is {largest}: {advice}",
        )
    if delay := queue.max_queue_delay_microseconds:
        yield warning(
            f"{path}.max_queue_delay_microseconds",
            f"max_queue_delay_microseconds is {delay}: it only delays, for the engine makes the batches; remove it",
        )
    if queue.preserve_ordering:
        make, effect = (
            (error, "Triton refuses it with priority_levels")
            if queue.priority_levels > 1
            else (warning, "each answer waits for all before it, which defeats continuous batching")
        )
        yield make(f"{path}.preserve_ordering", f"preserve_ordering is true: {effect}; remove it")
    yield from _priorities(entry, queue, path)
    yield from _timeouts(queue.default_queue_policy, f"{path}.default_queue_policy")
    for level, policy in queue.priority_queue_policy.items():
        yield from _timeouts(policy, f"{path}.priority_queue_policy.{level}.value")


def _priorities(entry: Entry, queue: Any, path: str) -> Iterator[Problem]:
    levels, default = queue.priority_levels, queue.default_priority_level
    if default and not levels:
        yield warning(
            f"{path}.default_priority_level",
            f"default_priority_level is {default}, and priority_levels is not set: set both, or none",
        )
    if levels and not 1 <= default <= levels:
        yield error(
            f"{path}.default_priority_level" if default else f"{path}.priority_levels",
            f"default_priority_level is {default}: with priority_levels {levels} it must be 1 to {levels}",
        )
    for level in queue.priority_queue_policy:
        if not 1 <= level <= levels:
            yield error(
                f"{path}.priority_queue_policy.{level}",
                f"priority_queue_policy has key {level}: with priority_levels {levels} it must be 1 to {levels}",
            )
    if levels > 1 and "max_waiting_requests" not in entry.settings:
        yield warning(
            f"{path}.priority_levels",
            f"priority_levels is {levels}, and max_waiting_requests is not set: Triton's levels count only for what "
            f"comes when {_USUAL_WAITING} requests wait in the engine; set it to what half a second can start",
        )


def _timeouts(policy: Any, path: str) -> Iterator[Problem]:
    timeout = policy.default_timeout_microseconds
    if 0 < timeout < _LOOK_INTERVAL_US:
        yield warning(
            f"{path}.default_timeout_microseconds",
            f"default_timeout_microseconds is {timeout} ({timeout / 1e6:g} s): Triton looks at its queue up to "
            f"{_LOOK_INTERVAL_US / 1e6:g} s late, and ends requests that could have started; raise it",
        )
    if policy.allow_timeout_override and not timeout:
        yield warning(
            f"{path}.allow_timeout_override",
            "allow_timeout_override is true, and default_timeout_microseconds is not set, without which no request's "
            "timeout counts: set it",
        )
    if timeout and policy.timeout_action == model_config_pb2.ModelQueuePolicy.DELAY:
        yield warning(
            f"{path}.timeout_action",
            "timeout_action is DELAY: a late request goes on waiting, behind all; use REJECT",
        )


def other_schedulers(entry: Entry) -> Iterator[Problem]:
    for field, instead in (
        ("sequence_batching", "a session is a request parameter here"),
        ("ensemble_scheduling", "an ensemble is an entry of its own, with platform ensemble"),
    ):
        if entry.config.HasField(field):
            yield error(field, f"{field} is set, and the engine schedules requests: remove it; {instead}")
    if entry.config.response_cache.enable and entry.is_decoupled:
        yield error("response_cache", "response_cache.enable is true: Triton refuses it for a model that streams")
    elif entry.config.response_cache.enable:
        yield warning(
            "response_cache",
            "response_cache.enable is true: an answer that was sampled is repeated; remove it, for prefix caching "
            "saves the work",
        )
