"""Continuous batching: the work of each step, queueing, preemption and caching."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.kv.hashing import PrefixHasher
from common.request.preprocessed import FinishReason
from worker_svc.engines.sim.block_manager import BlockManager
from worker_svc.engines.sim.scheduler import Job, SimScheduler, SimSequence
from worker_svc.engines.sim.timing import Timing
from worker_svc.engines.sim.token_oracle import TokenOracle
from worker_svc.engines.stop_tokens import StopToken
from worker_svc.kv_events.external_events import PagesStored

EOS = 2
SIZE = 4
TOKEN_ORACLE = TokenOracle(range(100, 900), EOS)
HASHER = PrefixHasher(mesh_key=b"", model="m", block_size=SIZE)
EOS_ENDS = {EOS: StopToken(FinishReason.EOS)}


def scheduler_of(
    blocks: int = 1000, seqs: int = 8, batched: int = 64, timing: Timing | None = None
) -> SimScheduler:
    return SimScheduler(
        BlockManager(blocks, SIZE),
        timing or Timing(),
        TOKEN_ORACLE,
        max_num_seqs=seqs,
        max_num_batched_tokens=batched,
    )


def u32(tokens: list[int]) -> bytes:
    return np.asarray(tokens, dtype="<u4").tobytes()


def job(tokens: list[int], max_tokens: int = 8, **more: object) -> Job:
    options: dict[str, object] = {"hasher": HASHER, **more}
    return Job(u32(tokens), max_tokens, **options)  # type: ignore[arg-type]


def step_of(scheduler: SimScheduler) -> list[SimSequence] | None:
    """Runs one step; None if there is nothing to compute."""
    step = scheduler.plan()
    return None if step is None else scheduler.complete(step)


def run_to_end(scheduler: SimScheduler, steps_max: int = 10_000) -> int:
    for steps in range(steps_max):
        if step_of(scheduler) is None:
            return steps
    raise AssertionError(f"still busy after {steps_max} steps")


def at_rest(scheduler: SimScheduler) -> bool:
    scheduler.blocks.check()
    return (scheduler.running, scheduler.waiting, scheduler.waiting_tokens) == (0, 0, 0) and (
        scheduler.blocks.used_blocks == 0
    )


def test_output_equals_the_token_oracle() -> None:
    scheduler = scheduler_of()
    seq = scheduler.submit(job([1, 2, 3], 200, stops=EOS_ENDS))

    run_to_end(scheduler)

    assert seq.output == TOKEN_ORACLE.continue_tokens([1, 2, 3], 200)
    assert seq.end is FinishReason.EOS
    assert at_rest(scheduler)


@given(
    jobs=st.lists(
        st.tuples(
            st.lists(st.integers(0, 1), min_size=1, max_size=30),
            st.integers(1, 30),
            st.integers(-1, 1),
            st.booleans(),
        ),
        min_size=1,
        max_size=12,
    ),
    blocks=st.integers(15, 40),
    batched=st.integers(4, 40),
    removed=st.sets(st.integers(0, 11), max_size=4),
)
@settings(max_examples=60, deadline=None)
def test_under_any_load_output_is_correct_and_all_counts_return_to_zero(
    jobs: list[tuple[list[int], int, int, bool]], blocks: int, batched: int, removed: set[int]
) -> None:
    scheduler = scheduler_of(blocks, seqs=4, batched=batched)
    seqs: list[SimSequence] = []
    for tokens, most, priority, cached in jobs:
        hasher = HASHER if cached else None
        seqs.append(scheduler.submit(job(tokens, most, priority=priority, hasher=hasher)))
        step = scheduler.plan()
        assert step is not None
        assert sum(count for _, count in step.entries) <= batched
        assert len(step.entries) <= 4
        for index in removed & set(range(len(seqs))):
            scheduler.remove(seqs[index])
        scheduler.complete(step)
        scheduler.blocks.check()
    run_to_end(scheduler)

    for index, (seq, (tokens, most, _, _)) in enumerate(zip(seqs, jobs, strict=True)):
        oracle = TOKEN_ORACLE.continue_tokens(tokens, most, ignore_eos=True)
        if index in removed and seq.end is None:
            assert seq.output == oracle[: len(seq.output)]
        else:
            assert (seq.output, seq.end) == (oracle, FinishReason.LENGTH)
    assert at_rest(scheduler)


def test_a_long_prompt_is_computed_in_chunks_alongside_running_sequences() -> None:
    scheduler = scheduler_of(batched=16)
    short = scheduler.submit(job([1], 20))
    step_of(scheduler)
    scheduler.submit(job(list(range(50)), 1))

    chunks = []
    while (step := scheduler.plan()) is not None:
        chunks.append([count for _, count in step.entries])
        scheduler.complete(step)

    assert chunks[:4] == [[1, 15], [1, 15], [1, 15], [1, 5]]
    assert len(short.output) == 20


def test_no_more_sequences_run_than_allowed() -> None:
    scheduler = scheduler_of(seqs=2)
    for number in range(5):
        scheduler.submit(job([number], 3))

    step_of(scheduler)

    assert (scheduler.running, scheduler.waiting, scheduler.waiting_tokens) == (2, 3, 3)


def test_the_larger_priority_starts_first_and_equals_in_their_order() -> None:
    scheduler = scheduler_of(seqs=1)
    seqs = [scheduler.submit(job([n], 1, priority=p)) for n, p in enumerate([0, 5, 0, 5])]

    finished: list[SimSequence] = []
    while (result := step_of(scheduler)) is not None:
        finished.extend(result)

    assert finished == [seqs[1], seqs[3], seqs[0], seqs[2]]


def test_a_small_request_does_not_overtake_a_large_one_that_waits_for_blocks() -> None:
    scheduler = scheduler_of(blocks=10)
    scheduler.submit(job(list(range(24)), 16))
    step_of(scheduler)
    large = scheduler.submit(job([7] * 30, 1))
    small = scheduler.submit(job([8], 1))

    step_of(scheduler)
    assert (large.cached_tokens, small.cached_tokens) == (None, None)
    run_to_end(scheduler)
    assert (large.end, small.end) == (FinishReason.LENGTH, FinishReason.LENGTH)


def test_without_blocks_the_last_sequence_is_preempted_and_keeps_its_output() -> None:
    scheduler = scheduler_of(blocks=8)
    first = scheduler.submit(job([1] * 8, 24))
    second = scheduler.submit(job([2] * 8, 24))

    finished: list[SimSequence] = []
    while (result := step_of(scheduler)) is not None:
        finished.extend(seq for seq in result if seq.end)

    assert scheduler.preemptions >= 1
    assert finished == [first, second]
    assert second.output == TOKEN_ORACLE.continue_tokens([2] * 8, 24, ignore_eos=True)
    assert at_rest(scheduler)


def test_a_lower_priority_sequence_is_preempted_even_if_it_came_first() -> None:
    scheduler = scheduler_of(blocks=8)
    scheduler.submit(job([1] * 8, 24, priority=-1))
    step_of(scheduler)
    important = scheduler.submit(job([2] * 8, 24))

    finished: list[SimSequence] = []
    while not finished:
        result = step_of(scheduler)
        assert result is not None
        finished.extend(seq for seq in result if seq.end)

    assert finished == [important]


@dataclass
class Pair:
    """A request, then a request with the same prompt."""

    scheduler: SimScheduler = field(default_factory=scheduler_of)

    def cached_of_second(self, first: Job, second: Job) -> int | None:
        self.scheduler.submit(first)
        run_to_end(self.scheduler)
        seq = self.scheduler.submit(second)
        run_to_end(self.scheduler)
        return seq.cached_tokens


@pytest.mark.parametrize(("length", "cached"), [(3, 0), (4, 0), (5, 4), (8, 4), (9, 8)])
def test_a_repeated_prompt_is_found_in_the_cache_but_for_its_last_token(
    length: int, cached: int
) -> None:
    tokens = list(range(length))

    assert Pair().cached_of_second(job(tokens, 1), job(tokens, 1)) == cached


def test_the_next_turn_reuses_the_output_of_the_last_one() -> None:
    answer = TOKEN_ORACLE.continue_tokens([1] * 6, 10, ignore_eos=True)
    next_turn = [1] * 6 + answer + [5] * 6

    # The last output token was never an input, so it has no KV.
    assert Pair().cached_of_second(job([1] * 6, 10), job(next_turn, 1)) == 12


def test_a_job_without_a_hasher_neither_reads_nor_fills_the_cache() -> None:
    pair = Pair()
    uncached = job(list(range(20)), 4, hasher=None)

    assert pair.cached_of_second(uncached, uncached) == 0
    assert pair.scheduler.blocks.cached_blocks == 0
    assert pair.cached_of_second(job(list(range(20)), 4), uncached) == 0


def test_jobs_of_different_adapters_share_no_block_and_their_events_name_the_adapter() -> None:
    pair = Pair()
    lora = PrefixHasher(mesh_key=b"", model="m", block_size=SIZE, lora_name="french")
    tokens = list(range(12))

    assert pair.cached_of_second(job(tokens), job(tokens, hasher=lora, lora_name="french")) == 0
    stored = [one for one in pair.scheduler.blocks.events if isinstance(one, PagesStored)]
    assert {one.lora for one in stored} == {"", "french"}


def test_equal_prompts_in_one_step_share_their_blocks_afterwards() -> None:
    scheduler = scheduler_of()
    for _ in range(3):
        scheduler.submit(job(list(range(16)), 5))

    step_of(scheduler)

    assert scheduler.running == 3
    assert scheduler.blocks.used_blocks == 4


def test_the_events_name_blocks_by_the_prefix_hash_of_what_they_hold() -> None:
    scheduler = scheduler_of(batched=8)
    seq = scheduler.submit(job(list(range(10)), 12))
    run_to_end(scheduler)
    tokens = [*range(10), *seq.output][:21]
    names = HASHER.prefix_hashes(tokens).tolist()

    stored = [one for one in scheduler.blocks.events if isinstance(one, PagesStored)]

    assert [name for one in stored for name in one.hashes] == names
    assert [one.parent for one in stored] == [None, names[1]]
    assert b"".join(one.token_ids for one in stored) == u32(tokens[: 4 * len(names)])


def test_removal_frees_all_resources_at_once_in_every_state() -> None:
    scheduler = scheduler_of(seqs=1)
    running, waiting = (scheduler.submit(job([n] * 9, 50)) for n in (1, 2))
    step = scheduler.plan()
    assert step is not None

    scheduler.remove(waiting)
    assert (scheduler.waiting, scheduler.waiting_tokens) == (0, 0)
    scheduler.remove(running)
    scheduler.remove(running)

    assert at_rest(scheduler)
    assert scheduler.complete(step) == []
    assert running.output == []
    assert scheduler.plan() is None


@pytest.mark.parametrize(
    ("is_visible", "extra", "end"), [(True, 1, FinishReason.STOP), (False, 0, FinishReason.STOP)]
)
def test_a_stop_token_ends_the_output_and_only_a_visible_one_is_part_of_it(
    is_visible: bool, extra: int, end: FinishReason
) -> None:
    oracle = TOKEN_ORACLE.continue_tokens([1, 2, 3], 20, ignore_eos=True)
    scheduler = scheduler_of()
    stops = {oracle[5]: StopToken(FinishReason.STOP, is_visible), **EOS_ENDS}
    seq = scheduler.submit(job([1, 2, 3], 20, stops=stops))

    run_to_end(scheduler)

    assert seq.output == oracle[: 5 + extra]
    assert (seq.end, seq.stop_token) == (end, oracle[5])


def test_no_stop_token_counts_before_min_tokens() -> None:
    oracle = TOKEN_ORACLE.continue_tokens([1, 2, 3], 20, ignore_eos=True)
    scheduler = scheduler_of()
    stops = {oracle[2]: StopToken(FinishReason.STOP), oracle[9]: StopToken(FinishReason.STOP)}
    seq = scheduler.submit(job([1, 2, 3], 20, stops=stops, min_tokens=5))

    run_to_end(scheduler)

    assert seq.output == oracle[:9]


def test_the_duration_of_a_step_depends_on_its_work() -> None:
    timing = Timing(base_s=1.0, prefill_token_s=0.1, decode_seq_s=0.01, kv_token_s=0.001)
    scheduler = scheduler_of(timing=timing)
    scheduler.submit(job([1] * 10, 3))

    durations = []
    while (step := scheduler.plan()) is not None:
        durations.append(step.duration_s)
        scheduler.complete(step)

    assert durations == pytest.approx([2.0, 1.01 + 0.010, 1.01 + 0.011])


def test_the_duration_of_a_step_counts_reused_tokens_but_not_removed_ones() -> None:
    timing = Timing(base_s=0.0, prefill_token_s=0, decode_seq_s=0, kv_token_s=1.0)
    scheduler = scheduler_of(timing=timing)
    scheduler.submit(job([1] * 10, 1))
    run_to_end(scheduler)
    leaver = scheduler.submit(job([2] * 7, 50))
    scheduler.submit(job([1] * 10, 3))

    durations = []
    for _ in range(3):
        step = scheduler.plan()
        assert step is not None
        durations.append(step.duration_s)
        scheduler.complete(step)
        scheduler.remove(leaver)

    assert durations == [8.0, 10.0, 11.0]


def test_with_all_blocks_pinned_the_engine_waits_and_then_continues() -> None:
    scheduler = scheduler_of(blocks=4)
    block_table = scheduler.blocks.admit([], 4 * SIZE)
    assert block_table is not None
    transfer = scheduler.blocks.pin(block_table)
    scheduler.blocks.release(block_table)
    seq = scheduler.submit(job([1] * 4, 2))

    assert scheduler.plan() is None
    scheduler.blocks.unpin(transfer)
    run_to_end(scheduler)

    assert seq.end is FinishReason.LENGTH


def test_a_job_that_can_never_fit_fails_an_assertion() -> None:
    with pytest.raises(AssertionError, match="forever"):
        scheduler_of(blocks=2).submit(job([1] * 6, 3))


def test_prompts_come_first_if_steps_are_not_mixed() -> None:
    scheduler = SimScheduler(
        *(BlockManager(1000, SIZE), Timing(), TOKEN_ORACLE),
        max_num_batched_tokens=8,
        is_mixed=False,
    )
    stream = scheduler.submit(job([1, 2, 3], 9))
    assert step_of(scheduler) == [stream]
    assert step_of(scheduler) == [stream]
    long = scheduler.submit(job([*range(100, 117)], 1))
    sizes = []
    while not long.is_ended:
        step = scheduler.plan()
        assert step is not None
        sizes.append((step.prefill_tokens, len(step.entries)))
        scheduler.complete(step)
    # The third chunk is one token, and so a token like that of the stream beside it.
    assert sizes == [(8, 1), (8, 1), (0, 2)]
    run_to_end(scheduler)
    assert stream.output == TOKEN_ORACLE.continue_tokens([1, 2, 3], 9)
    assert at_rest(scheduler)
