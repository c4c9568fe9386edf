"""Parts that adapters share: the loaded model, settings in JSON, and tensors of a file."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple, TypeVar

import msgspec
import numpy as np

from tidewheel.errors import ConfigError
from tidewheel.one_shot.signature import DTYPES, Arrays, Signature, TensorSpec
from tidewheel.regular_files import parse_object

_KindT = TypeVar("_KindT")
_NAMES = {np.dtype(kind).name: name for name, kind in DTYPES.items()}


class Adapter(NamedTuple):
    signature: Signature  # of the file, without the entry's settings
    device: str  # such as "cpu (2 threads)"
    weights_bytes: int  # 0: unknown
    run: Callable[[Arrays], Arrays]  # must not write to the inputs; may raise anything


def converted(text: str, setting: str, kind: type[_KindT]) -> _KindT:
    """Return a setting's JSON object as `kind`. Raise `ConfigError`."""
    try:
        return msgspec.convert(parse_object(text, setting), kind)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{setting} is {text}: {error}") from None


def tensor_spec(path: Path, name: str, dtype: str, shape: Iterable[int | str | None]) -> TensorSpec:
    """Return the spec of a tensor whose dtype has numpy's name; None is a dynamic size. Raise `ConfigError`."""
    if dtype not in _NAMES:
        raise ConfigError(f"{path}: {name} is {dtype}, which is not served: cast it inside the model, to float32 say")
    dims = tuple(f"{name}.{axis}" if size is None else size for axis, size in enumerate(shape))
    return TensorSpec(name, _NAMES[dtype], dims)
