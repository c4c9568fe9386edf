"""docs/scheduling.md describes every policy and every limit of a tenant."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

from tidewheel.scheduler.policy import POLICIES
from tidewheel.tenants import TenantLimits

TEXT = (Path(__file__).parents[2] / "docs" / "scheduling.md").read_text()


def shown(default: object) -> str:
    if default is None or default == "":
        return "none"
    return f"{default:g}" if isinstance(default, float) else str(default).lower()


def section(title: str) -> str:
    return TEXT.split(f"\n## {title}\n")[1].split("\n## ")[0]


def test_every_policy_and_every_limit_is_described() -> None:
    assert set(re.findall(r"^\| `(\w+)`", section("Policies"), re.MULTILINE)) == set(POLICIES)
    limits = {field.name: shown(field.default) for field in dataclasses.fields(TenantLimits)}
    assert dict(re.findall(r"^\| `(\w+)` \| (\S+) \|", section("Tenants"), re.MULTILINE)) == limits
