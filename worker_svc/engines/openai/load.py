"""The load that a server reports. Pure."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from prometheus_client.parser import text_string_to_metric_families

# A request needs some milliseconds from the adapter to the scheduler of the server.
_POLLS_UNTIL_COUNTED: Final = 2


@dataclass(frozen=True, slots=True)
class ServerLoad:
    """Load of one rank as the server reports it.

    progress: grows while the server works. measured_at: when it measured the load, on its own
    clock; 0: at the report.
    """

    running: int = 0
    waiting: int = 0
    waiting_tokens: int = 0
    used_tokens: int = 0
    prefill_tokens: int | None = None
    progress: int = 0
    measured_at: float = 0.0


class CountedRequests:
    """How many of the requests that were sent to each rank its reported load counts.

    SGLang measures its load every 15 steps, and at a prompt: one that waits while others decode is
    counted late. A load of a rank with running requests that was measured after the last poll
    counts what was sent before an earlier poll; an old one counts nothing more.
    """

    def __init__(self) -> None:
        self._counts: Counter[int] = Counter()
        # Requests sent before each of the last polls.
        self._earlier: deque[Mapping[int, int]] = deque(maxlen=_POLLS_UNTIL_COUNTED)
        self._measured_at: dict[int, float] = {}

    def record(self, loads: Sequence[ServerLoad], sent: Mapping[int, int]) -> None:
        """Records the response to a poll. sent: by rank, the requests before the poll."""
        for rank, load in enumerate(loads):
            if not (load.measured_at and load.running):
                self._counts[rank] = sent.get(rank, 0)
            elif load.measured_at != self._measured_at.get(rank) and self._earlier:
                self._counts[rank] = max(self._counts[rank], self._earlier[0].get(rank, 0))
            self._measured_at[rank] = load.measured_at
        self._earlier.append(dict(sent))

    def of(self, rank: int) -> int:
        """Returns the count of a rank."""
        return self._counts[rank]


@dataclass(frozen=True, slots=True)
class _Metrics:
    """Names of one kind of server, without `_total`.

    usage: share of the KV cache, older versions have the second name. computed: counters of work.
    """

    running: str
    waiting: str
    computed: Sequence[str]
    usage: Sequence[str] = ()


_KNOWN: Final = (
    _Metrics(
        "vllm:num_requests_running",
        "vllm:num_requests_waiting",
        ("vllm:prompt_tokens", "vllm:generation_tokens"),
        ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"),
    ),
    # llama-server with --metrics. Its counters of tokens grow at the end of a request only.
    _Metrics(
        "llamacpp:requests_processing",
        "llamacpp:requests_deferred",
        ("llamacpp:n_decode",),
    ),
)


# Any: JSON.
def read_sglang_loads(raw: Mapping[str, Any]) -> Sequence[ServerLoad]:
    """Returns the loads of `/v1/loads` by rank."""
    rows = sorted(raw["loads"], key=lambda one: one["dp_rank"])
    return [
        ServerLoad(
            running=row["num_running_reqs"],
            waiting=row["num_waiting_reqs"],
            waiting_tokens=row.get("num_waiting_uncached_tokens") or 0,
            used_tokens=row["num_used_tokens"],
            prefill_tokens=row.get("total_prefill_uncached_tokens"),
            progress=row.get("total_prefill_uncached_tokens") or 0,
            measured_at=row.get("timestamp") or 0.0,
        )
        for row in rows
    ]


def read_metrics(text: str, total_kv_tokens: int | None = None) -> Sequence[ServerLoad]:
    """Returns the load of `/metrics`, of all engines of the server together; empty if no known
    server has these metrics."""
    values: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name.endswith(("_created", "_bucket")):
                continue
            name = sample.name.removesuffix("_total")
            values[name] = values.get(name, 0.0) + sample.value
    for names in _KNOWN:
        if names.running in values:
            usage = next((values[name] for name in names.usage if name in values), 0.0)
            return [
                ServerLoad(
                    running=int(values[names.running]),
                    waiting=int(values.get(names.waiting, 0)),
                    used_tokens=int(usage * (total_kv_tokens or 0)),
                    progress=int(sum(values.get(name, 0.0) for name in names.computed)),
                )
            ]
    return []
