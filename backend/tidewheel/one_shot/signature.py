import functools
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
import numpy.typing as npt

from tidewheel.errors import ConfigError, InvalidRequest
from tidewheel.parameters import Parameter, at_least, check_fields
from tidewheel.sampling import MAX_SEED

Array = npt.NDArray[Any]
Arrays = Mapping[str, Array]  # by name of the tensor
Buckets = Mapping[str, Sequence[int]]  # ascending sizes by name of the dimension

DTYPES: Mapping[str, type[np.generic]] = {  # by Triton's names
    "BOOL": np.bool_, "UINT8": np.uint8, "UINT16": np.uint16, "UINT32": np.uint32, "UINT64": np.uint64,
    "INT8": np.int8, "INT16": np.int16, "INT32": np.int32, "INT64": np.int64, "FP16": np.float16,
    "FP32": np.float32, "FP64": np.float64, "BYTES": np.object_,
}  # fmt: skip
_Dtype = Annotated[str, msgspec.Meta(pattern=f"^({'|'.join(DTYPES)})$")]
_NAMES = {np.dtype(kind): name for name, kind in DTYPES.items()}


def dtype_name(array: Array) -> str:
    """Return Triton's name of an array's dtype; BYTES for texts."""
    return _NAMES.get(array.dtype, "BYTES" if array.dtype.kind in "SU" else str(array.dtype))


class TensorSpec(msgspec.Struct, frozen=True, array_like=True):
    name: str
    dtype: _Dtype
    dims: tuple[int | str, ...]  # a dynamic dimension has a name
    batch_axis: int | None = None  # where requests are joined; None: no batch dimension

    def fits(self, shape: Sequence[int]) -> bool:
        pairs = zip(self.dims, shape, strict=False)
        return len(shape) == len(self.dims) and all(dim == size or isinstance(dim, str) for dim, size in pairs)

    def describe(self) -> str:
        return f"{self.name} {self.dtype} [{', '.join(map(str, self.dims))}]"


def tensor_spec(path: Path, name: str, dtype: str, shape: Iterable[int | str | None]) -> TensorSpec:
    """Return the spec of a tensor whose dtype has numpy's name; None is a dynamic size. Raise `ConfigError`."""
    known = {kind.name: triton_name for kind, triton_name in _NAMES.items()}
    if dtype not in known:
        raise ConfigError(f"{path}: {name} is {dtype}, which is not served: cast it inside the model, to float32 say")
    dims = tuple(f"{name}.{axis}" if size is None else size for axis, size in enumerate(shape))
    return TensorSpec(name, known[dtype], dims)


