"""Known causes of reruns.

A test of real processes that fails runs again (`tests/conftest.py`). The summary names each rerun
whose cause is not noted here. An entry is removed when its cause is.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

# By test, without its parameters. "Busy": other programs use the processors.
CAUSES = {
    "tests/contract/test_registry.py::test_three_hundred_processes_can_register_at_once": (
        "300 registrations take more than WAIT_S of a busy machine"
    ),
    "tests/e2e/test_worker_death.py::test_streams_of_a_killed_worker_migrate_without_an_error": (
        "on a busy machine the outage is longer than OUTAGE_MAX_S; the bound is that of users"
    ),
}


def without_cause(node_ids: Iterable[str], causes: Mapping[str, str] = CAUSES) -> list[str]:
    """Returns the tests without a noted cause, sorted, without their parameters."""
    return sorted({node_id.partition("[")[0] for node_id in node_ids} - causes.keys())
