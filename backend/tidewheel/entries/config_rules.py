"""Rules on an entry's folder and `config.pbtxt`. Triton has its rules in `src/model_config_utils.cc`."""

import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from google.protobuf.descriptor import Descriptor
from tritonclient.grpc import model_config_pb2

from tidewheel.adapter.repository_entry import BACKEND, versions
from tidewheel.adapter.tensors import contradictions
from tidewheel.config import EngineConfig
from tidewheel.entries.entry import CONFIG_NAME, Entry, num_gpus
from tidewheel.entries.findings import Problem, error, json_fields, note, pbtxt_fields, walk, warning
from tidewheel.errors import ConfigError
from tidewheel.lora import MULTI_LORA
from tidewheel.regular_files import read_object, read_text
from tidewheel.settings import BOOLEANS, nearest

Rule = Callable[[Entry], Iterable[Problem]]
MakeProblem = Callable[[str, str], Problem]  # `error` or `warning`

MIGRATABLE = {"vllm": "vLLM", "tensorrtllm": "TensorRT-LLM"}
_USUAL_WAITING = EngineConfig.__dataclass_fields__["max_waiting_requests"].default
_LOOK_INTERVAL_US = 500_000  # between two looks of Triton at its queue

# Fields that other backends read: what to do instead.
_NOT_READ = {
    "platform": "backend says which backend it is",
    "optimization": "the engine has settings of its own",
    "batch_input": "the engine makes its own batches",
    "batch_output": "the engine makes its own batches",
    "default_model_filename": "the backend brings its model.py",
    "cc_model_filenames": "the backend brings its model.py",
    "model_operations": "there are no libraries to load",
}
_OTHER_SCHEDULERS = {
    "sequence_batching": "a session is a request parameter here",
    "ensemble_scheduling": "an ensemble is an entry of its own, with platform ensemble",
}


def schema(entry: Entry) -> Iterator[Problem]:
    """Yield fields that Triton does not know, and entries of equal name in a list."""
    messages: dict[str, Descriptor] = {"": model_config_pb2.ModelConfig.DESCRIPTOR}
    counts: Counter[str] = Counter()
    unknown: set[int] = set()  # a list of scalars is a field for each
    for path, field, parent in walk(pbtxt_fields(entry.text)):
        if parent not in messages or field.name_start in unknown:
            continue
        known = messages[parent].fields_by_name
        if field.name not in known:
            unknown.add(field.name_start)
            near = nearest(field.name, known)
            hint = f"did you mean {near!r}?" if near else "remove it, or Triton cannot read the file"
            yield error(path, f"{messages[parent].name} has no field {field.name!r}: {hint}", right_name=near)
        elif field.fields:
            messages[path] = known[field.name].message_type
            counts[path] += field.name in ("parameters", "input", "output")
    for path, count in counts.items():
        if count > 1:
            yield error(path, f"{path} is there {count} times, and only one counts: keep one")


def name(entry: Entry) -> Iterator[Problem]:
    if entry.config.name and entry.config.name != entry.name:
        yield error(
            "name", f"name is {entry.config.name!r}, and the folder {entry.name!r}: rename one, or remove name"
        )


def version_folder(entry: Entry) -> Iterator[Problem]:
    present, wanted = versions(entry.folder), set(entry.config.version_policy.specific.versions)
    if not present:
        yield error("", f"there is no version folder: Triton wants one, such as {entry.name}/1")
    elif wanted and not wanted & set(present):
        message = f"version_policy names {sorted(wanted)}, and the folder has {present}: name one of these"
        yield error("version_policy", message)


def declared_tensors(entry: Entry) -> dict[str, Any]:
    """Return an entry's tensors, batch size and parameters as Triton's Python API gives them."""
    type_name = model_config_pb2.DataType.Name
    declared: dict[str, Any] = {
        kind: [
            {"name": name, "data_type": type_name(tensor.data_type), "dims": list(tensor.dims)}
            for name, tensor in {tensor.name: tensor for tensor in getattr(entry.config, kind)}.items()
        ]
        for kind in ("input", "output")
    }
    declared["max_batch_size"] = entry.config.max_batch_size
    declared["parameters"] = {key: {"string_value": text} for key, text in entry.parameters.items()}
    return declared


def tensors(entry: Entry) -> Iterator[Problem]:
    if entry.kind != "text":  # whose tensors are compared with the model's
        return
    yield from (error(field, message) for field, message in contradictions(declared_tensors(entry)))
    if any(tensor.name == "text_input" and not tensor.optional for tensor in entry.config.input):
        yield note(
            "input.text_input",
            "text_input is declared without optional, so requests with messages or input_ids are refused: remove the "
            "declaration, or add optional: true",
        )


