"""Adapters: programs that run one-shot models, each a module here with `load(path, config) -> Adapter`."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

from tidewheel.config import EngineConfig
from tidewheel.errors import ConfigError
from tidewheel.one_shot.signature import Arrays, Signature
from tidewheel.regular_files import open_regular, parse_object
from tidewheel.settings import nearest


class Adapter(Protocol):
    @property
    def signature(self) -> Signature: ...  # of the file, without the entry's settings

    @property
    def device(self) -> str: ...  # such as "cpu (2 threads)"

    @property
    def weights_bytes(self) -> int: ...  # 0: unknown

    def run(self, inputs: Arrays) -> Arrays:
        """Return the outputs. Must not write to the inputs; may raise anything."""


class AdapterKind(NamedTuple):
    module: str
    extra: str  # of pyproject.toml
    file: str = ""  # in a version folder, names this adapter, as does its suffix; empty: only the setting does


ADAPTERS: Mapping[str, AdapterKind] = MappingProxyType(
    {
        "onnxruntime": AdapterKind("tidewheel.one_shot.onnx_runtime", "onnx", "model.onnx"),
    }
)
DEFAULTS: Mapping[str, object] = MappingProxyType(
    {
        "kind": "one_shot", "enable_prefix_caching": False, "cache_aware_order": False, "async_scheduling": False,
        "admit_by_growth": False, "max_num_seqs": 32, "max_num_batched_tokens": 32,
    }
)  # fmt: skip


def with_kind(settings: Mapping[str, object], folder: Path | None = None) -> dict[str, object]:
    """Return an entry's settings, completed if a file in its version folder or a setting names an adapter."""
    model, adapter = str(settings.get("model") or ""), str(settings.get("adapter") or "")
    files = {kind.file: name for name, kind in ADAPTERS.items() if kind.file}
    if not model and folder is not None:
        model = next((file for file in files if (folder / file).is_file()), "")
    adapter = adapter or {Path(file).suffix: name for file, name in files.items()}.get(Path(model).suffix, "")
    if not adapter:
        return dict(settings)
    return {**DEFAULTS, **settings, "adapter": adapter, "model": model}


def load_adapter(config: EngineConfig) -> tuple[Adapter, Signature]:
    """Load a model. Return it and its signature with the entry's settings. Raise `ConfigError`."""
    kind = ADAPTERS.get(config.adapter)
    if kind is None:
        near = nearest(config.adapter, ADAPTERS)
        hint = f"did you mean {near}?" if near else f"known are {', '.join(ADAPTERS)}"
        raise ConfigError(f"adapter is {config.adapter!r}: {hint}")
    path = Path(config.model)
    try:
        if kind.file:
            open_regular(path).close()
        module: Any = importlib.import_module(kind.module)
    except OSError as error:
        raise ConfigError(f"model is {config.model!r}: it cannot be read ({error.strerror})") from None
    except ImportError as error:
        raise ConfigError(
            f"adapter {config.adapter} cannot be imported ({error}): pip install 'tidewheel[{kind.extra}]'"
        ) from None
    adapter: Adapter = module.load(path, config)
    axes, buckets = _batch_axes(config.batch_axes), _buckets(config.buckets)
    return adapter, adapter.signature.with_settings(axes, buckets)


def _batch_axes(text: str) -> dict[str, int | None]:
    axes = parse_object(text, "batch_axes")
    for name, axis in axes.items():
        if axis is not None and (not isinstance(axis, int) or isinstance(axis, bool) or axis < 0):
            raise ConfigError(f"batch_axes has {axis!r} for {name!r}: give an axis from 0 on, or null")
    return axes  # type: ignore[return-value]


def _buckets(text: str) -> dict[str, list[int]]:
    buckets = parse_object(text, "buckets")
    for name, sizes in buckets.items():
        is_list = isinstance(sizes, list) and len(sizes) > 0
        if not is_list or not all(isinstance(size, int) and size > 0 for size in sizes):  # type: ignore[attr-defined]
            raise ConfigError(f"buckets has {sizes!r} for {name!r}: give a list of sizes, such as [32, 64]")
    return buckets  # type: ignore[return-value]
