"""Builds a value field by field. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Generic, TypeVar

from common.errors import InvalidRequest

P = TypeVar("P")


@dataclass(slots=True)
class Builder(Generic[P]):
    """Collects fields by name and builds a `cls`; `required_fields` must be set."""

    cls: type[P]
    required_fields: tuple[str, ...]
    values: dict[str, object] = field(default_factory=dict)

    def set(self, **values: object) -> Builder[P]:
        """Set fields; the last value counts. Raises TypeError for an unknown name."""
        known = self.cls.__dataclass_fields__  # type: ignore[attr-defined]
        for name in values:
            if name not in known:
                raise TypeError(f"{self.cls.__name__} has no field {name!r}")
        self.values.update(values)
        return self

    def build(self) -> P:
        """Return the value. Raises InvalidRequest with the first required field that is missing."""
        for name in self.required_fields:
            if name not in self.values:
                raise InvalidRequest(f"{self.cls.__name__} needs {name}", name)
        return self.cls(**self.values)
