from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tidewheel.errors import ConfigError
from tidewheel.models.architectures import NATIVE, check_class, check_config
from tidewheel.models.causal_lm import KVLayer, ModelShape, Progress
from tidewheel.models.model_folder import ConfigFields, architecture, one_line
from tidewheel.models.transformers_attention import IMPLEMENTATION, NO_INTERFACE, PagedAttention, install, probe
from tidewheel.models.weights import STAGE, check_weights_fit, checkpoint_files, named
from tidewheel_kernels import AttentionMetadata

# Keys that choose an implementation, some of which fetch code.
IMPLEMENTATION_KEYS = ("attn_implementation", "experts_implementation")


class TransformersModel:
    is_capturable = False  # a trial decides

    def __init__(self, model: Any, name: str, device: torch.device) -> None:
        self._model = model
        self._slot = install(model)
        probed = probe(model, self._slot, name, device)
        if len(set(probed.kv_shapes)) != 1:
            raise ConfigError(f"{name} is not offered: its layers keep keys of different shapes")
        num_kv_heads, head_dim = probed.kv_shapes[0]
        hidden_size = model.config.hidden_size
        self.shape = ModelShape(
            len(probed.kv_shapes), num_kv_heads, head_dim, probed.vocab_size, hidden_size,
            getattr(model.config, "intermediate_size", None) or 4 * hidden_size,
        )  # fmt: skip
        self.weights_bytes = sum(parameter.nbytes for parameter in model.parameters())

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        meta: AttentionMetadata,
        kv_layers: Sequence[KVLayer],
        logit_indices: torch.Tensor,
    ) -> torch.Tensor:
        with self._slot.holding(PagedAttention(meta, kv_layers)):
            logits: torch.Tensor = self._model(
                input_ids=token_ids.long().unsqueeze(0),
                position_ids=positions.unsqueeze(0),
                use_cache=False,
                logits_to_keep=logit_indices,
            ).logits
        return logits.squeeze(0)


def transformers_config(fields: ConfigFields) -> tuple[Any, Any]:
    name = architecture(fields)
    if name not in _names():
        raise ConfigError(
            f"{fields.where}: architecture {name!r} is unknown; offered are {', '.join(NATIVE)} "
            "and the causal decoders of transformers"
        )
    cls = getattr(transformers, name)
    check_class(cls, name)
    values = {k: v for k, v in fields.values.items() if not k.startswith("_") and k not in IMPLEMENTATION_KEYS}
    try:
        config = cls.config_class.from_dict(values)
    except Exception as error:
        raise ConfigError(f"{fields.where}: transformers refuses it for {name}: {one_line(error)}") from error
    check_config(config, name)
    return cls, config


def _names() -> set[str]:
    values = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
    return {name for value in values for name in ((value,) if isinstance(value, str) else value)}


@torch.inference_mode()
def load_transformers_model(
    folder: Path,
    cls: Any,
    config: Any,
    *,
    dtype: torch.dtype,
    device: torch.device,
    progress: Progress,
    dummy_seed: int | None = None,
) -> TransformersModel:
    if dummy_seed is None:
        files = checkpoint_files(folder)  # validates files before the library reads them
        check_weights_fit(sum(file.num_elements for file in files) * dtype.itemsize, dtype, device)
    try:
        if dummy_seed is None:
            model = _from_files(folder, cls, config, dtype)
        else:
            model = _random(cls, config, dtype, device, dummy_seed)
    except ConfigError:
        raise
    except Exception as error:
        if isinstance(error, KeyError) and error.args == (IMPLEMENTATION,):  # own attention table
            raise ConfigError(f"{cls.__name__} is not offered: {NO_INTERFACE}") from error
        raise ConfigError(f"{folder}: transformers cannot load {cls.__name__}: {one_line(error)}") from error
    progress(STAGE, 1.0)
    return TransformersModel(model.to(device).eval().requires_grad_(False), cls.__name__, device)


def _random(cls: Any, config: Any, dtype: torch.dtype, device: torch.device, seed: int) -> Any:
    torch.manual_seed(seed)
    with device:
        return cls._from_config(config, dtype=dtype, attn_implementation=IMPLEMENTATION)


def _from_files(folder: Path, cls: Any, config: Any, dtype: torch.dtype) -> Any:
    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    model, info = cls.from_pretrained(
        folder, config=config, dtype=dtype, attn_implementation=IMPLEMENTATION, use_safetensors=True,
        local_files_only=True, trust_remote_code=False, output_loading_info=True,
    )  # fmt: skip
    if info["missing_keys"]:
        raise ConfigError(f"{folder}: the checkpoint lacks {named(info['missing_keys'])}")
    if info["unexpected_keys"]:
        raise ConfigError(f"{folder}: the checkpoint has {named(info['unexpected_keys'])}, which has no place")
    return model
