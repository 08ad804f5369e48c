"""Figures of a replay: summaries, the table, the JSON object and the plot."""

from __future__ import annotations

import importlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

from replay.mesh import LoadSample, Outcome, ReplayResult


@dataclass(frozen=True, slots=True)
class Summary:
    """Figures of one run."""

    policy: str
    routers: int
    requests: int
    hit_rate: float
    """Share of prompt tokens read from the cache."""

    ttft_mean_s: float
    """Mean seconds to the first token."""

    ttft_p50_s: float
    """Median of the seconds to the first token."""

    ttft_p90_s: float
    """90th percentile of the seconds to the first token."""

    ttft_p99_s: float
    """99th percentile of the seconds to the first token."""

    itl_mean_s: float
    """Seconds for a further token: the mean of the means of the requests."""

    itl_p99_s: float
    """Seconds for a further token: the 99th percentile of the means of the requests."""

    split: float
    """Share of requests on a prefill and a decode worker."""

    load_variation: float
    """Standard deviation of the requests per worker divided by their mean, averaged over time."""

    duration_s: float
    unanswered: int
    """Requests without a complete output."""

    truncated: int
    """Requests cut to the size of the cache."""

    preemptions: int
    ttft_percentiles_s: tuple[float, ...] = ()
    """Seconds to the first token at each percentile from 0 to 100; empty without any."""


def summarize(policy: str, routers: int, result: ReplayResult) -> Summary:
    outcomes = result.outcomes
    ttfts = ttfts_of(outcomes)
    itls = sorted(
        (outcome.end_s - outcome.at_s - outcome.ttft_s) / (outcome.output_tokens - 1)
        for outcome in outcomes
        if outcome.end_s is not None and outcome.ttft_s is not None and outcome.output_tokens > 1
    )
    ends = [outcome.end_s for outcome in outcomes if outcome.end_s is not None]
    answered = [outcome for outcome in outcomes if outcome.ttft_s is not None]
    return Summary(
        policy,
        routers,
        len(outcomes),
        sum(o.cached_tokens for o in answered) / max(1, sum(o.input_tokens for o in answered)),
        fmean(ttfts) if ttfts else math.nan,
        percentile(ttfts, 0.5),
        percentile(ttfts, 0.9),
        percentile(ttfts, 0.99),
        fmean(itls) if itls else math.nan,
        percentile(itls, 0.99),
        sum(outcome.prefill is not None for outcome in outcomes) / len(outcomes),
        load_variation(result.samples),
        max(ends, default=0.0),
        len(outcomes) - len(ends),
        result.truncated,
        result.preemptions,
        tuple(percentile(ttfts, share / 100) for share in range(101)) if ttfts else (),
    )


def ttfts_of(outcomes: Sequence[Outcome]) -> list[float]:
    """Returns the times to the first token in seconds, sorted."""
    return sorted(outcome.ttft_s for outcome in outcomes if outcome.ttft_s is not None)


def percentile(ordered: Sequence[float], share: float) -> float:
    """Returns the value below which `share` of the sorted values lie; NaN without values."""
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))] if ordered else math.nan


def load_variation(samples: Sequence[LoadSample]) -> float:
    """Returns the figure of `Summary`. Moments without requests do not count."""
    busy = [sample.requests for sample in samples if sum(sample.requests)]
    return fmean(pstdev(counts) / fmean(counts) for counts in busy) if busy else 0.0


def to_json(summaries: Sequence[Summary], facts: Mapping[str, Any]) -> dict[str, Any]:
    runs = [
        {key: None if value != value else value for key, value in asdict(summary).items()}
        for summary in summaries
    ]
    return {**facts, "runs": runs}


def table(summaries: Sequence[Summary]) -> str:
    """Returns the summaries as aligned text, one line each."""
    titles = (
        "policy",
        "routers",
        "hit rate",
        "TTFT mean",
        "p50",
        "p90",
        "p99",
        "ITL p99",
        "load var.",
    )
    rows = [
        (
            summary.policy,
            str(summary.routers),
            f"{summary.hit_rate:.3f}",
            *(
                f"{value:.3f} s"
                for value in (
                    summary.ttft_mean_s,
                    summary.ttft_p50_s,
                    summary.ttft_p90_s,
                    summary.ttft_p99_s,
                )
            ),
            f"{summary.itl_p99_s * 1000:.1f} ms",
            f"{summary.load_variation:.2f}",
        )
        for summary in summaries
    ]
    widths = [max(len(row[at]) for row in (titles, *rows)) for at in range(len(titles))]
    lines = []
    for row in (titles, *rows):
        first, rest = row[0].ljust(widths[0]), zip(row[1:], widths[1:], strict=True)
        lines.append("  ".join((first, *(cell.rjust(width) for cell, width in rest))))
    return "\n".join(lines)


class PlotUnavailable(Exception):
    """matplotlib is not installed."""


def import_matplotlib() -> Any:
    """Raises PlotUnavailable."""
    try:
        matplotlib = importlib.import_module("matplotlib")
        matplotlib.use("Agg")
        return importlib.import_module("matplotlib.pyplot")
    except ImportError:
        raise PlotUnavailable(
            "--plot needs matplotlib: pip install 'kvmesh[plot]', or omit --plot"
        ) from None


def plot(runs: Sequence[tuple[Summary, ReplayResult]], title: str, path: Path) -> None:
    """Writes a picture: TTFT distribution, hit rate over routers, load over time."""
    pyplot = import_matplotlib()
    figure, (cdf, hits, loads) = pyplot.subplots(1, 3, figsize=(16, 4.8))
    fewest = min(summary.routers for summary, _ in runs)
    for summary, result in runs:
        if summary.routers != fewest:
            continue
        ttfts = ttfts_of(result.outcomes)
        shares = [(n + 1) / len(ttfts) for n in range(len(ttfts))]
        cdf.plot(ttfts, shares, label=summary.policy)
        times = [sample.at_s / 60 for sample in result.samples]
        loads.plot(times, [max(sample.requests) for sample in result.samples], label=summary.policy)
    policies = dict.fromkeys(summary.policy for summary, _ in runs)
    for policy in policies:
        points = sorted((s.routers, s.hit_rate) for s, _ in runs if s.policy == policy)
        hits.plot(*zip(*points, strict=True), marker="o", label=policy)
    cdf.set(title="Time to first token", xlabel="seconds", ylabel="share of requests", xscale="log")
    routers = sorted({summary.routers for summary, _ in runs})
    hits.set(title="Hit rate", xlabel="routers", ylabel="share of prompt tokens", xticks=routers)
    hits.set_ylim(bottom=0)
    loads.set(title="Load", xlabel="minutes", ylabel="requests at the busiest worker")
    for axes in (cdf, hits, loads):
        axes.grid(alpha=0.3)
    cdf.legend(fontsize=8)
    figure.suptitle(title)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