def transactions(entry: Entry) -> Iterator[Problem]:
    owner, field = entry.engine_of or entry.name, "model_transaction_policy"
    if not entry.is_decoupled or any(_answers_once(config, owner) for config in entry.others.values()):
        return
    if entry.engine_of:
        yield warning(field, f"engine_of is {owner!r}, and the entry streams too: set decoupled: false for /infer")
        return
    yield note(
        field,
        f"the model streams, so HTTP /infer and unary gRPC are refused: if a client wants them, add an entry "
        f"{entry.name}_infer with decoupled: false and the parameter engine_of {entry.name}",
    )


def _answers_once(config: Any, owner: str) -> bool:
    shares = "engine_of" in config.parameters and config.parameters["engine_of"].string_value == owner
    return shares and config.HasField("model_transaction_policy") and not config.model_transaction_policy.decoupled


def not_read(entry: Entry) -> Iterator[Problem]:
    for field, instead in _NOT_READ.items():
        if field in entry.fields:
            yield warning(field, f"{field} is set and not read: remove it; {instead}")


def model_json(entry: Entry) -> Iterator[Problem]:
    """Yield an unreadable `model.json`, and repeated keys, of which JSON keeps the last."""
    try:
        read_object(entry.json_path)
    except ConfigError as refusal:
        yield error("", str(refusal), file=entry.json_path)
        return
    counts = Counter(field.name for field in json_fields(read_text(entry.json_path) or ""))
    for key, count in counts.items():
        if count > 1:
            message = f"{key} is there {count} times, and only the last one counts: keep one"
            yield error(key, message, file=entry.json_path)


def multi_lora(entry: Entry) -> Iterator[Problem]:
    if entry.lora_path.exists() and not BOOLEANS.get(str(entry.settings.get("enable_lora")).strip().lower()):
        advice = "no adapter is served: set enable_lora to true in model.json, or remove the file"
        yield warning("", f"{MULTI_LORA} is there, and enable_lora is not true, so {advice}", file=entry.lora_path)


def backend(entry: Entry) -> Iterator[Problem]:
    config, field = entry.config, "backend"
    if config.backend in MIGRATABLE:
        whose = MIGRATABLE[config.backend]
        yield warning(field, f"passed over: an entry of Triton's {whose} backend; tidewheel migrate makes it ours")
    elif nearest(config.backend.lower(), [BACKEND]):
        yield error(field, f"backend is {config.backend!r}: did you mean {BACKEND!r}?")
    elif not config.backend and nearest(config.platform.lower(), [BACKEND]):
        yield error("platform", f'platform is {config.platform!r}: write backend: "{BACKEND}", not platform')
    elif config.platform == "ensemble":
        yield note("platform", "passed over: an ensemble")
    elif not config.backend and not config.platform and {"model", "engine_of"} & set(config.parameters):
        yield error("", f'{CONFIG_NAME} does not set backend: add backend: "{BACKEND}"')
    else:
        yield note(field, f"passed over: backend is {config.backend or config.platform!r}")


def _value_problem(make: MakeProblem, message: Any, path: str, field: str, advice: str) -> Problem:
    value = getattr(message, field)
    shown = str(value).lower() if isinstance(value, bool) else value
    return make(f"{path}.{field}", f"{field} is {shown}{advice}")


def instances(entry: Entry) -> Iterator[Problem]:
    for index, group in enumerate(entry.config.instance_group):
        path = f"instance_group.{index}"
        yield from _devices(group, path, num_gpus() if entry.is_this_machine else None)
        if group.passive:
            yield _value_problem(error, group, path, "passive", ": no request reaches the instance; remove it")
        if entry.is_this_machine and group.count > (num_cores := len(os.sched_getaffinity(0))):
            advice = f", and this machine has {num_cores} cores: an instance is a process, and one is often enough"
            yield _value_problem(warning, group, path, "count", advice)


def _devices(group: Any, path: str, present: int | None) -> Iterator[Problem]:
    kind, gpus = model_config_pb2.ModelInstanceGroup.Kind.Name(group.kind), list(group.gpus)
    last = max(gpus, default=0)
    if kind != "KIND_GPU" and not (kind == "KIND_AUTO" and gpus):
        if gpus:
            yield _value_problem(error, group, path, "gpus", f" with {kind}, which Triton refuses: remove gpus")
    elif present is not None and present <= last:
        message = f"kind is {kind} for GPU {last}, and this machine has {present}: write KIND_CPU, and set device"
        yield error(f"{path}.kind", message)
    elif gpus not in ([], [0]):
        advice = ", and the engine takes the first GPU it sees: write KIND_CPU, and set CUDA_VISIBLE_DEVICES"
        yield _value_problem(warning, group, path, "gpus", advice)


