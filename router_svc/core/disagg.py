"""Prefill and decode of one request on two workers: who can pair, where they meet (pure)."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from common.preprocessed import BootstrapInfo
from router_svc.core.fleet import Candidate

ROOM_MAX = 2**63 - 1


def bootstrap_of(prefill: Candidate, rng: Random) -> BootstrapInfo | None:
    """A fresh meeting place on the prefill worker; None if it advertises none.

    Without one prefill completes first, and what it left travels to decode with the request.
    """
    worker = prefill.instance
    if worker.bootstrap_host is None or worker.bootstrap_port is None:
        return None
    rank = prefill.placement.dp_rank - worker.dp_rank_start
    room = bootstrap_room(rng, worker.dp_size, rank)
    return BootstrapInfo(worker.bootstrap_host, worker.bootstrap_port, room)


def bootstrap_room(rng: Random, dp_size: int, dp_rank: int) -> int:
    """A random room in 0..2^63-1 with room mod dp_size == dp_rank: engines read the rank from it.

    dp_rank: counted from the worker's first rank. Formula: SGLang takes the rank from the room.
    """
    assert 0 <= dp_rank < dp_size, "a rank is one of the worker's"
    quotient = rng.randrange(ROOM_MAX + 1) % ((ROOM_MAX - dp_rank) // dp_size + 1)
    return quotient * dp_size + dp_rank


def mates(
    prefill: Sequence[Candidate], decode: Sequence[Candidate]
) -> tuple[Sequence[Candidate], Sequence[Candidate]]:
    """Those of each side with somebody of their transfer group on the other; both may be empty.

    KV pages can travel inside a group only: equal page size, dtype, layout and model.
    """
    both = {c.instance.transfer_group for c in prefill} & {
        c.instance.transfer_group for c in decode
    }
    return (
        [c for c in prefill if c.instance.transfer_group in both],
        [c for c in decode if c.instance.transfer_group in both],
    )
