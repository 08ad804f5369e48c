"""Time limits and errors of a KV handoff, equal for all engines. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from common.errors import Overloaded, WorkerLost

# Reason of an Overloaded: the decode worker itself had no blocks; its partner is not involved.
NO_BLOCKS: Final = "HANDOFF_NO_BLOCKS"
# Reasons of a WorkerLost that ends a leg; all are retryable, in another room.
NO_PARTNER: Final = "HANDOFF_NO_PARTNER"
PEER_ABORTED: Final = "HANDOFF_PEER_ABORTED"
PEER_LOST: Final = "HANDOFF_PEER_LOST"
ROOM_TAKEN: Final = "HANDOFF_ROOM_TAKEN"
MISMATCH: Final = "HANDOFF_MISMATCH"
FULL: Final = "HANDOFF_FULL"
EXPIRED: Final = "TRANSFER_EXPIRED"
FAILURES: Final = (
    *(NO_BLOCKS, NO_PARTNER, PEER_ABORTED, PEER_LOST),
    *(ROOM_TAKEN, MISMATCH, FULL, EXPIRED),
)

_MESSAGES: Final = {
    NO_PARTNER: "the other leg of the request did not arrive in time",
    PEER_ABORTED: "the other leg of the request was aborted",
    PEER_LOST: "the other worker of the request was lost",
    ROOM_TAKEN: "the room is in use by another leg",
    MISMATCH: "prompt or block size differ between the two workers of the room",
    FULL: "the prefill worker has reached its limit of rooms",
    EXPIRED: "the prefill worker no longer holds this transfer",
}


@dataclass(frozen=True, slots=True)
class HandoffTimeouts:
    """Time limits of a room, in seconds.

    partner_timeout_s: how long a leg waits for its partner, and how long a partner may be silent.
    abort_s: how long the pages of an aborted leg wait for the peer's confirmation. lease_s: how
    long a completed prefill keeps its KV.
    """

    partner_timeout_s: float = 10.0
    abort_s: float = 2.0
    lease_s: float = 30.0

    @property
    def ping_interval_s(self) -> float:
        return self.partner_timeout_s / 4

    @property
    def blocks_timeout_s(self) -> float:
        """Returns how long decode waits for blocks: less than prefill waits for decode."""
        return self.partner_timeout_s * 3 / 4


def handoff_error(reason: str) -> WorkerLost:
    message = _MESSAGES.get(reason, f"the handoff failed: {reason}")
    return WorkerLost(message, retryable=True, reason=reason)


def no_blocks_error(timeouts: HandoffTimeouts) -> Overloaded:
    """Returns the error of a decode leg that got no blocks in `blocks_timeout_s`."""
    message = f"no KV blocks became free within {timeouts.blocks_timeout_s:g} s"
    return Overloaded(timeouts.partner_timeout_s, message, reason=NO_BLOCKS)
