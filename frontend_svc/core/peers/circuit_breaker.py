"""Which workers a frontend leaves alone for now, and when it looks at them again (pure).

A worker trips when the frontend itself saw it fail: its stream was lost, it could not be dialled,
it did not accept in time, or its engine stood still. What a worker says about a request (bad
input, full, draining) never counts: busy is not dead. A tripped worker gets no request; probes with
growing intervals decide when it is whole again, so no client's request is the test.

Invariants: a worker is tripped at most once at a time; an interval never shrinks until the worker
is whole; workers that have left are forgotten.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from random import Random

FIRST_PROBE_INTERVAL_S = 0.2
PROBE_INTERVAL_MAX_S = 8.0
# Of a pool, so many may be left alone for standing still; a common cause must not empty it.
HUNG_FRACTION_MAX = 0.25


@dataclass(slots=True)
class _OpenCircuit:
    why: str
    is_hung: bool
    interval_s: float
    probe_at: float
    is_probing: bool = False


class CircuitBreaker:
    """One frontend's view of its workers. rng: jitters probes, so frontends do not gang up."""

    def __init__(self, rng: Random) -> None:
        self._rng = rng
        self._open_circuits: dict[int, _OpenCircuit] = {}

    def open_circuit(self, worker_id: int, why: str, now: float, *, is_hung: bool = False) -> bool:
        """The worker failed; whether that is news."""
        found = self._open_circuits.get(worker_id)
        if found is not None:
            # One that stood still and is now seen to be gone counts as gone.
            found.why, found.is_hung = why, found.is_hung and is_hung
            return False
        probe_at = now + self._jittered(FIRST_PROBE_INTERVAL_S)
        self._open_circuits[worker_id] = _OpenCircuit(
            why, is_hung, FIRST_PROBE_INTERVAL_S, probe_at
        )
        return True

    def close_circuit(self, worker_id: int) -> bool:
        """The worker works; whether that is news."""
        return self._open_circuits.pop(worker_id, None) is not None

    def why(self) -> dict[int, str]:
        """Tripped workers, with what was seen of them."""
        return {worker_id: circuit.why for worker_id, circuit in self._open_circuits.items()}

    def due(self, now: float) -> list[int]:
        """Workers to probe now; each is due again only after `record_probe`."""
        found = [
            worker_id
            for worker_id, circuit in self._open_circuits.items()
            if not circuit.is_probing and now >= circuit.probe_at
        ]
        for worker_id in found:
            self._open_circuits[worker_id].is_probing = True
        return found

    def record_probe(self, worker_id: int, is_success: bool, now: float) -> None:
        """What a probe found."""
        if is_success:
            self.close_circuit(worker_id)
            return
        circuit = self._open_circuits.get(worker_id)
        if circuit is not None:
            circuit.interval_s = min(circuit.interval_s * 2, PROBE_INTERVAL_MAX_S)
            circuit.probe_at = now + self._jittered(circuit.interval_s)
            circuit.is_probing = False

    def retain(self, present: Iterable[int]) -> None:
        """Forgets workers that have left."""
        present = set(present)
        for worker_id in [w for w in self._open_circuits if w not in present]:
            del self._open_circuits[worker_id]

    def excluded(self, pool: Iterable[int]) -> frozenset[int]:
        """Who of a model's workers gets no request.

        Of those that stand still, at most HUNG_SHARE of the pool and at least one: the ones that
        tripped first.
        """
        if not self._open_circuits:
            return frozenset()
        pool = set(pool)
        open_in_pool = [(w, circuit) for w, circuit in self._open_circuits.items() if w in pool]
        hung = [w for w, circuit in open_in_pool if circuit.is_hung]
        hung_max = max(1, int(HUNG_FRACTION_MAX * len(pool)))
        return frozenset(
            [w for w, circuit in open_in_pool if not circuit.is_hung] + hung[:hung_max]
        )

    def _jittered(self, seconds: float) -> float:
        return seconds * (0.75 + 0.5 * self._rng.random())


class RetryBudget:
    """How many retries a frontend may make, so that a failing mesh is not buried under them.

    Of the requests begun in the last WINDOW_S, SHARE may be retried, and FLOOR in any case. taken,
    refused: retries that were within it, and that were not, since the start.
    """

    RETRY_FRACTION = 0.1
    RETRIES_MIN = 64
    WINDOW_S = 10.0

    def __init__(self) -> None:
        self.granted = 0
        self.refused = 0
        self._window_start = 0.0
        self._requests = [0, 0]  # of the last full half window, and of this one
        self._retries = [0, 0]

    def request(self, now: float) -> None:
        """A request began."""
        self._advance_window(now)
        self._requests[1] += 1

    def take(self, now: float) -> bool:
        """Whether one more retry is within the budget; counts it if so."""
        self._advance_window(now)
        if sum(self._retries) >= max(self.RETRIES_MIN, self.RETRY_FRACTION * sum(self._requests)):
            self.refused += 1
            return False
        self.granted += 1
        self._retries[1] += 1
        return True

    def _advance_window(self, now: float) -> None:
        half = self.WINDOW_S / 2
        elapsed = now - self._window_start
        if elapsed < half:
            return
        is_adjacent = elapsed < 2 * half
        for counts in (self._requests, self._retries):
            counts[:] = [counts[1] if is_adjacent else 0, 0]
        self._window_start = now - elapsed % half


class HangDetector:
    """Tells a hung engine from a busy one by its heartbeats.

    Hung: engine_step stands still for `hung_after_s` while requests run. One request that waits
    says
    nothing, and neither does an idle engine.
    """

    def __init__(self, hung_after_s: float) -> None:
        self._hung_after_s = hung_after_s
        self._step = -1
        self._last_step_at: float | None = None

    def received(self, engine_step: int, running: int, now: float) -> bool:
        """A heartbeat came; whether the engine is hung."""
        if running == 0:
            self._last_step_at = None  # work that comes next has all its time
            return False
        if engine_step != self._step or self._last_step_at is None:
            self._step = engine_step
            self._last_step_at = now
            return False
        return now - self._last_step_at >= self._hung_after_s
