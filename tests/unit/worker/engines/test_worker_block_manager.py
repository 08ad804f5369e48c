"""The simulated KV cache against a naive model, and its rules one by one."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    invariant,
    rule,
    run_state_machine_as_test,
)

from worker_svc.engines.sim.block_manager import (
    BlockManager,
    BlockTable,
)
from worker_svc.kv_events.external_events import PagesRemoved, PagesStored

TOTAL = 9
SIZE = 4

Path = tuple[int, ...]
# Few enough that most prompts share a prefix.
PATHS = st.tuples(*[st.integers(0, 1)] * 3).map(lambda start: start + (0,) * (TOTAL - 3))


def name_of(path: Path) -> int:
    """A name for each path of contents 0 and 1."""
    name = 1
    for content in path:
        name = 2 * name + content
    return name


def names_of(path: Path) -> list[int]:
    return [name_of(path[: i + 1]) for i in range(len(path))]


def tokens_of(path: Path) -> bytes:
    return b"".join(bytes([content, 0, 0, 0]) * SIZE for content in path)


def named(manager: BlockManager, path: Path) -> BlockTable:
    """A table of the path's blocks, computed and named."""
    block_table = manager.admit(names_of(path), SIZE * len(path))
    assert block_table is not None
    name_rest(manager, block_table, path)
    return block_table


def name_rest(manager: BlockManager, block_table: BlockTable, path: Path) -> None:
    start = block_table.named
    manager.name(block_table, names_of(path)[start:], tokens_of(path[start:]))


def cached(manager: BlockManager, path: Path) -> None:
    manager.release(named(manager, path))


@dataclass(eq=False)
class Twin:
    """A table of the manager and its content in the model: paths, or ids of private blocks.

    path: contents of the blocks it has or may get.
    """

    real: BlockTable
    path: Path
    blocks: list[Path | int]
    named: int
    is_sealed: bool = False


@dataclass
class NaiveCache:
    """Recounts references each time, and searches all leaves for the least recently used."""

    twins: list[Twin] = field(default_factory=list)
    # Time of the last release of each cached path.
    idle_since: dict[Path, int] = field(default_factory=dict)
    privates: int = 0
    clock: int = 0

    def holders(self) -> Counter[Path | int]:
        return Counter(block for twin in self.twins for block in twin.blocks)

    def idle(self) -> list[Path]:
        held = self.holders()
        return [path for path in self.idle_since if not held[path]]

    def free(self) -> int:
        return TOTAL - len(self.holders()) - len(self.idle())

    def evict_for(self, count: int) -> list[int]:
        removed = []
        while self.free() < count:
            leaves = [
                path
                for path in self.idle()
                if not any(other[: len(path)] == path != other for other in self.idle_since)
            ]
            oldest = min(leaves, key=lambda path: self.idle_since[path])
            del self.idle_since[oldest]
            removed.append(name_of(oldest))
        return removed

    def new_privates(self, count: int) -> list[Path | int]:
        self.privates += count
        return list(range(self.privates - count, self.privates))

    def drop(self, twin: Twin) -> None:
        self.twins.remove(twin)
        held = self.holders()
        for block in reversed(twin.blocks):
            if isinstance(block, tuple) and not held[block]:
                self.clock += 1
                self.idle_since[block] = self.clock


