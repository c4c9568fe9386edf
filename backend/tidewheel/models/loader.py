from __future__ import annotations

import logging
from typing import NamedTuple

import torch

from tidewheel.config import EngineConfig, MaxModelLen
from tidewheel.errors import ConfigError
from tidewheel.models.architectures import NativeTraits, native_traits, parse_config
from tidewheel.models.causal_lm import CausalLM, ModelSource
from tidewheel.models.decoder import Decoder
from tidewheel.models.model_folder import architecture
from tidewheel.models.weights import STAGE, check_weights_fit, checkpoint_files, fill_random, load_weights

logger = logging.getLogger(__name__)


class LoadedModel(NamedTuple):
    model: CausalLM
    architecture: str
    max_model_len: int
    is_native: bool = True


def load_model(source: ModelSource) -> LoadedModel:
    fields, config = source.fields, source.config
    name = architecture(fields)
    traits = native_traits(fields)
    source.progress(STAGE, 0.0)
    logger.info("%s runs %s", name, "through transformers" if traits is None else "on the native decoder")
    if traits is not None:
        return _load_native(source, traits)
    # Importing transformers takes seconds.
    from tidewheel.models.transformers_model import load_transformers_model, transformers_config

    check_through_transformers(config, name)
    cls, hf_config = transformers_config(fields)
    context = getattr(hf_config, "max_position_embeddings", None) or config.max_model_len
    if context == "auto":
        raise ConfigError(f"{fields.where} does not say the context length of {name}: set max_model_len")
    max_model_len = resolve_max_model_len(config.max_model_len, context)
    return LoadedModel(load_transformers_model(source, cls, hf_config), name, max_model_len, is_native=False)


def _load_native(source: ModelSource, traits: NativeTraits) -> LoadedModel:
    folder, fields, config, dtype, device, progress = source
    shape = parse_config(fields, traits)
    max_model_len = resolve_max_model_len(config.max_model_len, shape.context_length)
    files = [] if config.load_format == "dummy" else checkpoint_files(folder)
    planned = Decoder(shape, max_model_len=1, dtype=dtype, device=torch.device("meta"))
    planned.check_quantization(config.quantization)
    check_weights_fit(planned.weights_bytes, dtype, device)
    try:
        decoder = Decoder(
            shape, max_model_len=max_model_len, dtype=dtype, device=device, deterministic=config.deterministic
        )
    except RuntimeError as error:  # the CPU allocator raises it, and CUDA a subclass
        raise ConfigError(f"{folder}: the weights do not fit into the memory of {device} as {dtype}") from error
    if config.load_format == "dummy":
        fill_random(decoder.destinations, config.seed, progress)
    else:
        load_weights(files, decoder.destinations, progress, ignored=decoder.ignores)
    if config.quantization == "fp8":
        decoder.quantize()
    decoder.pack()
    return LoadedModel(decoder, shape.architecture, max_model_len)


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
