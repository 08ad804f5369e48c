"""Regression scenarios of pairs and the index, and cases that random seeds rarely contain."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from common.request.preprocessed import StopConditions
from tests.sim.clients import ClientSpec, draw_conversations
from tests.sim.faults import Fault, FaultKind
from tests.sim.scenario import EOS, EOS_ONE_IN, SHORT_RECOVERY_MAX_S, TOKEN_IDS, Mode, Scenario
from tests.sim.world import Report
from tests.sim.world import run_scenario as run
from worker_svc.engines.sim.token_oracle import TokenOracle

TOKEN_ORACLE = TokenOracle(TOKEN_IDS, EOS, eos_one_in=EOS_ONE_IN)
LONG = StopConditions(max_tokens=60, ignore_eos=True)
FAULT = Fault(
    at=1.5,
    kind=FaultKind.PAIR_KILL,
    target_draw=0.0,
    second_draw=0.0,
    duration_s=1.0,
    near_s=0.1,
    far_s=0.1,
    notice_s=0.5,
)
# A prompt takes about half a second to compute, and as long to transfer.
SLOW = Scenario(
    seed=1,
    workers=0,
    prefills=("bootstrap", "bootstrap"),
    decodes=2,
    indexers=1,
    selector="kv",
    prefill_token_s=3e-3,
    batched_tokens=600,
    gb_per_s=0.05,
    chunk_pages=1,
    protect_first=False,
    recovery_max_s=SHORT_RECOVERY_MAX_S,
)
DEATHS = (FaultKind.PREFILL_KILL, FaultKind.DECODE_KILL, FaultKind.PAIR_KILL)
CLIENT_SPECS = draw_conversations(Random(3), 30, 6.0, TOKEN_ORACLE)

pytestmark = pytest.mark.slow


def passed(scenario: Scenario) -> Report:
    report = run(scenario)
    assert not report.violations, str(report)
    return report


@pytest.mark.parametrize("mode", ["bootstrap", "completed"])
def test_a_client_may_leave_in_any_phase_of_a_handoff(mode: Mode) -> None:
    """No process waits longer than the rules allow, and no page is leaked or corrupted."""
    client_specs = tuple(
        ClientSpec(
            n,
            0.7 * n,
            tuple(Random(n).choices(TOKEN_IDS, k=160)),
            LONG,
            disconnect_after_s=0.05 * n,
        )
        for n in range(40)
    )
    report = passed(replace(SLOW, prefills=(mode,), client_specs=client_specs))
    ended = report.counters["rooms_aborted"] + report.counters["rooms_failed"]
    assert ended >= 8
    assert report.counters["rooms_handed_over"] >= 8


@pytest.mark.parametrize(
    "kind", [FaultKind.PREFILL_KILL, FaultKind.DECODE_KILL, FaultKind.PAIR_KILL]
)
@pytest.mark.parametrize("mode", ["bootstrap", "completed"])
def test_requests_survive_the_death_of_either_worker_or_both(mode: Mode, kind: FaultKind) -> None:
    faults = tuple(replace(FAULT, kind=kind, at=1.0 + 1.7 * n) for n in range(3))
    report = passed(replace(SLOW, prefills=(mode, mode), client_specs=CLIENT_SPECS, faults=faults))
    assert report.counts["requests retried"] > 0


@pytest.mark.parametrize("kind", [FaultKind.PREFILL_HANG, FaultKind.DECODE_HANG])
@pytest.mark.parametrize("second_draw", [0.0, 0.9], ids=["accelerator", "process"])
def test_requests_survive_a_worker_that_hangs_during_a_handoff(
    kind: FaultKind, second_draw: float
) -> None:
    hang = replace(FAULT, kind=kind, second_draw=second_draw, duration_s=7.0)
    passed(replace(SLOW, client_specs=CLIENT_SPECS, faults=(hang,)))


def test_an_indexer_that_restarts_empty_receives_everything_again() -> None:
    """Its workers publish snapshots, and routers apply them as snapshots."""
    kill = replace(FAULT, kind=FaultKind.INDEXER_KILL, at=3.0)
    report = passed(
        replace(
            SLOW, client_specs=CLIENT_SPECS, faults=(kill, replace(kill, at=5.0, second_draw=0.9))
        )
    )
    assert report.counts["cached tokens predicted"] > 0


def test_an_indexer_dies_while_batches_are_lost_and_duplicated() -> None:
    garbled = replace(FAULT, kind=FaultKind.EVENTS_GARBLED, at=0.1, duration_s=7.0)
    kill = replace(FAULT, kind=FaultKind.INDEXER_KILL, at=3.0, duration_s=0.2)
    report = passed(replace(SLOW, blocks=64, client_specs=CLIENT_SPECS, faults=(garbled, kill)))
    assert report.counts["batches garbled"] > 0


def test_a_mesh_that_vanishes_from_the_registry_and_returns_serves_again() -> None:
    flaps = tuple(
        replace(FAULT, kind=FaultKind.REGISTRY_FLAP, at=0.5 + n, target_draw=n / 5, duration_s=1.2)
        for n in range(5)
    )
    passed(replace(SLOW, routers=2, indexers=2, client_specs=CLIENT_SPECS, faults=flaps))


@pytest.mark.parametrize("subscriber_bytes", [1500, 2048, 3000, 4096])
def test_a_router_that_missed_more_than_the_indexer_retains_catches_up(
    subscriber_bytes: int,
) -> None:
    """Formerly the router had missed more than a subscriber's queue may hold, so it was cut,
    resumed, and was cut again, until a worker published new events.
    """
    kill = replace(FAULT, kind=FaultKind.INDEXER_KILL, at=1.0, duration_s=6.0)
    report = passed(
        replace(
            SLOW,
            blocks=64,
            subscriber_bytes=subscriber_bytes,
            client_specs=CLIENT_SPECS,
            faults=(kill,),
        )
    )
    assert report.counts["indexer failovers"] > 0
