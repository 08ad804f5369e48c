"""Responses that clients may read and continue, bounded in size and time (pure)."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from operator import attrgetter

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
    """Keeps responses for `ttl_s` seconds, within `bytes_max`. `now`: seconds on any monotonic
    clock.

    A full store removes the oldest response of the tenant whose responses are the largest together.
    So a tenant may use what others do not, and keeps its equal part whatever the others store.
    """

    def __init__(self, bytes_max: int, ttl_s: float) -> None:
        self._bytes_max = bytes_max
        self._ttl_s = ttl_s
        # Oldest first; with the time at which each expires.
        self._entries: OrderedDict[str, tuple[StoredResponse, float]] = OrderedDict()
        self._tenants: dict[str, _TenantPart] = {}
        self.bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def put(self, response_id: str, stored: StoredResponse, now: float) -> None:
        self._entries[response_id] = stored, now + self._ttl_s
        part = self._tenants.setdefault(stored.tenant, _TenantPart())
        part.ids[response_id] = None
        part.bytes += stored.size
        self.bytes += stored.size
        self._remove_expired(now)
        while self.bytes > self._bytes_max:
            largest = max(self._tenants.values(), key=attrgetter("bytes"))
            self._remove(next(iter(largest.ids)))

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
        part = self._tenants[stored.tenant]
        del part.ids[response_id]
        part.bytes -= stored.size
        self.bytes -= stored.size
        if not part.ids:
            del self._tenants[stored.tenant]


@dataclass(slots=True)
class _TenantPart:
    """What one tenant stores."""

    ids: OrderedDict[str, None] = field(default_factory=OrderedDict)
    """Oldest first."""

    bytes: int = 0
