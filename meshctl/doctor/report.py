"""The output of doctor: a list by subject, or JSON (pure)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from itertools import groupby
from typing import Any

from meshctl.doctor.facts import Facts
from meshctl.doctor.findings import Finding, Severity, Subject
from meshctl.doctor.rules import NOTHING

EXIT_ERRORS = 1


def exit_status(findings: Iterable[Finding]) -> int:
    """Returns 1 if there is an error, else 0."""
    return EXIT_ERRORS if any(f.severity is Severity.ERROR for f in findings) else 0


# Any: JSON.
def to_json(facts: Facts, findings: Sequence[Finding]) -> dict[str, Any]:
    return {
        "findings": [
            {
                "name": finding.name,
                "severity": finding.severity.value,
                "subject": asdict(finding.subject),
                "found": finding.found,
                "remedy": finding.remedy,
            }
            for finding in findings
        ],
        "members": len(facts.members),
        **{f"{severity}s": _count(findings, severity) for severity in Severity},
    }


def to_lines(facts: Facts, findings: Sequence[Finding]) -> list[str]:
    """Returns the findings by subject, those with errors first, and a line of totals."""
    first: dict[Subject, int] = {}
    for finding in findings:
        first.setdefault(finding.subject, len(first))
    lines = []
    ordered = sorted(findings, key=lambda finding: first[finding.subject])
    for subject, of_subject in groupby(ordered, key=lambda finding: finding.subject):
        lines.append(str(subject))
        for finding in of_subject:
            lines.append(f"  {finding.severity.value:<8} {finding.name}: {finding.found}")
            if finding.remedy != NOTHING:
                lines.append(f"           -> {finding.remedy}")
    counts = ", ".join(
        f"{count} {severity.value}{'' if count == 1 else 's'}"
        for severity in Severity
        for count in [_count(findings, severity)]
    )
    return [*lines, "", f"{len(facts.members)} members: {counts}"]


def _count(findings: Iterable[Finding], severity: Severity) -> int:
    return sum(finding.severity is severity for finding in findings)
