from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence

from tidewheel import __version__
from tidewheel.engine.messages import EngineInfo
from tidewheel.server.backend_dir import BACKEND
from tidewheel.server.launch import Endpoints
from tidewheel.server.ports import authority, is_loopback
from tidewheel.server.triton_http import DeployedModel

OLDEST_FOR_PRODUCTION = (2, 69)  # Triton 26.05, for its security fixes
_DEFAULT_GRPC_PORT = 8001
_PROMPT = "A tuple is"


def describe_models(
    version: str, origin: str, models: Sequence[DeployedModel], infos: Mapping[str, EngineInfo]
) -> str:
    """Describe the server and its models. `infos`: model name → what its engine resolved."""
    lines = ["", f"Tidewheel {__version__} on Triton {version or 'of unknown version'} ({origin})", ""]
    for model in models:
        lines += _model_lines(model, infos)
    return "\n".join([*lines, ""])


def describe_endpoints(endpoints: Endpoints, models: Sequence[DeployedModel]) -> str:
    host, ports = endpoints.host, endpoints.ports
    lines = [
        f"  HTTP      http://{authority(host, ports.http)}",
        f"  gRPC      {authority(host, ports.grpc)}",
        f"  metrics   http://{authority(host, ports.metrics)}/metrics",
    ]
    example = next((m.name for m in models if m.decoupled and m.backend == BACKEND), None)
    if example is not None:
        lines += ["", "Try it:", *_examples(example, endpoints)]
    return "\n".join([*lines, "", "Ctrl-C ends the server."])


def version_warning(version: str, host: str) -> str | None:
    """Return why this server must not face a network, or None."""
    if is_loopback(host) or _number(version) >= OLDEST_FOR_PRODUCTION:
        return None
    return (
        f"Triton {version or 'of unknown version'} lacks security fixes and is not on loopback ({host}): serve with "
        "26.05 (server 2.69) or later, or leave --host at 127.0.0.1"
    )


def _model_lines(model: DeployedModel, infos: Mapping[str, EngineInfo]) -> list[str]:
    info = infos.get(model.name)
    if model.engine_of:
        return [f"  {model.name}: the engine of {model.engine_of}, for /infer and unary gRPC"]
    if info is None:
        return [f"  {model.name}: backend {model.backend}"]
    return [
        f"  {model.name}: {info.architecture}, {info.dtype}, on {info.device}; loaded in {info.load_seconds:.1f} s",
        f"    weights {_size(info.weights_bytes)}, activations {_size(info.activation_bytes)}, "
        f"graphs {_size(info.graph_bytes)}",
        f"    KV cache {_size(info.kv_cache_bytes)}: {info.num_blocks:,} blocks of {info.block_size} tokens = "
        f"{info.num_cache_tokens:,} tokens",
        f"    fits {info.max_concurrency:.1f} requests of full length ({info.max_model_len:,} tokens) at once; "
        f"{info.max_num_seqs} run at a time{', scheduled one step ahead' if info.async_scheduling else ''}",
    ]


def _examples(model: str, endpoints: Endpoints) -> list[str]:
    ports = endpoints.ports
    url = "" if ports.grpc == _DEFAULT_GRPC_PORT else f" --url {authority(endpoints.host, ports.grpc)}"
    name = shlex.quote(model)
    body = f'{{"text_input": "{_PROMPT}", "stream": true, "max_tokens": 60}}'
    return [
        f'  tidewheel generate{url} --model {name} "{_PROMPT}"',
        f"  tidewheel chat{url} --model {name}",
        f"  curl -N http://{authority(endpoints.host, ports.http)}/v2/models/{name}/generate_stream -d '{body}'",
    ]


def _size(count: int) -> str:
    if count >= 1 << 30:
        return f"{count / (1 << 30):.1f} GiB"
    return f"{count / (1 << 20):.1f} MiB"


def _number(version: str) -> tuple[int, ...]:
    parts = version.split(".")[:2]
    return tuple(int(part) for part in parts) if all(part.isdigit() for part in parts) else ()
