"""The bookings that a frontend holds, and their changes that the router has not received yet."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

from common.request.placement import Decision, Query
from common.wire.preprocessed import dataclass_to_proto
from frontend_svc.request.placement_request import PlacementKey
from frontend_svc.routers.session import key_to_proto
from kvmesh.router.v1 import router_pb2

# A booking is sent again this often: routers expire bookings that are not renewed.
RENEW_INTERVAL_S = 100.0


class HeldBookings:
    """Bookings by key. now: loop time; on_change: called when there is something to send. A session
    begins with all bookings, so prefills and frees are recorded only while one is open."""

    def __init__(
        self, frontend_id: int, now: Callable[[], float], on_change: Callable[[], None]
    ) -> None:
        self._frontend_id = frontend_id
        self._now = now
        self._on_change = on_change
        self._bookings: dict[PlacementKey, router_pb2.Booking] = {}
        self._renewed_at: dict[PlacementKey, float] = {}  # oldest first
        self._unsent_prefills_done: list[PlacementKey] = []
        self._unsent_outputs: dict[PlacementKey, router_pb2.OutputBlocks] = {}
        self._unsent_frees: list[PlacementKey] = []
        self.is_output_tracked = False  # by the router
        self.is_session_open = False

    def __len__(self) -> int:
        return len(self._bookings)

    def add(self, key: PlacementKey, query: Query, decision: Decision) -> None:
        routing, session_revision = query.routing, decision.session_revision
        session, lora_name = None, None
        if routing is not None and session_revision:
            session, lora_name = routing.session_control, routing.lora_name
        booking = self._bookings[key] = router_pb2.Booking(
            key=key_to_proto(key),
            frontend_id=self._frontend_id,
            model=query.model,
            prefill_tokens=decision.prefill_tokens,
            decode_blocks=decision.decode_blocks,
            revision=1,
            session_id="" if session is None else session.session_id,
            session_revision=session_revision,
            lora_name=lora_name or "",
            affinity_key=query.affinity_key,
        )
        dataclass_to_proto(decision.worker, booking.worker)
        if decision.prefill is not None:
            dataclass_to_proto(decision.prefill, booking.prefill)
        self._renewed_at[key] = self._now()

    def prefill_done(self, key: PlacementKey) -> None:
        booking = self._bookings.get(key)
        if booking is not None:
            booking.prefill_tokens = 0
            booking.revision += 1
            self._record(self._unsent_prefills_done, key)

    def output(self, key: PlacementKey, blocks: int, decay_fraction: float | None) -> None:
        """Records that the output grew by `blocks`, if the router tracks output. decay_fraction:
        share of the expected output still to come, 0..1; None: unknown."""
        booking = self._bookings.get(key)
        if booking is None or not self.is_output_tracked:
            return
        booking.decode_blocks += blocks
        if decay_fraction is not None:
            booking.decay_fraction = decay_fraction
        unsent = self._unsent_outputs.get(key)
        if unsent is None:
            unsent = self._unsent_outputs[key] = router_pb2.OutputBlocks(key=booking.key)
            booking.revision += 1  # once a message: unsent output goes out as one message
        unsent.blocks += blocks
        if decay_fraction is not None:
            unsent.decay_fraction = decay_fraction
        self._on_change()

    def free(self, key: PlacementKey) -> None:
        """Ends the booking, if any. The router frees it even if it is unknown here."""
        self._bookings.pop(key, None)
        self._renewed_at.pop(key, None)
        self._unsent_outputs.pop(key, None)
        self._record(self._unsent_frees, key)

    def begin_session(self) -> Iterable[router_pb2.Booking]:
        """Records that a session opens; returns all bookings, the first thing to send."""
        self._unsent_prefills_done, self._unsent_frees = [], []
        self._unsent_outputs.clear()
        self._renewed_at = dict.fromkeys(self._bookings, self._now())
        self.is_session_open = True
        return self._bookings.values()

    def move_changes_to(self, frame: router_pb2.SessionRequest) -> None:
        """Adds all unsent changes and due renewals to a frame."""
        frame.announced.extend(self._take_due_renewals())
        frame.prefills_done.extend(map(key_to_proto, self._unsent_prefills_done))
        frame.outputs.extend(self._unsent_outputs.values())
        frame.frees.extend(map(key_to_proto, self._unsent_frees))
        self._unsent_outputs.clear()
        self._unsent_prefills_done, self._unsent_frees = [], []

    @property
    def is_renewal_due(self) -> bool:
        oldest_at = next(iter(self._renewed_at.values()), math.inf)
        return self._now() - oldest_at >= RENEW_INTERVAL_S

    def _record(self, unsent: list[PlacementKey], key: PlacementKey) -> None:
        if self.is_session_open:
            unsent.append(key)
            self._on_change()

    def _take_due_renewals(self) -> list[router_pb2.Booking]:
        """Returns the bookings to send again; they include their unsent output."""
        now = self._now()
        due: list[PlacementKey] = []
        for key, at in self._renewed_at.items():
            if now - at < RENEW_INTERVAL_S:
                break
            due.append(key)
        for key in due:
            del self._renewed_at[key]
            self._renewed_at[key] = now
            self._unsent_outputs.pop(key, None)
        return [self._bookings[key] for key in due]
