"""Background requests: they wait for idle capacity, behind all others, and delay none."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from common.errors import MeshError, Overloaded
from common.registry.instances import Instance
from common.request.placement import Query
from router_svc.core.admission import QueuedRequest, QueueSettings
from router_svc.core.decision import DecisionRecord
from router_svc.core.eligibility import BackgroundLimits
from router_svc.core.policy import Policy
from router_svc.core.pools import PoolObserver
from router_svc.core.router import Router
from router_svc.core.selectors import SELECTORS
from tests.kit import instances
from tests.kit.bookings import FRONTEND, key
from tests.kit.instances import snapshot_of

BATCH = 1000
# Of a prompt that alone is more than a rank may have to compute.
LONG, SHORT = BATCH, 10


class Bed:
    """A router that gives background requests a tenth of a batch, and half of four sequences."""

    def __init__(
        self, *workers: Instance, threshold: float | None = None, requests_max: int = 100
    ) -> None:
        limits = BackgroundLimits(prefill_share=0.1, load_share=0.5)
        queue = QueueSettings(threshold=threshold, requests_max=requests_max)
        policy = Policy(queue=queue, background=limits)
        self.router = Router(SELECTORS["least_loaded"](), policy=policy)
        self.router.update(snapshot_of(*(workers or (worker(1),))), 0.0)
        self._session = self.router.load_tracker.open_session(FRONTEND)

    def admit(
        self,
        name: str,
        tokens: int = SHORT,
        *,
        is_background: bool = True,
        tenant: str = "",
        model: str = "m",
    ) -> DecisionRecord | QueuedRequest:
        query = Query(model, tokens, is_background=is_background, tenant=tenant)
        return self.router.admit(query, key(name), 1.0, Random(0), self._session)

    def rescan(self) -> list[str]:
        """Returns the requests that leave the queue."""
        found: list[tuple[QueuedRequest, DecisionRecord | MeshError | None]] = [
            *self.router.rescan(1.0, Random(0))
        ]
        return [queued.key.request_id for queued, outcome in found if outcome is not None]


def worker(number: int) -> Instance:
    return instances.worker(number, max_num_batched_tokens=BATCH, max_num_seqs=4)


def waits(outcome: DecisionRecord | QueuedRequest) -> bool:
    return isinstance(outcome, QueuedRequest)


def test_a_background_request_runs_at_once_on_an_idle_worker() -> None:
    assert not waits(Bed().admit("line"))


def test_it_waits_also_without_a_threshold_while_a_prompt_is_computed() -> None:
    bed = Bed()
    bed.admit("user", LONG, is_background=False)
    assert waits(bed.admit("line"))
    assert bed.rescan() == []
    bed.router.load_tracker.mark_prefill_done(key("user"))
    assert bed.rescan() == ["line"]


def test_it_leaves_sequences_free_for_others() -> None:
    bed = Bed()
    assert not any(waits(bed.admit(name, 1)) for name in ("a", "b"))
    assert waits(bed.admit("c", 1))
    assert not waits(bed.admit("user", LONG, is_background=False))


def test_others_never_wait_behind_it() -> None:
    bed = Bed()
    bed.admit("user", LONG, is_background=False)
    assert all(waits(bed.admit(f"line {n}")) for n in range(3))
    bed.router.queue.mark_all_dirty()
    assert not waits(bed.admit("user 2", LONG, is_background=False))


def test_others_in_the_queue_go_first() -> None:
    bed = Bed(threshold=0.5)
    bed.admit("user", LONG, is_background=False)
    assert waits(bed.admit("line"))
    assert waits(bed.admit("user 2", is_background=False))
    bed.router.load_tracker.mark_prefill_done(key("user"))
    assert bed.rescan() == ["user 2"]
    bed.router.load_tracker.free(key("user"))
    assert bed.rescan() == ["line"]


def test_it_goes_to_the_worker_that_has_room() -> None:
    bed = Bed(worker(1), worker(2))
    first = bed.admit("user", LONG, is_background=False)
    assert isinstance(first, DecisionRecord)
    line = bed.admit("line")
    assert isinstance(line, DecisionRecord)
    assert line.decision.worker != first.decision.worker


def test_the_lines_of_tenants_share_the_idle_capacity() -> None:
    bed = Bed()
    bed.admit("user", LONG, is_background=False)
    for tenant, count in (("a", 3), ("b", 1)):
        for n in range(count):
            query = Query("m", SHORT, is_background=True, tenant=tenant)
            bed.router.admit(query, key(f"{tenant} {n}"), 1.0, Random(0), None)
    bed.router.load_tracker.free(key("user"))
    assert set(bed.rescan()) == {"a 0", "b 0"}


def test_it_takes_no_place_of_others_in_the_queue() -> None:
    bed = Bed(threshold=0.5, requests_max=2)
    bed.admit("user", LONG, is_background=False)
    assert all(waits(bed.admit(name)) for name in ("line 1", "line 2"))
    with pytest.raises(Overloaded, match="2/2 requests"):
        bed.admit("line 3")
    assert all(waits(bed.admit(name, is_background=False)) for name in ("user 2", "user 3"))
    with pytest.raises(Overloaded, match="2/2 requests"):
        bed.admit("user 4", is_background=False)


def test_what_a_tenant_runs_on_idle_capacity_delays_none_of_its_others() -> None:
    bed = Bed(worker(1), replace(worker(2), model="idle"), threshold=0.5)
    bed.admit("user", LONG, is_background=False)
    for name in ("b 1", "b 2"):
        assert waits(bed.admit(name, LONG, is_background=False, tenant="b"))
    for n in range(3):
        assert not waits(bed.admit(f"line {n}", LONG, tenant="a", model="idle"))
        bed.router.load_tracker.free(key(f"line {n}"))
    assert waits(bed.admit("a 1", LONG, is_background=False, tenant="a"))
    for ends, begins in (("user", "b 1"), ("b 1", "a 1"), ("a 1", "b 2")):
        bed.router.load_tracker.free(key(ends))
        assert bed.rescan() == [begins]


def test_its_wait_is_no_age_of_the_queue() -> None:
    bed = Bed(threshold=0.5)
    bed.admit("user", LONG, is_background=False)
    bed.admit("line")
    assert bed.router.queue.oldest_wait_s(30.0) == 0.0
    bed.admit("user 2", is_background=False)
    assert bed.router.queue.oldest_wait_s(30.0) == 29.0


def test_it_is_no_reason_for_more_workers() -> None:
    samples = []
    for lines in (0, 3):
        bed = Bed()
        observer = PoolObserver(bed.router)
        observer.samples(1.0, {})
        bed.admit("user", LONG, is_background=False)
        assert all(waits(bed.admit(f"line {n}", LONG)) for n in range(lines))
        samples.append(observer.samples(11.0, {}))
    assert samples[0] == samples[1]
