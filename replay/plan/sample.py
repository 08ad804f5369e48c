"""`python -m replay.plan.sample TRACE SPEEDS WORKERS SECONDS`: prints requests to play on a mesh.

The first requests of a trace, so fast that their prompts keep the workers busy for USE of the time.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from replay.plan.speeds import Speeds, SpeedsError, parse_speeds
from replay.trace import TraceError, TraceRequest, at_speed, load_trace, spread_arrivals

USE = 0.6


def sample(
    requests: Sequence[TraceRequest], speeds: Speeds, workers: int, seconds: float
) -> list[TraceRequest]:
    """Returns the first requests whose work takes the workers USE of so many seconds, at the pace
    of the trace. workers: that compute prompts."""
    capacity_s, taken = workers * seconds * USE, list[TraceRequest]()
    known: set[int] = set()
    for request in requests:
        new = sum(name not in known for name in request.hash_ids)
        known.update(request.hash_ids)
        share = new / len(request.hash_ids) if request.hash_ids else 1.0
        capacity_s -= speeds.base_s + request.input_tokens * share * speeds.prefill_token_s
        if capacity_s < 0 and taken:
            break
        taken.append(request)
    span_s = taken[-1].at_s - taken[0].at_s
    return at_speed(taken, span_s / seconds) if span_s > 0 else taken


def main() -> int:
    path, speeds_path, workers, seconds = sys.argv[1:]
    try:
        speeds = parse_speeds(Path(speeds_path).read_text())
        trace = spread_arrivals(load_trace(Path(path)))
    except (OSError, SpeedsError, TraceError) as error:
        sys.stderr.write(f"meshctl plan: {error}\n")
        return 2
    requests = sample(trace, speeds, int(workers), float(seconds))
    rows = [[one.at_s, one.input_tokens, one.output_tokens, one.hash_ids] for one in requests]
    sys.stdout.write(json.dumps(rows) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
