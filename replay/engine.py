"""One worker of a replay: the simulated engine's scheduler on the replay's clock.

The scheduler, its KV cache and its timing are those of the sim engine. Content does not matter: all
tokens are equal, and the ids of the trace name the blocks.

A `Handoff` moves the KV of a prompt from a prefill to a decode worker, as the sim engine does: once
the prompt is computed and decode has all its blocks, in order over the link of the prefill worker.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from common.kv.events import Hashes
from common.kv.hashing import ChainState, PrefixHasher
from common.kv.load import Load
from replay.trace import PRIVATE_NAMES, TraceRequest
from router_svc.core.candidate import Leg
from worker_svc.engines.sim.block_manager import BlockManager
from worker_svc.engines.sim.config import SimHandoffConfig
from worker_svc.engines.sim.scheduler import Job, SimScheduler, SimSequence, Step
from worker_svc.engines.sim.timing import Timing
from worker_svc.engines.sim.token_oracle import TokenOracle
from worker_svc.kv_events.external_events import PagesRemoved, PagesStored

KvChange = PagesStored | PagesRemoved


class _EqualTokens(TokenOracle):
    """Every token is the same one."""

    def __init__(self) -> None:
        super().__init__((1,), 0, eos_one_in=0)

    def state_of(self, *_: Any, **__: Any) -> int:
        return 0

    def advance(self, state: int, token: int) -> int:
        return 0

    def next_token(self, state: int, *, can_end: bool = True) -> int:
        return 1


class _TraceHasher(PrefixHasher):
    """Names the blocks of one request: by the trace, then by numbers of its own."""

    def __init__(self, request_number: int, hash_ids: Hashes, block_size: int) -> None:
        self.block_size = block_size
        self._hash_ids = hash_ids
        self._private_base = PRIVATE_NAMES + (request_number << 24)

    def extend(
        self, state: ChainState, token_ids: Any
    ) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
        start, known = state.position, len(self._hash_ids)
        stop = start + len(token_ids) // 4 // self.block_size
        private = np.arange(max(start, known), max(stop, known), dtype=np.uint64)
        names = np.concatenate(
            (self._hash_ids[start:stop], private + np.uint64(self._private_base))
        )
        return names, np.zeros(stop - start, dtype=np.uint64)


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    """The sizes of a worker. Defaults: those of the sim engine, with 3,000 blocks of 512 tokens."""

    total_blocks: int = 3000
    block_size: int = 512
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    is_mixed: bool = True
    """Whether prompts and further tokens share a step; see `SimScheduler`."""

    timing: Timing = field(default=Timing())
    handoff: SimHandoffConfig = field(default=SimHandoffConfig())


def prompt_hashes(request: TraceRequest, block_size: int) -> Hashes:
    """Returns the names of the prompt's full blocks that the trace knows; 0 names no block."""
    blocks = min(request.input_tokens // block_size, len(request.hash_ids))
    return np.array(request.hash_ids[:blocks], dtype=np.uint64) + np.uint64(1)


class ReplayWorker:
    """One engine.

    schedule: calls a function at a time in seconds.
    on_tokens: called with the sequences that got a token or ended.
    on_allocated: called with the sequences that got blocks for KV of another worker.
    is_stuck: whether it accepts requests and computes nothing.
    link_free_at: when the handoffs from here that were started are over, in seconds.
    """

    def __init__(
        self,
        settings: WorkerSettings,
        schedule: Callable[[float, Callable[[float], None]], None],
        on_tokens: Callable[[Sequence[SimSequence], float], None],
        on_kv_changes: Callable[[Sequence[KvChange], float], None],
        on_allocated: Callable[[Sequence[SimSequence], float], None],
        *,
        is_stuck: bool = False,
    ) -> None:
        self.settings = settings
        self.blocks = BlockManager(settings.total_blocks, settings.block_size)
        self.scheduler = SimScheduler(
            self.blocks,
            settings.timing,
            _EqualTokens(),
            max_num_seqs=settings.max_num_seqs,
            max_num_batched_tokens=settings.max_num_batched_tokens,
            is_mixed=settings.is_mixed,
        )
        self._schedule = schedule
        self._on_tokens = on_tokens
        self._on_kv_changes = on_kv_changes
        self._on_allocated = on_allocated
        self.link_free_at = 0.0
        self._is_stuck = is_stuck
        self._step: Step | None = None
        self._steps = self._prefill_tokens = 0

    def submit(
        self, number: int, request: TraceRequest, hashes: Hashes, leg: Leg = "whole"
    ) -> SimSequence:
        """Adds a request, or a leg of it. The caller then calls `wake`."""
        hasher = _TraceHasher(number, hashes, self.settings.block_size)
        job = Job(
            bytes(4 * request.input_tokens),
            1 if leg == "prefill" else request.output_tokens,
            hasher=hasher,
            is_remote=leg == "decode",
            is_handed_over=leg == "prefill",
        )
        return self.scheduler.submit(job)

    def wake(self, now: float) -> None:
        """Starts a step if the engine is idle and has work."""
        if self._step is None:
            self._start_step(now)

    def load(self) -> Load:
        """Returns the load as the sim engine reports it."""
        return Load(
            engine_step=self._steps,
            running=self.scheduler.running,
            waiting=self.scheduler.waiting,
            waiting_tokens=self.scheduler.waiting_tokens,
            kv_used_blocks=self.blocks.used_blocks,
            kv_total_blocks=self.blocks.total_blocks,
            prefill_tokens=self._prefill_tokens,
        )

    def reserve_link(self, blocks: int, now: float) -> float:
        """Returns when so many blocks have left over the link, if they start at `now` or in their
        turn."""
        handoff = self.settings.handoff
        size = blocks * self.settings.block_size * handoff.bytes_per_token
        begin = max(now + handoff.latency_s, self.link_free_at)
        self.link_free_at = begin + size / (handoff.gb_per_s * 1e9)
        return self.link_free_at

    def finish_sending(self, sequence: SimSequence, now: float) -> None:
        """Releases the blocks of a prompt that has been handed over."""
        assert sequence.transfer is not None, "the blocks are pinned until then"
        self.blocks.unpin(sequence.transfer)
        sequence.transfer = None
        self.wake(now)

    def receive_kv(self, sequence: SimSequence, cached_tokens: int, now: float) -> None:
        """Starts a sequence after its KV has arrived; it gets its first token."""
        transfer = sequence.transfer
        assert transfer is not None, "the blocks are pinned until then"
        for block in transfer.blocks:
            self.blocks.write(block.page, block.stamp)
        self.blocks.unpin(transfer)
        sequence.transfer = None
        self.scheduler.on_kv_arrived(sequence, 1, cached_tokens)
        self._take_events(now)
        self._on_tokens((sequence,), now)
        self.wake(now)

    def _start_step(self, now: float) -> None:
        if self._is_stuck:
            return
        self._step = step = self.scheduler.plan()
        self._take_events(now)
        if allocated := self.scheduler.take_allocated():
            self._on_allocated(allocated, now)
        if step is not None:
            self._schedule(now + step.duration_s, self._complete_step)

    def _complete_step(self, now: float) -> None:
        assert self._step is not None, "a step is in flight"
        self._steps += 1
        self._prefill_tokens += self._step.prefill_tokens
        advanced = self.scheduler.complete(self._step)
        self._take_events(now)
        self._on_tokens(advanced, now)
        self._start_step(now)

    def _take_events(self, now: float) -> None:
        if self.blocks.events:
            self._on_kv_changes(self.blocks.take_events(), now)
