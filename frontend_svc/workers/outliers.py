"""Detects workers that fail more of their requests than their peers do (pure).

A worker is an outlier if in the last WINDOW_S

    failures >= FAILURES_MIN
    failures / requests >= SHARE_MIN
    failures / requests >= PEERS_FACTOR * (peer_failures + 1) / peer_requests

The summand 1 demands enough requests of the peers for a comparison. A failure that all workers have
(a common cause, an invalid kind of request) makes no worker an outlier.

The caller decides which failures count (`frontend_svc/request/machine.py`): a failed request that
is tried again counts against the first worker that failed it, and only if another worker answers
it. A request that fails everywhere therefore counts against no worker.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

WINDOW_S = 10.0
FAILURES_MIN = 4
SHARE_MIN = 0.2
PEERS_FACTOR = 3.0


class OutlierDetector:
    """Requests and failures of each worker of a frontend, in two half windows."""

    def __init__(self) -> None:
        self._window_start = 0.0
        # Of the previous half window and of the current one.
        self._requests = [Counter[int](), Counter[int]()]
        self._failures = [Counter[int](), Counter[int]()]

    def count_request(self, worker_id: int, now: float) -> None:
        if now - self._window_start >= WINDOW_S / 2:
            self._advance_window(now)
        self._requests[1][worker_id] += 1

    def count_failure(self, worker_id: int, peers: Iterable[int], now: float) -> str:
        """Counts a failed request. Returns why the worker is an outlier, "" if it is not.

        peers: workers that serve the same requests; may contain the worker.
        """
        self._advance_window(now)
        self._failures[1][worker_id] += 1
        others = set(peers) - {worker_id}
        failures, requests = self._sums({worker_id})
        peer_failures, peer_requests = self._sums(others)
        if failures < FAILURES_MIN or failures < SHARE_MIN * requests:
            return ""
        if failures * peer_requests < PEERS_FACTOR * (peer_failures + 1) * requests:
            return ""
        return (
            f"it failed {failures} of {requests} requests in {WINDOW_S:g} s, its peers "
            f"{peer_failures} of {peer_requests}"
        )

    def forget(self, worker_id: int) -> None:
        """Drops the counts of a worker: after a time without requests it is judged anew."""
        for counts in (*self._requests, *self._failures):
            counts.pop(worker_id, None)

    def _sums(self, workers: set[int]) -> tuple[int, int]:
        """Returns the failures and the requests of these workers."""
        failures, requests = (
            sum(counts[worker_id] for counts in halves for worker_id in workers)
            for halves in (self._failures, self._requests)
        )
        return failures, requests

    def _advance_window(self, now: float) -> None:
        half_s = WINDOW_S / 2
        elapsed_s = now - self._window_start
        if elapsed_s < half_s:
            return
        is_adjacent = elapsed_s < 2 * half_s
        for halves in (self._requests, self._failures):
            halves[:] = [halves[1] if is_adjacent else Counter(), Counter()]
        self._window_start = now - elapsed_s % half_s
