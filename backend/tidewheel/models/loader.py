import logging
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from tidewheel.config import EngineConfig, MaxModelLen
from tidewheel.errors import ConfigError
from tidewheel.models.architectures import check_num_ranks, native_traits, parse_config
from tidewheel.models.causal_lm import CausalLM, NativeModel, Progress
from tidewheel.models.config_fields import ConfigFields
from tidewheel.models.decoder import Decoder
from tidewheel.models.linear import GroupFormat
from tidewheel.models.model_folder import checkpoint_dtype, gguf_file_of
from tidewheel.models.quantized_checkpoint import QuantizedFolder, quantization_layout
from tidewheel.models.shard import Shard
from tidewheel.models.weight_source import (
    ROUNDED,
    RandomWeights,
    SafetensorsFolder,
    WeightSource,
    check_names,
    format_choice,
)
from tidewheel.models.whisper import WHISPER, Whisper, parse_whisper
from tidewheel.runner.device import check_quantization, resolve_cache_dtype, resolve_dtype
from tidewheel.runner.host_memory import available_host_bytes
from tidewheel.settings import shown_bytes

logger = logging.getLogger(__name__)
STAGE = "weights"
OFFERED_BY_WHISPER: Mapping[str, Sequence[object]] = {
    "deterministic": (False,), "kv_cache_dtype": ("auto", "int8"), "tensor_parallel_size": (1,),
    "enable_lora": (False,), "speculation": ("none", "prompt_lookup"),
}  # fmt: skip
OFFERED_THROUGH_TRANSFORMERS: Mapping[str, Sequence[object]] = {
    "quantization": ("auto", "none"), "pressure_quantization": ("none",), "deterministic": (False,),
    "tensor_parallel_size": (1,), "enable_lora": (False,),
}  # fmt: skip


class ModelPlan(NamedTuple):
    """Model that a folder's configuration asks for, before weights are read."""

    folder: Path
    fields: ConfigFields  # of `config.json`
    config: EngineConfig
    device: torch.device
    dtype: torch.dtype
    cache_dtype: torch.dtype
    architecture: str
    max_model_len: int
    native: NativeModel | None  # the whole model, on no device
    through_transformers: tuple[Any, Any] = (None, None)  # class of the model, and its configuration
    shard: Shard = Shard()
    rank_native: NativeModel | None = None  # this rank's part of `native`

    def open_source(self) -> WeightSource:
        """Return the checked checkpoint, or random weights. Raise `ConfigError`."""
        shapes = {} if self.native is None else self.native.shapes
        if self.config.load_format == "dummy":
            return RandomWeights(shapes, self.dtype, self.config.seed)
        source = open_checkpoint(self.folder, self.fields, shapes)
        if self.native is not None:
            check_names(source, self.native.shapes, self.native.ignores, self.folder)
        elif any(isinstance(stored.kind, GroupFormat) for stored in source.tensors.values()):
            raise ConfigError(
                f"{self.folder}: the weights are quantised, and {self.architecture} runs through transformers, which "
                "needs float weights: take the model that they were made of"
            )
        return source

    @property
    def vocab_size(self) -> int:
        return int(self.through_transformers[1].vocab_size) if self.native is None else self.native.shape.vocab_size

    def check_fits(self, source: WeightSource, beside: int = 0) -> int:
        """Return the weights' bytes. Raise `ConfigError` if with the bytes `beside` them they exceed free memory."""
        if self.native is None:
            can_round = False
            num_bytes = sum(math.prod(stored.shape) for stored in source.tensors.values()) * self.dtype.itemsize
        else:
            empty = self.decoder(source, torch.device("meta"))
            can_round, num_bytes = not (empty.to_fill or self.config.deterministic), empty.weights_bytes
        of_device = num_bytes * (self.shard.num_ranks if self.device.type == "cpu" else 1)  # ranks share the host
        name = "its weights and the model's" if beside else "the weights"
        check_weights_fit(beside + of_device, self.dtype, self.device, can_round=can_round, name=name)
        return num_bytes

    def decoder(self, source: WeightSource, device: torch.device) -> NativeModel:
        """Return the empty native model, in the formats of the setting or of `source`, which will load its parts.

        Raise `ConfigError`.
        """
        assert self.native is not None
        decoder = type(self.native)(
            self.native.config, max_model_len=self.max_model_len if device.type != "meta" else 1, dtype=self.dtype,
            device=device, deterministic=self.config.deterministic,
            format_of=format_choice(self.config.quantization, source), shard=self.shard,
        )  # fmt: skip
        if decoder.to_fill:
            cause = f"the weights of {self.folder} are quantised already"
            offered = {"pressure_quantization": ("none",), "deterministic": (False,)}
            refuse_others(self.config, offered, cause, ", or quantization to none")
        if self.config.pressure_quantization != "none":
            decoder.plan_copies(ROUNDED[self.config.pressure_quantization])
        if self.config.enable_lora:
            assert isinstance(decoder, Decoder), "others are refused"
            on = device if self.device.type == "cuda" else self.device  # a CPU's stacks take no memory
            decoder.add_lora_slots(self.config.max_loras, self.config.max_lora_rank, on)
        source.take_parts(decoder.tensor_parts)
        return decoder


