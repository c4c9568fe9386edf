"""Completion of `config.pbtxt`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from tidewheel.adapter.tensors import INPUTS, OUTPUTS, TensorSpec
from tidewheel.errors import ConfigError


def complete(config: Any) -> Any:
    """Add tensors, batch size and transaction policy to a `pb_utils.ModelConfig`, but keep what the entry declares.

    Raise `ConfigError` if the entry contradicts the model.
    """
    entry = config.as_dict()
    if entry.get("max_batch_size", 0) > 0:
        raise ConfigError(
            f"max_batch_size is {entry['max_batch_size']}: leave it out; the engine batches all requests by itself"
        )
    config.set_max_batch_size(0)
    for spec in _missing("input", INPUTS, entry["input"]):
        config.add_input({**_as_dict(spec), "optional": True})
    for spec in _missing("output", OUTPUTS, entry["output"]):
        config.add_output(_as_dict(spec))
    if "model_transaction_policy" not in entry:
        config.set_model_transaction_policy({"decoupled": True})
    return config


def _as_dict(spec: TensorSpec) -> dict[str, Any]:
    return {"name": spec.name, "data_type": spec.data_type, "dims": list(spec.dims)}


def _missing(kind: str, specs: Iterable[TensorSpec], declared: Iterable[Mapping[str, Any]]) -> list[TensorSpec]:
    """Return the undeclared tensors. Raise `ConfigError` if a declared one does not fit."""
    known = {spec.name: spec for spec in specs}
    for tensor in declared:
        spec = known.pop(tensor["name"], None)
        if spec is None:
            raise ConfigError(f"{kind} {tensor['name']!r} of config.pbtxt is none of this backend's: leave it out")
        given, dims = tensor["data_type"], list(tensor["dims"])
        if given != spec.data_type:
            raise ConfigError(f"{kind} {spec.name!r} has data_type {given}: it must be {spec.data_type}")
        if dims not in ([1], [-1]):
            raise ConfigError(f"{kind} {spec.name!r} has dims {dims}: they must be {list(spec.dims)}")
    return list(known.values())
