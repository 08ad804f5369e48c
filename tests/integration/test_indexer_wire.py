"""From an engine's ZeroMQ socket to `Match` and `Verify`: defects of other indexes, and tiers.

The first four tests cover failures of Dynamo 1.6.1's index with its own listener.
"""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("zmq", reason="needs pyzmq, which `make setup` installs")
pytest.importorskip("msgspec", reason="needs msgspec, which `make setup` installs")

import worker_svc.kv_events.publisher
from common.kv.events import Tier
from tests.integration.engine_wire import (
    BLOCK,
    CLEARED,
    EngineWire,
    names_of,
    partition_of,
    reader_of,
    removed,
    stored,
    wired_mesh,
)
from tests.kit.waiting import until
from worker_svc.kv_events.external_events import DuplicatePolicy, KvEventFormat

PROMPT = list(range(100, 100 + 5 * BLOCK))
OTHER = list(range(900, 900 + 3 * BLOCK))


# Defects of Dynamo's index.


async def test_equal_content_under_other_engine_hashes_loses_no_removals() -> None:
    one_wire, other_wire = EngineWire(), EngineWire(as_arrays=True)
    async with (
        wired_mesh() as mesh,
        mesh.worker(1, one_wire) as one,
        mesh.worker(2, other_wire) as other,
    ):
        await one_wire.publish(stored([11, 12, 13, 14, 15], None, PROMPT))
        # Another engine has other hashes for the same blocks, signed or unsigned.
        await other_wire.publish(stored([-1, -2, -3, -4, -5], None, PROMPT))
        # And one engine may hold equal content twice, under two names.
        await other_wire.publish(stored([71, 72, 73, 74, 75], None, PROMPT))
        await mesh.holds(one, PROMPT, 5)
        await mesh.holds(other, PROMPT, 5)
        await other_wire.publish(removed(2**64 - 5, -4), removed(75))
        await mesh.holds(other, PROMPT, 4)
        assert await mesh.depths(one, PROMPT) == (5, 5, 5), "its blocks are its own"
        await other_wire.publish(removed(74))
        await mesh.holds(other, PROMPT, 3)
        await other_wire.publish(removed(-3, -2, -1), removed(73, 72, 71))
        await mesh.holds(other, PROMPT, 0)
        assert await mesh.verified(other) == 0
        assert await mesh.verified(one) == 5


async def test_a_middle_block_that_returns_brings_its_tail_back() -> None:
    wire = EngineWire()
    async with wired_mesh() as mesh, mesh.worker(1, wire) as app:
        await wire.publish(stored([11, 12, 13, 14, 15], None, PROMPT))
        await mesh.holds(app, PROMPT, 5)
        await wire.publish(removed(13))
        await mesh.holds(app, PROMPT, 2)
        assert await mesh.verified(app) == 2, "unreachable blocks are not advertised"
        await wire.publish(stored([13], 12, PROMPT[2 * BLOCK : 3 * BLOCK]))
        await mesh.holds(app, PROMPT, 5)
        assert await mesh.verified(app) == 5


@pytest.mark.slow
async def test_an_engine_restart_that_resets_the_sequence_is_detected() -> None:
    wire = EngineWire()
    async with wired_mesh() as mesh, mesh.worker(1, wire) as app:
        for n in range(20):
            await wire.publish(stored([n], None, [n] * BLOCK))
        await wire.publish(stored([1001, 1002, 1003, 1004, 1005], None, PROMPT))
        await mesh.holds(app, PROMPT, 5)
        await wire.restart()
        await wire.publish(stored([1001, 1002, 1003], None, OTHER))
        await mesh.holds(app, OTHER, 3)
        assert await mesh.depths(app, PROMPT) == (0, 0, 0), "the old cache is gone"
        assert await mesh.verified(app) == 3
        assert mesh.state(app) == "exact"
        assert reader_of(app).counts["resets"] == 1


