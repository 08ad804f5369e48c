"""Continuous batching in engine time: what the simulated engine computes in each step. Pure.

A step gives every running sequence its next token, or the next chunk of its prompt; what is left
of `max_num_batched_tokens` admits waiting ones. `plan` chooses the step, `complete` says that its
time has passed; nothing is computed, cached or answered before that. One step is in flight at a
time; sequences may be submitted and removed in between.

Order: the larger `priority` goes first, then the earlier submitted; strictly, so a steady flow of
more important work delays the rest without bound (callers have deadlines). The head of the queue
is never overtaken by a smaller one. When blocks run out, the last of the running order gives up
its blocks and waits in its old place (LIFO); its answer is kept and computed over as if it were
prompt, mostly from the prefix cache.

Handoffs. A sequence whose KV comes from another worker (`Job.is_remote`) has its turn in the queue
for blocks, all of them for itself, and a place among the running ones; there it only arrives, until
`on_kv_arrived` says that the KV is there. One whose KV goes to another worker
(`Job.is_handed_over`)
leaves its blocks pinned in `transfer`, for its owner to unpin. What gave up its blocks is computed
over here, also on a worker that gets its prompts computed elsewhere.

Whoever is found to sit on a page with somebody else's content (see `core/block_manager.py`) goes on
with another state than the truth's: from there on its tokens are wrong, as a real model's would be.

Blocks of the prompt are named when their chunk is computed, blocks of the answer when the sequence
leaves the running ones. So a conversation's next turn finds both.

Invariants: a sequence is waiting, arriving, running or gone; only arriving and running ones hold
blocks; a gone one stays gone and its answer does not change.
"""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Final

import numpy as np

from common.kv.hashing import ChainState, PrefixHasher
from worker_svc.engines.sim.block_manager import BlockManager, BlockTable
from worker_svc.engines.sim.timing import Timing
from worker_svc.engines.sim.token_oracle import TokenOracle
from worker_svc.engines.sim.transfer import page_stamps

_ROOT: Final = ChainState(0, 0)
# The truth's state of a sequence that read a wrong page is off by this.
_CORRUPTION_MASK: Final = 0x5BD1E9955BD1E995


class EndReason(Enum):
    """Why an answer ended."""

    EOS = auto()
    STOP = auto()
    LENGTH = auto()


@dataclass(frozen=True, slots=True)
class StopToken:
    """What a stop token does. is_visible: whether it is part of the answer."""

    end: EndReason
    is_visible: bool = False


@dataclass(frozen=True, slots=True)
class Job:
    """What to generate.

    prompt: token ids, 4 bytes little endian each, at least one. max_tokens: at least 1.
    stops: what ends the answer, once min_tokens are there; the model's EOS must be among them,
    unless they are empty: then the model never says EOS. hasher: names the blocks; None keeps the
    job out of the prefix cache. lora_name: as in `BlocksStored`. priority: larger is sooner.
    is_remote, is_handed_over: KV comes from, goes to another worker; see the module.
    """

    prompt: bytes
    max_tokens: int
    stops: Mapping[int, StopToken] = field(default_factory=dict)
    min_tokens: int = 0
    hasher: PrefixHasher | None = None
    lora_name: str = ""
    priority: int = 0
    is_remote: bool = False
    is_handed_over: bool = False


@dataclass(slots=True, eq=False)
class SimSequence:
    """A job under way.

    output: the answer so far; only ever appended to. end: None until it is complete; stop_token:
    the token that ended it, if one did. cached_tokens: prompt tokens found in the cache when it
    first ran, None before; for a remote one, in the other worker's. computed: tokens whose KV is
    there; known: tokens of prompt and answer.
    is_awaited: its KV is still elsewhere. is_corrupt: it read a page with wrong content.
    transfer: pinned blocks; see the module. Times are engine time.
    """

    job: Job
    arrival_number: int
    submitted_at: float
    state: int
    total_tokens: int
    output: list[int] = field(default_factory=list)
    end: EndReason | None = None
    stop_token: int | None = None
    is_ended: bool = False
    started_at: float | None = None
    cached_tokens: int | None = None
    computed_tokens: int = 0
    capacity_tokens: int = 0
    block_table: BlockTable | None = None
    names: list[int] = field(default_factory=list)
    chain_state: ChainState = _ROOT
    is_kv_pending: bool = False
    is_corrupt: bool = False
    transfer: BlockTable | None = None

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return len(self.job.prompt) // 4

    @property
    def sort_key(self) -> tuple[int, int]:
        """The smaller goes first."""
        return -self.job.priority, self.arrival_number

    @property
    def first_token(self) -> int:
        """The first token of the answer, be it one that ended it."""
        if self.output:
            return self.output[0]
        assert self.stop_token is not None, "an answer without tokens was ended by one"
        return self.stop_token

    def content(self, start: int, stop: int) -> bytes:
        """Tokens start..stop-1 of prompt and answer, 4 bytes little endian each."""
        prompt = self.job.prompt[4 * start : 4 * stop]
        first = self.prompt_tokens
        if stop <= first:
            return prompt
        output_tokens = self.output[max(0, start - first) : stop - first]
        return prompt + np.asarray(output_tokens, dtype="<u4").tobytes()


