from collections.abc import Mapping
from dataclasses import dataclass, fields

from tidewheel.errors import ConfigError
from tidewheel.parameters import control_character
from tidewheel.regular_files import parse_object
from tidewheel.request import Priority
from tidewheel.settings import check_known

EVERYBODY = "*"  # all other tenants
MAX_NAMED_TENANTS = 4096
MAX_TENANT_CHARS = 128

_MAX_LIMIT = 1e15
_INTEGERS = ("max_blocks", "max_sessions", "max_priority")
_ALWAYS_SET = ("weight", "max_priority")


def _check_number(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or value != value:
        or_class = ", or a class by name" if name == "max_priority" else ""
        raise ConfigError(f"{name} is {value!r}: it must be a number{or_class}")
    if not 0 < value <= _MAX_LIMIT:
        raise ConfigError(f"{name} is {value}: it must be above 0 and at most {_MAX_LIMIT:g}")
    if name in _INTEGERS and not isinstance(value, int):
        raise ConfigError(f"{name} is {value}: it must be an integer")


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantLimits:
    """Limits of one tenant; None: unlimited. Raise `ConfigError`."""

    weight: float = 1.0  # share under the `fair` policy
    requests_per_s: float | None = None
    tokens_per_s: float | None = None  # of prompt and output
    max_blocks: int | None = None  # beyond, requests drop a class
    max_sessions: int | None = None
    max_priority: int = Priority.CRITICAL.value  # best class to request, 1 to 4
    each: bool = False  # in `*`: unknown tenants have rates and sessions of their own

    def __post_init__(self) -> None:
        if isinstance(self.max_priority, str) and self.max_priority.upper() in Priority.__members__:
            object.__setattr__(self, "max_priority", Priority[self.max_priority.upper()].value)
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name != "each" and (value is not None or field.name in _ALWAYS_SET):
                _check_number(field.name, value)
        if self.max_priority > Priority.LOW:
            raise ConfigError(f"max_priority is {self.max_priority}: it must be 1 (CRITICAL) to 4 (LOW)")
        if not isinstance(self.each, bool):
            raise ConfigError(f"each is {self.each!r}: it must be true or false")

    def granted(self, asked: Priority) -> Priority:
        """Return the requested class, limited by the tenant's best."""
        return max(asked, Priority(self.max_priority))


NO_LIMITS = TenantLimits()


def limits_of(tenants: Mapping[str, TenantLimits], tenant: str) -> TenantLimits:
    limits = tenants.get(tenant)
    return tenants.get(EVERYBODY, NO_LIMITS) if limits is None else limits


def account_of(tenants: Mapping[str, TenantLimits], tenant: str) -> str:
    """Return the account of a tenant's rates and sessions: `*` if unknown, unless `*` sets `each`."""
    has_own = tenant in tenants or tenants.get(EVERYBODY, NO_LIMITS).each
    return tenant if has_own else EVERYBODY


LORA_LIMITS = ("requests_per_s", "tokens_per_s", "each")  # those that an adapter may have


def parse_tenants(text: str, setting: str = "tenants") -> dict[str, TenantLimits]:
    """Parse ``{"acme": {"weight": 2, "tokens_per_s": 1000}, "*": {"requests_per_s": 5}}``. Raise `ConfigError`.

    The setting `lora_limits` names adapters, with `LORA_LIMITS` alone.
    """
    entries = parse_object(text, setting) if text.strip() else {}
    kind = "tenant" if setting == "tenants" else "adapter"
    if len(entries) > MAX_NAMED_TENANTS:
        raise ConfigError(f"{setting} names {len(entries)} {kind}s: at most {MAX_NAMED_TENANTS} are allowed")
    return {name: _parse_limits(name, entry, setting) for name, entry in entries.items()}


def _parse_limits(name: str, entry: object, setting: str) -> TenantLimits:
    if not name or len(name) > MAX_TENANT_CHARS:
        raise ConfigError(f"{setting} has a name of {len(name)} characters: it must be 1 to {MAX_TENANT_CHARS}")
    if control := control_character(name):
        raise ConfigError(f"{setting} has a name with {control}: remove it")
    if not isinstance(entry, dict):
        raise ConfigError(f"{setting}.{name} is {entry!r}: it must be an object of limits")
    known = [field.name for field in fields(TenantLimits)] if setting == "tenants" else LORA_LIMITS
    check_known(entry, known, f"{setting}.{name}: ")
    if "each" in entry and name != EVERYBODY:
        raise ConfigError(f"{setting}.{name}: each belongs to the entry '*' alone; remove it")
    try:
        return TenantLimits(**entry)
    except ConfigError as error:
        raise ConfigError(f"{setting}.{name}: {error}") from None
