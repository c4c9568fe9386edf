"""LoRA adapters as PEFT saves them: `adapter_config.json`, and two tensors a layer in `adapter_model.safetensors`."""

import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch

from tidewheel.errors import ConfigError
from tidewheel.models.architectures import ModelConfig
from tidewheel.models.config_fields import ConfigFields
from tidewheel.models.decoder import Decoder
from tidewheel.models.model_folder import one_line
from tidewheel.models.shard import TensorPart
from tidewheel.models.weight_source import WeightSource, check_names, named, read_tensors, uncounted
from tidewheel.regular_files import read_object
from tidewheel_kernels.lora import LoraMatrices
from tidewheel_kernels.native.huge_pages import empty_in_huge_pages

CONFIG_NAME, WEIGHTS_NAME, PICKLE_NAME = "adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"
# Parsing holds the interpreter, for which steps wait.
MAX_CONFIG_BYTES, MAX_HEADER_BYTES, HEADER_BYTES_OF_LAYER = 1 << 18, 1 << 16, 1 << 10
_READ = {"peft_type", "r", "lora_alpha", "use_rslora", "init_lora_weights"}
# How an adapter was made, or which layers it has, as its tensors say by their names.
_WITHOUT_EFFECT = {
    "auto_mapping", "base_model_name_or_path", "corda_config", "ensure_weight_tying", "eva_config", "exclude_modules",
    "fan_in_fan_out", "inference_mode", "layers_pattern", "layers_to_transform", "loftq_config", "lora_dropout",
    "lora_ga_config", "megatron_core", "peft_version", "qalora_group_size", "revision", "runtime_config",
    "target_modules", "task_type", "velora_config",
}  # fmt: skip
_OFF: tuple[object, ...] = (None, False, "none", [], {})
_INITIALIZATIONS = (None, True, False, "gaussian", "eva", "orthogonal", "mica")  # that leave the base as it is
_PEFT_AFFIXES = re.compile(r"^base_model\.model\.|\.default(?=\.weight$)")  # that a tensor's name gets from PEFT


@dataclass(eq=False)
class LoraWeights:
    """Adapter in host memory, for a model or one rank's part of it."""

    by_layer: Mapping[str, Sequence[LoraMatrices | None]]  # by `Linear.name`, in the order of the layer's parts
    rank: int
    num_bytes: int
    number: int = -1  # that ranks know it by


def read_lora_config(folder: Path) -> ConfigFields:
    """Return an adapter's configuration. Raise `ConfigError`, also for all that is not plain LoRA.

    An unknown key is refused unless its value is one that turns something off in PEFT.
    """
    path = folder / CONFIG_NAME
    fields = ConfigFields(read_object(path, MAX_CONFIG_BYTES), str(path))
    if not fields.values and not path.exists():
        raise ConfigError(f"{path} does not exist: give the folder of a LoRA adapter, as PEFT saves it")
    if fields.text("peft_type").upper() != "LORA":
        raise fields.error("peft_type", "LORA: other adapters are not served")
    for key in sorted(fields.values.keys() - _READ - _WITHOUT_EFFECT):
        if fields.values[key] not in _OFF:
            raise fields.error(key, "off or left out: only plain LoRA of linear layers is served")
    if fields.values.get("init_lora_weights") not in _INITIALIZATIONS:
        wanted = "true, false, gaussian, eva, orthogonal or mica; others change the base model's weights: convert it"
        raise fields.error("init_lora_weights", f"{wanted} with PEFT's path_initial_model_for_weight_conversion")
    return fields


