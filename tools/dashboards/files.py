"""The generated files, and what they are generated from."""

from __future__ import annotations

from pathlib import Path

from tools.dashboards import grafana
from tools.dashboards.alerts import rules
from tools.dashboards.boards import (
    batches,
    frontend,
    handoff,
    index,
    overview,
    routing,
    tenants,
    workers,
)
from tools.dashboards.catalog import catalog
from tools.dashboards.model import Board
from tools.dashboards.reference import reference_file

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "deploy" / "observability"
BOARDS: tuple[Board, ...] = (
    overview.BOARD,
    frontend.BOARD,
    routing.BOARD,
    handoff.BOARD,
    workers.BOARD,
    index.BOARD,
    tenants.BOARD,
    batches.BOARD,
)


def generated_files() -> dict[Path, str]:
    """Returns the content of each file."""
    dashboards = FOLDER / "grafana" / "dashboards"
    return {
        **{dashboards / f"{board.name}.json": grafana.encode(board) for board in BOARDS},
        FOLDER / "alerts.yml": rules.rules_file(),
        FOLDER / "alerts_test.yml": rules.tests_file(),
        ROOT / rules.RUNBOOK: rules.runbook_file(),
        ROOT / "docs" / "metrics.md": reference_file(catalog()),
    }
