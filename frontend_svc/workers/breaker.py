"""Decides which workers a frontend excludes, and when it probes them again (pure).

The circuit of a worker opens when the frontend itself observes a failure: the stream was lost, the
dial failed, a request was not accepted in time, or the engine hangs. What a worker reports about a
request (bad input, full, draining) does not count: a busy worker is not a dead one. A worker with
an open circuit gets no request. Probes at growing intervals decide when the circuit closes, so no
client's request is the test.

Invariants: a worker has at most one open circuit; its probe interval never shrinks until the
circuit closes; a worker whose circuits open every few seconds gets probes at growing first
intervals; workers that left are removed.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from random import Random

from common.streams.backoff import Backoff

FIRST_PROBE_INTERVAL_S = 0.2
# Requests may wait for a worker to recover: a successful probe must not be long after that.
PROBE_INTERVAL_MAX_S = 2.0
# Least and greatest factor of a probe interval.
_JITTER = (0.75, 1.25)
# A circuit that opens this soon after the worker's last one starts with twice its first interval:
# a worker that is late at every request but sends heartbeats passes each probe.
REOPENED_WITHIN_S = 8.0
# Fraction of a pool that may be excluded as hung: a common cause must not empty the pool.
HUNG_FRACTION_MAX = 0.25


@dataclass(slots=True)
class _OpenCircuit:
    reason: str
    # Whether the worker counts towards HUNG_FRACTION_MAX.
    is_hung: bool
    probe_intervals: Backoff
    probe_at: float
    is_probing: bool = False


@dataclass(slots=True)
class _Openings:
    """The circuits of one worker in the past."""

    last_at: float
    # First probe intervals of circuits that open soon after each other.
    first_intervals: Backoff


class CircuitBreaker:
    """The circuits of one frontend's workers. rng: jitters probes, to spread those of frontends."""

    def __init__(self, rng: Random) -> None:
        self._rng = rng
        self._open_circuits: dict[int, _OpenCircuit] = {}
        self._openings: dict[int, _Openings] = {}

    def open_circuit(
        self, worker_id: int, reason: str, now: float, *, is_hung: bool = False
    ) -> bool:
        """Records a failure of the worker; whether its circuit was closed before."""
        found = self._open_circuits.get(worker_id)
        if found is not None:
            # A hung worker that is then lost counts as lost.
            found.reason, found.is_hung = reason, found.is_hung and is_hung
            return False
        openings = self._openings.get(worker_id)
        if openings is None or now - openings.last_at >= REOPENED_WITHIN_S:
            exact = Backoff(FIRST_PROBE_INTERVAL_S, PROBE_INTERVAL_MAX_S, None)
            openings = self._openings[worker_id] = _Openings(now, exact)
        openings.last_at = now
        first_s = openings.first_intervals.next_s()
        intervals = Backoff(first_s, PROBE_INTERVAL_MAX_S, self._rng, jitter=_JITTER)
        opened = _OpenCircuit(reason, is_hung, intervals, now + intervals.next_s())
        self._open_circuits[worker_id] = opened
        return True

    def close_circuit(self, worker_id: int) -> bool:
        """Records that the worker works; whether its circuit was open before."""
        return self._open_circuits.pop(worker_id, None) is not None

    def reasons(self) -> dict[int, str]:
        """Workers with an open circuit -> the failure observed last."""
        return {worker_id: circuit.reason for worker_id, circuit in self._open_circuits.items()}

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
        """Closes the circuit after a successful probe, else doubles the probe interval."""
        if is_success:
            self.close_circuit(worker_id)
            return
        circuit = self._open_circuits.get(worker_id)
        if circuit is not None:
            circuit.probe_at = now + circuit.probe_intervals.next_s()
            circuit.is_probing = False

    def retain(self, present: Iterable[int]) -> None:
        present = set(present)
        for state in (self._open_circuits, self._openings):
            for worker_id in state.keys() - present:
                del state[worker_id]

    def excluded(self, pool: Iterable[int]) -> frozenset[int]:
        """Workers of a model's pool that get no request. Of the hung ones, at most
        HUNG_FRACTION_MAX of the pool and at least one, in the order in which their circuits
        opened. If all circuits are open, all workers: requests wait for a successful probe, and
        each worker is excluded until its own probe succeeds."""
        if not self._open_circuits:
            return frozenset()
        pool = set(pool)
        open_in_pool = [(w, circuit) for w, circuit in self._open_circuits.items() if w in pool]
        if len(open_in_pool) == len(pool):
            for _, circuit in open_in_pool:
                circuit.is_hung = False
            return frozenset(pool)
        hung = [w for w, circuit in open_in_pool if circuit.is_hung]
        hung_max = max(1, int(HUNG_FRACTION_MAX * len(pool)))
        lost = [w for w, circuit in open_in_pool if not circuit.is_hung]
        return frozenset(lost + hung[:hung_max])
