"""Affinity keys: conversations that clients name prefer the worker of their last request."""

from __future__ import annotations

from random import Random

import pytest

from common.kv.hashing import hashes_to_bytes
from common.kv.load import Load
from common.kv.prefix_index import SourceMatch
from common.request.placement import Placement, Query
from common.request.preprocessed import RoutingHints
from common.wire.preprocessed import dataclass_to_proto
from kvmesh.router.v1 import router_pb2
from router_svc.core.cost import CostSettings
from router_svc.core.events import RouterEvents
from router_svc.core.key_affinity import KeyAffinity, KeyHome
from router_svc.core.load_tracker import LoadTracker
from router_svc.core.overlap import IndexStatus
from router_svc.core.policy import Policy
from router_svc.core.replication import Replica
from router_svc.core.router import Router
from router_svc.core.selectors import SELECTORS
from router_svc.proto import booking_from_proto, booking_to_proto, query_from_proto
from tests.kit.bookings import FRONTEND, booking, key
from tests.kit.instances import snapshot_of, worker
from tests.kit.kv_events import array

KEY = 77
TOKENS = 640


class EmptyIndex:
    """An index in which no rank holds anything."""

    def __init__(self, state: str) -> None:
        self.state = state

    def match(self, query: Query) -> list[SourceMatch]:
        return []

    def index_status(self, placement: Placement, now: float) -> IndexStatus:
        return IndexStatus(self.state)


def router_of(
    state: str = "none", workers: int = 4, selector: str = "kv", weight: float = 1.0
) -> Router:
    router = Router(
        SELECTORS[selector](),
        index=EmptyIndex(state),
        cost_settings=CostSettings(affinity_weight=weight),
    )
    fleet = [worker(n, block_size=16, kv_index="events") for n in range(1, workers + 1)]
    router.update(snapshot_of(*fleet), 0.0)
    return router


def query(number: int = 0, affinity_key: int = KEY, tokens: int = TOKENS) -> Query:
    """A prompt that shares no block with those of other numbers; 0 tokens: its length is
    unknown."""
    names = array(range(1000 * number + 1, 1000 * number + 1 + tokens // 16))
    hashes = hashes_to_bytes(names)
    return Query("m", tokens, hashes, int(tokens > 0), 16, affinity_key=affinity_key)


def place(router: Router, number: int, **fields: int) -> tuple[int, str]:
    """Places a request that ends at once; returns its worker and the outcome for its key."""
    record = router.decide(query(number, **fields), key(number), float(number), Random(number))
    router.load_tracker.free(key(number))
    return record.decision.worker.worker_id, record.key_affinity


@pytest.mark.parametrize("tokens", [TOKENS, 0])
def test_requests_of_one_key_stay_on_one_worker_without_an_index(tokens: int) -> None:
    router = router_of()
    placed = [place(router, number, tokens=tokens) for number in range(12)]
    assert {worker_id for worker_id, _ in placed} == {placed[0][0]}
    assert [outcome for _, outcome in placed] == ["bound", *["kept"] * 11]
    others = {place(router, number, affinity_key=number)[0] for number in range(20, 40)}
    assert len(others) > 1, "other keys run elsewhere"


def test_the_preference_gives_way_to_load() -> None:
    router = router_of()
    home, _ = place(router, 0)
    busy = Load(waiting=1, waiting_tokens=10 * TOKENS, kv_total_blocks=100)
    router.load_tracker.report(home, 0, busy, 1.0)
    moved, outcome = place(router, 1)
    assert (moved != home, outcome) == (True, "moved")
    router.load_tracker.report(home, 0, Load(kv_total_blocks=100), 2.0)
    assert place(router, 3) == (moved, "kept"), "the key follows its last request"


def test_an_exact_index_decides_without_the_key() -> None:
    router = router_of("exact")
    assert len({place(router, number)[0] for number in range(12)}) > 1


def test_the_weight_0_disables_keys_and_other_selectors_ignore_them() -> None:
    for router in (router_of(weight=0.0), router_of(selector="round_robin")):
        assert len({place(router, number)[0] for number in range(12)}) > 1


def test_requests_without_a_key_are_placed_as_before() -> None:
    plain, keyed = router_of(), router_of()
    for number in range(1, 50):
        keyed.events.key_placed(booking(number, affinity_key=number))
    for number in range(30):
        assert place(plain, number, affinity_key=0) == place(keyed, number, affinity_key=0)


def test_an_explanation_names_the_outcome() -> None:
    router = router_of()
    home, _ = place(router, 0)
    record = router.preview(query(1), 1.0, Random(0))
    assert (record.decision.worker.worker_id, record.key_affinity) == (home, "kept")
    assert "affinity key kept" in record.decision.reasons


def test_a_pin_wins_over_the_key() -> None:
    router = router_of()
    home, _ = place(router, 0)
    other = home % 4 + 1
    pinned = query(1)
    pinned.routing = RoutingHints(backend_instance_id=other)
    record = router.decide(pinned, None, 1.0, Random(0))
    assert record.decision.worker.worker_id == other


def test_the_worker_of_a_key_is_compared_in_a_large_fleet() -> None:
    router = Router(SELECTORS["kv"](), index=EmptyIndex("none"), policy=Policy(candidates_max=16))
    fleet = [worker(n, block_size=16, kv_index="events") for n in range(1, 301)]
    router.update(snapshot_of(*fleet), 0.0)
    home, _ = place(router, 0)
    assert {place(router, number)[0] for number in range(1, 10)} == {home}


def test_a_table_forgets_the_key_that_was_placed_longest_ago() -> None:
    events = RouterEvents()
    table = KeyAffinity(events, keys_max=2)
    for number, affinity_key in enumerate((1, 2, 1, 3)):
        events.key_placed(booking(number, Placement(number, 0), affinity_key=affinity_key))
    assert (table.home(1), table.home(2)) == (KeyHome(Placement(2, 0), 7), None)
    assert (table.home(3), table.home(0), len(table)) == (KeyHome(Placement(3, 0), 7), None, 2)


def test_a_key_belongs_to_the_rank_that_computes_the_prompt() -> None:
    tracker = LoadTracker()
    table = KeyAffinity(tracker.events)
    pair = booking(0, Placement(1, 0), prefill=Placement(2, 1), affinity_key=KEY)
    tracker.book(pair, None, 0.0)
    assert table.home(KEY) == KeyHome(Placement(2, 1), 7)


def test_a_peer_learns_where_a_key_was_placed() -> None:
    routers = [router_of(), router_of()]
    replicas = [Replica(one.load_tracker, overlaps=one.overlaps) for one in routers]
    outbound, stream = replicas[0].open_outbound(), replicas[1].stream_opened(0)
    session = routers[0].load_tracker.open_session(FRONTEND, 1)
    placed = routers[0].decide(query(), key(0), 0.0, Random(0), session).decision.worker
    replicas[1].apply_frame(0, stream, outbound.frame(0.0), 0.0)
    routers[1].load_tracker.booking_ended(key(0))
    assert place(routers[1], 1) == (placed.worker_id, "kept")


def test_messages_carry_the_key_and_the_targets() -> None:
    made = booking(1, affinity_key=2**64 - 1)
    assert booking_from_proto(booking_to_proto(made), FRONTEND, "booking") == made
    message = booking_to_proto(made)
    message.affinity_key = 0
    assert booking_from_proto(message, FRONTEND, "booking").affinity_key == 0
    sent = Query("m", 5, affinity_key=2**64 - 1, ttft_target_ms=250.5, itl_target_ms=20.0)
    assert query_from_proto(dataclass_to_proto(sent, router_pb2.Query())) == sent
