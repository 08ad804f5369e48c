"""The row report: which rows of a document are proved, and how.

A row is proved

- by a service, if a marked test that passed goes through a running service
  (`tests/service_traffic.py`);
- in a core, if a marked test passed and the document has the reason beside the row,
  `*(core: ...)*`.

Any other row is open, also one with `*(open: ...)*` beside it, whatever its tests do. A row of
which a marked test failed is open.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest

# Only list items count, not mentions in prose. A line can have several.
_ITEM = re.compile(r"- \[ \] (?:\*\*\[TRAP\]\*\* )?(S[0-4]-\d{2,3})\b")
_REASON = re.compile(r"\*\((core|open): (.+?)\)\*")

Proof = Literal["service", "core", "open"]


@dataclass(frozen=True, slots=True)
class Row:
    """A row of the document. kind: what the document says beside it; "service" if nothing."""

    id: str
    kind: Proof
    reason: str


@dataclass(slots=True)
class Outcomes:
    """Results of the tests that are marked with one row."""

    passed: int = 0
    through_service: int = 0
    failed: int = 0


def read_rows(text: str) -> list[Row]:
    """Returns the rows of a document, in its order. Raises ValueError for a repeated row."""
    rows: dict[str, Row] = {}
    items = list(_ITEM.finditer(text))
    for item, following in zip(items, [*items[1:], None], strict=True):
        end = text.find("\n", item.end()) if following is None else following.start()
        line = text[item.end() : end].partition("\n")[0]
        found = _REASON.search(line)
        kind: Proof = "service" if found is None else "core" if found[1] == "core" else "open"
        if item[1] in rows:
            raise ValueError(f"row {item[1]} is listed twice")
        rows[item[1]] = Row(item[1], kind, found[2] if found else "")
    return list(rows.values())


def judge(row: Row, outcomes: Outcomes) -> tuple[Proof, str]:
    """Returns how a row is proved, and why not if it is open."""
    if row.kind == "open":
        return "open", row.reason
    if outcomes.failed:
        return "open", "a marked test failed"
    if not outcomes.passed:
        return "open", "no marked test passed"
    if row.kind == "service" and not outcomes.through_service:
        return "open", "no marked test goes through a running service"
    return row.kind, ""


def report_lines(rows: Iterable[Row], outcomes: Mapping[str, Outcomes]) -> list[str]:
    """Returns one line for each group, followed by its open rows with their reasons."""
    groups: dict[str, list[tuple[str, Proof, str]]] = {}
    for row in rows:
        proof, reason = judge(row, outcomes.get(row.id, Outcomes()))
        groups.setdefault(row.id[:2], []).append((row.id, proof, reason))
    lines = []
    for group, judged in sorted(groups.items()):
        proofs = [proof for _, proof, _ in judged]
        service, core, n_open = (proofs.count(p) for p in ("service", "core", "open"))
        lines.append(
            f"{group} {service + core}/{len(judged)} "
            f"(service {service}, core {core}, open {n_open})"
        )
        lines += [f"   {id} open: {reason}" for id, proof, reason in judged if proof == "open"]
    return lines


class RowReport:
    """A pytest plugin that collects outcomes by row and prints the report."""

    def __init__(self, document: Path) -> None:
        self._rows = read_rows(document.read_text())
        self._outcomes: dict[str, Outcomes] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        properties = report.user_properties
        for name, row in properties:
            if name != "row":
                continue
            outcomes = self._outcomes.setdefault(str(row), Outcomes())
            if report.failed:
                outcomes.failed += 1
            elif report.when == "call" and report.passed:
                outcomes.passed += 1
                outcomes.through_service += ("service", True) in properties

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        for line in report_lines(self._rows, self._outcomes):
            terminalreporter.write_line(line)
