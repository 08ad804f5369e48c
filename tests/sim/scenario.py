"""The inputs of a run (pure)."""

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
# By then keepalive has detected all losses, orphaned bookings have expired, and stops took effect.
RECOVERY_MAX_S = KEEPALIVE_S + 6.0
# Like RECOVERY_MAX_S, if each process notices broken links within FAST_DETECTION_S: stale sources
# count for 10 s.
SHORT_RECOVERY_MAX_S = 13.0

Mode = Literal["bootstrap", "completed"]


@dataclass(frozen=True, slots=True)
class Scenario:
    """Everything that determines a run. Times in virtual seconds, sizes as in `SimConfig`.

    delay_s: largest distance between processes; quantum_s: see `LinkDelay`. protect_first: no fault
    affects the first worker. requests_max: at each worker. window_bytes: see `net`. recovery_max_s:
    when the mesh must have recovered after the last request. linger_s: how long it then stays idle;
    if long enough, unused streams must be closed.

    With indexers there is a KV plane. workers: number of aggregated ones. prefills: handoff mode of
    each prefill worker. gb_per_s, chunk_pages, local_prefill: see `SimHandoffConfig`.
    prefill_token_s: see `Timing`.
    budget_bytes, subscriber_bytes: of each indexer, see its config; 0: no limit.

    choices: how the routers track caches, in turn. kv_index_modes, adapters: how the caches of
    workers are tracked, and which adapters they have, in turn within a role. temporary_model_s:
    when the only worker of another model leaves for good; None: no such worker.
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
        """The number in the name of a worker, unique in its role."""
        return int(worker[1:])

    def kv_index_mode(self, worker: str) -> KvIndex:
        """How the cache of a worker of that name is tracked."""
        return self.kv_index_modes[self.number_of(worker) % len(self.kv_index_modes)]

    def find_adapters(self, worker: str) -> frozenset[str]:
        """The adapters of a worker of that name."""
        return self.adapters[self.number_of(worker) % len(self.adapters)]

    @property
    def has_tight_capacity(self) -> bool:
        """Whether workers refuse requests, or let handoffs wait too long, for lack of capacity."""
        return self.requests_max < 100 or (self.decodes > 0 and self.blocks < 1000)

    @property
    def command(self) -> str:
        """The command that repeats the run."""
        storm = " --storm" if self.is_storm else ""
        return f"make sim SEEDS=1 ARGS='--first {self.seed}{storm} --trace'"
