"""Cases of `bench_replay`: conversations with names against without, on four routers.

Keys, of the conversation trace (`hints_…`) and of generated sessions (`hints_sessions_…`). In all,
arrivals are spread; `…_hit`: hit rate with names / without; `…_ttft`: mean TTFT likewise:

- `events`: with KV events. `late`: at ten times the lags; `no_indexer`: the indexer is down;
- `approx`: the workers send no KV events;
- `unread`: bodies pass through, so that a name is all that a router has.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from replay.mesh import MeshSettings, ReplayMesh
from replay.policies import POLICIES
from replay.report import Summary, summarize
from replay.trace import TraceRequest, spread_arrivals, with_sessions

ROUTERS = 4
BLOCK = 512


@dataclass(frozen=True, slots=True)
class Sight:
    """What routers see of caches and prompts."""

    policy: str = "kv"
    lag_factor: float = 1.0
    has_indexer: bool = True
    is_tokenized: bool = True


SIGHTS: Mapping[str, Sight] = {
    "events": Sight(),
    "late": Sight(lag_factor=10.0),
    "no_indexer": Sight(has_indexer=False),
    "approx": Sight("kv_approx"),
    "unread": Sight(is_tokenized=False),
}


def execute(requests: list[TraceRequest], sight: Sight, *, with_hints: bool) -> Summary:
    """Replays a trace once. Conversations are those of its generator, else what prompts show."""
    if not any(request.session for request in requests):
        requests = with_sessions(requests, BLOCK)
    settings = MeshSettings(
        routers=ROUTERS,
        index_lag_s=0.02 * sight.lag_factor,
        sync_lag_s=0.005 * sight.lag_factor,
        with_hints=with_hints,
        is_tokenized=sight.is_tokenized,
        has_indexer=sight.has_indexer,
    )
    result = ReplayMesh(settings, POLICIES[sight.policy]).run(spread_arrivals(requests))
    summary = summarize(sight.policy, ROUTERS, result)
    return replace(summary, ttft_percentiles_s=())


def table(found: Mapping[tuple[str, str, bool], Summary], workloads: list[str]) -> str:
    """Returns hit rate and mean TTFT of each case. found: by workload, sight and hints."""
    lines = [f"{'conversations by name':36}{'hit rate':>20}{'mean TTFT, s':>20}"]
    for workload in workloads:
        for name in SIGHTS:
            pair = [found[workload, name, with_hints] for with_hints in (False, True)]
            hits = " -> ".join(f"{one.hit_rate:.3f}" for one in pair)
            ttfts = " -> ".join(f"{one.ttft_mean_s:.3f}" for one in pair)
            lines.append(f"{workload + ', ' + name:36}{hits:>20}{ttfts:>20}")
    return "\n".join(lines) + "\n"


def figures(
    found: Mapping[tuple[str, str, bool], Summary], workloads: Mapping[str, str]
) -> dict[str, float]:
    """Returns the ratios of the module. workloads: prefix of the keys by workload."""
    ratios: dict[str, float] = {}
    for workload, prefix in workloads.items():
        for name in SIGHTS:
            without, named = (found[workload, name, with_hints] for with_hints in (False, True))
            ratios[f"{prefix}{name}_hit"] = named.hit_rate / without.hit_rate
            ratios[f"{prefix}{name}_ttft"] = named.ttft_mean_s / without.ttft_mean_s
    return ratios