def open_checkpoint(folder: Path, fields: ConfigFields, expected: Collection[str]) -> WeightSource:
    """Return a folder's weights; `expected`: the model's tensors, empty if not native. Raise `ConfigError`."""
    if (file := gguf_file_of(folder)) is not None:
        from tidewheel.models.gguf_file import GGUFFile

        if not expected:
            raise ConfigError(f"{file}: {fields.architecture} is not served of GGUF files: take its safetensors")
        return GGUFFile(file)
    source, layout = SafetensorsFolder(folder), quantization_layout(folder, fields)
    return source if layout is None else QuantizedFolder(source, layout, expected)


def plan_model(
    folder: Path, fields: ConfigFields, config: EngineConfig, device: torch.device, shard: Shard | None = None
) -> ModelPlan:
    """Return the plan of a model, or of one rank's part. Raise `ConfigError`."""
    shard = shard or Shard()
    dtype = resolve_dtype(config.dtype, checkpoint_dtype(fields), device)
    cache_dtype = resolve_cache_dtype(config.kv_cache_dtype, dtype, device)
    check_quantization(config.quantization, dtype, device)
    name, traits = fields.architecture, native_traits(fields)
    plan = partial(ModelPlan, folder, fields, config, device, dtype, cache_dtype, name)
    if name == WHISPER:
        cause = "no batch-invariant products, no scales for fp8, no draft models, and layers without shards or LoRA"
        refuse_others(config, OFFERED_BY_WHISPER, f"{WHISPER} has {cause}")
        shape: Any = parse_whisper(fields)
    elif traits is not None:
        shape = parse_config(fields, traits)
        check_num_ranks(shape, shard.num_ranks)
    else:  # importing transformers takes seconds
        from tidewheel.models.transformers_model import transformers_config

        cause = f"{name} runs through transformers, whose weights and products stay as they are"
        refuse_others(config, OFFERED_THROUGH_TRANSFORMERS, cause)
        cls, hf_config = transformers_config(fields)
        context = getattr(hf_config, "max_position_embeddings", None) or config.max_model_len
        if context == "auto":
            raise ConfigError(f"{fields.where} does not say the context length of {name}: set max_model_len")
        return plan(resolve_max_model_len(config.max_model_len, context), None, (cls, hf_config))
    make: Callable[..., NativeModel] = partial(
        Whisper if name == WHISPER else Decoder, shape, max_model_len=1, dtype=dtype, device=torch.device("meta"),
        format_of=format_choice(config.quantization),
    )  # fmt: skip
    native = make()
    rank_native = native if shard.num_ranks == 1 else make(shard=shard)
    for layer in rank_native.to_fill:
        layer.check_size(layer.format, "quantization")
    if config.pressure_quantization != "none":
        rank_native.plan_copies(ROUNDED[config.pressure_quantization])
    max_model_len = resolve_max_model_len(config.max_model_len, shape.context_length)
    return plan(max_model_len, native, shard=shard, rank_native=rank_native)


