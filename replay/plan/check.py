"""A prediction beside what a real mesh measured on the same requests (pure).

The file is JSON: `fleet` (workers by role), `requests` (second, prompt tokens, output tokens, names
of blocks), and `ttfts`, `itls` in seconds.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from replay.engine import WorkerSettings
from replay.plan.search import Fleet, predict
from replay.plan.speeds import Speeds
from replay.report import percentile
from replay.trace import TraceRequest, with_block_size


class CheckError(Exception):
    """A file of measured requests that cannot be used."""


@dataclass(frozen=True, slots=True)
class Figure:
    """One latency in seconds. error: (predicted - measured) / measured."""

    measured_s: float
    predicted_s: float
    error: float


@dataclass(frozen=True, slots=True)
class Check:
    """How far a prediction is from a run on a real mesh. A latency that no request had is None."""

    fleet: Fleet
    requests: int
    failed: int
    figures: dict[str, Figure | None]

    def text(self) -> str:
        """Returns lines for a terminal."""
        failed = f", {self.failed} failed" if self.failed else ""
        lines = [f"Check: {self.requests} requests on the running mesh, {self.fleet}{failed}"]
        for name, figure in self.figures.items():
            if figure is not None:
                lines.append(
                    f"  {name.replace('_', ' ').replace('ttft', 'TTFT').replace('itl', 'ITL')}: "
                    f"measured {figure.measured_s:.3f} s, predicted {figure.predicted_s:.3f} s "
                    f"({figure.error:+.0%})"
                )
        return "\n".join(lines) + "\n"


def compare(text: str, speeds: Speeds, worker: WorkerSettings, block_size: int) -> Check:
    """Predicts the requests of a file, and compares. block_size: tokens of a named block. Raises
    CheckError."""
    try:
        found: Any = json.loads(text)
        fleet = Fleet(**found["fleet"])
        requests = [
            TraceRequest(float(at_s), int(tokens), int(output), tuple(names))
            for at_s, tokens, output, names in found["requests"]
        ]
        ttfts = sorted(map(float, found["ttfts"]))
        itls = sorted(map(float, found["itls"]))
    except (ValueError, KeyError, TypeError) as error:
        raise CheckError(f"no measured requests: {type(error).__name__}: {error}") from None
    if not requests:
        raise CheckError("no measured requests: requests is empty")
    sized = with_block_size(requests, block_size, worker.block_size)
    predicted, _ = predict(fleet, sized, speeds, worker)
    figures = {
        "ttft_p50": _figure(ttfts, 0.5, predicted.ttft_p50_s),
        "ttft_p95": _figure(ttfts, 0.95, predicted.ttft_p95_s),
        "itl_p50": _figure(itls, 0.5, predicted.itl_p50_s),
        "itl_p95": _figure(itls, 0.95, predicted.itl_p95_s),
    }
    return Check(fleet, len(requests), len(requests) - len(ttfts), figures)


def _figure(measured: Sequence[float], share: float, predicted_s: float) -> Figure | None:
    if not measured or predicted_s != predicted_s:
        return None
    measured_s = percentile(measured, share)
    return Figure(measured_s, predicted_s, (predicted_s - measured_s) / measured_s)
