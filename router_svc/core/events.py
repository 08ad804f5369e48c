"""Events of one router process, which connect parts that must not import each other (pure).

`RouterEvents` is made first and passed to the constructors of its publishers and subscribers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, ParamSpec

from common.request.placement import Placement, Query
from router_svc.core.booking import Booking, BookingKey, SessionName

P = ParamSpec("P")


class Event(Generic[P]):
    """Calls its subscribers in order of subscription. They must not call back the publisher."""

    __slots__ = ("_subscribers",)

    def __init__(self) -> None:
        self._subscribers: tuple[Callable[P, object], ...] = ()

    def subscribe(self, subscriber: Callable[P, object]) -> None:
        self._subscribers += (subscriber,)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> None:
        for subscriber in self._subscribers:
            subscriber(*args, **kwargs)


class RouterEvents:
    """All events of one router."""

    def __init__(self) -> None:
        # The fleet: the set of workers, or what one advertises, changed.
        self.fleet_changed: Event[[]] = Event()
        # The load tracker: a request has its first token, so many seconds after its booking here.
        self.first_token: Event[[Booking, float]] = Event()
        # The load tracker: the load of a rank may have decreased.
        self.capacity_freed: Event[[Placement]] = Event()
        # A booking owned here was made, changed or given up, or a booking was freed by a request
        # to this router. Peers need an update.
        self.booking_changed: Event[[BookingKey]] = Event()
        # A booking with a client session was added, for whichever router owns it, or removed.
        # The flag of a removal: this router owned the booking.
        self.booking_added: Event[[Booking]] = Event()
        self.booking_removed: Event[[Booking, bool]] = Event()
        # A booking with an affinity key was added, for whichever router owns it.
        self.key_placed: Event[[Booking]] = Event()
        # A newer session of the same frontend superseded this frontend session.
        self.frontend_session_superseded: Event[[int]] = Event()
        # A prompt was sent to a rank and made approximate entries of its cache here.
        self.prompt_entered: Event[[Query, Placement]] = Event()
        # Client sessions: peers need an update of this one.
        self.session_changed: Event[[SessionName]] = Event()
        # This one has another placement than before, or none.
        self.session_moved: Event[[SessionName]] = Event()
