"""Load, cache and health of each worker."""

from __future__ import annotations

from tools.dashboards.model import Board, Panel, Query
from tools.dashboards.queries import of_worker, rate, total

_W = "kvmesh_worker"
_TOKENS = f'{_W}_engine_total{{name=~"tokens|prompt_tokens|cached_tokens"}}'
_POOL = '{model=~"$model", role=~"$role"}'
_NAME = "{{role}} {{instance}} {{dp_rank}}"


def _value(title: str, metric: str, text: str, unit: str = "short") -> Panel:
    """Returns the panel of a gauge of each rank."""
    return Panel(title, unit, (Query(of_worker(f"{_W}_{metric}"), _NAME),), text)


LOAD = (
    _value("Requests being computed", "running_requests", "In the batch of each rank."),
    _value("Requests that wait", "waiting_requests", "Accepted and not scheduled."),
    _value("Prompt tokens that wait", "waiting_tokens", "Before the first token of new requests."),
    Panel(
        "KV blocks in use",
        "percentunit",
        (Query(of_worker(f"{_W}_kv_used_blocks / ({_W}_kv_total_blocks > 0)"), _NAME),),
        "By running requests. Near 1 the engine preempts or refuses.",
    ),
    Panel(
        "Engine steps",
        "ops",
        (Query(of_worker(f"rate({_W}_engine_step[$__rate_interval])"), _NAME),),
        "A second. 0 with requests: the engine hangs.",
    ),
    _value("Open requests", "open_requests", "Admitted and not ended."),
    Panel(
        "Workers, present and recommended",
        "short",
        tuple(
            Query(f"max by (model, role) (kvmesh_router_{metric}{_POOL})", f"{{{{role}}}} {name}")
            for metric, name in (
                ("pool_workers", "present"),
                ("recommended_workers", "recommended"),
            )
        ),
        "Of all routers the greatest number. A gap that stays: nothing acts on the recommendation.",
    ),
)
OUTCOMES = (
    Panel(
        "Requests, by outcome",
        "ops",
        (
            Query(
                total(of_worker(rate(f"{_W}_requests_total")), "role", "outcome"),
                "{{role}} {{outcome}}",
            ),
        ),
        "`invalid_output`, `stalled` and `failed` are faults of the engine.",
    ),
    Panel(
        "Probes of the engine",
        "ops",
        (
            Query(
                total(of_worker(rate(f"{_W}_canaries_total")), "instance", "result"),
                "{{instance}} {{result}}",
            ),
        ),
        "Of an idle engine, by the worker itself.",
    ),
    _value("Engine fails", "engine_failing", "1: frontends send the worker no requests."),
    Panel(
        "Tokens of the engine",
        "ops",
        (
            Query(
                total(of_worker(rate(_TOKENS)), "role", "name"),
                "{{role}} {{name}}",
            ),
        ),
        "Computed, generated and found in the cache.",
        empty="only engines that count it: the sim does",
    ),
)
PROCESS = (
    Panel(
        "Processor",
        "percentunit",
        (Query(of_worker(rate("process_cpu_seconds_total")), "{{role}} {{instance}}"),),
        "Cores in use, without those of an engine in other processes.",
    ),
    Panel(
        "Memory",
        "bytes",
        (Query(of_worker("process_resident_memory_bytes"), "{{role}} {{instance}}"),),
        "Resident, without other processes of the engine.",
    ),
    Panel(
        "Open files",
        "percentunit",
        (Query(of_worker("process_open_fds / process_max_fds"), "{{role}} {{instance}}"),),
        "Share of the limit.",
    ),
    Panel(
        "Connections of peers",
        "short",
        (Query(of_worker("kvmesh_stream_connections"), "{{instance}} {{state}}"),),
        "Of the stream port.",
    ),
)

BOARD = Board(
    "workers",
    "KVMesh: workers",
    "Load, outcomes and processes of the workers, by role and model.",
    {"Load": LOAD, "Outcomes": OUTCOMES, "Processes": PROCESS},
)
