"""The state of the mesh for pages: `ConsoleState` of a running console."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing

from common.access.key_file import KeyFile
from common.errors import MeshError, NotFound, Unavailable
from common.inspection.decisions import read_decision
from console_svc.actions import explain, keys
from console_svc.actions.chat import stream_chat
from console_svc.actions.replay import Replays
from console_svc.collect.collector import Collector, Subscribers
from console_svc.collect.request_log import row_of
from console_svc.config import ConsoleConfig
from console_svc.state.actions import ChatDelta, ChatRequest, ReplayReport, ReplayRequest
from console_svc.state.batches import Batches
from console_svc.state.console_state import Unsubscribe
from console_svc.state.members import Curve, Event, IndexView, Member, Model, Overview
from console_svc.state.requests import Explanation, RequestRow, Trace
from console_svc.state.tenants import Tenants
from console_svc.traces.store import TraceStore
from console_svc.traces.tree import build_stages, build_trace

# In the id of a response: `chatcmpl-ID`.
_ID_CHARS = 32


class LiveState:
    """See `ConsoleState`."""

    def __init__(
        self,
        config: ConsoleConfig,
        collector: Collector,
        traces: TraceStore,
        replays: Replays,
        key_file: KeyFile | None,
        subscribers: Subscribers,
    ) -> None:
        self._config = config
        self._collector = collector
        self._traces = traces
        self._replays = replays
        self._key_file = key_file
        self._subscribers = subscribers
        # The requests of one version, since pages read them often.
        self._requests: tuple[int, tuple[RequestRow, ...]] = (-1, ())

    @property
    def version(self) -> int:
        return self._subscribers.version

    def subscribe(self, callback: Callable[[], None]) -> Unsubscribe:
        key = object()
        self._subscribers.callbacks[key] = callback

        def unsubscribe() -> None:
            self._subscribers.callbacks.pop(key, None)

        return unsubscribe

    @property
    def interval_s(self) -> float:
        return self._config.interval_s

    @property
    def overview(self) -> Overview:
        return self._collector.overview

    @property
    def members(self) -> Sequence[Member]:
        return self._collector.roster.members

    def member(self, name_or_id: str) -> Member | None:
        return self._collector.member(name_or_id)

    def member_curves(self, member_id: str) -> dict[str, Curve]:
        return self._collector.roster.curves(member_id)

    @property
    def events(self) -> Sequence[Event]:
        return tuple(self._collector.roster.events)

    @property
    def models(self) -> Sequence[Model]:
        return self._collector.models

    @property
    def index(self) -> Sequence[IndexView]:
        return self._collector.index

    @property
    def tenants(self) -> Tenants:
        return self._collector.tenants

    @property
    def batches(self) -> Batches:
        return self._collector.batches

    @property
    def requests(self) -> Sequence[RequestRow]:
        if self._requests[0] != self.version:
            self._requests = (self.version, self._collector.requests.newest(self._traces))
        return self._requests[1]

    def find_request(self, id_: str) -> RequestRow | None:
        for name in _ids(id_):
            if (row := self._collector.requests.find(name)) is not None:
                return row
            if (stored := self._traces.find(name)) is not None:
                return row_of(stored)
        return None

    def trace(self, id_: str) -> Trace | None:
        row = self.find_request(id_)
        names = _ids(id_) if row is None else (row.trace_id, row.request_id, *_ids(id_))
        stored = next(filter(None, map(self._traces.find, filter(None, names))), None)
        if stored is not None:
            return build_trace(stored)
        return None if row is None else build_stages(row)

    async def explain(self, id_: str) -> Explanation:
        row = self.find_request(id_)
        names = _ids(id_) if row is None else (row.request_id,)
        collector = self._collector
        routers = collector.roster.instances("router")
        if not routers:
            raise Unavailable("no router is registered")
        # The router that decided is asked first.
        if row is not None:
            routers.sort(key=lambda router: collector.roster.name(router.id) != row.router)
        silent = []
        for router in routers:
            name = collector.roster.name(router.id)
            for request_id in names:
                try:
                    async with collector.channels.use(router) as channel:
                        response = await read_decision(channel, request_id)
                except MeshError as error:
                    silent.append(f"{name} does not respond: {error.message}")
                    break
                if response is not None:
                    return explain.describe(request_id, name, response, row, collector.roster.name)
        if silent:
            raise Unavailable("; ".join(silent))
        text = f"no router has the decision of {id_!r}: each keeps its last 4096"
        raise NotFound(text, field="request_id")

    async def revoke_key(self, key_id: str) -> None:
        await keys.revoke_key(self._config.api_keys, self._key_file, key_id)
        self._collector.refresh()

    async def chat(self, request: ChatRequest) -> AsyncGenerator[ChatDelta, None]:
        serving = [m for m in self.members if m.service == "frontend" and m.url]
        if not serving:
            raise Unavailable("no frontend is registered")
        url = min(serving, key=lambda member: not member.is_healthy).url
        async with aclosing(stream_chat(self._config, url, request)) as deltas:
            async for delta in deltas:
                yield delta

    @property
    def replay_policies(self) -> Sequence[str]:
        return self._replays.policies

    @property
    def replay_workloads(self) -> Sequence[str]:
        return self._replays.workloads

    @property
    def replay_traces(self) -> Sequence[str]:
        return self._replays.traces

    async def replay(self, request: ReplayRequest) -> ReplayReport:
        return await self._replays.replay(request)


def _ids(text: str) -> tuple[str, ...]:
    """Returns a text, and the id of a request in that of its response."""
    last = text.rpartition("-")[2]
    return (text, last) if last != text and len(last) == _ID_CHARS else (text,)
