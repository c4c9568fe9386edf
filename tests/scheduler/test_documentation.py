"""docs/scheduling.md says what the settings are."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

from tidewheel.config import EngineConfig
from tidewheel.scheduler.policy import POLICIES
from tidewheel.tenants import TenantLimits

TEXT = (Path(__file__).parents[2] / "docs" / "scheduling.md").read_text()
ELSEWHERE = {  # settings that are none of scheduling
    "model", "tokenizer", "dtype", "device", "load_format", "seed", "max_model_len", "block_size", "num_blocks",
    "kv_cache_memory_mb", "gpu_memory_utilization", "enable_prefix_caching", "num_threads", "max_prompt_bytes",
    "engine_start_timeout_s", "enforce_eager", "debug_invariants",
}  # fmt: skip


def shown(default: object) -> str:
    if default is None or default == "":
        return "none"
    return f"{default:g}" if isinstance(default, float) else str(default).lower()


def section(title: str) -> str:
    return TEXT.split(f"\n## {title}\n")[1].split("\n## ")[0]


def test_every_scheduling_setting_is_listed_with_its_default() -> None:
    listed = dict(re.findall(r"^\| `(\w+)` \| (\S+) \|", section("Settings"), re.MULTILINE))
    fields = {field.name: shown(field.default) for field in dataclasses.fields(EngineConfig)}
    assert listed == {name: default for name, default in fields.items() if name not in ELSEWHERE}


def test_every_policy_and_every_limit_is_described() -> None:
    assert set(re.findall(r"^\| `(\w+)`", section("Policies"), re.MULTILINE)) == set(POLICIES)
    limits = {field.name: shown(field.default) for field in dataclasses.fields(TenantLimits)}
    assert dict(re.findall(r"^\| `(\w+)` \| (\S+) \|", section("Tenants"), re.MULTILINE)) == limits
