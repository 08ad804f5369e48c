"""Continuous batching in engine time: what the simulated engine computes in each step. Pure.

A step gives each running sequence its next token, or the next chunk of its prompt; the rest of
`max_num_batched_tokens` admits waiting ones. If steps are not mixed (`is_mixed`), a step computes
prompts as long as there are any, and tokens otherwise. `plan` chooses the step; `complete` applies
it after its duration has passed. One step is in flight at a time; sequences may be submitted and
removed in between.

Order: larger `priority` first, then earlier submission. The order is strict, so a steady flow of
higher priority delays the rest without bound (callers have deadlines). A smaller sequence never
overtakes the head of the queue. When blocks run out, the last running sequence is preempted: it
releases its blocks and waits in its old place (LIFO). Its output is kept and computed again as if
it were prompt, mostly from the prefix cache.

Handoffs. A sequence with KV from another worker (`Job.is_remote`) waits in the queue for all
its blocks, none of them shared, and for a running slot; then it awaits its KV until
`on_kv_arrived`. A sequence with KV for another worker (`Job.is_handed_over`) leaves its blocks
pinned in `transfer`, for its owner to unpin. A preempted sequence is computed again here, even on a
worker without local prefill.

A sequence that reads a page with wrong content (see `block_manager.py`) continues with a wrong
state: all its further tokens are wrong, as a real model's would be.

Blocks of the prompt are named when their chunk is computed, blocks of the output when the sequence
stops running. The next turn of a conversation finds both.

Invariants: a sequence is waiting, awaiting KV, running or ended. Only the second and third hold
blocks. An ended one stays ended and its output does not change.
"""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from common.kv.hashing import ChainState, PrefixHasher
from common.request.preprocessed import FinishReason, TokenLogprob
from worker_svc.engines.sim.block_manager import BlockManager, BlockTable
from worker_svc.engines.sim.constraint import Constraint
from worker_svc.engines.sim.logits import LogitChanges, LogitModel
from worker_svc.engines.sim.messages import page_stamps
from worker_svc.engines.sim.timing import Timing
from worker_svc.engines.sim.token_oracle import TokenOracle
from worker_svc.engines.stop_tokens import StopToken

_ROOT: Final = ChainState(0, 0)
# XORed into the oracle state of a sequence that read a wrong page.
_CORRUPTION_MASK: Final = 0x5BD1E9955BD1E995


@dataclass(frozen=True, slots=True)
class Job:
    """One generation request."""

    prompt: bytes
    """Token ids, 4 bytes little endian each, at least one."""

    max_tokens: int
    """At least 1."""

    stops: Mapping[int, StopToken] = field(default_factory=dict)
    """Tokens that end the output after min_tokens. They must include the model's EOS, or be empty:
    then the model never emits EOS."""

    min_tokens: int = 0
    hasher: PrefixHasher | None = None
    """Names the blocks; None bypasses the prefix cache."""

    lora_name: str = ""
    """Name of the adapter, empty for the base model."""

    cache_salt: str = ""
    """That of the hasher."""

    priority: int = 0
    """Larger is sooner."""

    is_remote: bool = False
    """Whether KV comes from another worker; see the module."""

    is_handed_over: bool = False
    """Whether KV goes to another worker; see the module."""

    constraint: Constraint | None = None
    """Of guided decoding, at the start of the output; it advances with the sequence."""

    seed: int | None = None
    """Seed of the output, or None."""

    changes: LogitChanges | None = None
    """Changes of the logits; they advance with the sequence."""

    logprobs: int | None = None
    """How many alternatives have log probabilities at each position; None: no token has."""


