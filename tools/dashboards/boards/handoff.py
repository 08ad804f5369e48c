"""Prefill and decode on separate workers."""

from __future__ import annotations

from tools.dashboards.model import Board, Panel, Query
from tools.dashboards.queries import of_instance, of_worker, rate, total

_R, _W = "kvmesh_router", "kvmesh_worker"


def _engine(title: str, name: str, text: str) -> Panel:
    """Returns the panel of a counter of the sim engine."""
    counter = f'{_W}_engine_total{{name=~"{name}"}}'
    query = Query(total(of_worker(rate(counter)), "role", "name"), "{{role}} {{name}}")
    return Panel(title, "ops", (query,), text, empty="only engines that count it: the sim does")


PLACEMENT = (
    Panel(
        "Served aggregated for lack of a pair",
        "ops",
        (
            Query(
                total(rate(of_instance(f"{_R}_aggregated_fallbacks_total")), "reason"),
                "{{reason}}",
            ),
        ),
        "Although the mesh has prefill or decode workers, by reason.",
    ),
    Panel(
        "Served aggregated by policy",
        "ops",
        (Query(total(rate(of_instance(f"{_R}_prefill_bypasses_total")), "reason"), "{{reason}}"),),
        "Although a pair was available, by reason.",
    ),
    Panel(
        "Requests being computed",
        "short",
        (Query(total(of_worker(f"{_W}_running_requests"), "role"), "{{role}}"),),
        "If one role is idle while the other has a queue, change their numbers.",
    ),
    Panel(
        "Requests that wait",
        "short",
        (Query(total(of_worker(f"{_W}_waiting_requests"), "role"), "{{role}}"),),
        "Accepted by a worker and not scheduled.",
    ),
)
TRANSFER = (
    Panel(
        "Handoffs in progress",
        "short",
        (Query(total(of_worker(f"{_W}_rooms_open"), "role"), "{{role}}"),),
        "Rooms of both sides. A number that only grows: the other side does not arrive.",
    ),
    Panel(
        "Handoffs that fail",
        "ops",
        (
            Query(
                total(of_worker(rate(f"{_W}_handoff_failures_total")), "role", "reason"),
                "{{role}} {{reason}}",
            ),
        ),
        "Legs of requests that failed because of their handoff; another pair continues them.",
    ),
    _engine(
        "Rooms, by their end",
        "rooms_.*|leases_expired|aborts_forced",
        "How handoffs end at each side.",
    ),
    _engine("Pages of KV", "pages_.*", "Written by prefill and received by decode."),
)

BOARD = Board(
    "handoff",
    "KVMesh: handoff",
    "Placement of pairs, and the transfer of KV from prefill to decode.",
    {"Placement": PLACEMENT, "Transfer": TRANSFER},
)
