"""Configuration of a LoRA adapter, `adapter_config.json` of PEFT."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tidewheel.errors import ConfigError
from tidewheel.models.config_fields import ConfigFields
from tidewheel.regular_files import read_object

NAME = "adapter_config.json"
MAX_BYTES = 1 << 20  # parsing holds the interpreter, whose steps wait
_USED = {"peft_type", "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "init_lora_weights"}
# How an adapter was made, or which layers it has, which its tensors say by their names.
_WITHOUT_EFFECT = {
    "auto_mapping", "base_model_name_or_path", "corda_config", "ensure_weight_tying", "eva_config", "exclude_modules",
    "fan_in_fan_out", "inference_mode", "layers_pattern", "layers_to_transform", "loftq_config", "lora_dropout",
    "lora_ga_config", "megatron_core", "peft_version", "qalora_group_size", "revision", "runtime_config",
    "target_modules", "task_type", "velora_config",
}  # fmt: skip
_OFF: tuple[object, ...] = (None, False, "none", [], {})
_INITIALIZATIONS = (None, True, False, "gaussian", "eva", "orthogonal", "mica")  # that leave the base as it is
# Regular expressions are not run: one can take hours.
_PATTERN = re.compile(r"\^?(?:\.\*\\?\.)?((?:[\w-]|\\?\.)+)\$?")


@dataclass(frozen=True, slots=True)
class LoraConfig:
    where: str  # file
    ranks: frozenset[int]  # that a layer may have
    alpha: float
    alphas: Mapping[str, float]  # of layers whose names, or their ends, are the keys; the first that fits holds
    is_rank_stabilized: bool

    def scale(self, module: str, rank: int) -> float:
        """Return the factor of a layer's matrices: alpha / rank, or alpha / sqrt(rank) in rank-stabilised LoRA."""
        fitting = (alpha for end, alpha in self.alphas.items() if f".{module}".endswith(f".{end}"))
        return next(fitting, self.alpha) / (math.sqrt(rank) if self.is_rank_stabilized else rank)


def read_lora_config(folder: Path) -> LoraConfig:
    """Return an adapter's configuration. Raise `ConfigError`, also for all that is not plain LoRA.

    A key is refused if it is unknown, unless its value is one by which PEFT turns something off.
    """
    path = folder / NAME
    fields = ConfigFields(read_object(path, MAX_BYTES), str(path))
    if not fields.values and not path.exists():
        raise ConfigError(f"{path} does not exist: give the folder of a LoRA adapter, as PEFT saves it")
    if fields.text("peft_type").upper() != "LORA":
        raise fields.error("peft_type", "LORA: other adapters are not served")
    for key in sorted(fields.values.keys() - _USED - _WITHOUT_EFFECT):
        if fields.values[key] not in _OFF:
            raise fields.error(key, "off or left out: only plain LoRA of linear layers is served")
    if fields.values.get("init_lora_weights") not in _INITIALIZATIONS:
        wanted = "true, false, gaussian, eva, orthogonal or mica; others change the base model's weights: convert it"
        raise fields.error("init_lora_weights", f"{wanted} with PEFT's path_initial_model_for_weight_conversion")
    ranks, alphas = fields.section("rank_pattern"), fields.section("alpha_pattern")
    return LoraConfig(
        str(path),
        frozenset([fields.integer("r"), *(ranks.integer(key) for key in ranks.values)]),
        fields.number("lora_alpha"),
        {_module_end(alphas, key): alphas.number(key) for key in alphas.values},
        fields.flag("use_rslora", False),
    )


def _module_end(patterns: ConfigFields, key: str) -> str:
    if (match := _PATTERN.fullmatch(key)) is None:
        raise patterns.error(key, "of a layer's name or its end: regular expressions are not run")
    return match[1].replace("\\.", ".")
