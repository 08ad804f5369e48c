"""One trial: a function, its arguments and its limits (pure)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class TrialLimits:
    """What a trial may use."""

    cpu_s: float
    """Processor time in seconds."""

    wall_s: float
    """Seconds, also while it gets no processor."""

    memory_bytes: int
    """Beyond the memory of the process before the trial."""

    reply_bytes: int = 1 << 16
    """Size of the result as JSON."""


@dataclass(frozen=True, slots=True)
class Trial:
    """function: `module:name`. Its result must be JSON; a ValueError refuses the input."""

    function: str
    # Any: the function's.
    arguments: tuple[Any, ...]
    limits: TrialLimits


class TrialRefused(ValueError):
    """The input of a trial is invalid; the message is the function's."""


class TrialExceeded(ValueError):
    """A trial exceeded its limit of processor time, memory or output; the message names it."""

    def __init__(self, message: str, *, is_time: bool) -> None:
        """is_time: whether more time might have been enough."""
        super().__init__(message)
        self.is_time = is_time
