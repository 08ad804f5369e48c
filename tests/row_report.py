"""The row report: which rows of a document are proved, and how.

The document declares the class of a row. A row counts as that class if a marked test passed and:

- service, the class of a row without declaration: a marked test that passed goes through a running
  service (`tests/service_traffic.py`), and a planted defect names the row (`tests/mutants`), which
  shows that its tests observe its effect and not any traffic;
- core, `*(core: reason)*`: no service output can show it;
- other, `**Here (other):** text`: another design stands for the row, and a marked test goes
  through a service that has it;
- refused, `**Here (refused):** text`: a service refuses the field by its name, as a marked test
  shows.

Any other row is open, also one with `*(open: reason)*`, whatever its tests do. A row of which a
marked test failed is open. Only service and core are proofs.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast, get_args

import pytest

from tests.mutants.mutants import MUTANTS

# Only list items count, not mentions in prose. A line can have several.
_ITEM = re.compile(r"- \[ \] (?:\*\*\[TRAP\]\*\* )?(S[0-4]-\d{2,3})\b")
_DECLARATION = re.compile(r"\*\((core|open): (.+?)\)\*|\*\*Here \((other|refused)\):\*\* (.+)")

Proof = Literal["service", "core", "other", "refused", "open"]


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
        if item[1] in rows:
            raise ValueError(f"row {item[1]} is listed twice")
        rows[item[1]] = _row(item[1], line)
    return list(rows.values())


def _row(id: str, line: str) -> Row:
    found = _DECLARATION.search(line)
    if found is None:
        return Row(id, "service", "")
    return Row(id, cast("Proof", found[1] or found[3]), (found[2] or found[4]).strip())


def planted_rows() -> frozenset[str]:
    """Returns the rows whose tests must find a planted defect."""
    return frozenset(row for mutant in MUTANTS for row in mutant.rows)


def judge(row: Row, outcomes: Outcomes, planted: Container[str]) -> tuple[Proof, str]:
    """Returns how a row is proved, and why not if it is open. planted: rows with a defect."""
    if row.kind == "open":
        return "open", row.reason
    if outcomes.failed:
        return "open", "a marked test failed"
    if not outcomes.passed:
        return "open", "no marked test passed"
    if row.kind != "core" and not outcomes.through_service:
        return "open", "no marked test goes through a running service"
    if row.kind == "service" and row.id not in planted:
        return "open", "no planted defect shows that its tests observe its effect"
    return row.kind, ""


def report_lines(
    rows: Iterable[Row], outcomes: Mapping[str, Outcomes], planted: Container[str]
) -> list[str]:
    """Returns for each group its line, the rows of other designs, those of refused fields, and the
    open rows with their reasons."""
    groups: dict[str, list[tuple[str, Proof, str]]] = {}
    for row in rows:
        proof, reason = judge(row, outcomes.get(row.id, Outcomes()), planted)
        groups.setdefault(row.id[:2], []).append((row.id, proof, reason))
    lines = []
    for group, judged in sorted(groups.items()):
        ids = {kind: [id for id, proof, _ in judged if proof == kind] for kind in get_args(Proof)}
        proved = len(ids["service"]) + len(ids["core"])
        counts = ", ".join(f"{kind} {len(of_kind)}" for kind, of_kind in ids.items())
        lines.append(f"{group} {proved}/{len(judged)} ({counts})")
        lines += [f"   {kind}: {' '.join(ids[kind])}" for kind in ("other", "refused") if ids[kind]]
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
        for line in report_lines(self._rows, self._outcomes, planted_rows()):
            terminalreporter.write_line(line)