@pytest.mark.slow
async def test_a_gap_without_repair_never_serves_a_wrong_index() -> None:
    wire = EngineWire(keeps=0)
    async with wired_mesh() as mesh, mesh.worker(1, wire) as app:
        # Without replay, the first batch to arrive shows that the reader is connected.
        await _first_batch_received(wire, app)
        await wire.publish(CLEARED)
        await wire.publish(stored([11, 12, 13, 14, 15], None, PROMPT))
        await mesh.holds(app, PROMPT, 5)
        await wire.publish(removed(15, 14, 13, 12, 11), reaches=False)
        await wire.publish(stored([21, 22, 23], None, OTHER))
        await mesh.holds(app, OTHER, 3)
        assert await mesh.depths(app, PROMPT) == (0, 0, 0), (
            "the block may be gone, so it is not advertised"
        )
        # Stale meanwhile if its stream ends on a busy machine; then it matches nothing.
        await until(lambda: mesh.state(app) == "degraded", "the status reports the subset")
        assert await mesh.verified(app) == 3
        await wire.publish(CLEARED)
        await wire.publish(stored([11, 12, 13, 14, 15], None, PROMPT))
        await mesh.holds(app, PROMPT, 5)
        await until(lambda: mesh.state(app) == "exact", "a cleared cache is fully known")


async def _first_batch_received(wire: EngineWire, app: object) -> None:
    from worker_svc.app import WorkerApp

    assert isinstance(app, WorkerApp)
    reader = reader_of(app)

    async def is_received() -> bool:
        await wire.publish(CLEARED)
        return reader.counts["batches"] > 0

    await until(is_received, "a batch is received")


# More cases on the same wire.


@pytest.mark.slow
async def test_a_repaired_gap_keeps_the_source_exact() -> None:
    wire = EngineWire()
    async with wired_mesh() as mesh, mesh.worker(1, wire) as app:
        await wire.publish(stored([11, 12, 13, 14, 15], None, PROMPT))
        await mesh.holds(app, PROMPT, 5)
        await wire.publish(removed(15), reaches=False)
        await wire.publish(removed(14), reaches=False)
        await wire.publish(stored([21, 22, 23], None, OTHER))
        await mesh.holds(app, OTHER, 3)
        assert await mesh.depths(app, PROMPT) == (3, 3, 3)
        # No later batch shows the gap; the idle timeout detects it.
        await wire.publish(removed(13), reaches=False)
        await mesh.holds(app, PROMPT, 2)
        assert mesh.state(app) == "exact"
        assert reader_of(app).counts["losses"] == 0


@pytest.mark.slow
async def test_a_gap_longer_than_what_the_engine_keeps_is_a_loss() -> None:
    wire = EngineWire(keeps=2)
    async with wired_mesh() as mesh, mesh.worker(1, wire) as app:
        await wire.publish(stored([11, 12, 13, 14, 15], None, PROMPT))
        await mesh.holds(app, PROMPT, 5)
        await wire.publish(removed(15, 14, 13, 12, 11), reaches=False)
        for n in range(5):
            await wire.publish(stored([n], None, [n] * BLOCK), reaches=False)
        await wire.publish(stored([21, 22, 23], None, OTHER))
        await mesh.holds(app, OTHER, 3)
        assert await mesh.depths(app, PROMPT) == (0, 0, 0)
        assert await mesh.depths(app, [4] * BLOCK) == (1, 1, 1), "the kept batches are known"
        assert mesh.state(app) == "degraded"
        assert reader_of(app).counts["losses"] == 1


async def test_an_invalid_engine_batch_counts_as_lost_events() -> None:
    wire = EngineWire()
    async with wired_mesh() as mesh, mesh.worker(1, wire) as app:
        await wire.publish(stored([11, 12, 13, 14, 15], None, PROMPT))
        await mesh.holds(app, PROMPT, 5)
        await wire.publish(stored([21, 22, 23], None, OTHER, medium="TAPE"))
        await wire.publish(stored([31], None, [7] * BLOCK))
        await mesh.holds(app, [7] * BLOCK, 1)
        assert await mesh.depths(app, PROMPT) == (0, 0, 0)
        assert mesh.state(app) == "degraded"
        assert reader_of(app).counts["malformed"] == 1