class LoraFile(WeightSource):
    """Adapter's tensors, or a rank's parts of them: "MODULE.lora_A.weight" [rank, in_features] and B [out, rank]."""

    def __init__(self, folder: Path, model: Decoder, max_rank: int) -> None:
        """Check all but values, and read no tensor: `model` may be on the device "meta". Raise `ConfigError`."""
        config, shapes, path = read_lora_config(folder), _whole_shapes(model.config), folder / WEIGHTS_NAME
        if not os.path.lexists(path):
            has = "pickled weights only, which are never loaded" if (folder / PICKLE_NAME).exists() else "no weights"
            raise ConfigError(f"{folder} has {has}: save the adapter with PEFT as {WEIGHTS_NAME}")
        stored = read_tensors(path, MAX_HEADER_BYTES + HEADER_BYTES_OF_LAYER * len(shapes))
        self.tensors = {_PEFT_AFFIXES.sub("", name): tensor for name, tensor in stored.items()}
        if len(self.tensors) < len(stored):
            raise ConfigError(f"{path} has two adapters: keep one of them")
        if outer := [name for name in stored if "embed_tokens" in name or "lm_head" in name]:
            raise ConfigError(f"{path} has {named(outer)}: adapters change no embedding and no output matrix")
        self.rank, self.modules = config.integer("r"), list[str]()
        if self.rank > max_rank:
            raise config.error("r", f"from 1 to max_lora_rank, which is {max_rank}")
        divisor = math.sqrt(self.rank) if config.flag("use_rslora", False) else self.rank
        self._scale = config.number("lora_alpha") / divisor
        expected, parts = dict[str, tuple[int, ...]](), dict[str, TensorPart]()
        for module in dict.fromkeys(name.rsplit(".", 2)[0] for name in self.tensors):
            if module not in shapes:
                continue
            self.modules.append(module)
            names, (outputs, inputs) = names_of(module), shapes[module]
            expected |= zip(names, ((self.rank, inputs), (outputs, self.rank)), strict=True)
            if (part := model.tensor_parts.get(f"{module}.weight")) is not None:
                parts[names[1 - part.axis]] = part  # some outputs of B, or some inputs of A
        check_names(self, expected, lambda _name: False, folder, "this base")
        if not expected:
            raise ConfigError(f"{path} has no tensors: save the adapter with PEFT again")
        self.take_parts(parts)

    def rounded(self, dtype: torch.dtype, device: torch.device) -> dict[str, torch.Tensor]:
        """Return the tensors in `dtype`, B scaled, in one block of host memory. Raise `ConfigError` if not finite."""
        read = {name: torch.empty(stored.part_shape, dtype=torch.float32) for name, stored in self.tensors.items()}
        self.copy(read, uncounted)
        for module in self.modules:
            read[names_of(module)[1]].mul_(self._scale)
        sizes = [value.numel() for value in read.values()]
        if device.type == "cuda":
            with torch.cuda.device(device):  # the current device is thread-local
                memory = torch.empty(sum(sizes), dtype=dtype).pin_memory()  # once, for the GPU's steps wait for it
        else:
            memory = empty_in_huge_pages(sum(sizes), dtype)
        for (name, value), piece in zip(read.items(), torch.split(memory, sizes), strict=True):
            # The CPU's kernel reads transposed matrices.
            read[name] = piece.view(value.shape) if device.type == "cuda" else piece.view(value.T.shape).T
            if not read[name].copy_(value).isfinite().all():
                raise ConfigError(f"{self.tensors[name].file}: {name} has NaN or infinite values as {dtype}")
        return read


def names_of(module: str) -> tuple[str, str]:
    return f"{module}.lora_A.weight", f"{module}.lora_B.weight"


def read_lora(folder: Path, model: Decoder, max_rank: int) -> LoraWeights:
    """Read an adapter, or a rank's part of it, in the model's dtype, pinned if on a GPU. Raise `ConfigError`."""
    file = LoraFile(folder, model, max_rank)
    try:
        values = file.rounded(model.norm.dtype, model.norm.device)
    except RuntimeError as error:  # an allocator's
        raise ConfigError(f"{folder} is not loaded for lack of host memory: {one_line(error)}") from error
    matrices = {
        f"{module}.weight": LoraMatrices(*(values[name] for name in names_of(module))) for module in file.modules
    }
    by_layer = {layer.name: [matrices.get(weight) for weight in layer.parts] for layer in model.lora_linears}
    return LoraWeights(by_layer, file.rank, sum(value.nbytes for value in values.values()))


@lru_cache(maxsize=1)
def _whole_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return the shapes [out_features, in_features] of the layers of all ranks that adapters may have, by module."""
    whole = Decoder(config, max_model_len=1, dtype=torch.float32, device=torch.device("meta"))
    weights = [name for layer in whole.lora_linears for name in layer.parts]
    return {name.removesuffix(".weight"): whole.shapes[name] for name in weights}
