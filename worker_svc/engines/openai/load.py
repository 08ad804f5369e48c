"""The load that a server reports. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from prometheus_client.parser import text_string_to_metric_families


@dataclass(frozen=True, slots=True)
class ServerLoad:
    """Load of one rank as the server reports it. progress: grows while the server works."""

    running: int = 0
    waiting: int = 0
    waiting_tokens: int = 0
    used_tokens: int = 0
    prefill_tokens: int | None = None
    progress: int = 0


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
