"""Decisions, bookings and index choice of a running router, as its gRPC clients observe them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from common.errors import Unavailable
from common.kv.hashing import HASH_SCHEME_ID, PrefixHasher, hashes_to_bytes
from common.request.placement import Query
from kvmesh.router.v1 import router_pb2 as pb
from router_svc.core.candidate import Candidate
from router_svc.core.selectors import RoundRobinSelector, Selection
from tests.kit import instances
from tests.kit.local_router import FRONTEND, NS, LocalRouter, error_of, key, local_router
from tests.kit.waiting import WAIT_S, until

B = 16
HASHER = PrefixHasher(mesh_key=b"", model="m", block_size=B)
APPROX: dict[str, Any] = {
    "kv_events": False,
    "recent_miss_weight": 0.0,
    "worker": {"kv_index": "events"},
}
instance = partial(instances.worker, namespace=NS)


def prompt(blocks: int, seed: int = 0) -> dict[str, Any]:
    """The fields of a query for this many blocks; equal seeds give equal prompts."""
    tokens = [(seed * 7919 + n) % 100_000 for n in range(blocks * B)]
    hashes = hashes_to_bytes(HASHER.prefix_hashes(tokens))
    return {
        "total_tokens": len(tokens),
        "prefix_hashes": hashes,
        "hash_scheme": HASH_SCHEME_ID,
        "block_size": B,
    }


async def explain(bed: LocalRouter, **query: Any) -> pb.ExplainResponse:
    request = pb.ExplainRequest(query=pb.Query(**{"model": "m", "total_tokens": 100, **query}))
    explained: pb.ExplainResponse = await bed.unary("Explain", request)
    return explained


async def overlaps(bed: LocalRouter, **query: Any) -> dict[int, int]:
    rows = (await explain(bed, **query)).candidates
    return {row.worker.worker_id: row.overlap_blocks for row in rows}


async def bookings(bed: LocalRouter) -> list[pb.Booking]:
    return list((await bed.unary("Dump", pb.DumpRequest())).bookings)


async def loads(bed: LocalRouter) -> dict[int, tuple[int, int, int]]:
    """Prefill tokens, blocks and requests of each worker, with an empty request on it."""
    request = pb.PotentialLoadsRequest(query=pb.Query(model="m"))
    rows = (await bed.unary("PotentialLoads", request)).loads
    return {
        row.worker.worker_id: (
            row.potential_prefill_tokens,
            row.potential_decode_blocks,
            row.active_requests,
        )
        for row in rows
    }


# Selection.


class LastWorker(RoundRobinSelector):
    """Always chooses the worker with the highest id."""

    name = "last"

    def select(self, query: Query, candidates: Sequence[Candidate], *args: Any) -> Selection:
        return Selection(max(candidates, key=lambda one: one.placement), "the last one")


@pytest.mark.row("S1-40")
async def test_a_selector_of_the_user_decides_every_request() -> None:
    async with local_router(selector=f"{__name__}:LastWorker") as bed:
        await bed.add_workers(1, 2, 3)
        for number in range(4):
            decision = await bed.route(number)
            assert (decision.worker.worker_id, "the last one" in decision.reasons[0]) == (3, True)
        assert (await explain(bed)).selector == "last"


@pytest.mark.row("S1-73", "S2-14")
async def test_only_allowed_workers_are_candidates_and_without_one_nothing_is_booked() -> None:
    async with local_router() as bed:
        await bed.add_workers(1, 2, 3)
        async with bed.session() as session:
            allowed = pb.New(id=1, key=key(1), query=pb.Query(model="m", total_tokens=10))
            allowed.query.routing.allowed_worker_ids.worker_ids.append(3)
            absent = pb.New(id=2, key=key(2), query=pb.Query(model="m", total_tokens=10))
            absent.query.routing.allowed_worker_ids.worker_ids.append(404)
            nothing = pb.New(id=3, key=key(3), query=pb.Query(model="m", total_tokens=10))
            nothing.query.routing.allowed_worker_ids.SetInParent()
            await session.send(news=[allowed, absent, nothing])
            results = await session.results_by_id(3)
            assert results[1].decision.worker.worker_id == 3
            for number in (2, 3):
                error = error_of(results[number])
                assert isinstance(error, Unavailable)
                assert error.reason == "NO_ALLOWED_WORKER"
            assert [one.key for one in await bookings(bed)] == [key(1)]


@pytest.mark.row("S2-06", "S2-07", "S2-08", "S2-09")
async def test_pins_choose_the_workers_and_ranks_of_both_legs() -> None:
    async with local_router() as bed:
        meeting = {"bootstrap_host": "p", "bootstrap_port": 8998}
        await bed.add_workers(1, 2, role="prefill", dp_size=2, **meeting)
        await bed.add_workers(11, 12, role="decode", dp_size=2)
        for prefill, decode, rank in ((1, 12, 0), (2, 11, 1), (1, 11, 1)):
            query = pb.Query(model="m", total_tokens=100)
            query.routing.prefill_worker_id, query.routing.decode_worker_id = prefill, decode
            query.routing.dp_rank, query.routing.prefill_dp_rank = rank, 1 - rank
            decision = (await bed.unary("Route", pb.RouteRequest(query=query))).decision
            assert (decision.prefill.worker_id, decision.prefill.dp_rank) == (prefill, 1 - rank)
            assert (decision.worker.worker_id, decision.worker.dp_rank) == (decode, rank)


@pytest.mark.row("S2-15", "S2-88")
async def test_taints_are_required_or_preferred() -> None:
    async with local_router() as bed:
        await bed.add(instance(1), instance(2, taints=frozenset({"a"})))
        for n, (field, chosen) in enumerate(
            (("required", {2}), ("preferred", {2}), ("avoid", {1}))
        ):
            found = set()
            for number in range(4):
                query = pb.Query(model="m", total_tokens=100)
                if field == "required":
                    query.routing.routing_constraints.required_taints.append("a")
                else:
                    weight = 10.0 if field == "preferred" else -10.0
                    query.routing.routing_constraints.preferred_taints["a"] = weight
                request = pb.RouteRequest(query=query, key=key(10 * n + number))
                found.add((await bed.unary("Route", request)).decision.worker.worker_id)
            assert found == chosen, field


@pytest.mark.row("S2-15", "S2-88")
async def test_a_worker_must_have_all_required_taints() -> None:
    async with local_router() as bed:
        await bed.add(instance(1, taints=frozenset({"a"})), instance(2, taints=frozenset("ab")))
        query = pb.Query(model="m", total_tokens=100)
        query.routing.routing_constraints.required_taints.extend("ab")
        assert (
            await bed.unary("Route", pb.RouteRequest(query=query))
        ).decision.worker.worker_id == 2
        query.routing.backend_instance_id = 1
        with pytest.raises(Unavailable) as refused:
            await bed.unary("Route", pb.RouteRequest(query=query))
        assert refused.value.reason == "NO_TAINTED_WORKER"


@pytest.mark.row("S1-39")
async def test_what_a_worker_advertises_anew_applies_to_the_next_decision() -> None:
    async with local_router() as bed:
        await bed.add_workers(1, 2)
        query = pb.Query(model="m", total_tokens=100)
        query.routing.routing_constraints.required_taints.append("new")
        with pytest.raises(Unavailable):
            await bed.unary("Route", pb.RouteRequest(query=query))
        await bed.leases[2].update(instance(2, taints=frozenset({"new"})))

        fleet = bed.router.fleet
        await until(
            lambda: any(one.instance.taints for one in fleet.candidates("m", "aggregated")),
            "the router sees the taint",
        )
        reply = await bed.unary("Route", pb.RouteRequest(query=query))
        assert reply.decision.worker.worker_id == 2


@pytest.mark.row("S1-107")
async def test_a_worker_that_has_left_is_never_selected() -> None:
    async with local_router(queue_threshold=0.0) as bed:
        await bed.add_workers(1, 2, max_num_batched_tokens=100)
        async with bed.session() as session:
            for number in range(2):
                await session.place(number)
            # Both are busy, so these wait.
            await session.send_queries(2, 3, 4)
            await bed.waiting(3)
            await bed.leases[1].close()
            await until(lambda: not bed.router.fleet.is_present(1), "worker 1 has left")
            await session.send(frees=[key(0), key(1)])
            chosen = set()
            for _ in range(3):
                (result,) = await session.results(1)
                chosen.add(result.decision.worker.worker_id)
                await session.send(frees=[key(result.id)])
            assert chosen == {2}
            for number in range(5, 15):
                placed = await session.place(number)
                assert placed.decision.worker.worker_id == 2
                await session.send(frees=[key(number)])


# Bookings.


@pytest.mark.row("S1-24", "S1-80", "S1-81", "S1-82")
async def test_prefill_done_and_free_change_the_load_exactly_once() -> None:
    async with local_router() as bed:
        await bed.add_workers(1)
        async with bed.session() as session:
            await session.place(0, total_tokens=100)
            await session.place(1, total_tokens=60)
            one, other = sorted(await bookings(bed), key=lambda b: b.key.request_id)
            assert (one.key, one.frontend_id, one.model) == (key(0), FRONTEND, "m")
            assert (one.worker.worker_id, one.prefill_tokens, one.decode_blocks) == (1, 100, 7)
            assert (other.prefill_tokens, other.decode_blocks) == (60, 4)
            assert one.revision > 0
            expected = [
                ({"prefills_done": [key(0)]}, (60, 11, 2)),
                ({"prefills_done": [key(0)]}, (60, 11, 2)),
                ({"frees": [key(1)]}, (0, 7, 1)),
                ({"frees": [key(1)]}, (0, 7, 1)),
                ({"frees": [key(0)]}, (0, 0, 0)),
            ]
            for number, (frame, load) in enumerate(expected, 10):
                await session.send(**frame)
                await answered(session, number)
                found = await loads(bed)
                assert found[1] == (load[0], load[1], load[2] + 1), frame


async def answered(session: Any, number: int) -> None:
    """Waits until the router has handled all frames sent before."""
    await session.send_queries(number, model="no such model")
    error_of((await session.results(1))[0])


@pytest.mark.row("S1-83")
async def test_output_blocks_add_load_that_decays() -> None:
    async with local_router(track_output_blocks=True) as bed:
        await bed.add_workers(1)
        async with bed.session() as session:
            assert session.hello_ack.track_output_blocks
            await session.place(0, total_tokens=100)
            seen = []
            for number, (blocks, decay) in enumerate(((1, None), (2, None), (1, 0.5)), 10):
                output = pb.OutputBlocks(key=key(0), blocks=blocks, decay_fraction=decay)
                await session.send(outputs=[output])
                await answered(session, number)
                seen.append((await loads(bed))[1][1])
            assert seen[:2] == [8, 10]
            assert seen[2] < 10, "the weight of the booking is halved"


@pytest.mark.row("S1-70", "S1-104")
async def test_blocks_are_booked_by_number_and_only_if_they_are_tracked() -> None:
    for tracked, blocks in ((True, 10), (False, 0)):
        async with local_router(track_active_blocks=tracked) as bed:
            await bed.add_workers(1)
            decision = await bed.route(1, **prompt(10))
            assert decision.charged_decode_blocks == blocks
            (booking,) = await bookings(bed)
            assert booking.decode_blocks == blocks


@pytest.mark.row("S1-104", "S2-86")
async def test_a_request_can_override_what_is_tracked_for_itself_only() -> None:
    async with local_router() as bed:
        await bed.add_workers(1)
        override = {"track_prefill_tokens": False}
        unbooked = await bed.route(1, config_override=override)
        booked = await bed.route(2)
        assert (unbooked.charged_prefill_tokens, booked.charged_prefill_tokens) == (0, 100)


@pytest.mark.row("S1-79")
async def test_a_booking_of_another_router_counts_as_load() -> None:
    async with local_router() as bed:
        await bed.add_workers(1, 2)
        async with bed.session() as session:
            elsewhere = pb.Booking(
                key=key(9),
                frontend_id=FRONTEND,
                model="m",
                worker=pb.Placement(worker_id=1),
                prefill_tokens=500,
                decode_blocks=40,
                revision=1,
            )
            absent = pb.Booking(
                key=key(8),
                frontend_id=FRONTEND,
                model="m",
                worker=pb.Placement(worker_id=404),
                decode_blocks=1,
                revision=1,
            )
            await session.send(announced=[elsewhere, absent])
            assert (await session.place(1)).decision.worker.worker_id == 2
            assert (await loads(bed))[1] == (500, 40, 2), "with the request itself"


# The index.


@pytest.mark.row("S1-41", "S1-42", "S1-45", "S1-46", "S1-48")
@pytest.mark.parametrize(
    ("settings", "state", "reason"),
    [
        ({"overlap_score_credit": 0.0}, "none", "overlap_score_credit is 0"),
        (
            {"overlap_score_credit": 0.0, "kv_events": False},
            "none",
            "overlap_score_credit is 0",
        ),
        ({"kv_events": False}, "approx", ""),
        ({"router_predicted_ttl_secs": 0.0}, "none", "no indexer was reached yet"),
    ],
)
async def test_the_first_rule_that_applies_chooses_the_index(
    settings: dict[str, Any], state: str, reason: str
) -> None:
    async with local_router(**settings) as bed:
        await bed.add(instance(1, kv_index="events"))
        decision = await bed.route(1, **prompt(4))
        assert (decision.worker.worker_id, decision.overlap_blocks) == (1, 0)
        (row,) = (await bed.unary("Dump", pb.DumpRequest())).workers
        assert row.source_state == state
        assert reason in row.source_reason
        held = await overlaps(bed, **prompt(4))
        assert held == {1: 4 if state == "approx" else 0}


@pytest.mark.row("S1-27", "S1-43", "S1-50", "S1-98")
async def test_approximate_entries_expire_after_their_ttl() -> None:
    async with local_router(router_ttl_secs=5.0, **APPROX) as bed:
        await bed.add_workers(1)
        await bed.route(1, **prompt(4))
        bed.clock.now += 4.9
        assert await overlaps(bed, **prompt(4)) == {1: 4}
        bed.clock.now += 0.2

        async def is_expired() -> bool:
            return await overlaps(bed, **prompt(4)) == {1: 0}

        await until(is_expired, "the entries have expired")


@pytest.mark.row("S1-27", "S1-99", "S1-100")
async def test_approximate_entries_above_the_size_are_pruned_to_the_target() -> None:
    limits: dict[str, Any] = {"router_max_tree_size": 40, "router_prune_target_ratio": 0.5}
    async with local_router(**limits, **APPROX) as bed:
        await bed.add_workers(1)

        async def held() -> list[int]:
            rows = [await overlaps(bed, **prompt(4, seed=number)) for number in range(11)]
            return [row[1] for row in rows]

        for number in range(10):
            bed.clock.now += 0.01
            await bed.route(number, **prompt(4, seed=number))
        assert await held() == [4] * 10 + [0]
        bed.clock.now += 0.01
        await bed.route(10, **prompt(4, seed=10))

        async def is_pruned() -> bool:
            return await held() == [0] * 6 + [4] * 5

        await until(is_pruned, "the newest half of the size is left")


@pytest.mark.row("S1-52")
async def test_a_worker_that_returns_has_no_entries_on_any_rank() -> None:
    async with local_router(**APPROX) as bed:
        await bed.add_workers(1, dp_size=2)
        for rank in range(2):
            query = pb.Query(model="m", **prompt(4))
            query.routing.backend_instance_id, query.routing.dp_rank = 1, rank
            request = pb.RouteRequest(query=query, book=True, key=key(rank), frontend_id=FRONTEND)
            await bed.unary("Route", request)
        rows = (await explain(bed, **prompt(4))).candidates
        assert [row.overlap_blocks for row in rows] == [4, 4]
        await bed.leases[1].close()
        await until(lambda: not bed.router.fleet.is_present(1), "the worker has left")
        await bed.add_workers(1, dp_size=2)
        rows = (await explain(bed, **prompt(4))).candidates
        assert [row.overlap_blocks for row in rows] == [0, 0]


# Settings.


def start(folder: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    """Starts a router whose flags are invalid."""
    return subprocess.run(
        [sys.executable, "-m", "router_svc", "--registry-path", str(folder), *flags],
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
        env={"PYTHONPATH": os.pathsep.join(sys.path), "PATH": os.environ["PATH"]},
    )


@pytest.mark.row("S1-101")
def test_event_threads_stop_the_start_and_are_named(tmp_path: Path) -> None:
    done = start(tmp_path, "--router-event-threads=4")
    assert done.returncode == 2
    assert "--router-event-threads" in done.stderr


@pytest.mark.row("S1-102")
def test_values_out_of_range_stop_the_start_and_are_all_named(tmp_path: Path) -> None:
    values = {
        "--router-ttl-secs": "0",
        "--router-max-tree-size": "0",
        "--router-prune-target-ratio": "1.5",
        "--overlap-score-credit": "-1",
    }
    done = start(tmp_path, *(f"{flag}={value}" for flag, value in values.items()))
    assert done.returncode == 2
    for flag in values:
        assert flag in done.stderr
