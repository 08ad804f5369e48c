"""The rules about recovery can fail: a part with a deliberate mistake is caught by them."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from random import Random
from typing import Any

import pytest

from router_svc.core.replication import Frame
from router_svc.replication_sync import PeerSync
from tests.sim.clients import draw_wishes
from tests.sim.faults import Fault, FaultKind
from tests.sim.fleet import Parts, WatchedEngines, WatchedRouterClient
from tests.sim.scenario import EOS, EOS_ONE_IN, WORDS, Scenario
from tests.sim.world import run_scenario
from worker_svc.engines.sim.token_oracle import Truth

pytestmark = pytest.mark.slow


def fault(kind: FaultKind, at: float, *, pick: float = 0.9, lasts_s: float = 1.0) -> Fault:
    return Fault(at, kind, pick, 0.0, lasts_s, near_s=0.1, far_s=0.1, notice_s=0.5)


CALM = Scenario(
    seed=7,
    routers=3,
    frontends=2,
    selector="round_robin",
    wishes=draw_wishes(
        Random(7), 60, 9.0, Truth(WORDS, EOS, eos_one_in=EOS_ONE_IN), long_prompts=False
    ),
)
FREEZE = replace(CALM, faults=(fault(FaultKind.WORKER_FREEZE, 4.0, lasts_s=6.0),))
KILL = replace(CALM, faults=(fault(FaultKind.ROUTERS_KILL, 4.0),))
LOSS = replace(CALM, faults=tuple(fault(FaultKind.SYNC_GARBLED, 1.0) for _ in range(3)))
OLD_NEWS = replace(
    CALM,
    faults=(
        *(fault(FaultKind.REGISTRY_OLD, 1.0 + n, pick=n / 6, lasts_s=1.0) for n in range(6)),
        fault(FaultKind.WORKER_DRAIN, 2.0),
        fault(FaultKind.ROUTER_DRAIN, 3.0),
    ),
)


@pytest.mark.parametrize("scenario", [CALM, FREEZE, KILL, LOSS, OLD_NEWS])
def test_the_real_parts_recover_in_these_scenarios(scenario: Scenario) -> None:
    report = run_scenario(scenario)
    assert not report.breaches, str(report)


class NeverProbes(WatchedEngines):
    """What it left alone once, it leaves alone."""

    async def _probe_tripped(self) -> None:
        await asyncio.sleep(400.0)

    def moved(self, worker_id: int) -> None:
        pass


class GivesUpOnRouters(WatchedRouterClient):
    """Has one session, and no other after it."""

    async def run(self) -> None:
        self._choose_once = self._choose
        self._choose = self._first  # type: ignore[method-assign]
        await super().run()

    def _first(self) -> Any:
        self._choose = (lambda: None) if self.is_connected else self._first  # type: ignore
        return self._choose_once()


class TellsOfNothing(PeerSync):
    """Its books are its own."""

    def __init__(self, *args: Any, **others: Any) -> None:
        super().__init__(*args, **others)
        self.replica.changed = lambda key: None  # type: ignore[method-assign]


class TellsNobody(PeerSync):
    """Hears of others, who never hear of it."""

    async def _keep_telling(self, *args: Any) -> None:
        await asyncio.sleep(400.0)


class IgnoresDigests(PeerSync):
    """Never asks for what it missed."""

    def __init__(self, *args: Any, **others: Any) -> None:
        super().__init__(*args, **others)
        take = self.replica.take

        def believe(router_id: int, stream: int, frame: Frame, now: float) -> bool:
            return take(router_id, stream, replace(frame, digest=0), now)

        self.replica.take = believe  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("rule", "scenario", "parts"),
    [
        ("known", FREEZE, Parts(engines=NeverProbes)),
        ("known", KILL, Parts(placer=GivesUpOnRouters)),
        ("known", CALM, Parts(peers=TellsNobody)),
        ("books", CALM, Parts(peers=TellsOfNothing)),
        ("rest", LOSS, Parts(peers=IgnoresDigests)),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_a_mesh_that_does_not_recover_is_caught(
    rule: str, scenario: Scenario, parts: Parts
) -> None:
    assert rule in {breach.rule for breach in run_scenario(scenario, parts).breaches}
