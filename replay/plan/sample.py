"""`python -m replay.plan.sample TRACE SPEEDS FLEET SECONDS BLOCKS BLOCK_SIZE`: prints requests to
play on a mesh.

The first requests of a trace, so fast that their tokens keep the workers busy for USE of the time.
FLEET is JSON: workers by role. BLOCKS, BLOCK_SIZE: as the options of `replay.plan`; BLOCKS may be
empty.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from replay.engine import WorkerSettings
from replay.plan.search import Fleet
from replay.plan.speeds import Speeds, SpeedsError, parse_speeds
from replay.trace import TraceError, TraceRequest, at_speed, load_trace, spread_arrivals

USE = 0.6


def sample(
    requests: Sequence[TraceRequest],
    speeds: Speeds,
    fleet: Fleet,
    seconds: float,
    worker: WorkerSettings,
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
        outputs_s += request.output_tokens * _token_s(request, speeds, worker)
        if _use(prompts_s, outputs_s, fleet) > seconds * USE and taken:
            break
        taken.append(request)
    span_s = taken[-1].at_s - taken[0].at_s
    return at_speed(taken, span_s / seconds) if span_s > 0 else taken


def _token_s(request: TraceRequest, speeds: Speeds, worker: WorkerSettings) -> float:
    """Returns the seconds that a token of the output takes in the largest batch of such requests:
    all of them share the base of a step."""
    cached = request.input_tokens + request.output_tokens / 2
    held = request.input_tokens + request.output_tokens
    at_once = min(worker.max_num_seqs, worker.total_blocks * worker.block_size / held)
    return speeds.base_s / max(1.0, at_once) + speeds.decode_seq_s + speeds.kv_token_s * cached


def _use(prompts_s: float, outputs_s: float, fleet: Fleet) -> float:
    """Returns the seconds for which the busier pool computes prompts and outputs."""
    if fleet.prefill and fleet.decode:
        return max(prompts_s / fleet.prefill, outputs_s / fleet.decode)
    return (prompts_s + outputs_s) / max(1, fleet.workers)


def main() -> int:
    path, speeds_path, fleet, seconds, blocks, block_size = sys.argv[1:]
    try:
        speeds = parse_speeds(Path(speeds_path).read_text())
        trace = spread_arrivals(load_trace(Path(path)))
    except (OSError, SpeedsError, TraceError) as error:
        sys.stderr.write(f"meshctl plan: {error}\n")
        return 2
    worker = speeds.capacity.settings(int(blocks) if blocks else None, int(block_size))
    requests = sample(trace, speeds, Fleet(**json.loads(fleet)), float(seconds), worker)
    rows = [[one.at_s, one.input_tokens, one.output_tokens, one.hash_ids] for one in requests]
    sys.stdout.write(json.dumps(rows) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
