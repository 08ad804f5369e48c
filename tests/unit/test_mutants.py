"""The list of mutants fits the code."""

from __future__ import annotations

import pytest

from tests.mutants.__main__ import DOCUMENT, ROOT, mutated
from tests.mutants.mutant import Mutant
from tests.mutants.mutants import MUTANTS
from tests.row_report import planted_rows, read_rows


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda one: one.name)
def test_the_text_of_a_mutant_occurs_once_and_its_rows_are_proved(mutant: Mutant) -> None:
    text = (ROOT / mutant.path).read_text()
    compile(mutated(mutant, text), mutant.path, "exec")
    proved = {row.id for row in read_rows(DOCUMENT.read_text()) if row.kind != "open"}
    assert set(mutant.rows) <= proved


def test_each_row_that_a_service_proves_has_a_defect() -> None:
    rows = read_rows(DOCUMENT.read_text())
    assert {row.id for row in rows if row.kind == "service"} - planted_rows() == set()
