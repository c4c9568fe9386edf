from __future__ import annotations

import logging
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from tidewheel.config import EngineConfig, MaxModelLen
from tidewheel.errors import ConfigError
from tidewheel.models.architectures import ModelConfig, native_traits, parse_config
from tidewheel.models.causal_lm import CausalLM, Progress
from tidewheel.models.config_fields import ConfigFields
from tidewheel.models.decoder import Decoder
from tidewheel.models.model_folder import architecture, checkpoint_dtype
from tidewheel.models.safetensors_file import SafetensorsFile
from tidewheel.models.weights import STAGE, check_weights_fit, checkpoint_files, fill_random, load_weights
from tidewheel.runner.device import check_quantization, resolve_cache_dtype, resolve_dtype

logger = logging.getLogger(__name__)


class ModelPlan(NamedTuple):
    """Model that a folder's configuration asks for, before weights are read."""

    folder: Path
    config: EngineConfig
    device: torch.device
    dtype: torch.dtype
    cache_dtype: torch.dtype
    architecture: str
    max_model_len: int
    native: Decoder | None  # on no device
    through_transformers: tuple[Any, Any] = (None, None)  # class of the model, and its configuration

    def files(self) -> list[SafetensorsFile]:
        """Return the checkpoint's files, none for random weights. Raise `ConfigError`."""
        return [] if self.config.load_format == "dummy" else checkpoint_files(self.folder)

    def weights_bytes(self, files: list[SafetensorsFile]) -> int:
        if self.native is not None:
            return self.native.weights_bytes
        return sum(file.num_elements for file in files) * self.dtype.itemsize


def plan_model(folder: Path, fields: ConfigFields, config: EngineConfig, device: torch.device) -> ModelPlan:
    """Return the plan of a model. Raise `ConfigError` for a model or a setting that is not offered."""
    dtype = resolve_dtype(config.dtype, checkpoint_dtype(fields), device)
    cache_dtype = resolve_cache_dtype(config.kv_cache_dtype, dtype, device)
    check_quantization(config.quantization, dtype, device)
    name, traits = architecture(fields), native_traits(fields)
    plan = partial(ModelPlan, folder, config, device, dtype, cache_dtype, name)
    if traits is not None:
        shape = parse_config(fields, traits)
        max_model_len = resolve_max_model_len(config.max_model_len, shape.context_length)
        native = Decoder(shape, max_model_len=1, dtype=dtype, device=torch.device("meta"))
        native.check_quantization(config.quantization)
        return plan(max_model_len, native)
    # Importing transformers takes seconds.
    from tidewheel.models.transformers_model import transformers_config

    check_through_transformers(config, name)
    cls, hf_config = transformers_config(fields)
    context = getattr(hf_config, "max_position_embeddings", None) or config.max_model_len
    if context == "auto":
        raise ConfigError(f"{fields.where} does not say the context length of {name}: set max_model_len")
    return plan(resolve_max_model_len(config.max_model_len, context), None, (cls, hf_config))


def load_model(plan: ModelPlan, files: list[SafetensorsFile], progress: Progress) -> CausalLM:
    """Load the model from the plan's `files`. Raise `ConfigError`."""
    way = "through transformers" if plan.native is None else "on the native decoder"
    logger.info("%s runs %s", plan.architecture, way)
    check_weights_fit(plan.weights_bytes(files), plan.dtype, plan.device)
    if plan.native is not None:
        return _load_native(plan, plan.native.config, files, progress)
    from tidewheel.models.transformers_model import load_transformers_model

    seed = None if files else plan.config.seed
    model = load_transformers_model(*plan.through_transformers, plan.folder, seed, plan.dtype, plan.device)
    progress(STAGE, 1.0)
    return model


def _load_native(plan: ModelPlan, shape: ModelConfig, files: list[SafetensorsFile], progress: Progress) -> CausalLM:
    config, dtype, device = plan.config, plan.dtype, plan.device
    try:
        decoder = Decoder(
            shape, max_model_len=plan.max_model_len, dtype=dtype, device=device, deterministic=config.deterministic
        )
    except RuntimeError as error:  # the CPU allocator raises it, and CUDA a subclass
        raise ConfigError(f"{plan.folder}: the weights do not fit into the memory of {device} as {dtype}") from error
    if files:
        load_weights(files, decoder.destinations, progress, ignored=decoder.ignores)
    else:
        fill_random(decoder.destinations, config.seed, progress)
    if config.quantization == "fp8":
        decoder.quantize()
    decoder.pack()
    return decoder


def check_through_transformers(config: EngineConfig, architecture: str) -> None:
    if config.quantization != "none":
        raise ConfigError(
            f"quantization is {config.quantization}: {architecture} runs through transformers, whose weights stay as "
            "they are; set it to none"
        )
    if config.deterministic:
        raise ConfigError(
            f"deterministic is true: {architecture} runs through transformers, whose products are torch's, and their "
            "sums may depend on the batch; set it to false"
        )


def resolve_max_model_len(wanted: MaxModelLen, context: int) -> int:
    if wanted == "auto":
        return context
    if wanted > context:
        raise ConfigError(f"max_model_len is {wanted}: the model was made for at most {context} tokens")
    return wanted