def native_queue(entry: Entry) -> Iterator[Problem]:
    if not entry.config.HasField("dynamic_batching"):
        return
    queue, path = entry.config.dynamic_batching, "dynamic_batching"
    if queue.preferred_batch_size:
        largest = entry.config.max_batch_size
        is_wrong = max(queue.preferred_batch_size) > largest
        advice = f", and max_batch_size is {largest}: remove it, for the engine makes the batches"
        yield _value_problem(error if is_wrong else warning, queue, path, "preferred_batch_size", advice)
    if queue.max_queue_delay_microseconds:
        advice = ": it only delays, for the engine makes the batches; remove it"
        yield _value_problem(warning, queue, path, "max_queue_delay_microseconds", advice)
    if queue.preserve_ordering:
        make: MakeProblem = warning
        effect = "each answer waits for all before it, which defeats continuous batching"
        if queue.priority_levels > 1:
            make, effect = error, "Triton refuses it with priority_levels"
        yield _value_problem(make, queue, path, "preserve_ordering", f": {effect}; remove it")
    yield from _priorities(entry, queue, path)
    yield from _timeouts(queue.default_queue_policy, f"{path}.default_queue_policy")
    for level, policy in queue.priority_queue_policy.items():
        yield from _timeouts(policy, f"{path}.priority_queue_policy.{level}.value")


def _priorities(entry: Entry, queue: Any, path: str) -> Iterator[Problem]:
    levels, default = queue.priority_levels, queue.default_priority_level
    if default and not levels:
        advice = ", and priority_levels is not set: set both, or none"
        yield _value_problem(warning, queue, path, "default_priority_level", advice)
    allowed = f"with priority_levels {levels} it must be 1 to {levels}"
    if levels and not 1 <= default <= levels:
        field = "default_priority_level" if default else "priority_levels"
        yield error(f"{path}.{field}", f"default_priority_level is {default}: {allowed}")
    for level in queue.priority_queue_policy:
        if not 1 <= level <= levels:
            yield error(f"{path}.priority_queue_policy.{level}", f"priority_queue_policy has key {level}: {allowed}")
    if levels > 1 and "max_waiting_requests" not in entry.settings:
        advice = (
            ", and max_waiting_requests is not set: Triton's levels count only for what comes when "
            f"{_USUAL_WAITING} requests wait in the engine; set it to what half a second can start"
        )
        yield _value_problem(warning, queue, path, "priority_levels", advice)


def _timeouts(policy: Any, path: str) -> Iterator[Problem]:
    timeout = policy.default_timeout_microseconds
    if 0 < timeout < _LOOK_INTERVAL_US:
        advice = (
            f" ({timeout / 1e6:g} s): Triton looks at its queue up to {_LOOK_INTERVAL_US / 1e6:g} s late, and ends "
            "requests that could have started; raise it"
        )
        yield _value_problem(warning, policy, path, "default_timeout_microseconds", advice)
    if policy.allow_timeout_override and not timeout:
        advice = ", and default_timeout_microseconds is not set, without which no request's timeout counts: set it"
        yield _value_problem(warning, policy, path, "allow_timeout_override", advice)
    if timeout and policy.timeout_action == model_config_pb2.ModelQueuePolicy.DELAY:
        message = "timeout_action is DELAY: a late request goes on waiting, behind all; use REJECT"
        yield warning(f"{path}.timeout_action", message)


def other_schedulers(entry: Entry) -> Iterator[Problem]:
    for field, instead in _OTHER_SCHEDULERS.items():
        if entry.config.HasField(field):
            yield error(field, f"{field} is set, and the engine schedules requests: remove it; {instead}")
    if entry.config.response_cache.enable:
        make: MakeProblem = warning
        effect = "an answer that was sampled is repeated; remove it, for prefix caching saves the work"
        if entry.is_decoupled:
            make, effect = error, "Triton refuses it for a model that streams"
        yield make("response_cache", f"response_cache.enable is true: {effect}")


_IN_ORDER: tuple[Rule, ...] = (  # of findings
    schema, name, version_folder, model_json, multi_lora, tensors, transactions, instances, native_queue,
    other_schedulers, not_read,
)  # fmt: skip
CONFIG_RULES: Mapping[str, Rule] = {rule.__name__.replace("_", "-"): rule for rule in _IN_ORDER}
