"""The last ended requests of this process."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from frontend_svc.endpoints.request_context import EndedRequest
from frontend_svc.members import Members
from frontend_svc.recent_requests.record import RecentQuery, RecentRequest, record_of


class RecentRequests:
    """Keeps the records of the last `limit` requests. last_sequence: that of the newest one; 0:
    none has ended."""

    def __init__(self, limit: int, members: Members) -> None:
        """
        - members: have the names of workers and routers.
        """
        self._members = members
        self._records = deque[RecentRequest](maxlen=limit)
        self.last_sequence = 0

    def add(self, ended: EndedRequest) -> None:
        if self._records.maxlen == 0:
            return
        record = record_of(ended, self._members.snapshot)
        self.last_sequence += 1
        record.sequence = self.last_sequence
        self._records.append(record)

    def find(self, query: RecentQuery) -> Iterator[RecentRequest]:
        """Yields the records that a query finds, newest first; those of now, whatever is added
        meanwhile."""
        for record in reversed(tuple(self._records)):
            if record.sequence <= query.after:
                return
            if query.matches(record):
                yield record