@dataclass(slots=True, eq=False)
class SimSequence:
    """The state of a job."""

    job: Job
    arrival_number: int
    state: int
    total_tokens: int
    """Tokens of prompt and output."""

    pending_tokens: int = 0
    """Tokens to compute before the next output token, less those cached when it was queued."""

    output: list[int] = field(default_factory=list)
    """Tokens so far, append-only."""

    logprobs: list[TokenLogprob] = field(default_factory=list)
    """Of each output token, if the job has any."""

    next_logprob: TokenLogprob | None = None
    """Of the token that is computed."""

    end: FinishReason | None = None
    """None until the output is complete."""

    stop_token: int | None = None
    """The token that ended the output, if any."""

    is_ended: bool = False
    cached_tokens: int | None = None
    """Prompt tokens found in the cache at its first start, None before; for a remote one, in the
    other worker's cache."""

    host_cached_tokens: int = 0
    """Those of `cached_tokens` that were on the host."""

    computed_tokens: int = 0
    """Tokens with KV present."""

    capacity_tokens: int = 0
    block_table: BlockTable | None = None
    names: list[int] = field(default_factory=list)
    chain_state: ChainState = _ROOT
    is_kv_pending: bool = False
    """Whether its KV has not arrived."""

    is_corrupt: bool = False
    """Whether it read a page with wrong content."""

    transfer: BlockTable | None = None
    """Pinned blocks; see the module."""

    @property
    def prompt_tokens(self) -> int:
        return len(self.job.prompt) // 4

    @property
    def first_token(self) -> int:
        """Returns the first token of the output, even if it ended the output."""
        if self.output:
            return self.output[0]
        assert self.stop_token is not None, "an output without tokens was ended by a token"
        return self.stop_token

    def content(self, start: int, stop: int) -> bytes:
        """Returns tokens start..stop-1 of prompt and output, 4 bytes little endian each."""
        prompt = self.job.prompt[4 * start : 4 * stop]
        first = self.prompt_tokens
        if stop <= first:
            return prompt
        output_tokens = self.output[max(0, start - first) : stop - first]
        return prompt + np.asarray(output_tokens, dtype="<u4").tobytes()


@dataclass(frozen=True, slots=True)
class Step:
    """A planned step: tokens per sequence, and its duration."""

    entries: Sequence[tuple[SimSequence, int]]
    prefill_tokens: int
    duration_s: float


