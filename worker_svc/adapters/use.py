"""Which adapters have many requests on a worker (pure)."""

from __future__ import annotations

from collections.abc import Mapping

# Open requests of an adapter from which on it is busy, and below which it is not, after QUIET_S.
# Two copies share the requests of one, so that an adapter which gets a copy stays busy.
BUSY_REQUESTS = 8
QUIET_REQUESTS = 4
BUSY_S = 3.0
QUIET_S = 60.0


class AdapterUse:
    """The busy adapters of one worker. Another state must last for a while before it counts."""

    def __init__(self) -> None:
        self.busy: frozenset[str] = frozenset()
        # Since when the state of an adapter is another one.
        self._since: dict[str, float] = {}

    def update(self, open_requests: Mapping[str, int], now: float) -> frozenset[str]:
        """Returns the busy adapters. open_requests: running and queued ones by adapter."""
        differing = {
            name
            for name in {*open_requests, *self.busy}
            if (name in self.busy) != self._is_used(name, open_requests.get(name, 0))
        }
        self._since = {name: self._since.get(name, now) for name in differing}
        for name, since in tuple(self._since.items()):
            if now - since >= (QUIET_S if name in self.busy else BUSY_S):
                self.busy ^= {name}
                del self._since[name]
        return self.busy

    def _is_used(self, name: str, count: int) -> bool:
        return count >= (QUIET_REQUESTS if name in self.busy else BUSY_REQUESTS)
