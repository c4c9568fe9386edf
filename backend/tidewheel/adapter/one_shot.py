"""One-shot models in Triton: their tensors in `config.pbtxt`, in requests and in responses."""

import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from tidewheel.adapter.repository_entry import read_entry, real_entry, resolve_settings, versions
from tidewheel.adapter.tensors import (
    DeclaredSpec,
    DeclaredSpecs,
    add_missing,
    refused_tensors,
    request_parameters,
    traceparent,
)
from tidewheel.config import EngineConfig
from tidewheel.engine.launcher import python_environment, python_executable
from tidewheel.errors import ConfigError, PromptTooLarge
from tidewheel.frontend.coercion import ParameterSource
from tidewheel.frontend.request_parameters import GenerateRequest, RemoteCall
from tidewheel.frontend.settings import FrontendSettings
from tidewheel.one_shot.adapters import with_kind
from tidewheel.one_shot.shared_tensors import PackedTensor, PackedTensors
from tidewheel.one_shot.signature import Signature, dtype_name
from tidewheel.settings import MIB
from tidewheel_process.process_tree import arguments

_REPOSITORY = "--model-repository"
_PRINT = "from tidewheel.one_shot.adapters import print_signature; print_signature()"


def signature_of(config: EngineConfig) -> Signature:
    """Return a model's signature, read in a process of its own. Raise `ConfigError`."""
    command = [python_executable(), "-P", "-c", _PRINT, msgspec.json.encode(config.to_settings()).decode()]
    limit = config.engine_start_timeout_s
    try:
        done = subprocess.run(command, capture_output=True, env=python_environment(), timeout=limit, check=False)  # noqa: S603
        found = msgspec.json.decode(done.stdout.rpartition(b"\n")[2], type=Signature | str)
    except subprocess.TimeoutExpired:
        raise ConfigError(f"{config.model} was not loaded within {limit:g} s: raise engine_start_timeout_s") from None
    except msgspec.DecodeError:
        last = done.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        raise ConfigError(f"{config.model}: the process that loads it ended with {done.returncode}: {last}") from None
    if isinstance(found, str):
        raise ConfigError(found)
    return found


def find_entry(model: str, server_pid: int) -> Path | None:
    """Return the folder of a model in the repositories that a tritonserver was started with; None without one."""
    words = arguments(server_pid)
    named = [word.partition("=")[2] for word in words if word.startswith(f"{_REPOSITORY}=")]
    named += [words[index + 1] for index, word in enumerate(words[:-1]) if word == _REPOSITORY]
    return next((folder for name in named if (folder := Path(name) / model).is_dir()), None)


def kind_of(folder: Path, version: str, settings: Mapping[str, object]) -> str:
    """Return the kind of an entry's model; "text" for a twin."""
    return "text" if "engine_of" in settings else str(with_kind(settings, folder / version).get("kind", "text"))


def one_shot_settings(config: Mapping[str, Any], folder: Path) -> EngineConfig | None:
    """Return the engine's settings if the entry is of a one-shot model, else None. Raise `ConfigError`."""
    version = str(max(versions(folder), default=1))
    entry = read_entry(config["name"], real_entry(folder), version, config)
    is_text = kind_of(entry.folder, version, {**entry.parameters, **entry.model_json}) == "text"
    return None if is_text else resolve_settings(entry).engine


def complete_entry(config: Any, server_pid: int) -> Any | None:
    """Complete the `pb_utils.ModelConfig` of a one-shot model; None for another. Raise `ConfigError`."""
    entry = config.as_dict()
    folder = find_entry(entry.get("name", ""), server_pid)
    settings = None if folder is None else one_shot_settings(entry, folder)
    if settings is None:
        return None
    return complete(config, signature_of(settings), decoupled=settings.kind == "iterative")


def complete(config: Any, signature: Signature, *, decoupled: bool = False) -> Any:
    """Add the model's tensors to a `pb_utils.ModelConfig`. Raise `ConfigError` for contradictory fields."""
    entry = config.as_dict()
    for _, message in contradictions(entry, signature):
        raise ConfigError(message)
    return add_missing(config, _declared(entry, signature), optional={}, decoupled=decoupled)


def contradictions(entry: Mapping[str, Any], signature: Signature) -> Iterator[tuple[str, str]]:
    """Yield (path, message) of each field with which the model does not load."""
    size, specs = int(entry.get("max_batch_size", 0)), (*signature.inputs, *signature.outputs)
    if size and any(spec.batch_axis != 0 or len(spec.dims) < 2 for spec in specs):
        yield "max_batch_size", f"max_batch_size is {size}, and not all tensors begin with a batch: leave it out"
    yield from refused_tensors(entry, _declared(entry, signature))


def _declared(entry: Mapping[str, Any], signature: Signature) -> DeclaredSpecs:
    """Return the tensors as an entry declares them: without the batch dimension if `max_batch_size` stands for it."""
    first = int(int(entry.get("max_batch_size", 0)) > 0)
    return {
        kind: [
            DeclaredSpec(
                spec.name,
                "TYPE_STRING" if spec.dtype == "BYTES" else f"TYPE_{spec.dtype}",
                tuple(-1 if isinstance(dim, str) else dim for dim in spec.dims[first:]),
            )
            for spec in specs
        ]
        for kind, specs in (("input", signature.inputs), ("output", signature.outputs))
    }


def read_tensors(
    request: Any,
    settings: FrontendSettings,
    max_input_mb: int,
    arrival_ns: int,
    call: RemoteCall | None = None,
    *,
    stream: bool = False,
) -> GenerateRequest:
    """Copy a Triton request's tensors, unless `call` has them. Raise `PromptTooLarge`, before the copy, or `Busy`."""
    arrays = {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}
    size = sum(array.nbytes if array.dtype.kind != "O" else sum(map(len, array.flat)) for array in arrays.values())
    if size > max_input_mb * MIB:
        raise PromptTooLarge(f"the inputs have {size} bytes: at most {max_input_mb * MIB} are allowed (max_input_mb)")
    parameters = request_parameters(request)
    shapes = [PackedTensor(name, dtype_name(array), array.shape, 0) for name, array in arrays.items()]
    return GenerateRequest(
        task="infer",
        request_id=request.request_id(),
        inputs=PackedTensors.of(arrays, keeps=True) if call is None else PackedTensors(shapes),
        call=call,
        stream=stream,
        parameters=(ParameterSource(origin="request parameter", values=parameters),) if parameters else (),
        arrival_ns=arrival_ns,
        traceparent=traceparent(request, settings),
        timeout_us=settings.timeout_us(request.timeout()),
    )
