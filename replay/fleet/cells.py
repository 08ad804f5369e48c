"""The choice of a cell, before the choice of a worker in it (pure).

Each key has the cells in an order of its own (rendezvous hashing), so requests of one key go to one
cell, and a cell that comes or goes moves only its own keys. The first cell of the order whose load
is within the bound takes the request (consistent hashing with bounded loads).
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from struct import Struct

_KEY = Struct("<QQ")


def weight(key: int, cell: int) -> int:
    """Returns the rank of a cell for a key; the greatest is first."""
    return int.from_bytes(blake2b(_KEY.pack(key, cell), digest_size=8).digest(), "little")


def choose_cell(key: int, loads: Sequence[float], bound: float) -> int:
    """Returns the cell of a request.

    loads: of the cells, by number.
    bound: greatest load of a cell, as a multiple of the mean load; at least 1.
    """
    limit = bound * (sum(loads) + 1) / len(loads)
    order = sorted(range(len(loads)), key=lambda cell: weight(key, cell), reverse=True)
    return next((cell for cell in order if loads[cell] < limit), order[0])
