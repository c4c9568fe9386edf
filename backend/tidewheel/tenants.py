"""Limits and weights by tenant, from the `tenants` setting."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, fields

from tidewheel.errors import ConfigError
from tidewheel.settings import unknown_setting

EVERYBODY = "*"  # the entry of tenants that have none of their own
MAX_NAMED_TENANTS = 4096
MAX_TENANT_CHARS = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantLimits:
    """What one tenant may have. None: no limit. Raises `ConfigError` naming the field and the value."""

    weight: float = 1.0  # share of the engine under the `fair` policy, relative to the other tenants
    requests_per_s: float | None = None
    tokens_per_s: float | None = None  # prompt and asked-for output tokens, when a request is admitted
    max_blocks: int | None = None  # KV blocks of its running requests and sessions, before it drops a class

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value is None and field.name != "weight":
                continue
            if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
                raise ConfigError(f"{field.name} is {value!r}: it must be a number")
            if value <= 0:
                raise ConfigError(f"{field.name} is {value}: it must be above 0")
        if self.max_blocks is not None and not isinstance(self.max_blocks, int):
            raise ConfigError(f"max_blocks is {self.max_blocks}: it must be an integer")


NO_LIMITS = TenantLimits()


def parse_tenants(text: str) -> dict[str, TenantLimits]:
    """``{"acme": {"weight": 2, "tokens_per_s": 1000}, "*": {"requests_per_s": 5}}`` by tenant."""
    if not text.strip():
        return {}
    try:
        entries = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"tenants is not JSON: {error}") from None
    if not isinstance(entries, dict):
        raise ConfigError("tenants must be a JSON object: a name, and an object of limits for each tenant")
    if len(entries) > MAX_NAMED_TENANTS:
        raise ConfigError(f"tenants names {len(entries)} tenants: at most {MAX_NAMED_TENANTS} are allowed")
    return {name: _parse_limits(name, entry) for name, entry in entries.items()}


def _parse_limits(name: str, entry: object) -> TenantLimits:
    if not name or len(name) > MAX_TENANT_CHARS:
        raise ConfigError(f"tenants has a name of {len(name)} characters: it must be 1 to {MAX_TENANT_CHARS}")
    if not isinstance(entry, dict):
        raise ConfigError(f"tenants.{name} is {entry!r}: it must be an object of limits")
    known = [field.name for field in fields(TenantLimits)]
    for key in entry:
        if key not in known:
            raise ConfigError(f"tenants.{name}: {unknown_setting(key, known)}")
    try:
        return TenantLimits(**entry)
    except ConfigError as error:
        raise ConfigError(f"tenants.{name}: {error}") from None