class BlockManagerMachine(RuleBasedStateMachine):
    twins = Bundle("twins")
    transfers = Bundle("transfers")

    def __init__(self) -> None:
        super().__init__()
        self.manager = BlockManager(TOTAL, SIZE)
        self.model = NaiveCache()
        self.published: dict[int, int | None] = {}

    @rule(
        target=twins,
        path=PATHS,
        tokens=st.integers(1, SIZE * 5),
    )
    def admit(self, path: Path, tokens: int) -> Twin | None:
        full = tokens // SIZE
        block_table = self.manager.admit(names_of(path[:full]), tokens)
        reused_count = 0
        while (
            reused_count < (tokens - 1) // SIZE
            and path[: reused_count + 1] in self.model.idle_since
        ):
            reused_count += 1
        twin = Twin(BlockTable(), path, [path[: i + 1] for i in range(reused_count)], reused_count)
        self.model.twins.append(twin)
        missing = -(-tokens // SIZE) - reused_count
        if missing > self.model.free() + len(self.model.idle()):
            self.model.twins.remove(twin)
            assert block_table is None
            return None
        self.expect_removed(self.model.evict_for(missing))
        twin.blocks += self.model.new_privates(missing)
        assert block_table is not None
        assert (block_table.reused_count, block_table.named) == (reused_count, reused_count)
        twin.real = block_table
        return twin

    @rule(twin=twins, more=st.integers(0, 2 * SIZE))
    def grow(self, twin: Twin | None, more: int) -> None:
        if twin is None or twin not in self.model.twins or len(twin.blocks) > TOTAL - 2:
            return
        fits = self.manager.grow(twin.real, SIZE * len(twin.blocks) + more)
        missing = -(-more // SIZE)
        assert fits == (missing <= self.model.free() + len(self.model.idle()))
        if fits:
            self.expect_removed(self.model.evict_for(missing))
            twin.blocks += self.model.new_privates(missing)

    @rule(twin=twins, count=st.integers(1, 4))
    def name(self, twin: Twin | None, count: int) -> None:
        if twin is None or twin not in self.model.twins:
            return
        start, stop = twin.named, min(twin.named + count, len(twin.blocks))
        names = names_of(twin.path)[start:stop]
        self.manager.name(twin.real, names, tokens_of(twin.path[start:stop]))
        for index in range(start, stop):
            path = twin.path[: index + 1]
            block = twin.blocks[index]
            if twin.is_sealed:
                break
            if path not in self.model.idle_since:
                self.model.idle_since[path] = 0
                for other in self.model.twins:
                    other.blocks = [path if one == block else one for one in other.blocks]
            elif self.model.holders()[block] > 1:
                twin.is_sealed = True
                break
            twin.blocks[index] = path
            twin.named += 1

    @rule(twin=consumes(twins))
    def release(self, twin: Twin | None) -> None:
        if twin is not None:
            self.model.drop(twin)
            self.manager.release(twin.real)

    @rule(target=transfers, twin=twins)
    def pin(self, twin: Twin | None) -> Twin | None:
        if twin is None or twin not in self.model.twins:
            return None
        pinned = Twin(self.manager.pin(twin.real), twin.path, [*twin.blocks], twin.named, True)
        self.model.twins.append(pinned)
        return pinned

    @rule(twin=consumes(transfers))
    def unpin(self, twin: Twin | None) -> None:
        if twin is not None:
            self.model.drop(twin)
            self.manager.unpin(twin.real)

    @rule()
    def flush(self) -> None:
        idle = self.model.idle()
        assert self.manager.flush() == len(idle)
        for path in idle:
            del self.model.idle_since[path]

    def expect_removed(self, names: list[int]) -> None:
        events = [one for one in self.manager.events if isinstance(one, PagesRemoved)]
        assert [name for event in events for name in event.hashes] == names

    @invariant()
    def the_manager_and_the_model_agree(self) -> None:
        self.manager.check()
        assert self.manager.used_blocks == len(self.model.holders())
        assert self.manager.available_blocks == TOTAL - len(self.model.holders())
        assert set(self.manager.names()) == {name_of(path) for path in self.model.idle_since}

    @invariant()
    def the_events_describe_the_cache_and_never_a_parentless_page(self) -> None:
        for event in self.manager.take_events():
            if isinstance(event, PagesRemoved):
                for name in event.hashes:
                    del self.published[name]
                    assert name not in self.published.values()
                continue
            assert len(event.token_ids) == 4 * SIZE * len(event.hashes)
            for parent, name in zip((event.parent, *event.hashes), event.hashes, strict=False):
                assert name not in self.published
                assert parent is None or parent in self.published
                self.published[name] = parent
        assert set(self.published) == set(self.manager.names())


@pytest.mark.slow
def test_any_history_agrees_with_a_naive_model() -> None:
    run_state_machine_as_test(
        BlockManagerMachine,
        settings=settings(max_examples=60, stateful_step_count=40, deadline=None),
    )


def test_a_second_request_reuses_the_blocks_of_the_first() -> None:
    manager = BlockManager(TOTAL, SIZE)
    first = named(manager, (0, 1, 0))

    second = manager.admit(names_of((0, 1, 1)), 3 * SIZE)

    assert second is not None
    assert second.reused_count == 2
    assert second.blocks[:2] == first.blocks[:2]
    assert manager.used_blocks == 4


def test_the_last_token_of_a_fully_cached_prompt_is_computed_again() -> None:
    manager = BlockManager(TOTAL, SIZE)
    cached(manager, (0, 1, 0))

    for tokens, reused_count in ((3 * SIZE, 2), (3 * SIZE + 1, 3), (1, 0)):
        block_table = manager.admit(names_of((0, 1, 0)), tokens)
        assert block_table is not None
        assert block_table.reused_count == reused_count
        manager.release(block_table)


def test_the_least_recently_used_leaf_is_evicted_first_and_a_parent_after_its_children() -> None:
    manager = BlockManager(4, SIZE)
    cached(manager, (0, 0))
    cached(manager, (0, 1))
    manager.take_events()

    assert manager.admit([], 4 * SIZE) is not None
    removed = [PagesRemoved((name_of((0, 0)), name_of((0, 1)), name_of((0,))))]
    assert manager.take_events() == removed


def test_without_capacity_nothing_changes() -> None:
    manager = BlockManager(4, SIZE)
    cached(manager, (0, 1))
    block_table = manager.admit(names_of((1, 1, 1)), 2 * SIZE)
    assert block_table is not None
    before = (manager.names(), manager.available_blocks, manager.take_events())

    assert manager.admit(names_of((0, 0)), 3 * SIZE) is None
    assert manager.grow(block_table, 5 * SIZE) is False
    assert (manager.names(), manager.available_blocks) == before[:2]
    assert manager.take_events() == []


def test_blocks_that_a_request_reuses_do_not_count_as_capacity_for_its_others() -> None:
    manager = BlockManager(4, SIZE)
    cached(manager, (0, 1))

    assert manager.admit(names_of((0, 1)), 5 * SIZE) is None
    assert manager.admit(names_of((0, 1)), 4 * SIZE) is not None


def test_two_sequences_that_computed_the_same_block_share_one() -> None:
    manager = BlockManager(TOTAL, SIZE)
    path = (0, 1)
    twins = [manager.admit(names_of(path), 2 * SIZE) for _ in range(2)]
    assert manager.used_blocks == 4

    for twin in twins:
        assert twin is not None
        name_rest(manager, twin, path)

    assert manager.used_blocks == 2
    assert len(manager.take_events()) == 1


def test_events_carry_parents_and_tokens_in_order() -> None:
    manager = BlockManager(TOTAL, SIZE)
    cached(manager, (0,))
    named(manager, (0, 1, 1))

    assert manager.take_events() == [
        PagesStored((name_of((0,)),), None, tokens_of((0,)), SIZE),
        PagesStored(tuple(names_of((0, 1, 1))[1:]), name_of((0,)), tokens_of((1, 1)), SIZE),
    ]


def test_pinned_blocks_outlive_their_request_until_the_transfer_ends() -> None:
    manager = BlockManager(4, SIZE)
    block_table = manager.admit([], 4 * SIZE)
    assert block_table is not None
    transfer = manager.pin(block_table)

    manager.release(block_table)
    assert (manager.used_blocks, manager.open_transfers) == (4, 1)
    assert manager.admit([], 1) is None

    manager.unpin(transfer)
    assert (manager.used_blocks, manager.open_transfers) == (0, 0)


def test_a_name_taken_under_another_parent_leaves_the_blocks_private() -> None:
    manager = BlockManager(TOTAL, SIZE)
    cached(manager, (0, 1))
    collides = [name_of((1,)), name_of((0, 1)), name_of((1, 1, 1))]
    block_table = manager.admit(collides, 3 * SIZE)
    assert block_table is not None

    manager.name(block_table, collides, tokens_of((1, 1, 1)))

    manager.check()
    assert block_table.named == 1
    manager.release(block_table)
    assert manager.used_blocks == 0


def test_a_double_release_or_an_unpin_without_a_pin_fails_an_assertion() -> None:
    manager = BlockManager(4, SIZE)
    block_table = manager.admit([], 1)
    assert block_table is not None
    transfer = manager.pin(block_table)

    with pytest.raises(AssertionError):
        manager.release(transfer)
    with pytest.raises(AssertionError):
        manager.unpin(block_table)


def test_sizes_below_one_are_rejected_by_name() -> None:
    with pytest.raises(ValueError, match="total_blocks"):
        BlockManager(0, 16)
