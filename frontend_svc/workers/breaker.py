"""Decides which workers a frontend excludes, and when it probes them again (pure).

The circuit of a worker opens when the frontend observes a failure: the stream was lost, the dial
failed, a request was not accepted in time, or the engine hangs; when the worker fails more requests
than its peers (`outliers.py`); or when the worker reports that its engine fails. What a worker
reports about a request (bad input, full, draining) does not count: a busy worker is not a dead one.
A worker with an open circuit gets no request. Probes at growing intervals decide when the circuit
closes, so no client's request is the test.

A failing engine may respond to probes and fail at requests. Therefore the time before the first
probe of a failing worker doubles with each circuit that opens soon after the last one closed.

Invariants: a worker has at most one open circuit; its probe interval never shrinks until the
circuit closes, except to PROBE_INTERVAL_MAX_S after the first one; a worker whose circuits open
soon after each other gets growing first intervals; workers that left are removed; a pool is never
excluded as a whole if one of its workers is only failing.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
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
# The same for failing workers. After its circuit closes, a worker needs some requests to fail.
FAILING_FIRST_INTERVAL_S = 1.0
FAILING_INTERVAL_MAX_S = 30.0
FAILED_AGAIN_WITHIN_S = 60.0
# Fraction of a pool that may be excluded as hung: a common cause must not empty the pool.
HUNG_FRACTION_MAX = 0.25
# The same for failing workers without a failed probe.
FAILING_FRACTION_MAX = 0.5


class Cause(Enum):
    """Why a circuit is open.

    LOST: the worker cannot be reached, or accepts nothing.
    HUNG: it is silent, or its engine makes no steps; it may recover soon.
    FAILING: its engine fails at requests, or at probes.
    """

    LOST = "lost"
    HUNG = "hung"
    FAILING = "failing"


# A cause replaces those before it, until the circuit closes.
_SEVERITY = (Cause.HUNG, Cause.FAILING, Cause.LOST)


@dataclass(slots=True)
class _OpenCircuit:
    cause: Cause
    reason: str
    probe_intervals: Backoff
    probe_at: float
    is_probing: bool = False
    # Whether a probe of this circuit has failed.
    has_failed_probe: bool = False


@dataclass(slots=True)
class _Openings:
    """The circuits of one worker in the past, with one kind of cause."""

    last_at: float
    # First probe intervals of circuits that open soon after each other.
    first_intervals: Backoff


class CircuitBreaker:
    """The circuits of one frontend's workers. rng: jitters probes, to spread those of frontends."""

    def __init__(self, rng: Random) -> None:
        self._rng = rng
        self._open_circuits: dict[int, _OpenCircuit] = {}
        # Key: the worker, and whether it was failing.
        self._openings: dict[tuple[int, bool], _Openings] = {}

    def open_circuit(
        self, worker_id: int, reason: str, now: float, cause: Cause = Cause.LOST
    ) -> bool:
        """Records a failure of the worker; whether its circuit was closed before."""
        found = self._open_circuits.get(worker_id)
        if found is not None:
            # A hung worker that is then lost counts as lost.
            found.reason = reason
            found.cause = max(found.cause, cause, key=_SEVERITY.index)
            return False
        first_s = self._next_first_interval_s(worker_id, now, is_failing=cause is Cause.FAILING)
        later_s = min(2 * first_s, PROBE_INTERVAL_MAX_S)
        intervals = Backoff(later_s, PROBE_INTERVAL_MAX_S, self._rng, jitter=_JITTER)
        probe_at = now + first_s * self._rng.uniform(*_JITTER)
        self._open_circuits[worker_id] = _OpenCircuit(cause, reason, intervals, probe_at)
        return True

    def _next_first_interval_s(self, worker_id: int, now: float, *, is_failing: bool) -> float:
        """Counts an opening; returns the time before its first probe, without jitter."""
        key = worker_id, is_failing
        openings = self._openings.get(key)
        again_within_s = FAILED_AGAIN_WITHIN_S if is_failing else REOPENED_WITHIN_S
        if openings is None or now - openings.last_at >= again_within_s:
            first_s = FAILING_FIRST_INTERVAL_S if is_failing else FIRST_PROBE_INTERVAL_S
            max_s = FAILING_INTERVAL_MAX_S if is_failing else PROBE_INTERVAL_MAX_S
            openings = self._openings[key] = _Openings(now, Backoff(first_s, max_s, None))
        openings.last_at = now
        return openings.first_intervals.next_s()

    def close_circuit(self, worker_id: int, now: float) -> bool:
        """Records that the worker works; whether its circuit was open before."""
        if self._open_circuits.pop(worker_id, None) is None:
            return False
        failings = self._openings.get((worker_id, True))
        if failings is not None:
            failings.last_at = now
        return True

    def reasons(self) -> dict[int, str]:
        """Workers with an open circuit -> the failure observed last."""
        return {worker_id: circuit.reason for worker_id, circuit in self._open_circuits.items()}

    def count_by_cause(self) -> dict[Cause, int]:
        """Returns the number of open circuits of each cause."""
        counts = dict.fromkeys(Cause, 0)
        for circuit in self._open_circuits.values():
            counts[circuit.cause] += 1
        return counts

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
            self.close_circuit(worker_id, now)
            return
        circuit = self._open_circuits.get(worker_id)
        if circuit is not None:
            circuit.probe_at = now + circuit.probe_intervals.next_s()
            circuit.is_probing, circuit.has_failed_probe = False, True

    def probe_early(self, worker_id: int, now: float) -> None:
        """Records that the worker may work again: if it has failed a probe, the next is due now."""
        circuit = self._open_circuits.get(worker_id)
        if circuit is not None and circuit.has_failed_probe:
            circuit.probe_at = now

    def retain(self, present: Iterable[int]) -> None:
        present = set(present)
        for worker_id in self._open_circuits.keys() - present:
            del self._open_circuits[worker_id]
        for key in [key for key in self._openings if key[0] not in present]:
            del self._openings[key]

    def excluded(self, pool: Iterable[int]) -> frozenset[int]:
        """Returns the workers of a pool that get no request.

        pool: workers that can replace each other: of one model and role.

        - Lost workers: all.
        - Hung ones: at most HUNG_FRACTION_MAX of the pool and at least one, in the order in which
          their circuits opened.
        - Failing ones: all that failed a probe; of the others, at most FAILING_FRACTION_MAX of the
          pool and at least one. None, if no worker were left: the failures may have a common
          cause, and an error is better than a wait.

        If all workers are lost or hung, all: requests wait for a successful probe, and each worker
        is excluded until its own probe succeeds.
        """
        if not self._open_circuits:
            return frozenset()
        pool = set(pool)
        found = [(w, circuit) for w, circuit in self._open_circuits.items() if w in pool]
        failing = [(w, circuit) for w, circuit in found if circuit.cause is Cause.FAILING]
        if len(found) == len(pool) and not failing:
            for _, circuit in found:
                circuit.cause = Cause.LOST
            return frozenset(pool)
        lost = {w for w, circuit in found if circuit.cause is Cause.LOST}
        hung = [w for w, circuit in found if circuit.cause is Cause.HUNG]
        excluded = lost.union(hung[: _share(HUNG_FRACTION_MAX, pool)])
        suspects = [w for w, circuit in failing if not circuit.has_failed_probe]
        excluded_failing = {w for w, circuit in failing if circuit.has_failed_probe}
        excluded_failing.update(suspects[: _share(FAILING_FRACTION_MAX, pool)])
        if excluded | excluded_failing != pool:
            excluded |= excluded_failing
        return frozenset(excluded)


def _share(fraction: float, pool: set[int]) -> int:
    return max(1, int(fraction * len(pool)))
