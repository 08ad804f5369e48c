"""Checks of the clocks of members against the clock of this host (pure)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from meshctl.doctor.facts import Facts
from meshctl.doctor.findings import Finding, member_subject
from meshctl.doctor.rules import finding

DIFFERENCE_MAX_S: Final = 2.0


def check_clocks(facts: Facts) -> Iterator[Finding]:
    for member in facts.members:
        if member.clock_ahead_s is None:
            continue
        # At least so much, whatever the direction in which the answer was delayed.
        certain_s = abs(member.clock_ahead_s) - member.clock_error_s
        if certain_s <= DIFFERENCE_MAX_S:
            continue
        direction = "ahead of" if member.clock_ahead_s > 0 else "behind"
        is_refused = certain_s > facts.limits.call_valid_s
        allowed_s = facts.limits.call_valid_s if is_refused else DIFFERENCE_MAX_S
        yield finding(
            "clock_too_far" if is_refused else "clock_differs",
            member_subject(member.instance),
            f"its clock is {abs(member.clock_ahead_s):.1f} s {direction} the clock of this host;"
            f" allowed are {allowed_s:g} s",
        )
