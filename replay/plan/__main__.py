"""`python -m replay.plan`, also `meshctl plan`: the workers that a trace needs."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from replay.engine import WorkerSettings
from replay.plan.check import CheckError, compare
from replay.plan.search import Fleet, Prediction, Targets, cheapest, predict, search
from replay.plan.speeds import Speeds, SpeedsError, parse_speeds
from replay.report import PlotUnavailable, import_matplotlib
from replay.trace import (
    TraceError,
    TraceRequest,
    at_speed,
    load_trace,
    spread_arrivals,
    with_block_size,
)

EXIT_NOT_MET = 1


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="meshctl plan",
        description="Find the fewest workers that meet targets of TTFT and ITL on a trace.",
        allow_abbrev=False,
    )
    parser.add_argument("trace", type=Path, help=".jsonl (Mooncake, --request-trace) or .csv file")
    parser.add_argument("--speeds", type=Path, required=True, help="file of measured speeds")
    parser.add_argument("--ttft-s", type=float, help="95th percentile, seconds")
    parser.add_argument("--itl-s", type=float, help="95th percentile, seconds")
    parser.add_argument("--speed", type=float, default=1.0, help="multiple of the arrival rate")
    parser.add_argument("--requests", type=int, default=2000, help="first requests to use")
    parser.add_argument("--max-workers", type=int, default=32, help="largest fleet to try")
    parser.add_argument("--aggregated", action="store_true", help="no prefill and decode workers")
    parser.add_argument("--blocks", type=int, help="KV blocks of a worker, if not as measured")
    parser.add_argument(
        "--block-size", type=int, default=512, help="tokens of a block of the trace"
    )
    parser.add_argument("--check", type=Path, metavar="FILE", help="measured on a real mesh")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="needs matplotlib")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def plot(
    best: Fleet,
    requests: Sequence[TraceRequest],
    speeds: Speeds,
    worker: WorkerSettings,
    targets: Targets,
    path: Path,
) -> None:
    """Draws the TTFT and ITL of the replay of a fleet."""
    pyplot = import_matplotlib()
    _, result = predict(best, requests, speeds, worker, replays=1)
    figure, (first, further) = pyplot.subplots(2, 1, figsize=(11, 6), sharex=True)
    done = [o for o in result.outcomes if o.ttft_s is not None and o.end_s is not None]
    minutes = [outcome.at_s / 60 for outcome in done]
    first.plot(minutes, [(o.ttft_s or 0) + speeds.outside_s for o in done], ".", markersize=3)
    if targets.ttft_s is not None:
        first.axhline(targets.ttft_s, color="black", linewidth=0.8, label="target")
        first.legend(loc="upper right")
    first.set(ylabel="TTFT, s", yscale="log", title=str(best))
    itls = [((o.end_s or 0) - o.at_s - (o.ttft_s or 0)) / max(1, o.output_tokens - 1) for o in done]
    further.plot(minutes, itls, ".", markersize=3)
    if targets.itl_s is not None:
        further.axhline(targets.itl_s, color="black", linewidth=0.8, label="target")
        further.legend(loc="upper right")
    further.set(ylabel="ITL, s", xlabel="minute")
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def row(prediction: Prediction, targets: Targets) -> str:
    low, high = prediction.ttft_p95_range_s
    itl_low, itl_high = (1000 * value for value in prediction.itl_p95_range_s)
    cells = (
        f"{prediction.ttft_p50_s:12.3f}",
        f"{prediction.ttft_p95_s:9.3f}",
        f" ({low:.3f} to {high:.3f})".ljust(20),
        f"{prediction.itl_p50_s * 1000:12.1f}",
        f"{prediction.itl_p95_s * 1000:9.1f}",
        f" ({itl_low:.1f} to {itl_high:.1f})".ljust(20),
        "  meets the targets" if prediction.meets(targets) else "",
    )
    return f"{prediction.fleet!s:26}{''.join(cells)}".rstrip() + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    parser = build_parser()
    args = parser.parse_args(argv)
    if not args.speed > 0:
        parser.error(f"--speed must be above 0, not {args.speed:g}")
    targets = Targets(args.ttft_s, args.itl_s)
    if targets == Targets():
        parser.error("a target is needed: --ttft-s, --itl-s or both")
    try:
        speeds = parse_speeds(args.speeds.read_text())
        worker = speeds.capacity.settings(args.blocks, args.block_size)
        check = None
        if args.check is not None:
            check = compare(args.check.read_text(), speeds, worker, args.block_size)
        requests = at_speed(spread_arrivals(load_trace(args.trace)[: args.requests]), args.speed)
        requests = with_block_size(requests, args.block_size, worker.block_size)
        if args.plot is not None:
            import_matplotlib()
    except (OSError, SpeedsError, TraceError, CheckError, PlotUnavailable) as error:
        parser.error(str(error))
    found: list[Prediction] = []
    if not args.json:
        titles = (("TTFT p50 s", 12), ("p95", 9), ("", 20), ("ITL p50 ms", 12), ("p95", 9))
        sys.stdout.write(" " * 26 + "".join(t.rjust(width) for t, width in titles) + "\n")
    for prediction in search(
        requests, speeds, worker, targets, args.max_workers, splits=not args.aggregated
    ):
        found.append(prediction)
        if not args.json:
            sys.stdout.write(row(prediction, targets))
            sys.stdout.flush()
    best = cheapest(found, targets)
    if args.json:
        answer: dict[str, Any] = {
            "best": None if best is None else best.to_json(),
            "tried": [prediction.to_json() for prediction in found],
            "check": None if check is None else asdict(check),
        }
        sys.stdout.write(json.dumps(answer) + "\n")
    elif best is None:
        sys.stdout.write(f"no fleet of up to {args.max_workers} workers meets the targets\n")
    else:
        sys.stdout.write(f"\n{best.fleet}: the fewest workers that meet the targets\n")
    if check is not None and not args.json:
        sys.stdout.write(f"\n{check.text()}")
    if best is not None and args.plot is not None:
        plot(best.fleet, requests, speeds, worker, targets, args.plot)
    return EXIT_NOT_MET if best is None else 0


if __name__ == "__main__":
    sys.exit(main())
