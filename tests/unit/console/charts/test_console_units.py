"""Texts of figures."""

from __future__ import annotations

import pytest

from console_svc.charts.units import (
    age,
    clock,
    count,
    duration,
    number,
    percent,
    plural,
    rate,
    size,
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (number(1234567), "1,234,567"),
        (number(None), "-"),
        (count(999_999), "999,999"),
        (count(1_250_000), "1.25 M"),
        (rate(2.55), "2.5"),
        (rate(0), "0"),
        (rate(153.4), "153"),
        (percent(0.426), "43 %"),
        (percent(0.004), "0.4 %"),
        (percent(None), "-"),
        (duration(0), "0 ms"),
        (duration(0.254), "0.25 ms"),
        (duration(9.46), "9.5 ms"),
        (duration(812), "812 ms"),
        (duration(2500), "2.50 s"),
        (duration(90_000), "1.5 min"),
        (size(900), "900 B"),
        (size(5 << 20), "5.0 MiB"),
        (age(3.4), "3 s"),
        (age(7200), "2 h"),
        (age(259_200), "3 d"),
        (clock(0), "-"),
        (clock(3661), "01:01:01"),
        (plural(1, "worker"), "1 worker"),
        (plural(1200, "worker"), "1,200 workers"),
    ],
)
def test_figures_have_short_texts(text: str, expected: str) -> None:
    assert text == expected
