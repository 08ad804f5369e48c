"""`make bench-replay`: routing policies on ten workloads in virtual time; the last line is JSON.

8 workers with 3,000 blocks of 512 tokens, one router. Keys, all ratios of mean TTFT except hits:

- `conversation_vs_least_loaded`, `conversation_vs_random`: kv on Mooncake conversation at speed 2;
  `conversation_queued_vs_least_loaded`: with `queue_threshold` 0.5;
- `geomean_vs_best`: geometric mean over the workloads of kv / the best policy of each;
  `geomean_verified`: over the workloads that the weights of the cost were not chosen on;
- `no_reuse_vs_least_loaded`: kv on prompts that share nothing;
- `slow_worker_p99`: p99 with one of 8 workers at a quarter of the speed / without;
- `routers4_hit`, `routers4_ttft`: 4 routers / one router, arrivals spread; `routers8_*` likewise,
  `routers4_late_ttft` at ten times the lags; `approx4_*` without KV events (`kv_approx`);
- `hints_*`: see `replay_hints.py`; `plain_*`, `priority_*`, `deadlines_*`: `replay_deadlines.py`.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from bench import replay_deadlines, replay_hints
from replay.mesh import MeshSettings, ReplayMesh
from replay.policies import POLICIES
from replay.report import Summary, summarize
from replay.settings import parse_settings
from replay.trace import TraceRequest, at_speed, load_trace, spread_arrivals
from replay.workloads import generate

TRACES = Path(__file__).parent / "traces"
CONVERSATION = "mooncake_conversation.jsonl.gz"
AZURE = "azure2023_conversation.csv.gz"
COMPARED = ("kv", "dynamo", "least_loaded", "random", "llm_d", "sglang_cache_aware")
SEED = 1


@dataclass(frozen=True, slots=True)
class Workload:
    """source: a file of TRACES or a generator. requests: the first ones; None: all. is_chosen_on:
    the weights of the cost were chosen on it.
    """

    name: str
    source: str
    requests: int | None = 4000
    speed: float = 1.0
    speeds: tuple[float, ...] = ()
    is_chosen_on: bool = False

    def read(self, requests_max: int | None) -> list[TraceRequest]:
        count = min(self.requests or sys.maxsize, requests_max or sys.maxsize)
        if "." in self.source:
            requests = load_trace(TRACES / self.source)[:count]
        else:
            requests = generate(self.source, count, SEED)
        return at_speed(requests, self.speed)


WORKLOADS = (
    Workload("conversation", CONVERSATION, None, 2.0, is_chosen_on=True),
    Workload("conversation_overload", CONVERSATION, None, 2.72),
    Workload("azure_conversation", AZURE, None, 8.5, is_chosen_on=True),
    Workload("no_reuse", "no_reuse"),
    Workload("zipf_prefixes", "zipf_prefixes", is_chosen_on=True),
    Workload("sessions", "sessions", is_chosen_on=True),
    Workload("tool_agents", "tool_agents"),
    Workload("bursts", "bursts", is_chosen_on=True),
    Workload("one_slow_worker", CONVERSATION, 4000, 1.7, (0.25,)),
    Workload("one_stuck_worker", CONVERSATION, 2000, 1.0, (0.0,)),
)
WITHOUT_SLOW_WORKER = Workload("without_slow_worker", CONVERSATION, 4000, 1.7)


@dataclass(frozen=True, slots=True)
class Run:
    workload: Workload
    policy: str = "kv"
    routers: int = 1
    is_spread: bool = False
    lag_factor: float = 1.0
    settings: tuple[str, ...] = ()


def execute(run: Run, requests_max: int | None) -> Summary:
    requests = run.workload.read(requests_max)
    if run.is_spread:
        requests = spread_arrivals(requests)
    settings = MeshSettings(
        routers=run.routers,
        speeds=run.workload.speeds,
        rules=parse_settings(run.settings).rules,
        index_lag_s=0.02 * run.lag_factor,
        sync_lag_s=0.005 * run.lag_factor,
    )
    result = ReplayMesh(settings, POLICIES[run.policy]).run(requests)
    return summarize(run.policy, run.routers, result)


# Workload of the cases with conversations -> prefix of their keys.
HINT_WORKLOADS = {"conversation": "hints_", "sessions": "hints_sessions_"}
TARGET_REQUESTS = 4000


def _workload(name: str) -> Workload:
    return next(workload for workload in WORKLOADS if workload.name == name)


def _execute_hints(
    workload: str, sight: str, with_hints: bool, requests_max: int | None
) -> Summary:
    requests = _workload(workload).read(requests_max)
    return replay_hints.execute(requests, replay_hints.SIGHTS[sight], with_hints=with_hints)


def _target_requests(requests_max: int | None) -> list[TraceRequest]:
    count = min(TARGET_REQUESTS, requests_max or TARGET_REQUESTS)
    return load_trace(TRACES / CONVERSATION)[:count]


def _capacity(requests_max: int | None) -> float:
    return replay_deadlines.capacity(_target_requests(requests_max))


def _execute_targets(
    way: str, speed: float, requests_max: int | None
) -> replay_deadlines.Attainment:
    return replay_deadlines.execute(_target_requests(requests_max), way, speed, SEED)


def _run_hints(pool: ProcessPoolExecutor, requests_max: int | None) -> dict[str, float]:
    """Prints the table of the cases with conversations; returns their figures."""
    cases = [
        (workload, sight, with_hints)
        for workload in HINT_WORKLOADS
        for sight in replay_hints.SIGHTS
        for with_hints in (False, True)
    ]
    futures = {case: pool.submit(_execute_hints, *case, requests_max) for case in cases}
    found = {case: future.result() for case, future in futures.items()}
    sys.stdout.write(replay_hints.table(found, list(HINT_WORKLOADS)))
    return replay_hints.figures(found, HINT_WORKLOADS)


def _run_targets(pool: ProcessPoolExecutor, requests_max: int | None) -> dict[str, float]:
    """Prints the table of the cases with latency targets; returns their figures."""
    ways, speed = replay_deadlines.WAYS, pool.submit(_capacity, requests_max).result()
    futures = {way: pool.submit(_execute_targets, way, speed, requests_max) for way in ways}
    found = {way: future.result() for way, future in futures.items()}
    sys.stdout.write(replay_deadlines.table(found))
    return replay_deadlines.figures(found)


def _run_policies(pool: ProcessPoolExecutor, requests_max: int | None) -> dict[str, float]:
    """Prints the table of the policies; returns their figures."""
    runs: dict[object, Run] = {(w.name, p): Run(w, p) for w in WORKLOADS for p in COMPARED}
    conversation = WORKLOADS[0]
    runs |= {
        "one": Run(conversation, is_spread=True),
        "routers4": Run(conversation, routers=4, is_spread=True),
        "routers8": Run(conversation, routers=8, is_spread=True),
        "routers4_late": Run(conversation, routers=4, is_spread=True, lag_factor=10.0),
        "queued": Run(conversation, settings=("queue_threshold=0.5",)),
        "approx": Run(conversation, "kv_approx", is_spread=True),
        "approx4": Run(conversation, "kv_approx", routers=4, is_spread=True),
        "without_slow_worker": Run(WITHOUT_SLOW_WORKER),
    }
    futures = {key: pool.submit(execute, run, requests_max) for key, run in runs.items()}
    found = {key: future.result() for key, future in futures.items()}
    sys.stdout.write(_table(found))
    return _figures(found)


_CASES = {"policies": _run_policies, "hints": _run_hints, "targets": _run_targets}


def geomean(values: Sequence[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--requests", type=int, help="at most so many of each workload")
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    names = ", ".join(_CASES)
    parser.add_argument("--cases", default=",".join(_CASES), help=f"which of {names}; all")
    args = parser.parse_args()
    found: dict[str, float] = {}
    with ProcessPoolExecutor(args.processes) as pool:
        for name in args.cases.split(","):
            found |= _CASES[name](pool, args.requests)
    figures = {name: round(value, 3) for name, value in found.items()}
    sys.stdout.write(json.dumps(figures) + "\n")


def _ttft(found: dict[object, Summary], workload: str, policy: str) -> float:
    return found[workload, policy].ttft_mean_s


def _table(found: dict[object, Summary]) -> str:
    lines = [f"{'mean TTFT, s':24}" + "".join(f"{policy:>20}" for policy in COMPARED)]
    lines += [
        f"{w.name:24}" + "".join(f"{_ttft(found, w.name, policy):20.3f}" for policy in COMPARED)
        for w in WORKLOADS
    ]
    return "\n".join(lines) + "\n"


def _figures(found: dict[object, Summary]) -> dict[str, float]:
    vs_best = {
        w: _ttft(found, w.name, "kv") / min(_ttft(found, w.name, p) for p in COMPARED)
        for w in WORKLOADS
    }
    stuck = found["one_stuck_worker", "kv"]
    kv = _ttft(found, "conversation", "kv")
    no_reuse = _ttft(found, "no_reuse", "kv") / _ttft(found, "no_reuse", "least_loaded")
    slow, fast = found["one_slow_worker", "kv"], found["without_slow_worker"]
    figures = {
        "conversation_vs_least_loaded": kv / _ttft(found, "conversation", "least_loaded"),
        "conversation_queued_vs_least_loaded": found["queued"].ttft_mean_s
        / _ttft(found, "conversation", "least_loaded"),
        "conversation_vs_random": kv / _ttft(found, "conversation", "random"),
        "geomean_vs_best": geomean(list(vs_best.values())),
        "geomean_verified": geomean([v for w, v in vs_best.items() if not w.is_chosen_on]),
        "no_reuse_vs_least_loaded": no_reuse,
        "slow_worker_p99": slow.ttft_p99_s / fast.ttft_p99_s,
        "stuck_worker_unanswered": stuck.unanswered / stuck.requests,
    }
    one_router = {"routers4": "one", "routers8": "one", "routers4_late": "one", "approx4": "approx"}
    for name, single in one_router.items():
        reference = found[single]
        figures[f"{name}_hit"] = found[name].hit_rate / reference.hit_rate
        figures[f"{name}_ttft"] = found[name].ttft_mean_s / reference.ttft_mean_s
    return figures


if __name__ == "__main__":
    main()
