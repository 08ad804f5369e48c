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

from collections.abc import Iterable

from frontend_svc.recent_counts import RecentCounts

WINDOW_S = 10.0
FAILURES_MIN = 4
SHARE_MIN = 0.2
PEERS_FACTOR = 3.0


class OutlierDetector:
    """Requests and failures of each worker of a frontend."""

    def __init__(self) -> None:
        self._requests = RecentCounts[int](WINDOW_S)
        self._failures = RecentCounts[int](WINDOW_S)

    def count_request(self, worker_id: int, now: float) -> None:
        self._requests.add(worker_id, now)

    def count_failure(self, worker_id: int, peers: Iterable[int], now: float) -> str:
        """Counts a failed request. Returns why the worker is an outlier, "" if it is not.

        peers: workers that serve the same requests; may contain the worker.
        """
        self._requests.advance(now)
        self._failures.add(worker_id, now)
        failures, requests = self._sums({worker_id})
        peer_failures, peer_requests = self._sums(set(peers) - {worker_id})
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
        self._requests.forget(worker_id)
        self._failures.forget(worker_id)

    def _sums(self, workers: set[int]) -> tuple[int, int]:
        """Returns the failures and the requests of these workers."""
        failures = sum(self._failures[worker_id] for worker_id in workers)
        return failures, sum(self._requests[worker_id] for worker_id in workers)
