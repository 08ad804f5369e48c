"""The rules about recovery can fail: a rule reports a part with a deliberate mistake."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from random import Random
from typing import Any

import pytest

from common.errors import InternalError, MeshError
from frontend_svc.request.gateway import Gateway
from router_svc.core.events import Event
from router_svc.core.load_tracker import LoadTracker
from router_svc.core.replication import Frame
from router_svc.replication_sync import PeerSync
from tests.sim.clients import draw_client_specs
from tests.sim.faults import Fault, FaultKind
from tests.sim.fleet import ObservedEngineClient, ObservedRouterClient, Parts
from tests.sim.scenario import EOS, EOS_ONE_IN, TOKEN_IDS, Scenario
from tests.sim.world import run_scenario
from worker_svc.engines.sim.token_oracle import TokenOracle

pytestmark = pytest.mark.slow


def fault(
    kind: FaultKind, at: float, *, target_draw: float = 0.9, duration_s: float = 1.0
) -> Fault:
    return Fault(at, kind, target_draw, 0.0, duration_s, near_s=0.1, far_s=0.1, notice_s=0.5)


NO_FAULTS = Scenario(
    seed=7,
    routers=3,
    frontends=2,
    selector="round_robin",
    client_specs=draw_client_specs(
        Random(7), 60, 9.0, TokenOracle(TOKEN_IDS, EOS, eos_one_in=EOS_ONE_IN), long_prompts=False
    ),
)
FREEZE = replace(NO_FAULTS, faults=(fault(FaultKind.WORKER_FREEZE, 4.0, duration_s=6.0),))
FAIL = replace(NO_FAULTS, faults=(fault(FaultKind.WORKER_FAIL, 3.0, duration_s=6.0),))
KILL = replace(NO_FAULTS, faults=(fault(FaultKind.ROUTERS_KILL, 4.0),))
LOSS = replace(NO_FAULTS, faults=tuple(fault(FaultKind.SYNC_GARBLED, 1.0) for _ in range(3)))
STALE_REGISTRY = replace(
    NO_FAULTS,
    faults=(
        *(
            fault(FaultKind.REGISTRY_OLD, 1.0 + n, target_draw=n / 6, duration_s=1.0)
            for n in range(6)
        ),
        fault(FaultKind.WORKER_DRAIN, 2.0),
        fault(FaultKind.ROUTER_DRAIN, 3.0),
    ),
)


@pytest.mark.parametrize("scenario", [NO_FAULTS, FREEZE, FAIL, KILL, LOSS, STALE_REGISTRY])
def test_the_real_parts_recover_in_these_scenarios(scenario: Scenario) -> None:
    report = run_scenario(scenario)
    assert not report.violations, str(report)


class NeverProbes(ObservedEngineClient):
    """Never includes an excluded worker again."""

    async def _probe_open_circuits(self) -> None:
        await asyncio.sleep(400.0)

    def progressed(self, worker_id: int) -> None:
        pass


class NeverRetriesInternalErrors(Gateway):
    """Has no retry budget for them."""

    def __init__(self, *args: Any, **others: Any) -> None:
        super().__init__(*args, **others)
        take = self.retries.take

        def take_for_others(now: float, error: MeshError) -> bool:
            return not isinstance(error, InternalError) and take(now, error)

        self.retries.take = take_for_others  # type: ignore[method-assign]


class NeverReconnectsToRouters(ObservedRouterClient):
    """Opens one session, and no other after it."""

    async def run(self) -> None:
        self._choose_once = self._choose
        self._choose = self._first  # type: ignore[method-assign]
        await super().run()

    def _first(self) -> Any:
        self._choose = (lambda: None) if self.is_connected else self._first  # type: ignore
        return self._choose_once()


class SendsNoBookings(PeerSync):
    """Sends no booking to its peers."""

    def __init__(self, *args: Any, **others: Any) -> None:
        super().__init__(*args, **others)
        book: LoadTracker = args[1]
        book.events.booking_changed = Event()


class NeverSendsUpdates(PeerSync):
    """Receives updates from other routers, but sends none."""

    async def _keep_outbound_stream(self, *args: Any, **others: Any) -> None:
        await asyncio.sleep(400.0)


class IgnoresDigests(PeerSync):
    """Never requests what it missed."""

    def __init__(self, *args: Any, **others: Any) -> None:
        super().__init__(*args, **others)
        apply_frame = self.replica.apply_frame

        def take_without_digest(router_id: int, stream: int, frame: Frame, now: float) -> bool:
            return apply_frame(router_id, stream, replace(frame, digest=0), now)

        self.replica.apply_frame = take_without_digest  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("rule", "scenario", "parts"),
    [
        ("known", FREEZE, Parts(engines=NeverProbes)),
        ("known", FAIL, Parts(engines=NeverProbes)),
        ("errors", FAIL, Parts(gateway=NeverRetriesInternalErrors)),
        ("known", KILL, Parts(router_port=NeverReconnectsToRouters)),
        ("known", NO_FAULTS, Parts(peers=NeverSendsUpdates)),
        ("bookings", NO_FAULTS, Parts(peers=SendsNoBookings)),
        ("rest", LOSS, Parts(peers=IgnoresDigests)),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_a_mesh_that_does_not_recover_is_caught(
    rule: str, scenario: Scenario, parts: Parts
) -> None:
    assert rule in {violation.rule for violation in run_scenario(scenario, parts).violations}
