"""Responses that clients may read and continue, bounded in size and time (pure)."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

# Memory of an entry and of an item apart from their bytes.
_ENTRY_OVERHEAD_BYTES = 600
_ITEM_OVERHEAD_BYTES = 50


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """response: its object, as JSON. input_items: the items before its output, each as JSON: those
    of the responses that it continues, and its own input, without instructions. tenant: whose
    clients may read it; "" without API keys."""

    response: bytes
    input_items: tuple[bytes, ...]
    tenant: str = ""

    @property
    def size(self) -> int:
        """Bytes of memory. Items that several responses share count for each."""
        sizes = [len(item) + _ITEM_OVERHEAD_BYTES for item in self.input_items]
        return _ENTRY_OVERHEAD_BYTES + len(self.response) + sum(sizes)


class ResponseStore:
    """Keeps responses for `ttl_s` seconds, and the newest ones within `bytes_max`. `now`: seconds
    on any monotonic clock."""

    def __init__(self, bytes_max: int, ttl_s: float) -> None:
        self._bytes_max = bytes_max
        self._ttl_s = ttl_s
        # Oldest first; with the time at which each expires.
        self._entries: OrderedDict[str, tuple[StoredResponse, float]] = OrderedDict()
        self.bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def put(self, response_id: str, stored: StoredResponse, now: float) -> None:
        self._entries[response_id] = stored, now + self._ttl_s
        self.bytes += stored.size
        self._remove_expired(now)
        while self.bytes > self._bytes_max:
            self._remove(next(iter(self._entries)))

    def get(self, response_id: str, now: float) -> StoredResponse | None:
        self._remove_expired(now)
        entry = self._entries.get(response_id)
        return None if entry is None else entry[0]

    def delete(self, response_id: str, now: float) -> bool:
        """Returns whether it was stored."""
        is_stored = self.get(response_id, now) is not None
        if is_stored:
            self._remove(response_id)
        return is_stored

    def _remove_expired(self, now: float) -> None:
        for response_id in self._expired(now):
            self._remove(response_id)

    def _expired(self, now: float) -> Iterable[str]:
        expired = []
        for response_id, (_, expires_at) in self._entries.items():
            if expires_at > now:
                break
            expired.append(response_id)
        return expired

    def _remove(self, response_id: str) -> None:
        stored, _ = self._entries.pop(response_id)
        self.bytes -= stored.size
