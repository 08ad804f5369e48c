"""The host tier of the simulated KV cache: what moves between the tiers, and what is reported."""

from __future__ import annotations

from collections import defaultdict
from random import Random

import pytest

from common.kv.events import Tier
from worker_svc.engines.sim.block_manager import BlockManager, BlockTable
from worker_svc.engines.sim.scheduler import Job, SimScheduler
from worker_svc.engines.sim.timing import Timing
from worker_svc.engines.sim.token_oracle import TokenOracle
from worker_svc.kv_events.external_events import PagesRemoved, PagesStored

SIZE = 4

Path = tuple[int, ...]


def names_of(path: Path) -> list[int]:
    names, name = [], 1
    for content in path:
        name = 3 * name + content
        names.append(name)
    return names


def content_of(path: Path) -> bytes:
    return b"".join(bytes([content, 0, 0, 0]) * SIZE for content in path)


def admit(manager: BlockManager, path: Path) -> BlockTable | None:
    """A table of the path and one more token, with all names; None without capacity."""
    table = manager.admit(names_of(path), SIZE * len(path) + 1)
    if table is not None:
        start = table.named
        manager.fill(table, start, len(path))
        manager.name(table, names_of(path)[start:], content_of(path[start:]))
    return table


def use(manager: BlockManager, path: Path) -> BlockTable:
    table = admit(manager, path)
    assert table is not None
    counts = BlockTable(reused_count=table.reused_count, host_count=table.host_count)
    manager.release(table)
    return counts


class Published:
    """The pages by tier, as events report them."""

    def __init__(self) -> None:
        self.content: dict[int, bytes] = {}
        self.parents: dict[int, int | None] = {}
        self.held: dict[Tier, set[int]] = defaultdict(set)

    def apply(self, events: list[PagesStored | PagesRemoved]) -> None:
        for event in events:
            held = self.held[event.tier]
            if isinstance(event, PagesRemoved):
                assert held.issuperset(event.hashes), "a removed page was held"
                held.difference_update(event.hashes)
                continue
            for index, (parent, name) in enumerate(
                zip((event.parent, *event.hashes), event.hashes, strict=False)
            ):
                content = event.token_ids[4 * SIZE * index :][: 4 * SIZE]
                assert name not in held, "a page is stored once on a tier"
                assert self.content.setdefault(name, content) == content
                assert self.parents.setdefault(name, parent) == parent
                assert parent is None or any(parent in one for one in self.held.values())
                held.add(name)


def test_any_history_reports_what_the_tiers_hold() -> None:
    rng, manager, published = Random(5), BlockManager(9, SIZE, 6), Published()
    open_tables: list[BlockTable] = []
    loaded = 0
    for _ in range(4000):
        path = tuple(rng.randrange(2) for _ in range(rng.randrange(1, 5)))
        if open_tables and rng.random() < 0.6:
            manager.release(open_tables.pop(rng.randrange(len(open_tables))))
        elif (table := admit(manager, path)) is not None:
            assert manager.is_intact(table, 0, len(path))
            loaded += table.host_count
            open_tables.append(table)
        if rng.random() < 0.01:
            manager.flush()
        manager.check()
        published.apply(manager.take_events())
        assert published.held[Tier.DEVICE] == set(manager.names())
        assert len(published.held[Tier.HOST]) == manager.host_blocks <= 6
        assert published.held[Tier.DEVICE].isdisjoint(published.held[Tier.HOST])
        held = published.held[Tier.DEVICE] | published.held[Tier.HOST]
        assert all((parent := published.parents[one]) is None or parent in held for one in held)
    assert loaded > 100, "blocks returned from the host"


def test_an_evicted_prefix_returns_from_the_host() -> None:
    manager = BlockManager(4, SIZE, 8)
    use(manager, (1, 1, 1))
    use(manager, (2, 2, 2))
    again = use(manager, (1, 1, 1))
    assert (again.reused_count, again.host_count) == (3, 3)
    assert manager.cached_tokens(names_of((1, 1, 1)), 13) == 12
    assert use(manager, (1, 1, 1)).host_count == 0


def test_the_host_evicts_the_oldest_blocks_and_a_flush_empties_it() -> None:
    manager = BlockManager(4, SIZE, 2)
    use(manager, (1, 1, 1))
    use(manager, (2, 2, 2))
    assert manager.host_blocks == 2
    assert manager.cached_tokens(names_of((1, 1, 1)), 13) == 8, "the deepest block came first"
    assert manager.flush() == 5
    assert manager.host_blocks == manager.cached_blocks == 0


def test_a_size_below_zero_is_refused() -> None:
    with pytest.raises(ValueError, match="host_blocks: -1: must not be negative"):
        BlockManager(1, 1, -1)


@pytest.mark.parametrize("is_mixed", [True, False])
def test_tokens_of_the_host_take_their_time_in_the_step(is_mixed: bool) -> None:
    class Names:
        """Names the blocks by the position alone: all prompts share them."""

        def extend(self, state, content):  # type: ignore[no-untyped-def]
            import numpy as np

            count = len(content) // 4 // SIZE
            names = np.arange(state.position + 1, state.position + count + 1, dtype=np.uint64)
            return names, np.zeros(count, dtype=np.uint64)

    manager = BlockManager(4, SIZE, 8)
    timing = Timing(base_s=1.0, prefill_token_s=0.0, decode_seq_s=0.0, kv_token_s=0, host_token_s=2)
    scheduler = SimScheduler(manager, timing, TokenOracle((1,), 0), is_mixed=is_mixed)
    prompt = content_of((1, 1, 1))

    def step_s() -> float:
        job = Job(prompt, 1, hasher=Names())  # type: ignore[arg-type]
        sequence = scheduler.submit(job)
        step = scheduler.plan()
        assert step is not None
        scheduler.complete(step)
        assert sequence.is_ended
        return step.duration_s

    assert step_s() == 1.0
    blocker = manager.admit((), 4 * SIZE)
    assert blocker is not None
    manager.release(blocker)
    assert step_s() == 1.0 + 2 * 2 * SIZE, "two blocks; the last token is computed"
    assert step_s() == 1.0
