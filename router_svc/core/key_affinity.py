"""Where requests with one affinity key were last sent (pure).

Clients name their conversations by hints, such as `prompt_cache_key`. A frontend sends the hash of
the hint, its tenant and the model: the *affinity key*. A key is no session: it binds nothing. The
prompt of the key's last request counts as cached at the rank that computed it, if the index does
not report the cache of that rank; the cost then decides, so that a loaded rank loses the request
(`cost`).

Routers learn keys from bookings, those of their peers too, so that they agree without messages of
its own. A table is bounded: a new key evicts the one that was placed longest ago.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

from common.request.placement import Placement
from router_svc.core.booking import Booking
from router_svc.core.events import RouterEvents

# About 250 bytes each.
KEYS_MAX = 65_536
# Outcome for a request with a key: the first one placed; on the rank of the last one; on another.
KEY_OUTCOMES = ("bound", "kept", "moved")


class KeyHome(NamedTuple):
    """The rank that computed the last prompt of a key, and the blocks that count as cached
    there."""

    placement: Placement
    blocks: int


class KeyAffinity:
    """The ranks of keys. keys_max: most keys that are kept."""

    def __init__(self, events: RouterEvents, keys_max: int = KEYS_MAX) -> None:
        assert keys_max > 0, "keys_max must be positive"
        self._keys_max = keys_max
        # In order of placement, the oldest first.
        self._homes: OrderedDict[int, KeyHome] = OrderedDict()
        events.key_placed.subscribe(self.placed)

    def placed(self, booking: Booking) -> None:
        """Handles `RouterEvents.key_placed`."""
        key = booking.affinity_key
        self._homes.pop(key, None)
        self._homes[key] = KeyHome(booking.prefill or booking.worker, booking.decode_blocks)
        if len(self._homes) > self._keys_max:
            self._homes.popitem(last=False)

    def home(self, key: int) -> KeyHome | None:
        """Returns where the last request of a key was sent; None: unknown, or 0 for no key."""
        return self._homes.get(key)

    def __len__(self) -> int:
        return len(self._homes)


def key_outcome(home: KeyHome | None, placement: Placement) -> str:
    """Returns one of KEY_OUTCOMES. home: before the decision. placement: of the prompt."""
    if home is None:
        return "bound"
    return "kept" if home.placement == placement else "moved"
