"""Members of the mesh, their load, and what the indexers hold of them (pure)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from common.inspection.traffic import Traffic

SERVING = "serving"
FAILING = "failing"
"""Health of a worker that responds, but of which the engine fails its probes."""
UNKNOWN = "unknown"
"""Health of a member that was not asked yet."""


@dataclass(frozen=True, slots=True)
class Rank:
    """The load of one data-parallel rank of a worker."""

    dp_rank: int
    running: int
    waiting: int
    waiting_tokens: int
    kv_used_blocks: int
    kv_total_blocks: int | None
    """None: the engine does not report it."""

    rooms_open: int
    """Handoffs in progress."""


@dataclass(frozen=True, slots=True)
class Member:
    """One registered instance."""

    id: str
    """Decimal digits: it exceeds 2^53."""

    service: str
    """`frontend`, `router`, `indexer` or `worker`."""

    name: str
    """Its stable name; without one, its id."""

    address: str
    url: str = ""
    """Of a frontend: its API, without /v1."""

    model: str = ""
    role: str = ""
    """Of a worker: `aggregated`, `prefill` or `decode`."""

    version: str = ""
    """Version and form of the process; "": it does not say."""

    transfer_group: str = ""
    """Workers of one group can exchange KV."""

    domain: str = ""
    """Its transfer domain, as the routers use it; "": none."""

    taints: tuple[str, ...] = ()
    adapters: tuple[str, ...] = ()
    """Loaded LoRA adapters."""

    kv_index: str = "none"
    """`events`: exact; `approx`: routers assume it from decisions; `none`."""

    dp_size: int = 1
    block_size: int | None = None
    context_length: int | None = None
    health: str = UNKNOWN
    """`serving`, `not_serving`, `failing`, `unknown`, or why it does not respond: `unavailable`,
    `deadline_exceeded`, `unauthenticated`."""

    failure: str = ""
    """Why its engine fails."""

    is_routable: bool | None = None
    """Whether its peers send it work; None: unknown."""

    missing: tuple[str, ...] = ()
    """Peers that do not send it work yet, with the reason."""

    ranks: tuple[Rank, ...] = ()
    running: int | None = None
    """Requests; of a frontend too. None: unknown."""

    waiting: int | None = None
    requests_per_s: float | None = None
    """Of a frontend."""

    tokens_per_s: float | None = None
    """Of a frontend: output tokens."""

    seen_s: float = 0.0
    """Unix seconds of its first appearance to this console."""

    asked_s: float = 0.0
    """Unix seconds of the last response or failure; 0: not asked yet."""

    @property
    def kv_use(self) -> float | None:
        """Share of KV blocks in use by running requests; None: unknown."""
        total = sum(rank.kv_total_blocks or 0 for rank in self.ranks)
        return sum(rank.kv_used_blocks for rank in self.ranks) / total if total else None

    @property
    def is_healthy(self) -> bool:
        return self.health == SERVING


@dataclass(frozen=True, slots=True)
class Event:
    """A change of a member."""

    at_s: float
    """Unix seconds."""

    kind: str
    """`joined`, `left`, `changed` or `health`."""

    member_id: str
    name: str
    service: str
    text: str
    """What happened, as a short sentence."""


@dataclass(frozen=True, slots=True)
class Adapter:
    """A LoRA adapter of a model. workers: names of those that have it."""

    name: str
    workers: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Model:
    """A model that workers serve."""

    name: str
    card_checksum: str = ""
    """"": it has no card (the request passes through to the engine)."""

    aliases: tuple[str, ...] = ()
    kinds: tuple[str, ...] = ()
    """`chat`, `completions`, `embedding`."""

    context_length: int | None = None
    block_size: int | None = None
    hash_scheme: str = ""
    tool_parser: str = ""
    reasoning_parser: str = ""
    artifacts: Mapping[str, int] = field(default_factory=dict)
    """Files of the card with their sizes in bytes."""

    workers: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Names of its workers by role."""

    adapters: tuple[Adapter, ...] = ()
    canary: str = ""
    """`ok`, `failing: STAGE: REASON`; "": no result."""

    problem: str = ""
    """Why it is not ready at a frontend."""


@dataclass(frozen=True, slots=True)
class IndexSource:
    """What one indexer holds of one rank of a worker."""

    indexer: str
    worker: str
    """Its name."""

    worker_id: str
    dp_rank: int
    state: str
    """`exact`, `degraded`, `repairing`, …: as the indexer reports it."""

    reason: str
    blocks: int
    """On all tiers."""

    tiers: Mapping[str, int] = field(default_factory=dict)
    """Blocks by tier: `device`, `host`, `disk`. Empty: the indexer does not report them."""

    capacity_blocks: int | None = None
    """Of the worker's rank on the device; None: unknown."""

    epoch: int = 0
    sequence: int = 0
    age_s: float = 0.0
    """Since its last message."""

    model: str = ""

    @property
    def is_exact(self) -> bool:
        return self.state == "exact"


@dataclass(frozen=True, slots=True)
class IndexView:
    """One indexer."""

    indexer: str
    blocks: int
    batches_applied: int
    used_bytes: int
    budget_bytes: int
    """0: no limit."""

    sources: tuple[IndexSource, ...] = ()
    problem: str = ""
    """Why the figures are missing or old."""


@dataclass(frozen=True, slots=True)
class Curve:
    """A figure over time: the same number of times and values, oldest first."""

    times_s: tuple[float, ...] = ()
    """Unix seconds."""

    values: tuple[float | None, ...] = ()
    """None: unknown at that time."""


@dataclass(frozen=True, slots=True)
class Overview:
    """The mesh as a whole. Latencies cover the last 10 s; None: unknown."""

    namespace: str = ""
    registry: str = ""
    """What it reads the members from."""

    registry_problem: str = ""
    """Why the members may be old."""

    members: int = 0
    unhealthy: int = 0
    traffic: Traffic = field(default_factory=Traffic)
    """Its running and waiting requests are those of the workers."""

    kv_use: float | None = None
    curves: Mapping[str, Curve] = field(default_factory=dict)
    """By name: those of `Traffic`, and `kv_use`."""

    problems: tuple[str, ...] = ()
    """What the operator should look at, as sentences."""
