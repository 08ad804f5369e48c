"""Figures over time in bounded memory (pure)."""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping, Sequence

from console_svc.state.members import Curve


class History:
    """The last values of some figures, which are measured at the same times."""

    def __init__(self, names: Sequence[str], length: int) -> None:
        self._names = tuple(names)
        self._length = length
        self._times = array("d")
        # NaN: unknown.
        self._values = {name: array("f") for name in names}

    def add(self, at_s: float, values: Mapping[str, float | None]) -> None:
        """Adds the values of one moment; an absent one is unknown. at_s: Unix seconds."""
        self._times.append(at_s)
        for name in self._names:
            value = values.get(name)
            self._values[name].append(math.nan if value is None else value)
        if len(self._times) > self._length:
            del self._times[0]
            for kept in self._values.values():
                del kept[0]

    def curves(self) -> dict[str, Curve]:
        times = tuple(self._times)
        return {
            name: Curve(times, tuple(None if math.isnan(v) else round(v, 4) for v in values))
            for name, values in self._values.items()
        }