def load_model(plan: ModelPlan, source: WeightSource, progress: Progress) -> CausalLM:
    """Load the model. Raise `ConfigError`."""
    way = "through transformers" if plan.native is None else "on the native decoder"
    logger.info("%s runs %s", plan.architecture, way)
    if plan.native is None:
        from tidewheel.models.transformers_model import load_transformers_model

        seed = plan.config.seed if isinstance(source, RandomWeights) else None
        model = load_transformers_model(*plan.through_transformers, plan.folder, seed, plan.dtype, plan.device)
        progress(STAGE, 1.0)
        return model
    try:
        decoder = plan.decoder(source, plan.device)
    except RuntimeError as error:  # the CPU allocator raises it, and CUDA a subclass
        raise ConfigError(
            f"{plan.folder}: the weights do not fit into the memory of {plan.device} as {plan.dtype}"
        ) from error
    total = sum(source.tensors[name].num_bytes for name in decoder.shapes)
    done = 0

    def read(num_bytes: int) -> None:
        nonlocal done
        done += num_bytes
        progress(STAGE, done / total)

    source.copy(decoder.destinations, read)
    for layer in decoder.to_fill:
        layer.fill([source.matrix(name, plan.device) for name in layer.parts])
        read(sum(source.tensors[name].num_bytes for name in layer.parts))
    decoder.pack()
    return decoder


def refuse_others(
    config: EngineConfig, offered: Mapping[str, Sequence[object]], cause: str, remedy: str = ""
) -> None:
    """Raise `ConfigError` for a setting with another value than those offered."""
    for setting, values in offered.items():
        if (value := getattr(config, setting)) not in values:
            wanted = " or ".join(str(each).lower() for each in values)
            raise ConfigError(f"{setting} is {str(value).lower()}: {cause}; set it to {wanted}{remedy}")


def resolve_max_model_len(wanted: MaxModelLen, context: int) -> int:
    if wanted == "auto":
        return context
    if wanted > context:
        raise ConfigError(f"max_model_len is {wanted}: the model was made for at most {context} tokens")
    return wanted


BYTES_OF_ROUNDED = {"int8": 17 / 16, "int4": 5 / 8}  # of a weight, with scales and minimums


def check_weights_fit(
    num_bytes: int, dtype: torch.dtype, device: torch.device, *, can_round: bool = False, name: str = "the weights"
) -> None:
    """Raise `ConfigError`, with what would fit, if weights exceed free memory; `can_round`: `quantization` helps."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        room = f"{torch.cuda.get_device_name(device)} has {shown_bytes(free)} free of {shown_bytes(total)}"
    else:
        free = total = available_host_bytes()
        room = f"{shown_bytes(free)} of host memory are free"
    if num_bytes > free:
        needed = f"{name} need {shown_bytes(num_bytes)} as {str(dtype).removeprefix('torch.')}"
        raise ConfigError(
            f"{needed}, and {room}: {_what_would_fit(num_bytes, dtype, free, total, device, can_round)}"
        )


def _what_would_fit(
    num_bytes: int, dtype: torch.dtype, free: int, total: int, device: torch.device, can_round: bool
) -> str:
    halved = num_bytes * torch.bfloat16.itemsize // dtype.itemsize
    if dtype.itemsize > torch.bfloat16.itemsize and halved <= free:
        return f"set dtype to 'bfloat16', which needs {shown_bytes(halved)}"
    for name, share in BYTES_OF_ROUNDED.items() if can_round else ():
        if (rounded := int(num_bytes / dtype.itemsize * share)) <= free:
            return f"set quantization to {name!r}, which needs about {shown_bytes(rounded)}"
    if device.type == "cpu":
        return "use a machine or a container with more memory, or a smaller model"
    if num_bytes <= total:
        return f"{shown_bytes(total - free)} are in use; stop what else runs on this GPU, or use another"
    return f"use a GPU with more than {shown_bytes(num_bytes)}"
