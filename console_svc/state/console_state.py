"""The interface between the pages and everything behind them."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Protocol

from console_svc.state.actions import ChatDelta, ChatRequest, ReplayReport, ReplayRequest
from console_svc.state.batches import Batches
from console_svc.state.members import Curve, Event, IndexView, Member, Model, Overview
from console_svc.state.requests import Explanation, RequestRow, Trace
from console_svc.state.tenants import Tenants

Unsubscribe = Callable[[], None]


class ConsoleState(Protocol):
    """What pages read and call. There is one for all viewers of a process.

    Properties return the newest immutable value at once; they never wait. Coroutines raise a
    `MeshError` (`common.errors`), whose message a page shows.
    """

    @property
    def version(self) -> int:
        """Grows with each change of a property. A page renders again if it differs."""

    def subscribe(self, callback: Callable[[], None]) -> Unsubscribe:
        """Calls `callback` in the event loop after a change, at most once an interval. The page
        calls the result when its client disconnects."""

    @property
    def interval_s(self) -> float:
        """Seconds between two measurements."""

    @property
    def overview(self) -> Overview: ...

    @property
    def members(self) -> Sequence[Member]:
        """Frontends, routers, indexers, workers; then by name."""

    def member(self, name_or_id: str) -> Member | None: ...

    def member_curves(self, member_id: str) -> dict[str, Curve]:
        """Returns `running`, `waiting` and `kv_use` of a member over time; empty curves if it has
        none."""

    @property
    def events(self) -> Sequence[Event]:
        """Changes of members, newest first."""

    @property
    def models(self) -> Sequence[Model]: ...

    @property
    def index(self) -> Sequence[IndexView]: ...

    @property
    def tenants(self) -> Tenants: ...

    @property
    def batches(self) -> Batches: ...
    @property
    def requests(self) -> Sequence[RequestRow]:
        """Recent requests, newest first. Those that were not sampled have no trace id."""

    def find_request(self, id_: str) -> RequestRow | None:
        """Returns a recent request by its id, that of its response (`chatcmpl-…`), its trace or its
        client; None: it is not here."""

    def trace(self, id_: str) -> Trace | None:
        """Returns the spans of a request, by the same ids; without spans its stages. None: it is
        not here."""

    async def explain(self, id_: str) -> Explanation:
        """Returns why a worker was chosen. Raises NotFound and Unavailable."""

    async def revoke_key(self, key_id: str) -> None:
        """Removes a key from the file; frontends refuse it within 2 s. Raises NotFound, and
        PermissionDenied if this console may not."""

    def chat(self, request: ChatRequest) -> AsyncGenerator[ChatDelta, None]:
        """Streams a chat through a frontend. Raises a MeshError for an error of the frontend. The
        page closes the generator (`contextlib.aclosing`) to abort the request."""

    @property
    def replay_policies(self) -> Sequence[str]: ...

    @property
    def replay_workloads(self) -> Sequence[str]:
        """Names of workloads that can be generated."""

    @property
    def replay_traces(self) -> Sequence[str]:
        """Files of the configured folder."""

    async def replay(self, request: ReplayRequest) -> ReplayReport:
        """Compares routing policies; one replay runs at a time. Raises InvalidRequest, Overloaded
        while another replay runs, and Unavailable after the time limit."""
