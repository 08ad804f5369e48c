"""The batch services: progress of lines, and what limits it."""

from __future__ import annotations

from tools.dashboards.model import Board, Panel, Query
from tools.dashboards.queries import of_instance, rate, total

_B = "kvmesh_batch"
_NONE = "a mesh without a batch service"


def _value(title: str, metric: str, text: str) -> Panel:
    """Returns the panel of a gauge of each service."""
    query = Query(of_instance(f"{_B}_{metric}"), "{{instance}}")
    return Panel(title, "short", (query,), text, empty=_NONE)


LINES = (
    Panel(
        "Tries of lines, by outcome",
        "ops",
        (
            Query(
                total(rate(of_instance(f"{_B}_lines_total")), "outcome"),
                "{{outcome}}",
            ),
        ),
        "`failed`: in an error file; `retried`: sent again, for lack of capacity or an error.",
        empty=_NONE,
    ),
    Panel(
        "Lines in flight",
        "short",
        (
            Query(of_instance(f"{_B}_lines_in_flight"), "{{instance}}"),
            Query(of_instance(f"{_B}_lines_in_flight_limit"), "limit of {{instance}}"),
        ),
        "The limit falls when the mesh refuses lines, and rises with those that succeed.",
        empty=_NONE,
    ),
    _value("Batches in progress", "running", "Of the service that runs them."),
)
SERVICES = (
    _value("Lease", "has_lease", "1: this service runs the lines; exactly one has it."),
    _value("Results that wait", "results_unwritten", "For the database; at 4,096 no line is sent."),
    _value("Routable", "routable", "1: frontends send it calls."),
)

BOARD = Board(
    "batches",
    "KVMesh: batches",
    "Progress of batches, and the services that run them.",
    {"Lines": LINES, "Services": SERVICES},
)
