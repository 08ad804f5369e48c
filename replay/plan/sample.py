"""`python -m replay.plan.sample TRACE SPEEDS FLEET SECONDS`: prints requests to play on a mesh.

The first requests of a trace, so fast that their tokens keep the workers busy for USE of the time.
FLEET is JSON: workers by role.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from replay.plan.search import Fleet
from replay.plan.speeds import Speeds, SpeedsError, parse_speeds
from replay.trace import TraceError, TraceRequest, at_speed, load_trace, spread_arrivals

USE = 0.6


def sample(
    requests: Sequence[TraceRequest], speeds: Speeds, fleet: Fleet, seconds: float
) -> list[TraceRequest]:
    """Returns the first requests whose work takes a pool of workers USE of so many seconds, at the
    pace of the trace."""
    prompts_s = outputs_s = 0.0
    known: set[int] = set()
    taken: list[TraceRequest] = []
    for request in requests:
        new = sum(name not in known for name in request.hash_ids)
        known.update(request.hash_ids)
        share = new / len(request.hash_ids) if request.hash_ids else 1.0
        prompts_s += speeds.base_s + request.input_tokens * share * speeds.prefill_token_s
        # The base of a step is shared by all requests that decode in it: many at a high load.
        outputs_s += request.output_tokens * speeds.decode_seq_s
        if _use(prompts_s, outputs_s, fleet) > seconds * USE and taken:
            break
        taken.append(request)
    span_s = taken[-1].at_s - taken[0].at_s
    return at_speed(taken, span_s / seconds) if span_s > 0 else taken


def _use(prompts_s: float, outputs_s: float, fleet: Fleet) -> float:
    """Returns the seconds for which the busier pool computes prompts and outputs."""
    if fleet.prefill and fleet.decode:
        return max(prompts_s / fleet.prefill, outputs_s / fleet.decode)
    return (prompts_s + outputs_s) / max(1, fleet.workers)


def main() -> int:
    path, speeds_path, fleet, seconds = sys.argv[1:]
    try:
        speeds = parse_speeds(Path(speeds_path).read_text())
        trace = spread_arrivals(load_trace(Path(path)))
    except (OSError, SpeedsError, TraceError) as error:
        sys.stderr.write(f"meshctl plan: {error}\n")
        return 2
    requests = sample(trace, speeds, Fleet(**json.loads(fleet)), float(seconds))
    rows = [[one.at_s, one.input_tokens, one.output_tokens, one.hash_ids] for one in requests]
    sys.stdout.write(json.dumps(rows) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