@pytest.mark.slow
async def test_a_silent_engine_restart_is_detected() -> None:
    wire = EngineWire()
    async with wired_mesh() as mesh, mesh.worker(1, wire) as app:
        await wire.publish(stored([11, 12, 13, 14, 15], None, PROMPT))
        await mesh.holds(app, PROMPT, 5)
        await wire.restart()
        await mesh.holds(app, PROMPT, 0)
        assert mesh.state(app) == "exact"
        assert await mesh.verified(app) == 0


@pytest.mark.slow
async def test_a_restarted_engine_at_the_same_sequence_is_detected() -> None:
    wire = EngineWire()
    async with wired_mesh() as mesh, mesh.worker(1, wire) as app:
        await wire.publish(stored([11, 12], None, PROMPT[: 2 * BLOCK]))
        await wire.publish(stored([13, 14, 15], 12, PROMPT[2 * BLOCK :]))
        await mesh.holds(app, PROMPT, 5)
        await wire.restart()
        await wire.publish(stored([21], None, OTHER[:BLOCK]), reaches=False)
        await wire.publish(stored([22], 21, OTHER[BLOCK : 2 * BLOCK]), reaches=False)
        # Its number is the next one of the old engine.
        await wire.publish(stored([23], 22, OTHER[2 * BLOCK :]))
        await mesh.holds(app, OTHER, 3)
        await mesh.holds(app, PROMPT, 0)
        assert await mesh.verified(app) == 3


@pytest.mark.slow
async def test_a_new_connection_without_proof_of_continuity_counts_as_lost_events() -> None:
    wire = EngineWire(keeps=0)
    async with wired_mesh() as mesh, mesh.worker(1, wire) as app:
        reader = reader_of(app)
        # Batches sent before the reader connects are lost too, which is common on a busy machine.
        await wire.publish(CLEARED, reaches=False)
        await _first_batch_received(wire, app)
        await wire.publish(stored([11, 12, 13, 14, 15], None, PROMPT))
        await mesh.holds(app, PROMPT, 5)
        losses = reader.counts["losses"]
        assert losses == 1
        await wire.restart()
        await until(lambda: reader.counts["losses"] > losses, "the new connection is noticed")
        await mesh.holds(app, PROMPT, 0)
        await wire.publish(CLEARED, reaches=False)

        async def is_indexed() -> bool:
            await wire.publish(stored([21, 22, 23], None, OTHER))
            return await mesh.depths(app, OTHER) == (3, 3, 3)

        await until(is_indexed, "the index has the new prompt")
        assert await mesh.depths(app, PROMPT) == (0, 0, 0)
        assert mesh.state(app) == "degraded"


async def test_tiers_go_from_the_engines_events_to_the_matched_depths() -> None:
    event_format = KvEventFormat(BLOCK, BLOCK, DuplicatePolicy.IDEMPOTENT, tiers=3)
    wire = EngineWire()
    async with wired_mesh() as mesh, mesh.worker(1, wire, event_format=event_format) as app:
        await wire.publish(stored([11, 12, 13, 14, 15], None, PROMPT, medium="GPU"))
        await mesh.holds(app, PROMPT, 5)
        # Copied to the host, then evicted from the device, the deepest further to the disk.
        await wire.publish(stored([13, 14, 15], 12, PROMPT[2 * BLOCK :], medium="CPU_PINNED"))
        await wire.publish(removed(15, 14, 13, medium="GPU"))
        await mesh.holds(app, PROMPT, (2, 5, 5))
        await wire.publish(stored([15], 14, PROMPT[4 * BLOCK :], medium="DISK"))
        await wire.publish(removed(15, medium="CPU_PINNED"))
        await mesh.holds(app, PROMPT, (2, 4, 5))
        assert await mesh.verified(app) == 2 + 4 + 5, "sets are cumulative"
        names = names_of(partition_of(app), PROMPT).tolist()
        for tier, count in ((Tier.DEVICE, 2), (Tier.HOST, 4), (Tier.DISK, 5)):
            assert mesh.published(app, tier=tier) == set(names[:count])
        # The start leaves the device: the device blocks after it cannot match any more.
        await wire.publish(stored([11], None, PROMPT[:BLOCK], medium="CPU_PINNED"))
        await wire.publish(removed(11, medium="GPU"))
        await mesh.holds(app, PROMPT, (0, 4, 5))
        await wire.publish(removed(11, medium="CPU_PINNED"))
        await mesh.holds(app, PROMPT, 0)
        assert await mesh.verified(app) == 0