@dataclass(frozen=True, slots=True)
class Step:
    """A chosen step: how many tokens of which sequence, and how long it takes."""

    entries: Sequence[tuple[SimSequence, int]]
    prefill_tokens: int
    duration_s: float


@dataclass(frozen=True, slots=True)
class StepResult:
    """A step that is over: its time, and the sequences which advanced or ended."""

    duration_s: float
    advanced: Sequence[SimSequence]


class SimScheduler:
    """Schedules sequences over one `BlockManager`.

    Raises ValueError unless 1 <= max_num_seqs <= max_num_batched_tokens.
    """

    def __init__(
        self,
        blocks: BlockManager,
        timing: Timing,
        truth: TokenOracle,
        *,
        max_num_seqs: int = 256,
        max_num_batched_tokens: int = 8192,
    ) -> None:
        if not 1 <= max_num_seqs <= max_num_batched_tokens:
            raise ValueError(
                f"max_num_seqs: {max_num_seqs} is not in 1..max_num_batched_tokens"
                f" ({max_num_batched_tokens})"
            )
        self.blocks = blocks
        self.preemptions = 0
        # First tokens that came with KV and are not what follows the prompt.
        self.corrupt_tokens = 0
        self.waiting_tokens = 0
        self._timing = timing
        self._token_oracle = truth
        self._max_num_seqs = max_num_seqs
        self._max_num_batched_tokens = max_num_batched_tokens
        self._submitted_count = 0
        # Both in the order of rank.
        self._waiting: list[SimSequence] = []
        self._running: list[SimSequence] = []
        # In the order in which they got their blocks; dicts, for their order.
        self._awaiting_kv: dict[SimSequence, None] = {}
        self._allocated: dict[SimSequence, None] = {}
        self._kv_tokens = 0

    @property
    def waiting(self) -> int:
        """Sequences that wait, arriving ones included."""
        return len(self._waiting) + len(self._awaiting_kv)

    @property
    def running(self) -> int:
        """Sequences that run."""
        return len(self._running)

    def submit(self, job: Job, now: float) -> SimSequence:
        """Takes a job in; it waits for the next `plan`."""
        tokens = len(job.prompt) // 4
        assert tokens >= 1, "a prompt has at least one token"
        assert job.max_tokens >= 1, "an answer has room for at least one token"
        assert tokens + job.max_tokens <= self.blocks.total_blocks * self.blocks.block_size, (
            "a job that does not fit the whole cache would wait forever"
        )
        state = self._token_oracle.state_of(np.frombuffer(job.prompt, dtype="<u4"), job.lora_name)
        self._submitted_count += 1
        seq = SimSequence(
            job, self._submitted_count, now, state, tokens, is_kv_pending=job.is_remote
        )
        self._extend_names(seq, tokens)
        self._enqueue(seq)
        return seq

    def remove(self, seq: SimSequence) -> None:
        """Ends a sequence at once, wherever it is; one that is gone already is left alone."""
        if seq.is_ended:
            return
        if seq in self._awaiting_kv:
            assert seq.block_table is not None, "arriving sequences hold blocks"
            del self._awaiting_kv[seq]
            self._allocated.pop(seq, None)
            self.blocks.release(seq.block_table)
            seq.block_table = None
        elif seq.block_table is None:
            self._waiting.remove(seq)
            self.waiting_tokens -= _pending_tokens(seq)
        else:
            self._stop_running(seq)
        seq.is_ended = True

    def take_allocated(self) -> list[SimSequence]:
        """The sequences that got blocks for their KV to arrive in, since the last call.

        Their blocks are pinned in `transfer`, for the owner to unpin once nobody writes to them.
        """
        allocated, self._allocated = self._allocated, {}
        return list(allocated)

    def on_kv_arrived(self, seq: SimSequence, token: int, cached_tokens: int) -> None:
        """An arriving sequence's KV is there, and the transfer's pin is undone.

        token: the first of the answer, as the other worker has it; be it one that ends it.
        """
        assert seq.block_table is not None, "arriving sequences hold blocks"
        del self._awaiting_kv[seq]
        seq.is_kv_pending, seq.cached_tokens = False, cached_tokens
        bisect.insort(self._running, seq, key=_sort_key)
        seq.computed_tokens = seq.prompt_tokens
        seq.capacity_tokens = len(seq.block_table.blocks) * self.blocks.block_size
        self._kv_tokens += seq.computed_tokens
        is_intact = self.blocks.verify_received(seq.block_table, len(seq.block_table.blocks))
        self._name_blocks(seq)
        can_end = _can_end(seq)
        self.corrupt_tokens += token != self._token_oracle.next_token(seq.state, can_end=can_end)
        self._append(seq, token, can_end)
        if not is_intact:
            self._mark_corrupt(seq)

    def plan(self, now: float) -> Step | None:
        """The next step; None where nothing can be computed."""
        entries: list[tuple[SimSequence, int]] = []
        # Each running sequence is sure of one token; prompts share what that leaves.
        token_budget = self._max_num_batched_tokens - len(self._running)
        decode_count = 0
        while len(entries) < len(self._running):
            seq = self._running[len(entries)]
            count = seq.total_tokens - seq.computed_tokens
            if count == 1:
                decode_count += 1
            else:
                count = 1 + min(count - 1, token_budget)
                token_budget -= count - 1
            if seq.computed_tokens + count > seq.capacity_tokens and not self._ensure_capacity(
                seq, seq.computed_tokens + count
            ):
                decode_count -= count == 1
                break
            entries.append((seq, count))
        self._admit(entries, token_budget, now)
        if not entries:
            return None
        prefill = sum(count for _, count in entries) - decode_count
        return Step(entries, prefill, self._timing.step_s(prefill, decode_count, self._kv_tokens))

    def complete(self, step: Step) -> list[SimSequence]:
        """Ends the step: the sequences which got a token or ended. Removed ones are left out."""
        truth, size = self._token_oracle, self.blocks.block_size
        self._find_corrupt_sequences()
        advanced: list[SimSequence] = []
        computed_tokens = 0
        for seq, count in step.entries:
            if seq.is_ended:
                continue
            if count > 1 or seq.computed_tokens % size == 0:
                self._fill(seq, count)
            seq.computed_tokens += count
            computed_tokens += count
            output = seq.output
            if count > 1 or not output:
                self._name_blocks(seq)
            if seq.computed_tokens < seq.total_tokens:
                continue
            advanced.append(seq)
            can_end = _can_end(seq)
            self._append(seq, truth.next_token(seq.state, can_end=can_end), can_end)
        # Those which left took their tokens, this step's included, off the sum already.
        self._kv_tokens += computed_tokens
        return advanced

    def step(self, now: float) -> StepResult | None:
        """`plan` and `complete` in one, for callers without a clock."""
        step = self.plan(now)
        return None if step is None else StepResult(step.duration_s, self.complete(step))

    def _append(self, seq: SimSequence, token: int, can_end: bool) -> None:
        """The next token of the answer, or its end."""
        if can_end and token in seq.job.stops:
            self._stop(seq, token)
            return
        seq.output.append(token)
        seq.total_tokens += 1
        seq.state = self._token_oracle.advance(seq.state, token)
        if len(seq.output) == seq.job.max_tokens:
            self._finish(seq, EndReason.LENGTH)

    def _fill(self, seq: SimSequence, count: int) -> None:
        """Writes the pages whose first token is among the next `count`."""
        assert seq.block_table is not None, "running sequences hold blocks"
        size = self.blocks.block_size
        stop = -(-(seq.computed_tokens + count) // size)
        self.blocks.fill(seq.block_table, -(-seq.computed_tokens // size), stop)

    def _find_corrupt_sequences(self) -> None:
        """Spoils whoever runs on a page that a transfer has overwritten."""
        corrupt_blocks = self.blocks.take_corrupt_blocks()
        if not corrupt_blocks:
            return
        for seq in self._running:
            assert seq.block_table is not None, "running sequences hold blocks"
            if not corrupt_blocks.isdisjoint(seq.block_table.blocks):
                self._mark_corrupt(seq)

    def _mark_corrupt(self, seq: SimSequence) -> None:
        if not seq.is_corrupt:
            seq.is_corrupt = True
            seq.state ^= _CORRUPTION_MASK

    def _admit(self, entries: list[tuple[SimSequence, int]], token_budget: int, now: float) -> None:
        while self._waiting and token_budget > 0 and self._free_slots > 0:
            seq = self._waiting[0]
            if seq.is_kv_pending:
                if not self._allocate_for_remote_kv(seq, now):
                    return
                continue
            # All of its prompt at once: a prompt half computed is not worth preempting others for.
            seq.block_table = self.blocks.admit(seq.names, seq.total_tokens)
            if seq.block_table is None:
                return
            del self._waiting[0]
            self.waiting_tokens -= _pending_tokens(seq)
            bisect.insort(self._running, seq, key=_sort_key)
            if not self.blocks.is_intact(seq.block_table, 0, seq.block_table.reused_count):
                self._mark_corrupt(seq)
            block_size = self.blocks.block_size
            seq.capacity_tokens = len(seq.block_table.blocks) * block_size
            seq.computed_tokens = seq.block_table.reused_count * block_size
            self._kv_tokens += seq.computed_tokens
            if seq.started_at is None:
                seq.started_at, seq.cached_tokens = now, seq.computed_tokens
            count = min(seq.total_tokens - seq.computed_tokens, token_budget)
            token_budget -= count
            entries.append((seq, count))

    @property
    def _free_slots(self) -> int:
        return self._max_num_seqs - len(self._running) - len(self._awaiting_kv)

    def _allocate_for_remote_kv(self, seq: SimSequence, now: float) -> bool:
        """Gives the head of the queue the blocks its KV arrives in; False without room."""
        # Nothing cached is reused: all of it is going to be written.
        seq.block_table = self.blocks.admit((), seq.total_tokens)
        if seq.block_table is None:
            return False
        del self._waiting[0]
        stamps = page_stamps(seq.job.prompt, self.blocks.block_size, seq.job.lora_name)
        self.blocks.expect_stamps(seq.block_table, stamps)
        seq.transfer = self.blocks.pin(seq.block_table)
        seq.started_at = now
        self._awaiting_kv[seq] = None
        self._allocated[seq] = None
        return True

    def _ensure_capacity(self, seq: SimSequence, tokens: int) -> bool:
        """Grows a running sequence, if need be at the expense of the last; False if that was it."""
        assert seq.block_table is not None, "running sequences hold blocks"
        while not self.blocks.grow(seq.block_table, tokens):
            victim = self._running[-1]
            self.preemptions += 1
            self._stop_running(victim)
            self._enqueue(victim)
            if victim is seq:
                return False
        seq.capacity_tokens = len(seq.block_table.blocks) * self.blocks.block_size
        return True

    def _stop(self, seq: SimSequence, token: int) -> None:
        stop = seq.job.stops[token]
        if stop.is_visible:
            seq.output.append(token)
            seq.total_tokens += 1
        seq.stop_token = token
        self._finish(seq, stop.end)

    def _finish(self, seq: SimSequence, end: EndReason) -> None:
        seq.end = end
        self._stop_running(seq)
        seq.is_ended = True

    def _stop_running(self, seq: SimSequence) -> None:
        """Takes a running sequence out of the running ones; its full blocks stay cached."""
        assert seq.block_table is not None, "running sequences hold blocks"
        self._extend_names(seq, seq.computed_tokens)
        self._name_blocks(seq)
        if seq.job.is_handed_over and seq.end is not None:
            seq.transfer = self.blocks.pin(seq.block_table)
        self.blocks.release(seq.block_table)
        self._running.remove(seq)
        self._kv_tokens -= seq.computed_tokens
        seq.block_table, seq.computed_tokens, seq.capacity_tokens = None, 0, 0

    def _enqueue(self, seq: SimSequence) -> None:
        bisect.insort(self._waiting, seq, key=_sort_key)
        self.waiting_tokens += _pending_tokens(seq)

    def _name_blocks(self, seq: SimSequence) -> None:
        """Names the blocks that are full and have a known name."""
        assert seq.block_table is not None, "running sequences hold blocks"
        start = seq.block_table.named
        stop = min(seq.computed_tokens // self.blocks.block_size, len(seq.names))
        if stop > start:
            size = self.blocks.block_size
            # Who shares them later finds out by itself.
            if not self.blocks.is_intact(seq.block_table, start, stop):
                self._mark_corrupt(seq)
            content = seq.content(start * size, stop * size)
            self.blocks.name(seq.block_table, seq.names[start:stop], content, seq.job.lora_name)

    def _extend_names(self, seq: SimSequence, tokens: int) -> None:
        """Computes the names of all full blocks of the first `tokens` tokens."""
        size = self.blocks.block_size
        start, stop = len(seq.names), tokens // size
        if seq.job.hasher is None or stop <= start:
            return
        names, sums = seq.job.hasher.extend(seq.chain_state, seq.content(start * size, stop * size))
        seq.names.extend(names.tolist())
        seq.chain_state = ChainState(stop, int(sums[-1]))


def _pending_tokens(seq: SimSequence) -> int:
    """Tokens that are to be computed before the next one of the answer is there."""
    return 0 if seq.is_kv_pending else seq.total_tokens


def _can_end(seq: SimSequence) -> bool:
    return bool(seq.job.stops) and len(seq.output) >= seq.job.min_tokens


def _sort_key(seq: SimSequence) -> tuple[int, int]:
    return seq.sort_key