class Signature(msgspec.Struct, frozen=True, array_like=True):
    """Tensors of a model. `buckets`: sizes to which inputs are padded."""

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    buckets: dict[str, tuple[int, ...]] = {}

    def __hash__(self) -> int:
        return hash(self.inputs)

    @property
    def is_batched(self) -> bool:
        return any(spec.batch_axis is not None for spec in self.inputs)

    def with_settings(self, batch_axes: Mapping[str, int | None], buckets: Buckets) -> "Signature":
        """Return the signature with an entry's settings. Raise `ConfigError` if they do not fit the model.

        Scalars, which Triton does not have, get the shape [1]. Without `batch_axes`, requests are joined along axis 0
        if it is dynamic in all tensors, with one name.
        """
        tensors = (*self.inputs, *self.outputs)
        _check_names("batch_axes", batch_axes, {spec.name for spec in tensors})
        firsts = {spec.dims[0] if spec.dims else 0 for spec in tensors}
        named = {dim for dim in firsts if "." not in str(dim)}  # others are named by the adapter
        is_usual = len(named) <= 1 and all(isinstance(dim, str) for dim in firsts)
        axes = {spec.name: 0 if is_usual else None for spec in tensors} | dict(batch_axes)
        if batch_axes and any(axes[spec.name] is None for spec in self.outputs):
            raise ConfigError(f"batch_axes is {dict(batch_axes)}: it must name an axis of each output")
        for spec in tensors:
            axis = axes[spec.name]
            if axis is not None and (axis >= len(spec.dims) or not isinstance(spec.dims[axis], str)):
                raise ConfigError(f"batch_axes names axis {axis} of {spec.describe()}: it is not dynamic")
        others = [dim for spec in self.inputs for axis, dim in enumerate(spec.dims) if axis != axes[spec.name]]
        _check_names("buckets", buckets, {dim for dim in others if isinstance(dim, str)})
        inputs, outputs = (
            tuple(msgspec.structs.replace(spec, dims=spec.dims or (1,), batch_axis=axes[spec.name]) for spec in specs)
            for specs in (self.inputs, self.outputs)
        )
        return Signature(inputs, outputs, {name: tuple(sorted(sizes)) for name, sizes in buckets.items()})

    @functools.lru_cache(1024)  # noqa: B019 - a process has one signature
    def check(self, tensors: tuple[tuple[str, str, tuple[int, ...]], ...], max_items: int) -> int:
        """Check (name, dtype, shape) of each input. Return the size of the batch dimension, 1 without one.

        Raise `InvalidRequest`.
        """
        given = {name: (dtype, shape) for name, dtype, shape in tensors}
        known = {spec.name for spec in self.inputs}
        if given.keys() != known:
            raise InvalidRequest(f"inputs are {', '.join(given) or 'missing'}: the model takes {', '.join(known)}")
        items: dict[int, str] = {}
        for spec in self.inputs:
            dtype, shape = given[spec.name]
            if dtype != spec.dtype or not spec.fits(shape):
                raise InvalidRequest(f"input {spec.name} is {dtype} {list(shape)}: the model takes {spec.describe()}")
            if spec.batch_axis is not None:
                items[shape[spec.batch_axis]] = spec.name
            self.padded(spec, shape)
        if len(items) > 1:
            sizes = " and ".join(f"{size} in {name}" for size, name in items.items())
            raise InvalidRequest(f"the batch dimension is {sizes}: it must be the same in all inputs")
        size = next(iter(items), 1)
        if not 1 <= size <= max_items:
            raise InvalidRequest(
                f"the batch dimension is {size}: it must be 1 to {max_items} (max_num_batched_tokens)"
            )
        return size

    def padded(self, spec: TensorSpec, shape: Sequence[int]) -> tuple[int, ...]:
        """Return an input's shape, each dimension padded to its bucket. Raise `InvalidRequest` beyond the last."""
        return tuple(self._bucket_size(spec, dim, size) for dim, size in zip(spec.dims, shape, strict=True))

    def _bucket_size(self, spec: TensorSpec, dim: int | str, size: int) -> int:
        sizes = self.buckets.get(dim, ()) if isinstance(dim, str) else ()
        found = next((one for one in sizes if one >= size), None if sizes else size)
        if found is None:
            raise InvalidRequest(f"dimension {dim} of {spec.name} is {size}: at most {sizes[-1]} is served (buckets)")
        return found

    def bucket(self, inputs: Mapping[str, Any], *, with_values: bool = True) -> str:
        """Return the key of requests that may be joined: padded shapes, and values of inputs without a batch."""
        parts = []
        for spec in self.inputs:
            array = inputs[spec.name]
            shape = list(self.padded(spec, array.shape))
            if spec.batch_axis is not None:
                del shape[spec.batch_axis]
            elif self.is_batched and with_values:
                parts.append(blake2b(repr(array.tolist()).encode(), digest_size=8).hexdigest())
            parts.append("x".join(map(str, shape)))
        return ",".join(parts) or "-"

    def sizes(self, inputs: Arrays) -> dict[str, int]:
        """Return the sizes of dimensions with buckets, before padding."""
        return {
            dim: size
            for spec in self.inputs
            for dim, size in zip(spec.dims, inputs[spec.name].shape, strict=True)
            if isinstance(dim, str) and dim in self.buckets
        }


def _check_names(setting: str, given: Iterable[str], known: set[str]) -> None:
    for name in given:
        if name not in known:
            raise ConfigError(f"{setting} names {name!r}: the model has {', '.join(sorted(known)) or 'none'}")


_choice = partial(Parameter, "one of a few words", max_chars=32)


class StepOptions(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Parameters of a request to a model that takes many steps. Raise `InvalidRequest`."""

    steps: Annotated[int | None, Parameter("steps; not given: the model's `default_steps`")] = None
    size: Annotated[str, Parameter("width x height; empty: the model's first", max_chars=32)] = ""
    guidance_scale: Annotated[float | None, Parameter("guidance; up to 1: none", low=0, high=100)] = None
    seed: Annotated[int | None, Parameter("seed of the noise", low=0, high=MAX_SEED)] = None
    preview_every: Annotated[int, at_least(0, "steps between previews; 0: none")] = 0
    partial_images: Annotated[int, at_least(0, "previews at most, if preview_every is 0")] = 0
    on_deadline: Annotated[str, _choice(choices=("error", "preview"))] = "error"
    format: Annotated[str, _choice(choices=("raw", "png", "png_base64"))] = "raw"

    def __post_init__(self) -> None:
        check_fields(self)


class StepOffer(msgspec.Struct, frozen=True, array_like=True):
    """Steps and sizes that a model allows."""

    sizes: tuple[str, ...]  # such as "64x64", width first
    max_steps: int
    default_steps: int
    default_guidance: float = 0.0  # 0: the model knows no guidance

    def completed(self, options: StepOptions) -> StepOptions:
        """Return the options with the model's defaults. Raise `InvalidRequest` for what is not offered."""
        steps = self.default_steps if options.steps is None else options.steps
        if not 1 <= steps <= self.max_steps:
            raise InvalidRequest(f"steps is {steps}: it must be 1 to {self.max_steps} (max_steps)")
        size = options.size or self.sizes[0]
        if size not in self.sizes:
            raise InvalidRequest(f"size is {size!r}: the model offers {', '.join(self.sizes)}")
        guidance = self.default_guidance if options.guidance_scale is None else options.guidance_scale
        if guidance > 1.0 and not self.default_guidance:
            raise InvalidRequest(f"guidance_scale is {guidance:g}: the model was made without guidance")
        every = options.preview_every
        if options.partial_images and not every:
            every = -(-steps // (options.partial_images + 1))
        return msgspec.structs.replace(options, steps=steps, size=size, guidance_scale=guidance, preview_every=every)