async def test_adapters_and_salts_have_separate_chains_and_unknown_ones_none() -> None:
    wire = EngineWire()
    async with wired_mesh() as mesh, mesh.worker(1, wire) as app:
        await wire.publish(
            stored([11, 12, 13, 14, 15], None, PROMPT, lora_name="sql"),
            stored([21, 22, 23, 24], None, PROMPT[: 4 * BLOCK], cache_salt="tenant"),
            stored([31, 32, 33], None, PROMPT[: 3 * BLOCK]),
        )
        await mesh.holds(app, PROMPT, 5, lora="sql")
        await mesh.holds(app, PROMPT, 4, salt="tenant")
        await mesh.holds(app, PROMPT, 3)
        await mesh.holds(app, PROMPT, 0, lora="sql", salt="tenant")
        await wire.publish(removed(11))
        await mesh.holds(app, PROMPT, 0, lora="sql")
        assert await mesh.depths(app, PROMPT) == (3, 3, 3)
        # An adapter without a name, and an image: these blocks are indistinguishable from others.
        await wire.publish(
            {**stored([41, 42, 43], None, OTHER), "lora_id": 7},
            stored([51, 52, 53], None, OTHER, extra_keys=[["image"], None, None]),
            stored([61], None, [5] * BLOCK),
        )
        await mesh.holds(app, [5] * BLOCK, 1)
        assert await mesh.depths(app, OTHER) == (0, 0, 0)
        assert mesh.state(app) == "exact", "they are excluded by rule, not lost"


async def test_adapters_of_vllm_are_named_among_the_keys_of_its_blocks() -> None:
    wire = EngineWire(as_map=True)
    adapter: dict[str, Any] = {"lora_id": 1, "lora_name": "sql", "group_idx": 0}
    event_format = KvEventFormat(BLOCK, BLOCK, DuplicatePolicy.COUNTED, tiers=3)
    async with wired_mesh() as mesh, mesh.worker(1, wire, event_format=event_format) as app:
        await wire.publish(
            stored([1, 2], None, PROMPT[: 2 * BLOCK], extra_keys=[["sql"], ["sql"]], **adapter),
            # A salt is a key of the first block only, and has no mark.
            stored([3, 4], None, OTHER[: 2 * BLOCK], extra_keys=[["sql", "x"], ["sql"]], **adapter),
            stored([5], 4, OTHER[2 * BLOCK :], extra_keys=[["sql"]], **adapter),
            stored([6], None, [5] * BLOCK, medium="STORAGE", extra_keys=[None]),
        )
        await mesh.holds(app, [5] * BLOCK, (0, 0, 1))
        await mesh.holds(app, PROMPT, 2, lora="sql")
        assert await mesh.depths(app, PROMPT) == (0, 0, 0)
        assert await mesh.depths(app, OTHER, lora="sql") == (0, 0, 0)
        assert mesh.state(app) == "exact"


