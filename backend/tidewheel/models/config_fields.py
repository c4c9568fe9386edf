from collections.abc import Mapping

from tidewheel.errors import ConfigError

MAX_INT = 2**31 - 1
MAX_CONTEXT = 1 << 24  # tokens; a rotation table takes 1 KiB each
MIN_NUMBER, MAX_NUMBER = 1e-12, 1e12
MAX_SHOWN_CHARS = 80


class ConfigFields:
    """Typed access to a JSON object; a `ConfigError` names file, key and value."""

    def __init__(self, values: Mapping[str, object], where: str) -> None:
        self.values = values
        self.where = where

    def section(self, key: str) -> "ConfigFields":
        value = self._value(key, {})
        if not isinstance(value, dict):
            raise self.error(key, "an object")
        return ConfigFields(value, f"{self.where}: {key}")

    def integer(self, key: str, default: int | None = None, *, low: int = 1, high: int = MAX_INT) -> int:
        value = self._value(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise self.error(key, f"an integer from {low} to {high}")
        return value

    def optional_integer(self, key: str) -> int | None:
        return None if self.values.get(key) is None else self.integer(key)

    def number(self, key: str, default: float | None = None) -> float:
        value = self._value(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not MIN_NUMBER <= value <= MAX_NUMBER:
            raise self.error(key, f"a number from {MIN_NUMBER:g} to {MAX_NUMBER:g}")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self._value(key, default)
        if not isinstance(value, bool):
            raise self.error(key, "true or false")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        value = self._value(key, default)
        if not isinstance(value, str):
            raise self.error(key, "text")
        return value

    def texts(self, key: str) -> tuple[str, ...]:
        value = self.values.get(key)
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self.error(key, "a list of texts")
        return tuple(value)

    @property
    def architecture(self) -> str:
        names = self.texts("architectures")
        if len(names) != 1:
            raise self.error("architectures", "a list of one name")
        return names[0]

    def error(self, key: str, wanted: str) -> ConfigError:
        if key not in self.values:
            return ConfigError(f"{self.where}: {key} is missing")
        shown = repr(self.values[key])[:MAX_SHOWN_CHARS]
        return ConfigError(f"{self.where}: {key} is {shown}, it must be {wanted}")

    def _value(self, key: str, default: object) -> object:
        value = self.values.get(key)
        return default if value is None else value
