"""The page of batches: sums of those that run, and the row of each."""

from __future__ import annotations

from console_svc.pages.batches import COLUMNS, RESPONSE_COLUMNS, tiles
from console_svc.state.batches import Batches, BatchView, ResponseCountView


def batch(status: str, total: int = 10, completed: int = 4, failed: int = 1) -> BatchView:
    return BatchView(
        f"batch_{status}", "acme", status, "/v1/completions", total, completed, failed, 3, 1.0, 2.0
    )


def test_the_sums_are_those_of_batches_that_run() -> None:
    found = Batches(True, "batch-0", (batch("in_progress"), batch("validating", 0, 0, 0)))
    done = (*found.batches, batch("completed", 10, 9, 1))
    assert tiles(Batches(True, "batch-0", done)) == {
        "Batches that run": ("2", "by batch-0"),
        "Lines left": ("5", "of 10"),
        "Lines in flight": ("6", ""),
    }
    assert tiles(Batches(True))["Batches that run"] == ("0", "by no service")


def test_a_row_has_the_share_of_lines_with_a_result() -> None:
    texts = {column.name: column.text(batch("failed")) for column in COLUMNS}
    assert (texts["done"], texts["failed"], texts["status"]) == ("50 %", "1", "failed")
    assert batch("validating", 0, 0, 0).done is None
    assert next(column.tone for column in COLUMNS if column.tone)(batch("failed")) == "bad"


def test_a_row_counts_the_responses_of_a_tenant_with_one_status() -> None:
    row = ResponseCountView("", "failed", 1200)
    assert [column.text(row) for column in RESPONSE_COLUMNS] == ["-", "failed", "1,200"]
