"""What the console reads of the metrics of a frontend (pure)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from prometheus_client.parser import text_string_to_metric_families

from common.inspection.traffic import Sample, read_sample
from console_svc.state.tenants import Usage

_USAGE = "_usage_"
_NAMES = {
    "requests": "requests",
    "failed_requests": "failed",
    "prompt_tokens": "prompt_tokens",
    "cached_tokens": "cached_tokens",
    "output_tokens": "output_tokens",
}


class UsageKey(NamedTuple):
    """What usage is counted by. key: the id of an API key. adapter: "": none."""

    tenant: str
    key: str
    model: str
    adapter: str


@dataclass(frozen=True, slots=True)
class Scrape:
    """The metrics of one frontend at one moment."""

    sample: Sample
    usage: Mapping[UsageKey, Usage] = field(default_factory=dict)
    """Since the start of the frontend. Empty: it does not count it."""


def read_scrape(text: str, at_s: float) -> Scrape:
    """Returns the figures of a Prometheus text. Raises ValueError for another text."""
    usage: dict[UsageKey, dict[str, float]] = {}
    for key, name, value in _usage_values(_usage_lines(text)):
        of_key = usage.setdefault(key, {})
        of_key[name] = of_key.get(name, 0.0) + value
    found = {key: Usage(**values) for key, values in usage.items()}
    return Scrape(read_sample(_traffic_lines(text), at_s), found)


def _usage_values(text: str) -> Iterator[tuple[UsageKey, str, float]]:
    for family in text_string_to_metric_families(text):
        name = _NAMES.get(family.name.partition(_USAGE)[2])
        if name is None:
            continue
        for sample in family.samples:
            labels = sample.labels
            yield (
                UsageKey(*(labels.get(label, "") for label in UsageKey._fields)),
                name,
                sample.value,
            )


# The parser takes about 20 microseconds a line, and most metrics are read by nothing here.


def _usage_lines(text: str) -> str:
    return "".join(line for line in text.splitlines(keepends=True) if _USAGE in line)


_TRAFFIC = (
    "_time_to_first_token_seconds",
    "_requests_total",
    "_requests ",
    "_output_tokens_total",
    "_output_tokens ",
    "_inflight_requests",
    "_queued_requests",
)


def _traffic_lines(text: str) -> str:
    return "".join(
        line
        for line in text.splitlines(keepends=True)
        if _USAGE not in line and any(name in line for name in _TRAFFIC)
    )


def sum_usage(scrapes: Mapping[str, Scrape]) -> dict[UsageKey, Usage]:
    """Returns the usage of several frontends together."""
    total: dict[UsageKey, Usage] = {}
    for scrape in scrapes.values():
        for key, usage in scrape.usage.items():
            total[key] = add_usage(total.get(key, Usage()), usage)
    return total


def add_usage(one: Usage, other: Usage) -> Usage:
    return Usage(
        one.requests + other.requests,
        one.failed + other.failed,
        one.prompt_tokens + other.prompt_tokens,
        one.cached_tokens + other.cached_tokens,
        one.output_tokens + other.output_tokens,
    )
