"""Typed, bounded access to the fields of an untrusted config.json.

Whatever a file holds, reading a field gives a value inside its range or a `ConfigError` that names the field. Messages
show values in ASCII and shortened, so that a hostile string cannot write to a terminal.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NoReturn

from kvgen.errors import ConfigError
from kvgen.json_file import shown

POSITIONS = 2**31 - 1


class Fields:
    """One JSON object. null counts as absent, as it does in transformers."""

    def __init__(self, values: object, where: str = "") -> None:
        if not isinstance(values, Mapping):
            name = where or "config"
            raise ConfigError(f"{name}: got {shown(values)}; it must be a JSON object, such as {{...}}")
        self.values = values
        self.where = where

    def name(self, key: str) -> str:
        """The field's full name, for messages."""
        return f"{self.where}.{key}" if self.where else key

    def fail(self, key: str, rule: str) -> NoReturn:
        """Raise for a field that is there and wrong."""
        raise ConfigError(f"{self.name(key)}: got {shown(self.values.get(key))}; {rule}")

    def has(self, key: str) -> bool:
        """Whether the field is there and not null."""
        return self.values.get(key) is not None

    def require(self, architecture: str, *keys: str) -> None:
        """Raise one error that names every missing field."""
        missing = [self.name(key) for key in keys if not self.has(key)]
        if missing:
            raise ConfigError(
                f"{missing[0]}: missing from a {architecture} config; it needs {', '.join(map(self.name, keys))}; "
                f"missing: {', '.join(missing)}"
            )

    def integer(self, key: str, *, high: int, low: int = 1, default: int | None = None) -> int:
        """An int in low..high; without a default the field is required."""
        value = self.values.get(key)
        if value is None:
            value = default
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            self.fail(key, f"it must be an integer; valid: {low} to {high}")
        return value

    def optional_integer(self, key: str, *, high: int, low: int = 1) -> int | None:
        """An int in low..high, or None where the field is absent."""
        return self.integer(key, low=low, high=high) if self.has(key) else None

    def number(self, key: str, *, high: float, low: float, default: float | None = None) -> float:
        """A float in low..high (an int is one too); without a default the field is required."""
        value = self.values.get(key)
        if value is None:
            value = default
        if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
            self.fail(key, f"it must be a number; valid: {low:g} to {high:g}")
        return float(value)

    def optional_number(self, key: str, *, high: float, low: float) -> float | None:
        """A float in low..high, or None where the field is absent."""
        return self.number(key, low=low, high=high) if self.has(key) else None

    def flag(self, key: str, *, default: bool) -> bool:
        """A bool, `default` where the field is absent."""
        value = self.values.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            self.fail(key, "it must be a boolean; valid: true, false")
        return value

    def choice(self, key: str, choices: Mapping[str, str], *, default: str) -> str:
        """The value that `choices` gives for a string, `default` where the field is absent."""
        value = self.values.get(key)
        if value is None:
            return default
        if not isinstance(value, str) or value not in choices:
            self.fail(key, f"it is none that kvgen knows; valid: {', '.join(choices)}")
        return choices[value]

    def items(self, key: str, *, length: int) -> list[object]:
        """A list of exactly `length` values."""
        value = self.values.get(key)
        if not isinstance(value, list) or len(value) != length:
            self.fail(key, f"it must be a list; valid: {length} entries")
        return value

    def numbers(self, key: str, *, length: int, low: float, high: float) -> tuple[float, ...]:
        """A list of exactly `length` floats in low..high."""
        entries = Fields({str(i): v for i, v in enumerate(self.items(key, length=length))}, self.name(key))
        return tuple(entries.number(str(i), low=low, high=high) for i in range(length))

    def object(self, key: str) -> Fields | None:
        """A nested object, None where the field is absent."""
        return Fields(self.values[key], self.name(key)) if self.has(key) else None

    def inner(self, path: str) -> tuple[Fields | None, str]:
        """The object that holds a field, and the field's own name; a dot reaches into an object. None: there is no object."""
        place: Fields | None = self
        *outer, last = path.split(".")
        for key in outer:
            place = place.object(key) if place is not None else None
        return place, last
