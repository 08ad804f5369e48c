"""What the console reads of the metrics of a frontend (pure)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from prometheus_client.parser import text_string_to_metric_families

from common.inspection.traffic import Sample, read_sample
from common.usage import COUNTS, DIMENSIONS, UsageCounts, UsageKey

_USAGE = "_usage_"


@dataclass(frozen=True, slots=True)
class Scrape:
    """The metrics of one frontend at one moment."""

    sample: Sample
    usage: Mapping[UsageKey, UsageCounts] = field(default_factory=dict)
    """Since the start of the frontend. Empty: it does not count it."""


def read_scrape(text: str, at_s: float) -> Scrape:
    """Returns the figures of a Prometheus text. Raises ValueError for another text."""
    usage: dict[UsageKey, dict[str, int]] = {}
    for key, name, value in _usage_values(_usage_lines(text)):
        of_key = usage.setdefault(key, {})
        of_key[name] = of_key.get(name, 0) + value
    found = {key: UsageCounts(**values) for key, values in usage.items()}
    return Scrape(read_sample(_traffic_lines(text), at_s), found)


def _usage_values(text: str) -> Iterator[tuple[UsageKey, str, int]]:
    for family in text_string_to_metric_families(text):
        name = family.name.partition(_USAGE)[2]
        if name not in COUNTS:
            continue
        for sample in family.samples:
            labels = sample.labels
            yield (
                UsageKey(**{label: labels.get(label, "") for label in DIMENSIONS}),
                name,
                int(sample.value),
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


def sum_usage(scrapes: Mapping[str, Scrape]) -> dict[UsageKey, UsageCounts]:
    """Returns the usage of several frontends together."""
    total: dict[UsageKey, UsageCounts] = {}
    for scrape in scrapes.values():
        for key, usage in scrape.usage.items():
            total[key] = total.get(key, UsageCounts()) + usage
    return total
