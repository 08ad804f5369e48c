"""What a run depends on (pure)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from common.registry.instances import KvIndex
from router_svc.core.overlap import EVENT_INDEX_SETTINGS, IndexSettings
from router_svc.core.policy import DEFAULT_POLICY, Policy
from tests.sim.clients import ClientSpec
from tests.sim.faults import KEEPALIVE_S, Fault
from tests.sim.net import WINDOW_BYTES

TOKEN_IDS = tuple(range(10, 500))
EOS = 2
EOS_ONE_IN = 60
# By then keepalive has told everybody, orphaned bookings have expired, and stops were heeded.
RECOVERY_MAX_S = KEEPALIVE_S + 6.0
# As REST_S, where everybody notices within SOON_S what broke: stale sources count for 10 s.
SHORT_RECOVERY_MAX_S = 13.0

Mode = Literal["bootstrap", "completed"]


@dataclass(frozen=True, slots=True)
class Scenario:
    """Everything a run depends on. Times in virtual seconds, sizes as in `SimConfig`.

    delay_s: how far apart processes are, at most; quantum_s: see `Path`. spares_first: no fault
    strikes the first worker. requests_max: at each worker. window_bytes: see `net`. rest_s: when
    all must be well after the last request. lingers_s: how long it is left alone then; past IDLE_S,
    streams must be closed.

    With indexers there is a KV plane. workers are aggregated ones. prefills: how each prefill
    worker hands over. gb_per_s, chunk_pages, local_prefill: see `SimHandoffConfig`.
    prefill_token_s: see `Timing`; with batched_tokens, a step must not take as long as a hang.
    budget_bytes, subscriber_bytes: of each indexer, see its config; 0: no bound.

    choices: how the routers know caches, in turn. kv_ways, adapters: how the caches of workers can
    be known, and which adapters they have, in turn within a role. visitor_s: when the only worker
    of another model leaves for good; None: there is none.
    """

    seed: int
    is_storm: bool = False
    workers: int = 3
    prefills: tuple[Mode, ...] = ()
    decodes: int = 0
    indexers: int = 0
    gb_per_s: float = 25.0
    chunk_pages: int = 64
    local_prefill: bool = True
    prefill_token_s: float = 2e-5
    batched_tokens: int = 8192
    routers: int = 1
    frontends: int = 1
    selector: str = "least_loaded"
    policy: Policy = DEFAULT_POLICY
    step_s: float = 0.04
    blocks: int = 4096
    seqs: int = 64
    delay_s: float = 0.02
    jitter_s: float = 0.005
    quantum_s: float = 0.0
    protect_first: bool = True
    requests_max: int = 4096
    window_bytes: int = WINDOW_BYTES
    budget_bytes: int = 0
    subscriber_bytes: int = 1 << 20
    recovery_max_s: float = RECOVERY_MAX_S
    linger_s: float = 0.0
    choices: tuple[IndexSettings, ...] = (EVENT_INDEX_SETTINGS,)
    kv_index_modes: tuple[KvIndex, ...] = ("events",)
    adapters: tuple[frozenset[str], ...] = (frozenset(),)
    temporary_model_s: float | None = None
    client_specs: tuple[ClientSpec, ...] = ()
    faults: tuple[Fault, ...] = ()

    def number_of(self, worker: str) -> int:
        """What distinguishes it from the others of its role, from its name."""
        return int(worker[1:])

    def kv_index_mode(self, worker: str) -> KvIndex:
        """How the cache of a worker of that name can be known."""
        return self.kv_index_modes[self.number_of(worker) % len(self.kv_index_modes)]

    def find_adapters(self, worker: str) -> frozenset[str]:
        """The adapters of a worker of that name."""
        return self.adapters[self.number_of(worker) % len(self.adapters)]

    @property
    def has_tight_capacity(self) -> bool:
        """Whether workers refuse requests, or let handoffs wait too long, for want of room."""
        return self.requests_max < 100 or (self.decodes > 0 and self.blocks < 1000)

    @property
    def command(self) -> str:
        """How to run it again."""
        storm = " --storm" if self.is_storm else ""
        return f"make sim SEEDS=1 ARGS='--first {self.seed}{storm} --trace'"
