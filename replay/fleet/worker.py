"""A worker that costs a few microseconds a request, for fleets of thousands (pure).

It computes prompts in order of arrival, each as a whole, and decodes beside them:

    prompt_s = base_s + prefill_token_s * uncached tokens
    response_s = output tokens * (base_s + decode_seq_s * running requests)

Its cache holds whole blocks; the block that was used longest ago leaves first, the end of a prompt
before its beginning. The test of this module compares it with the replay of the engine.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass

from common.kv.load import Load
from replay.engine import WorkerSettings


@dataclass(slots=True, eq=False)
class Prompt:
    """A request at a worker. names: of the blocks that other prompts may share."""

    names: Sequence[int]
    input_tokens: int
    output_tokens: int
    cached_blocks: int = 0


@dataclass(slots=True)
class CacheChange:
    """Blocks that a worker stored, shallow first, and evicted, deep first."""

    stored: list[int]
    evicted: list[int]


class FleetWorker:
    """One worker."""

    def __init__(self, settings: WorkerSettings) -> None:
        self._settings = settings
        self._cache: OrderedDict[int, None] = OrderedDict()
        self._waiting: deque[Prompt] = deque()
        self._current: Prompt | None = None
        self._waiting_tokens = 0
        self._held_blocks = 0
        self._prefill_tokens = self._steps = 0
        self.running = 0

    @property
    def requests(self) -> int:
        return self.running + len(self._waiting) + (self._current is not None)

    @property
    def is_idle(self) -> bool:
        return not self.requests

    def fill(self, names: Sequence[int]) -> CacheChange:
        """Stores the blocks of a prompt without computing it."""
        return self._store(names)

    def submit(self, prompt: Prompt) -> None:
        """Adds a request. The caller then calls `start`."""
        self._waiting.append(prompt)
        self._waiting_tokens += prompt.input_tokens

    def start(self) -> tuple[Prompt, float] | None:
        """Begins the next prompt if none is computed; returns it and the seconds that it takes."""
        if self._current is not None or not self._waiting:
            return None
        self._current = prompt = self._waiting.popleft()
        self._waiting_tokens -= prompt.input_tokens
        size = self._settings.block_size
        for name in prompt.names:
            if name not in self._cache:
                break
            prompt.cached_blocks += 1
        uncached = prompt.input_tokens - prompt.cached_blocks * size
        self._prefill_tokens += uncached
        timing = self._settings.timing
        return prompt, timing.step_s(max(1, uncached), self.running, 0)

    def finish_prompt(self) -> tuple[CacheChange, float]:
        """Ends the prompt that is computed; returns the changes of the cache, and the seconds until
        the end of the response."""
        prompt = self._current
        assert prompt is not None, "a prompt is computed"
        self._current = None
        self._steps += 1
        self.running += 1
        self._held_blocks += len(prompt.names)
        token_s = self._settings.timing.step_s(0, self.running, 0)
        return self._store(prompt.names), (prompt.output_tokens - 1) * token_s

    def end(self, prompt: Prompt) -> None:
        self.running -= 1
        self._held_blocks -= len(prompt.names)

    def load(self) -> Load:
        current = 0 if self._current is None else 1
        return Load(
            engine_step=self._steps,
            running=self.running + current,
            waiting=len(self._waiting),
            waiting_tokens=self._waiting_tokens,
            kv_used_blocks=min(self._held_blocks, self._settings.total_blocks),
            kv_total_blocks=self._settings.total_blocks,
            prefill_tokens=self._prefill_tokens,
        )

    def _store(self, names: Sequence[int]) -> CacheChange:
        cache, stored = self._cache, list[int]()
        for name in names:
            if name not in cache:
                stored.append(name)
                cache[name] = None
        # Of one prompt the last block leaves first.
        for name in reversed(names):
            cache.move_to_end(name)
        evicted = [
            cache.popitem(last=False)[0] for _ in range(len(cache) - self._settings.total_blocks)
        ]
        return CacheChange(stored, evicted)