class SimScheduler:
    """Schedules over one `BlockManager`. Requires 1 <= max_num_seqs <= max_num_batched_tokens.

    logit_model: of jobs with `changes`; None without such jobs.
    """

    def __init__(
        self,
        blocks: BlockManager,
        timing: Timing,
        token_oracle: TokenOracle,
        logit_model: LogitModel | None = None,
        *,
        max_num_seqs: int = 256,
        max_num_batched_tokens: int = 8192,
        is_mixed: bool = True,
    ) -> None:
        self.blocks = blocks
        self.preemptions = 0
        # First tokens that came with KV but do not follow the prompt.
        self.corrupt_tokens = 0
        self.waiting_tokens = 0
        self._timing = timing
        self.token_oracle = token_oracle
        self._logit_model = logit_model
        self._max_num_seqs = max_num_seqs
        self._max_num_batched_tokens = max_num_batched_tokens
        self._is_mixed = is_mixed
        self._submitted_count = 0
        # Both ordered by `_sort_key`.
        self._waiting: list[SimSequence] = []
        self._running: list[SimSequence] = []
        # In the order of allocation; dicts keep the order.
        self._awaiting_kv: dict[SimSequence, None] = {}
        self._allocated: dict[SimSequence, None] = {}
        self._kv_tokens = 0

    @property
    def waiting(self) -> int:
        """Returns the number of waiting sequences, including those that await KV."""
        return len(self._waiting) + len(self._awaiting_kv)

    @property
    def running(self) -> int:
        return len(self._running)

    def submit(self, job: Job) -> SimSequence:
        """Adds a job, which waits for the next `plan`."""
        tokens = len(job.prompt) // 4
        assert tokens >= 1 <= job.max_tokens, "prompt and output have at least one token"
        assert tokens + job.max_tokens <= self.blocks.total_blocks * self.blocks.block_size, (
            "a job that does not fit the whole cache would wait forever"
        )
        prompt = np.frombuffer(job.prompt, dtype="<u4")
        state = self.token_oracle.state_of(prompt, job.lora_name, job.seed)
        self._submitted_count += 1
        seq = SimSequence(job, self._submitted_count, state, tokens, is_kv_pending=job.is_remote)
        self._extend_names(seq, tokens)
        self._enqueue(seq)
        return seq

    def remove(self, seq: SimSequence) -> None:
        """Ends a sequence in any state; no effect on an ended one."""
        if seq.is_ended:
            return
        if seq.block_table is None:
            self._waiting.remove(seq)
            self.waiting_tokens -= seq.pending_tokens
        elif seq in self._awaiting_kv:
            del self._awaiting_kv[seq]
            self._allocated.pop(seq, None)
            self.blocks.release(seq.block_table)
            seq.block_table = None
        else:
            self._stop_running(seq)
        seq.is_ended = True

    def take_allocated(self) -> list[SimSequence]:
        """Returns the sequences that got blocks for remote KV since the last call.

        The owner unpins the blocks in `transfer` once no transfer writes to them.
        """
        allocated, self._allocated = self._allocated, {}
        return list(allocated)

    def on_kv_arrived(self, seq: SimSequence, token: int, cached_tokens: int) -> None:
        """Starts a sequence after its KV arrived. The caller has unpinned the transfer.

        token: the first of the output as the other worker computed it, even if it ends the output.
        """
        assert seq.block_table is not None, "sequences awaiting KV hold blocks"
        del self._awaiting_kv[seq]
        seq.is_kv_pending, seq.cached_tokens = False, cached_tokens
        bisect.insort(self._running, seq, key=_sort_key)
        seq.computed_tokens = seq.prompt_tokens
        seq.capacity_tokens = len(seq.block_table.blocks) * self.blocks.block_size
        self._kv_tokens += seq.computed_tokens
        is_intact = self.blocks.verify_received(seq.block_table, len(seq.block_table.blocks))
        self._name_blocks(seq)
        can_end = _can_end(seq)
        self.corrupt_tokens += token != self._next_token(seq, can_end)
        self._append(seq, token, can_end)
        if not is_intact:
            self._mark_corrupt(seq)

    def plan(self) -> Step | None:
        """Returns the next step; None if there is nothing to compute."""
        if not self._is_mixed and (step := self._plan_prompts()) is not None:
            return step
        entries: list[tuple[SimSequence, int]] = []
        # Each running sequence gets one token; prompts share the rest.
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
        host_tokens = self._admit(entries, token_budget)
        if not entries:
            return None
        prefill = sum(count for _, count in entries) - decode_count
        duration_s = self._timing.step_s(prefill, decode_count, self._kv_tokens, host_tokens)
        return Step(entries, prefill, duration_s)

    def _plan_prompts(self) -> Step | None:
        """Returns a step of prompts only; None without any."""
        entries: list[tuple[SimSequence, int]] = []
        token_budget = self._max_num_batched_tokens
        for seq in self._running:
            # Their blocks were allocated with those of the whole prompt.
            if token_budget and (count := seq.total_tokens - seq.computed_tokens) > 1:
                entries.append((seq, min(count, token_budget)))
                token_budget -= entries[-1][1]
        host_tokens = self._admit(entries, token_budget)
        if not entries:
            return None
        prefill = sum(count for _, count in entries)
        cached = sum(seq.computed_tokens for seq, _ in entries)
        return Step(entries, prefill, self._timing.step_s(prefill, 0, cached, host_tokens))

    def complete(self, step: Step) -> list[SimSequence]:
        """Completes the step. Returns the sequences that got a token or ended, not removed ones."""
        size = self.blocks.block_size
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
            if count > 1 or not seq.output:
                self._name_blocks(seq)
            if seq.computed_tokens < seq.total_tokens:
                continue
            advanced.append(seq)
            can_end = _can_end(seq)
            self._append(seq, self._next_token(seq, can_end), can_end)
        # Removed sequences subtracted their tokens, including this step's, already.
        self._kv_tokens += computed_tokens
        return advanced

    def _next_token(self, seq: SimSequence, can_end: bool) -> int | None:
        """Returns the next token; None if the sequence's constraint failed."""
        oracle, constraint, changes = self.token_oracle, seq.job.constraint, seq.job.changes
        if constraint is None:
            token, allowed = oracle.next_token(seq.state, can_end=can_end), None
        else:
            draw = constraint.next_token(oracle, seq.state)
            if draw is None:
                return None
            token, allowed = draw
        if changes is None and seq.job.logprobs is None:
            return token
        assert self._logit_model is not None, "the scheduler of such jobs has logits"
        logits = self._logit_model.logits(seq.state, token, can_end=can_end, allowed=allowed)
        if changes is not None:
            token = int(changes.apply(logits).argmax())
        if seq.job.logprobs is not None:
            seq.next_logprob = self._logit_model.logprob(seq.state, logits, token, seq.job.logprobs)
        return token

    def _append(self, seq: SimSequence, token: int | None, can_end: bool) -> None:
        """Appends a token to the output, or ends the output."""
        if token is None:
            self._finish(seq, FinishReason.ERROR)
            return
        if can_end and token in seq.job.stops:
            self._stop(seq, token)
            return
        self._append_output(seq, token)
        seq.state = self.token_oracle.advance(seq.state, token)
        if seq.job.changes is not None:
            seq.job.changes.output[token] += 1
        if seq.job.constraint is not None and not seq.job.constraint.accept(token):
            self._finish(seq, FinishReason.ERROR)
        elif len(seq.output) == seq.job.max_tokens:
            self._finish(seq, FinishReason.LENGTH)

    def _fill(self, seq: SimSequence, count: int) -> None:
        """Writes the pages that start within the next `count` tokens."""
        assert seq.block_table is not None, "running sequences hold blocks"
        size, first = self.blocks.block_size, seq.computed_tokens
        self.blocks.fill(seq.block_table, -(-first // size), -(-(first + count) // size))

    def _find_corrupt_sequences(self) -> None:
        """Marks sequences that run on a page which a transfer has overwritten."""
        corrupt_blocks = self.blocks.take_corrupt_blocks()
        for seq in self._running if corrupt_blocks else ():
            if seq.block_table and not corrupt_blocks.isdisjoint(seq.block_table.blocks):
                self._mark_corrupt(seq)

    def _mark_corrupt(self, seq: SimSequence) -> None:
        if not seq.is_corrupt:
            seq.is_corrupt = True
            seq.state ^= _CORRUPTION_MASK

    def _admit(self, entries: list[tuple[SimSequence, int]], token_budget: int) -> int:
        """Starts waiting sequences. Returns how many of their tokens were on the host."""
        host_tokens = 0
        while self._waiting and token_budget > 0:
            if len(self._running) + len(self._awaiting_kv) >= self._max_num_seqs:
                break
            seq = self._waiting[0]
            if seq.is_kv_pending:
                if not self._allocate_for_remote_kv(seq):
                    break
                continue
            # Blocks for the whole prompt: half a prompt is not worth preempting others.
            seq.block_table = self.blocks.admit(seq.names, seq.total_tokens)
            if seq.block_table is None:
                break
            del self._waiting[0]
            self.waiting_tokens -= seq.pending_tokens
            bisect.insort(self._running, seq, key=_sort_key)
            if not self.blocks.is_intact(seq.block_table, 0, seq.block_table.reused_count):
                self._mark_corrupt(seq)
            block_size = self.blocks.block_size
            seq.capacity_tokens = len(seq.block_table.blocks) * block_size
            seq.computed_tokens = seq.block_table.reused_count * block_size
            self._kv_tokens += seq.computed_tokens
            host_tokens += seq.block_table.host_count * block_size
            if seq.cached_tokens is None:
                seq.cached_tokens = seq.computed_tokens
                seq.host_cached_tokens = seq.block_table.host_count * block_size
            count = min(seq.total_tokens - seq.computed_tokens, token_budget)
            token_budget -= count
            entries.append((seq, count))
        return host_tokens

    def _allocate_for_remote_kv(self, seq: SimSequence) -> bool:
        """Allocates blocks for the remote KV of the queue's head. Returns False without any."""
        # No cached block is reused: the transfer writes all of them.
        seq.block_table = self.blocks.admit((), seq.total_tokens)
        if seq.block_table is None:
            return False
        del self._waiting[0]
        stamps = page_stamps(seq.job.prompt, self.blocks.block_size, seq.job.lora_name)
        self.blocks.expect_stamps(seq.block_table, stamps)
        seq.transfer = self.blocks.pin(seq.block_table)
        self._awaiting_kv[seq] = None
        self._allocated[seq] = None
        return True

    def _ensure_capacity(self, seq: SimSequence, tokens: int) -> bool:
        """Extends a running sequence by preemption. Returns False if it is preempted itself."""
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

    @staticmethod
    def _append_output(seq: SimSequence, token: int) -> None:
        seq.output.append(token)
        seq.total_tokens += 1
        if seq.job.logprobs is not None:
            assert seq.next_logprob is not None, "the token has been computed"
            seq.logprobs.append(seq.next_logprob)

    def _stop(self, seq: SimSequence, token: int) -> None:
        stop = seq.job.stops[token]
        if stop.is_visible:
            self._append_output(seq, token)
        seq.stop_token = token
        self._finish(seq, stop.reason)

    def _finish(self, seq: SimSequence, end: FinishReason) -> None:
        seq.end = end
        self._stop_running(seq)
        seq.is_ended = True

    def _stop_running(self, seq: SimSequence) -> None:
        """Removes a sequence from the running ones; its full blocks stay cached."""
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
        cached = self.blocks.cached_tokens(seq.names, seq.total_tokens)
        seq.pending_tokens = 0 if seq.is_kv_pending else seq.total_tokens - cached
        self.waiting_tokens += seq.pending_tokens

    def _name_blocks(self, seq: SimSequence) -> None:
        """Names the full blocks that have a known name."""
        assert seq.block_table is not None, "running sequences hold blocks"
        start = seq.block_table.named
        stop = min(seq.computed_tokens // self.blocks.block_size, len(seq.names))
        if stop <= start:
            return
        # Sequences that share the blocks later check them again.
        if not self.blocks.is_intact(seq.block_table, start, stop):
            self._mark_corrupt(seq)
        size = self.blocks.block_size
        content = seq.content(start * size, stop * size)
        job, names = seq.job, seq.names[start:stop]
        self.blocks.name(seq.block_table, names, content, job.lora_name, job.cache_salt)

    def _extend_names(self, seq: SimSequence, tokens: int) -> None:
        """Computes the names of all full blocks of the first `tokens` tokens."""
        size = self.blocks.block_size
        start, stop = len(seq.names), tokens // size
        if seq.job.hasher is None or stop <= start:
            return
        names, sums = seq.job.hasher.extend(seq.chain_state, seq.content(start * size, stop * size))
        seq.names.extend(names.tolist())
        seq.chain_state = ChainState(stop, int(sums[-1]))


def _can_end(seq: SimSequence) -> bool:
    return bool(seq.job.stops) and len(seq.output) >= seq.job.min_tokens


def _sort_key(seq: SimSequence) -> tuple[int, int]:
    return -seq.job.priority, seq.arrival_number
