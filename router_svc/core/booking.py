"""A booking, and the sessions that it belongs to. Plain values (pure).

No value is changed once it is made. A booking is not declared frozen, since every decision makes
one and a frozen one takes twice as long to make.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from common.errors import InvalidRequest
from common.request.placement import Placement


class BookingKey(NamedTuple):
    """Identifies a booking at every router: frontend incarnation, request id, attempt."""

    frontend_id: int
    request_id: str
    attempt: int


@dataclass(slots=True, unsafe_hash=True)
class Booking:
    """The load of one attempt of one request."""

    key: BookingKey
    model: str
    worker: Placement
    prefill: Placement | None = None
    """None if prefill runs on `worker`."""

    prefill_tokens: int = 0
    """They count on `prefill` (or `worker`), and are 0 once prefill is done."""

    decode_blocks: int = 0
    """They count on `worker`, each with the weight `decay`."""

    revision: int = 1
    decay: float = 1.0
    """Weight of a block, 0..1: a nearly finished request counts less."""

    generation: int = 0
    session_id: str = ""
    """Of the client session, empty without one."""

    session_revision: int = 0
    """Of its session record, from 1."""

    lora_name: str = ""
    """The session's adapter."""

    affinity_key: int = 0
    """Of the query; 0: none."""

    @property
    def session(self) -> tuple[str, str, str]:
        return self.model, self.session_id, self.lora_name

    @property
    def version(self) -> tuple[int, int]:
        """Orders versions of one booking; the greater is newer."""
        return self.generation, self.revision

    def __post_init__(self) -> None:
        if not 0.0 <= self.decay <= 1.0:
            raise InvalidRequest(
                f"decay_fraction must be within 0..1, not {self.decay}", "decay_fraction"
            )
        for name, value in (
            ("prefill_tokens", self.prefill_tokens),
            ("decode_blocks", self.decode_blocks),
        ):
            if value < 0:
                raise InvalidRequest(f"{name} must be at least 0, not {value}", name)
        if self.revision < 1:
            raise InvalidRequest(f"revision must be at least 1, not {self.revision}", "revision")


class SessionName(NamedTuple):
    """A client session of one model or adapter. Adapters share no KV and may run elsewhere."""

    model: str
    session_id: str
    lora_name: str = ""


class SessionHello(NamedTuple):
    """A frontend session. generation: number among those of the frontend, from 1; 0: unknown."""

    frontend_id: int
    generation: int
