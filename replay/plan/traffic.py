"""`python -m replay.plan.traffic FILE`: writes a trace like the traffic of a running mesh.

Standard input is the JSON of `meshctl/view/live_traffic.py`: lengths of prompts and responses in a
period. Arrivals are a Poisson process of the same rate; lengths are drawn from the histograms, one
independent of the other, and scaled to the same sums. The share of the prompts that was cached is
kept as the share that all prompts have in common.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

from replay.trace import TraceRequest

REQUESTS = 2000
# Fewer say nothing about the lengths.
REQUESTS_MIN = 10


def requests_like(
    found: dict[str, Any], block_size: int, count: int = REQUESTS, seed: int = 1
) -> list[TraceRequest]:
    """Returns requests like those of the period. Raises ValueError if it had too few."""
    rng = Random(seed)
    served = sum(row[2] for row in found["prompts"]["buckets"])
    if served < REQUESTS_MIN:
        raise ValueError(
            f"{served:g} requests in {found['seconds']:g} s, fewer than {REQUESTS_MIN}: watch "
            "the mesh for longer, or plan with a trace"
        )
    rate = served / found["seconds"]
    prompts = _draw(found["prompts"], count, rng)
    outputs = _draw(found["outputs"], count, rng)
    cached_share = min(1.0, found["cached_tokens"] / max(1.0, found["prompts"]["total"]))
    at_s, requests = 0.0, list[TraceRequest]()
    for prompt, output in zip(prompts, outputs, strict=True):
        at_s += rng.expovariate(rate)
        common = range(round(cached_share * prompt / block_size))
        requests.append(TraceRequest(at_s, prompt, output, tuple(common)))
    return requests


def _draw(lengths: dict[str, Any], count: int, rng: Random) -> list[int]:
    """Returns lengths of at least 1, log-uniform in each bucket."""
    rows = lengths["buckets"]
    if not rows:
        return [1] * count
    drawn: list[float] = []
    for low, high, _ in rng.choices(rows, [row[2] for row in rows], k=count):
        drawn.append(math.exp(rng.uniform(math.log(max(1.0, low)), math.log(max(1.0, high)))))
    mean = lengths["total"] / sum(row[2] for row in rows)
    scale = mean * count / sum(drawn)
    return [max(1, round(value * scale)) for value in drawn]


def to_lines(requests: Sequence[TraceRequest]) -> str:
    """Returns the text of a trace as `load_trace` reads it."""
    rows = [
        {
            "timestamp": round(one.at_s * 1000, 3),
            "input_length": one.input_tokens,
            "output_length": one.output_tokens,
            "hash_ids": list(one.hash_ids),
        }
        for one in requests
    ]
    return "".join(json.dumps(row) + "\n" for row in rows)


def main() -> int:
    path, block_size = Path(sys.argv[1]), int(sys.argv[2])
    try:
        path.write_text(to_lines(requests_like(json.loads(sys.stdin.read()), block_size)))
    except (OSError, ValueError, KeyError, TypeError) as error:
        sys.stderr.write(f"meshctl plan: {error}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
