"""What an alert consists of, with an example that makes it fire and resolve."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

# Minutes of the examples before, during and after the fault.
BEFORE_MIN, FAULT_MIN, AFTER_MIN = 10, 15, 20

Severity = Literal["page", "ticket"]


@dataclass(frozen=True, slots=True)
class Series:
    """A time series of an example, with a sample a minute.

    A gauge has the values `healthy` and `faulty`, a counter grows by them each minute. faulty:
    None: the series has no samples during the fault.
    """

    name: str
    """With labels."""

    healthy: float
    faulty: float | None
    is_counter: bool = False

    def values(self, fault_min: int, after_min: int) -> str:
        """Returns the samples in the notation of promtool."""
        parts, value = [], 0.0
        for level, minutes in (
            (self.healthy, BEFORE_MIN),
            (self.faulty, fault_min),
            (self.healthy, after_min),
        ):
            if level is None:
                parts.append(f"_x{minutes}")
            elif self.is_counter:
                # `a+bxn` has n + 1 samples.
                parts.append(f"{value:.10g}+{level:.10g}x{minutes - 1}")
                value += level * minutes
            else:
                parts.append(f"{level:.10g}x{minutes - 1}")
        return " ".join(parts)


def gauge(name: str, healthy: float, faulty: float | None) -> Series:
    return Series(name, healthy, faulty)


def counter(name: str, healthy: float, faulty: float) -> Series:
    """Returns a counter. healthy, faulty: its increase a minute."""
    return Series(name, healthy, faulty, is_counter=True)


@dataclass(frozen=True, slots=True)
class Example:
    """A fault that an alert reports: it fires at its end, and has resolved some time later."""

    series: tuple[Series, ...]

    labels: Mapping[str, str]
    """Of the alert, without its severity."""

    fault_min: int = FAULT_MIN
    after_min: int = AFTER_MIN


@dataclass(frozen=True, slots=True)
class Alert:
    """One alert, with its entry of the runbook."""

    name: str
    expr: str

    lasts: str
    """How long the expression must be true, as Prometheus writes durations."""

    severity: Severity
    """page: users are affected; ticket: they may be soon, or something is slower than it could
    be."""

    symptom: str
    """The summary, with `{{ $labels.x }}` for labels."""

    meaning: str
    look: tuple[str, ...]
    do: tuple[str, ...]
    example: Example

    @property
    def anchor(self) -> str:
        """Of its heading in the runbook."""
        return self.name.lower()

    def symptom_of(self, labels: Mapping[str, str]) -> str:
        """Returns the symptom with the values of labels."""
        return re.sub(r"\{\{ \$labels\.(\w+) \}\}", lambda match: labels[match[1]], self.symptom)
