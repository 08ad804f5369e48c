"""A state of the console that a test fills in, and values for it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from common.errors import NotFound
from common.inspection.traffic import Traffic
from common.usage import UsageCounts
from console_svc.state.actions import ChatDelta, ChatRequest, ReplayReport, ReplayRequest, ReplayRun
from console_svc.state.batches import Batches
from console_svc.state.members import (
    SERVING,
    Adapter,
    Curve,
    Event,
    IndexSource,
    IndexView,
    Member,
    Model,
    Overview,
    Rank,
)
from console_svc.state.requests import (
    Candidate,
    Explanation,
    RequestRow,
    SpanLink,
    Trace,
    TraceSpan,
)
from console_svc.state.tenants import Key, Tenants, TenantView

NOW_S = 1_795_000_000.0
MODEL = "sim"
TRACE_ID = "4bf92f3577b34da6a3ce929d0e0e4736"
REQUEST_ID = "9f8e7d6c5b4a39281706f5e4d3c2b1a0"


def member(name: str, service: str = "worker", **fields: Any) -> Member:
    """Returns a member that serves. fields: other values of fields of `Member`."""
    given: dict[str, Any] = {
        "id": str(abs(hash(name)) % 2**62),
        "service": service,
        "name": name,
        "address": "127.0.0.1:1",
        "version": "0.1.0",
        "health": SERVING,
        "is_routable": True,
        "seen_s": NOW_S,
        "asked_s": NOW_S,
    }
    if service == "worker":
        given |= {"model": MODEL, "role": "aggregated", "kv_index": "events", "block_size": 16}
    return Member(**given | fields)


def rank(used: int = 40, total: int | None = 100, **fields: int) -> Rank:
    given = {"dp_rank": 0, "running": 3, "waiting": 1, "waiting_tokens": 200, "rooms_open": 0}
    return Rank(kv_used_blocks=used, kv_total_blocks=total, **given | fields)


def loaded(name: str, used: int = 40, **fields: Any) -> Member:
    """Returns a worker with a load."""
    given: dict[str, Any] = {"ranks": (rank(used),), "running": 3, "waiting": 1}
    return member(name, **given | fields)


def pairs(count: int, domain: str = "rack-a") -> list[Member]:
    """Returns so many prefill and decode workers."""
    return [
        loaded(f"{role}-{domain}-{n}", 10 + 7 * n % 90, role=role, domain=domain)
        for role in ("prefill", "decode")
        for n in range(count)
    ]


def small_mesh() -> list[Member]:
    """Returns a mesh of each service, with two pairs."""
    front = [
        member(
            f"frontend-{n}", "frontend", running=4, requests_per_s=12.5, url="http://127.0.0.1:1"
        )
        for n in range(2)
    ]
    routers = [member(f"router-{n}", "router") for n in range(2)]
    return [*front, *routers, member("indexer-0", "indexer"), *pairs(2)]


def large_mesh(workers: int, domains: int = 25) -> list[Member]:
    """Returns a mesh of each service, with so many workers in domains of equal size."""
    each = workers // domains // 2
    found = [member(f"frontend-{n}", "frontend", running=40) for n in range(8)]
    found += [member(f"router-{n}", "router") for n in range(4)]
    found += [member(f"indexer-{n}", "indexer") for n in range(2)]
    for domain in range(domains):
        found += pairs(each, f"rack-{domain:02}")
    return found


def source(worker: str = "worker-0", **fields: Any) -> IndexSource:
    given: dict[str, Any] = {
        "indexer": "indexer-0",
        "worker": worker,
        "worker_id": worker,
        "dp_rank": 0,
        "state": "exact",
        "reason": "",
        "blocks": 60,
        "tiers": {"device": 50, "host": 10},
        "capacity_blocks": 100,
        "sequence": 12,
        "age_s": 0.3,
        "model": MODEL,
    }
    return IndexSource(**given | fields)


def index_view(sources: Sequence[IndexSource], **fields: Any) -> IndexView:
    given: dict[str, Any] = {
        "indexer": "indexer-0",
        "blocks": sum(s.blocks for s in sources),
        "batches_applied": 1234,
        "used_bytes": 5 << 20,
        "budget_bytes": 1 << 30,
    }
    return IndexView(sources=tuple(sources), **given | fields)


def curve(*values: float | None) -> Curve:
    """Returns a curve with a value each second."""
    return Curve(tuple(NOW_S + at for at in range(len(values))), values)


def request_row(**fields: Any) -> RequestRow:
    given: dict[str, Any] = {
        "request_id": REQUEST_ID,
        "trace_id": TRACE_ID,
        "received_s": NOW_S,
        "frontend": "frontend-0",
        "model": MODEL,
        "endpoint": "chat_completions",
        "tenant": "acme",
        "status": "stop",
        "http_status": 200,
        "total_ms": 812.0,
        "ttft_ms": 95.0,
        "queued_ms": 0.0,
        "prompt_tokens": 640,
        "output_tokens": 64,
        "cached_tokens": 480,
        "predicted_cached_tokens": 512,
        "workers": ("prefill-rack-a-0", "decode-rack-a-1"),
        "is_split": True,
        "attempts": 1,
        "router": "router-0",
        "reasons": ("longest prefix",),
    }
    return RequestRow(**given | fields)


def span(span_id: str, name: str, start_ms: float, duration_ms: float, **fields: Any) -> TraceSpan:
    given: dict[str, Any] = {"parent_id": "1", "depth": 1, "service": "worker", "member": ""}
    return TraceSpan(
        span_id=span_id, name=name, start_ms=start_ms, duration_ms=duration_ms, **given | fields
    )


def pair_trace() -> Trace:
    """Returns the trace of a request with a handoff from prefill to decode."""
    spans = (
        span("1", "chat", 0, 812, parent_id="", depth=0, service="frontend", member="frontend-0"),
        span("2", "route", 4, 3, service="router", member="router-0"),
        span(
            "3", "prefill", 8, 82, member="prefill-rack-a-0", attributes={"disagg_role": "prefill"}
        ),
        span(
            "4",
            "decode",
            9,
            800,
            member="decode-rack-a-1",
            links=("3",),
            attributes={"disagg_role": "decode"},
            events=((95.0, "first_token"),),
        ),
    )
    return Trace(TRACE_ID, REQUEST_ID, NOW_S, 812, spans, (SpanLink("3", "4"),))


def candidate(worker: str, **fields: Any) -> Candidate:
    given: dict[str, Any] = {
        "leg": "prefill",
        "worker": worker,
        "worker_id": worker,
        "dp_rank": 0,
        "is_chosen": False,
        "cost": 0.2,
        "excluded_reason": "",
        "overlap_blocks": 30,
        "active_requests": 3,
        "prefill_tokens": 200,
        "decode_blocks": 40,
        "index_state": "exact",
        "index_reason": "",
        "report_age_ms": 90,
        "terms": {"prefill": 0.12, "decode": 0.05, "active": 0.03, "taint_factor": 1.0},
    }
    return Candidate(**given | fields)


def explanation(**fields: Any) -> Explanation:
    given: dict[str, Any] = {
        "request_id": REQUEST_ID,
        "router": "router-0",
        "selector": "kv",
        "age_s": 4.0,
        "worker": "decode-rack-a-1",
        "prefill": "prefill-rack-a-0",
        "reasons": ("the prefix of 32 blocks is cached", "lowest cost of 2"),
        "predicted_cached_tokens": 512,
        "actual_cached_tokens": 480,
        "overlap_blocks": 32,
        "queued_ms": 0,
        "candidates": (
            candidate("prefill-rack-a-0", is_chosen=True, cost=0.11),
            candidate("prefill-rack-a-1", overlap_blocks=0, terms={"prefill": 0.4, "decode": 0.01}),
            candidate("decode-rack-a-1", leg="decode", is_chosen=True),
            candidate(
                "decode-rack-a-0", leg="decode", cost=None, terms={}, excluded_reason="circuit open"
            ),
        ),
    }
    return Explanation(**given | fields)


def tenant(
    name: str, share: float | None = None, fair: float | None = None, **fields: Any
) -> TenantView:
    key = Key(f"key_{name}", ("infer", "embeddings"), NOW_S, None, is_expired=False)
    used = UsageCounts(120, 2, 60_000, 30_000, 9_000)
    given: dict[str, Any] = {
        "keys": (key,),
        "requests_per_s": 20.0,
        "tokens_per_min": 600_000,
        "concurrency": 64,
        "weight": 1.0,
        "usage": used,
        "by_model": {MODEL: used},
        "by_key": {key.id: used},
        "by_adapter": {"poet": UsageCounts(10, 0, 2_000, 500, 400)},
    }
    return TenantView(name, recent_share=share, fair_share=fair, **given | fields)


def model(**fields: Any) -> Model:
    given: dict[str, Any] = {
        "name": MODEL,
        "card_checksum": "ab12cd34ef56ab12cd34",
        "aliases": ("default",),
        "kinds": ("chat", "completions"),
        "context_length": 32_768,
        "block_size": 16,
        "hash_scheme": "xxh3",
        "tool_parser": "hermes",
        "artifacts": {"tokenizer.json": 120_000},
        "workers": {"prefill": ("prefill-rack-a-0",), "decode": ("decode-rack-a-0",)},
        "adapters": (Adapter("poet", ("decode-rack-a-0",)),),
        "canary": "ok",
    }
    return Model(**given | fields)


def overview(members: Sequence[Member]) -> Overview:
    values = [20 + n % 7 for n in range(60)]
    names = [field.name for field in fields(Traffic)]
    return Overview(
        namespace="mesh",
        registry="the registry .run/registry",
        members=len(members),
        unhealthy=sum(not m.is_healthy for m in members),
        traffic=Traffic(24.0, 1530.0, 88.0, 310.0, running=7, waiting=1),
        kv_use=0.38,
        curves={**{n: curve(*values) for n in names}, "kv_use": curve(*(v / 60 for v in values))},
    )


@dataclass
class FakeState:
    """A `ConsoleState` of the given values. A test changes the values, and calls `change`."""

    members: Sequence[Member] = field(default_factory=small_mesh)
    overview: Overview = field(default_factory=Overview)
    events: Sequence[Event] = ()
    models: Sequence[Model] = ()
    index: Sequence[IndexView] = ()
    tenants: Tenants = field(default_factory=Tenants)
    batches: Batches = field(default_factory=Batches)
    requests: Sequence[RequestRow] = ()
    traces: dict[str, Trace] = field(default_factory=dict)
    explanations: dict[str, Explanation] = field(default_factory=dict)
    version: int = 0
    interval_s: float = 0.05
    revoked: list[str] = field(default_factory=list)
    chats: list[ChatRequest] = field(default_factory=list)
    deltas: Sequence[ChatDelta] = ()
    replay_policies: Sequence[str] = ("kv", "least_loaded", "random")
    replay_workloads: Sequence[str] = ("sessions", "bursts")
    replay_traces: Sequence[str] = ()

    def change(self) -> None:
        self.version += 1

    def subscribe(self, callback: Callable[[], None]) -> Callable[[], None]:
        return lambda: None

    def member(self, name_or_id: str) -> Member | None:
        return next((m for m in self.members if name_or_id in (m.name, m.id)), None)

    def member_curves(self, member_id: str) -> dict[str, Curve]:
        return {
            "running": curve(1, 2, 3),
            "waiting": curve(0, 0, 1),
            "kv_use": curve(0.1, 0.2, 0.4),
        }

    def find_request(self, id_: str) -> RequestRow | None:
        return next(
            (r for r in self.requests if id_ in (r.request_id, r.trace_id, r.client_id)), None
        )

    def trace(self, id_: str) -> Trace | None:
        return self.traces.get(id_)

    async def explain(self, id_: str) -> Explanation:
        if id_ not in self.explanations:
            raise NotFound(f"no decision for {id_}", field="request_id")
        return self.explanations[id_]

    async def revoke_key(self, key_id: str) -> None:
        self.revoked.append(key_id)

    async def chat(self, request: ChatRequest) -> AsyncGenerator[ChatDelta, None]:
        self.chats.append(request)
        for delta in self.deltas:
            await asyncio.sleep(0)
            yield delta

    async def replay(self, request: ReplayRequest) -> ReplayReport:
        figures = {
            "hit_rate": 0.6,
            "ttft_mean_s": 0.12,
            "ttft_p50_s": 0.1,
            "ttft_p90_s": 0.3,
            "ttft_p99_s": 0.9,
            "load_variation": 0.4,
        }
        cdf = tuple((0.05 * 1.3**n, n / 20) for n in range(21))
        runs = tuple(ReplayRun(policy, figures, cdf) for policy in request.policies)
        return ReplayReport(request.trace, {"workers": request.workers}, runs)


def full_state(members: Sequence[Member] | None = None) -> FakeState:
    """Returns a state with something on each page."""
    members = small_mesh() if members is None else members
    workers = [m for m in members if m.service == "worker"]
    sources = [
        source(w.name, worker_id=w.id, tiers={"device": 10 + 83 * n % 90, "host": 5})
        for n, w in enumerate(workers)
    ]
    if sources:
        sources[-1] = source(
            workers[-1].name, worker_id=workers[-1].id, state="degraded", reason="gap repair"
        )
    shares = (tenant("acme", 0.6, 0.5), tenant("globex", 0.4, 0.5), tenant("initech"))
    return FakeState(
        members=members,
        overview=overview(members),
        events=(Event(NOW_S, "joined", "1", "worker-0", "worker", "joined the mesh"),),
        models=(model(),),
        index=(index_view(sources),),
        tenants=Tenants(has_keys=True, can_revoke=True, tenants=shares),
        requests=(request_row(), request_row(request_id="b" * 32, trace_id="", is_split=False)),
        traces={REQUEST_ID: pair_trace()},
        explanations={REQUEST_ID: explanation()},
    )
