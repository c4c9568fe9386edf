"""Rules about the folder of an entry and its `config.pbtxt`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from google.protobuf.descriptor import Descriptor
from tritonclient.grpc import model_config_pb2

from tidewheel.adapter.repository_entry import BACKEND
from tidewheel.adapter.tensors import complete
from tidewheel.entries.entry import CONFIG_NAME, Entry
from tidewheel.entries.finding import Problem, error, note, warning
from tidewheel.entries.scheduler_rules import instances, native_queue, other_schedulers
from tidewheel.entries.source_text import json_fields, pbtxt_fields, walk
from tidewheel.errors import ConfigError
from tidewheel.frontend.model_files import read_object, read_text
from tidewheel.settings import nearest

Rule = Callable[[Entry], Iterable[Problem]]

MIGRATABLE = {"vllm": "vLLM", "tensorrtllm": "TensorRT-LLM"}

# Read for other backends: what to do instead.
_NOT_READ = {
    "platform": "backend says which backend it is",
    "optimization": "the engine has settings of its own",
    "batch_input": "the engine makes its own batches",
    "batch_output": "the engine makes its own batches",
    "default_model_filename": "the backend brings its model.py",
    "cc_model_filenames": "the backend brings its model.py",
    "model_operations": "there are no libraries to load",
}


def schema(entry: Entry) -> Iterator[Problem]:
    """Find fields that Triton does not know, and elements of one name."""
    messages: dict[str, Descriptor] = {"": model_config_pb2.ModelConfig.DESCRIPTOR}
    counts: Counter[str] = Counter()
    unknown: set[int] = set()  # a list of scalars is a field for each
    for path, field, parent in walk(pbtxt_fields(entry.text)):
        if parent not in messages:
            continue
        known = messages[parent].fields_by_name
        if field.name_start in unknown:
            continue
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
    wanted = set(entry.config.version_policy.specific.versions)
    if not entry.versions:
        yield error("", f"there is no version folder: Triton wants one, such as {entry.name}/1")
    elif wanted and not wanted & set(entry.versions):
        yield error(
            "version_policy",
            f"version_policy names {sorted(wanted)}, and the folder has {entry.versions}: name one of these",
        )


def tensors(entry: Entry) -> Iterator[Problem]:
    """Find what the load refuses in the declared tensors, each time without what it refused before."""
    declared: dict[str, Any] = {
        "max_batch_size": entry.config.max_batch_size,
        "input": _tensors(entry.config.input),
        "output": _tensors(entry.config.output),
        "parameters": {key: {"string_value": text} for key, text in entry.parameters.items()},
    }
    while refusal := _refusal(declared):
        field = _drop_refused(declared, refusal)
        yield error(field, refusal)
        if not field:
            return
    if any(tensor.name == "text_input" and not tensor.optional for tensor in entry.config.input):
        yield note(
            "input.text_input",
            "text_input is declared without optional, so requests with messages or input_ids are refused: remove the "
            "declaration, or add optional: true",
        )


class _Draft:
    """`ModelConfig` of the Python backend's API, whose changes are forgotten."""

    def __init__(self, declared: Mapping[str, Any]) -> None:
        self._declared = declared

    def as_dict(self) -> Mapping[str, Any]:
        return self._declared

    def __getattr__(self, _: str) -> Callable[[Any], None]:
        return lambda _: None


def _tensors(declared: Iterable[Any]) -> list[dict[str, Any]]:
    type_name = model_config_pb2.DataType.Name
    by_name = {tensor.name: tensor for tensor in declared}
    return [
        {"name": name, "data_type": type_name(tensor.data_type), "dims": list(tensor.dims)}
        for name, tensor in by_name.items()
    ]


def _refusal(declared: Mapping[str, Any]) -> str:
    try:
        complete(_Draft(declared))
    except ConfigError as refusal:
        return str(refusal)
    return ""


def _drop_refused(declared: dict[str, Any], refusal: str) -> str:
    """Remove what was refused and return its path; empty if it cannot be told."""
    if refusal.startswith("max_batch_size"):
        declared["max_batch_size"] = 0
        return "max_batch_size"
    for kind in ("input", "output"):
        for tensor in declared[kind]:
            if refusal.startswith(f"{kind} {tensor['name']!r}"):
                declared[kind].remove(tensor)
                return f"{kind}.{tensor['name']}"
    return ""


def transactions(entry: Entry) -> Iterator[Problem]:
    owner, field = entry.engine_of or entry.name, "model_transaction_policy"
    if not entry.is_decoupled or any(_answers_once(config, owner) for config in entry.others.values()):
        return
    if entry.engine_of:
        yield warning(field, f"engine_of is {owner!r}, and the entry streams too: set decoupled: false for /infer")
        return
    yield warning(
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
    """Find what is no JSON, and keys that are there twice, of which JSON keeps the last one."""
    try:
        read_object(entry.json_path)
    except ConfigError as refusal:
        yield error("", str(refusal), file=entry.json_path)
        return
    counts = Counter(field.name for field in json_fields(read_text(entry.json_path) or ""))
    for key, count in counts.items():
        if count > 1:
            yield error(
                key, f"{key} is there {count} times, and only the last one counts: keep one", file=entry.json_path
            )


def backend(entry: Entry) -> Iterator[Problem]:
    """Judge an entry that does not say that it is ours."""
    config, field = entry.config, "backend"
    if config.backend in MIGRATABLE:
        whose = MIGRATABLE[config.backend]
        yield note(field, f"passed over: an entry of Triton's {whose} backend; tidewheel migrate makes it ours")
    elif nearest(config.backend.lower(), [BACKEND]):
        yield error(field, f"backend is {config.backend!r}: did you mean {BACKEND!r}?")
    elif config.platform == "ensemble":
        yield note("platform", "passed over: an ensemble")
    elif not config.backend and not config.platform and {"model", "engine_of"} & set(config.parameters):
        yield error("", f'{CONFIG_NAME} does not set backend: add backend: "{BACKEND}"')
    else:
        yield note(field, f"passed over: backend is {config.backend or config.platform!r}")


# Name → rule, in the order of findings.
ENTRY_RULES: Mapping[str, Rule] = {
    "schema": schema,
    "name": name,
    "version-folder": version_folder,
    "model-json": model_json,
    "tensors": tensors,
    "transactions": transactions,
    "instances": instances,
    "native-queue": native_queue,
    "other-schedulers": other_schedulers,
    "not-read": not_read,
}
