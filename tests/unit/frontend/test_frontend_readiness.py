"""When a frontend is ready."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from common.registry.instances import Snapshot
from common.service.routable.peers import Routable, WaitingPeer
from frontend_svc.readiness import Readiness, assess_readiness
from tests.kit.instances import worker

WAITING = WaitingPeer(7, "", "worker", "its card is loading")


def readiness(routable: Routable, *, is_draining: bool = False) -> Readiness:
    """Returns the readiness of a frontend that serves one model."""
    models: Any = SimpleNamespace(
        names=lambda: frozenset({"m"}),
        workers=lambda _: (worker(1, model="m"),),
        absent={},
        loading=frozenset(),
        not_ready={},
        hidden={},
    )
    router: Any = SimpleNamespace(is_connected=True)
    engines: Any = SimpleNamespace(exclusion_reasons=dict)
    hit_monitor: Any = SimpleNamespace(degraded=list)
    canaries: Any = SimpleNamespace(results={})
    return assess_readiness(
        Snapshot(),
        models,
        router,
        engines,
        hit_monitor,
        canaries,
        routable,
        is_draining=is_draining,
    )


@pytest.mark.parametrize(
    ("routable", "reasons"),
    [
        (Routable(True), ()),
        (Routable(True, given_up=(WAITING,)), ()),
        (Routable(False), ("not registered yet",)),
        (Routable(False, missing=(WAITING,)), ("worker 7: its card is loading",)),
    ],
    ids=["routable", "without a given-up peer", "before its registration", "waits for a peer"],
)
def test_a_frontend_is_ready_once_it_is_routable(
    routable: Routable, reasons: tuple[str, ...]
) -> None:
    found = readiness(routable)
    assert found.reasons == reasons
    assert found.is_ready == (not reasons)


def test_a_frontend_that_drains_is_not_ready() -> None:
    found = readiness(Routable(False, is_leaving=True), is_draining=True)
    assert (found.is_ready, found.reasons) == (False, ("draining",))
