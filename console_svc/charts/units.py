"""Texts of figures: numbers, shares, durations, sizes and times (pure)."""

from __future__ import annotations

from datetime import UTC, datetime

NONE = "-"
"""Text of an unknown figure."""

_SIZES = ("B", "KiB", "MiB", "GiB", "TiB")
_COUNTS = ((1e12, "T"), (1e9, "G"), (1e6, "M"))


def number(value: float | None, digits: int = 0) -> str:
    """Returns the value with groups of three digits."""
    return NONE if value is None else f"{value:,.{digits}f}"


def count(value: float | None) -> str:
    """Returns a number of things; above a million with three digits, as `1.25 M`."""
    if value is None:
        return NONE
    for unit, suffix in _COUNTS:
        if abs(value) >= unit:
            return f"{value / unit:.3g} {suffix}"
    return number(value)


def rate(value: float | None) -> str:
    """Returns a number a second, with one digit below ten."""
    return NONE if value is None else number(value, 1 if 0 < value < 10 else 0)


def percent(share: float | None) -> str:
    """Returns a share of 0..1 as percent, with one digit below one percent."""
    if share is None:
        return NONE
    value = 100 * share
    return f"{value:.1f} %" if 0.05 <= value < 1 else f"{value:.0f} %"


def duration(ms: float | None) -> str:
    """Returns milliseconds with a fitting unit."""
    if ms is None:
        return NONE
    if ms >= 60_000:
        return f"{ms / 60_000:.1f} min"
    if ms >= 1000:
        return f"{ms / 1000:.2f} s"
    digits = 0 if ms >= 100 or not ms else 1 if ms >= 1 else 2
    return f"{ms:.{digits}f} ms"


def size(count_of_bytes: float) -> str:
    """Returns bytes with a binary unit."""
    value = float(count_of_bytes)
    for unit in _SIZES[:-1]:
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} {_SIZES[-1]}"


def age(seconds: float | None) -> str:
    """Returns a duration in its largest unit."""
    if seconds is None:
        return NONE
    seconds = max(0.0, seconds)
    if seconds < 60:
        return f"{seconds:.0f} s"
    if seconds < 3600:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.0f} h" if seconds < 172_800 else f"{seconds / 86_400:.0f} d"


def clock(unix_s: float) -> str:
    """Returns the time of day in UTC; "-" for 0."""
    return f"{_at(unix_s):%H:%M:%S}" if unix_s else NONE


def moment(unix_s: float | None) -> str:
    """Returns date and time in UTC; "-" for 0 and None."""
    return f"{_at(unix_s):%Y-%m-%d %H:%M:%S} UTC" if unix_s else NONE


def plural(value: int, noun: str) -> str:
    """Returns `1 worker`, `2 workers`."""
    return f"{number(value)} {noun}{'' if value == 1 else 's'}"


def _at(unix_s: float) -> datetime:
    return datetime.fromtimestamp(unix_s, UTC)
