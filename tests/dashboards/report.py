"""The results of the checks, as lines of text and one line of JSON."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field

# Any: figures by name.
from typing import Any


@dataclass(slots=True)
class Report:
    """What the checks have found."""

    passed: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    notes: dict[str, Any] = field(default_factory=dict)

    def check(self, name: str, is_right: bool, reason: str = "") -> None:
        """Records a check. reason: why it failed."""
        if is_right:
            self.passed.append(name)
        else:
            self.failed[name] = reason
            print(f"FAILED {name}: {reason}", flush=True)

    def skip(self, name: str, reason: str) -> None:
        """Records what may be without data, with the reason."""
        self.skipped[name] = reason
        print(f"no data {name}: {reason}", flush=True)

    # Any: JSON.
    def note(self, name: str, value: Any) -> None:
        self.notes[name] = value
        print(f"{name}: {value}", flush=True)

    def run(self, name: str, part: Callable[[], None]) -> None:
        """Runs a part of the checks; an error of it is a failure."""
        passed, failed = len(self.passed), len(self.failed)
        try:
            part()
        except Exception as error:
            self.check(name, False, f"{type(error).__name__}: {error}")
        found = f"{len(self.passed) - passed} passed, {len(self.failed) - failed} failed"
        print(f"{name}: {found}", flush=True)

    def line(self) -> str:
        """Returns the sums as JSON."""
        sums = {
            "passed": len(self.passed),
            "failed": len(self.failed),
            "skipped": len(self.skipped),
        }
        return json.dumps({**sums, **self.notes, "failures": sorted(self.failed)})
