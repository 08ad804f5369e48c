"""One worker of a replay: the simulated engine's scheduler on the replay's clock.

The scheduler, its KV cache and its timing are those of the sim engine. Content does not matter: all
tokens are equal, and the ids of the trace name the blocks.
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
from worker_svc.engines.sim.block_manager import BlockManager
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
    timing: Timing = field(default=Timing())


def prompt_hashes(request: TraceRequest, block_size: int) -> Hashes:
    """The names of the prompt's full blocks that the trace knows; 0 names no block."""
    blocks = min(request.input_tokens // block_size, len(request.hash_ids))
    return np.array(request.hash_ids[:blocks], dtype=np.uint64) + np.uint64(1)


class ReplayWorker:
    """One engine. schedule: calls a function at a time in seconds. on_tokens: called with the
    sequences that got a token or ended. is_stuck: it accepts requests and computes nothing.
    """

    def __init__(
        self,
        settings: WorkerSettings,
        schedule: Callable[[float, Callable[[float], None]], None],
        on_tokens: Callable[[Sequence[SimSequence], float], None],
        on_kv_changes: Callable[[Sequence[KvChange], float], None],
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
        )
        self._schedule = schedule
        self._on_tokens = on_tokens
        self._on_kv_changes = on_kv_changes
        self._is_stuck = is_stuck
        self._step: Step | None = None
        self._steps = self._prefill_tokens = 0

    def submit(
        self, number: int, request: TraceRequest, hashes: Hashes, output_tokens: int, now: float
    ) -> SimSequence:
        """Add a request; its first step starts at once if the engine is idle."""
        hasher = _TraceHasher(number, hashes, self.settings.block_size)
        prompt = bytes(4 * request.input_tokens)
        sequence = self.scheduler.submit(Job(prompt, output_tokens, hasher=hasher))
        if self._step is None:
            self._start_step(now)
        return sequence

    def load(self) -> Load:
        """The load as the sim engine reports it."""
        return Load(
            engine_step=self._steps,
            running=self.scheduler.running,
            waiting=self.scheduler.waiting,
            waiting_tokens=self.scheduler.waiting_tokens,
            kv_used_blocks=self.blocks.used_blocks,
            kv_total_blocks=self.blocks.total_blocks,
            prefill_tokens=self._prefill_tokens,
        )

    def _start_step(self, now: float) -> None:
        if self._is_stuck:
            return
        self._step = step = self.scheduler.plan()
        self._take_events(now)
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