async def test_models_and_block_sizes_have_separate_indexes() -> None:
    small, large, other = EngineWire(), EngineWire(), EngineWire()
    wide = KvEventFormat(2 * BLOCK, 2 * BLOCK, DuplicatePolicy.IDEMPOTENT)
    prompt = list(range(8 * BLOCK))
    async with (
        wired_mesh() as mesh,
        mesh.worker(1, small) as one,
        mesh.worker(2, large, event_format=wide, model="wide") as two,
        mesh.worker(3, other, model="another") as three,
    ):
        await small.publish(stored(range(8), None, prompt))
        await large.publish(stored(range(3), None, prompt[: 6 * BLOCK], block=2 * BLOCK))
        await other.publish(stored(range(5), None, prompt[: 5 * BLOCK]))
        for app, depth in ((one, 8), (two, 3), (three, 5)):
            await mesh.holds(app, prompt, depth)
            partition = partition_of(app)
            rows = await mesh.rows(partition, names_of(partition, prompt))
            assert [row.source.worker_id for row in rows] == [app.instance_id], (
                "no other worker matches"
            )
        # A chain of one partition matches nothing in another.
        foreign = await mesh.rows(partition_of(two), names_of(partition_of(one), prompt))
        assert foreign == []


@pytest.mark.row("S1-10", "S1-33")
async def test_each_rank_of_a_worker_is_a_separate_source() -> None:
    wires = [EngineWire(rank=rank) for rank in range(2)]
    async with wired_mesh() as mesh, mesh.worker(1, *wires) as app:
        await wires[0].publish(stored([11, 12, 13, 14, 15], None, PROMPT))
        await wires[1].publish(stored([11, 12], None, PROMPT[: 2 * BLOCK]))
        await mesh.holds(app, PROMPT, 5, rank=0)
        await mesh.holds(app, PROMPT, 2, rank=1)
        await wires[0].publish(CLEARED)
        await mesh.holds(app, PROMPT, 0, rank=0)
        assert await mesh.depths(app, PROMPT, rank=1) == (2, 2, 2)
        assert await mesh.verified(app) == 2


@pytest.mark.slow
async def test_a_publisher_withdraws_blocks_for_an_index_over_budget_and_stays_exact(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(worker_svc.kv_events.publisher, "REGROW_INTERVAL_S", 3600.0)
    wire = EngineWire()
    chain = 64
    async with wired_mesh(budget_mb=0) as mesh, mesh.worker(1, wire) as app:
        ingest = mesh.indexer.ingest
        prompts = [[n, *range(chain * BLOCK - 1)] for n in range(400)]
        for n, prompt in enumerate(prompts):
            await wire.publish(stored(range(n * chain, (n + 1) * chain), None, prompt))
        await until(
            lambda: reader_of(app).counts["batches"] == len(prompts), "all batches are received"
        )
        assert app.publisher is not None
        counters = app.publisher.counters
        # Blocks stored after a shrink do not fit, so all must be stored before.
        await until(lambda: mesh.is_synced(app), "all is in the index")
        budget = ingest.budget.budget_bytes = 10**6
        await until(lambda: counters["shrunk_blocks"], "the publisher has the request")
        await until(
            lambda: mesh.is_synced(app) and ingest.feed.used_bytes <= budget,
            "the publisher has withdrawn enough blocks",
        )
        blocks = await mesh.verified(app)
        assert 0 < blocks < len(prompts) * chain
        assert mesh.state(app) == "exact", "blocks are withdrawn by batches"
        # The deepest went first: all prompts are cut at about the same depth.
        depths = [(await mesh.depths(app, prompt))[0] for prompt in prompts]
        assert sum(depths) == blocks
        assert max(depths) - min(depths) <= 1
        # Evicted blocks are removed, withdrawn before or not.
        for n in range(200):
            await wire.publish(removed(*range((n + 1) * chain - 1, n * chain - 1, -1)))
        await mesh.holds(app, prompts[199], 0)
        await mesh.verified(app)
        names = {name for p in prompts[200:] for name in names_of(partition_of(app), p).tolist()}
        assert mesh.published(app) <= names, "all advertised blocks are held"
