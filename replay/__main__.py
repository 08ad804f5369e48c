"""`python -m replay TRACE`, also `meshctl replay TRACE`: compare routing policies on a trace."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NoReturn, TypeVar

from replay.engine import WorkerSettings
from replay.mesh import MeshSettings, ReplayMesh, ReplayResult
from replay.policies import POLICIES, ReplayPolicy
from replay.report import (
    PlotUnavailable,
    Summary,
    import_matplotlib,
    plot,
    summarize,
    table,
    to_json,
)
from replay.settings import SETTING_NAMES, RouterSettings, parse_settings
from replay.trace import (
    TraceError,
    TraceRequest,
    at_speed,
    largest_batch,
    load_trace,
    spread_arrivals,
)
from replay.workloads import GENERATORS, generate
from worker_svc.engines.sim.timing import Timing

DEFAULT_POLICIES = "kv,dynamo,least_loaded,random"
# One request of so many updates the progress line.
_PROGRESS_REQUESTS = 100

T = TypeVar("T", int, float)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        sys.stderr.write(f"{self.prog}: {message} (see {self.prog} --help)\n")
        raise SystemExit(2)


def _bounded(kind: Callable[[str], T], low: T) -> Callable[[str], T]:
    def parse(text: str) -> T:
        try:
            value = kind(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
        if not value >= low or value == float("inf"):
            raise argparse.ArgumentTypeError(f"{text} is below {low:g} or not finite")
        return value

    return parse


def _list_of(parse: Callable[[str], T]) -> Callable[[str], tuple[T, ...]]:
    return lambda text: tuple(parse(part) for part in text.split(","))


def _policies(text: str) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(text.split(",")))
    for name in names:
        if name not in POLICIES:
            known = ", ".join(POLICIES)
            raise argparse.ArgumentTypeError(f"{name!r}: no such policy; one of {known}")
    return names


def build_parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="meshctl replay",
        description="Replay a trace of requests in virtual time under several routing policies. "
        "Routers, index and KV caches are those of the mesh; the engine is the sim engine.",
        allow_abbrev=False,
    )
    _add_trace_arguments(parser)
    _add_fleet_arguments(parser)
    parser.add_argument("--seed", type=_bounded(int, 0), default=1, help="of random choices")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="write plots; needs matplotlib")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def _add_trace_arguments(parser: argparse.ArgumentParser) -> None:
    generators = ", ".join(GENERATORS)
    parser.add_argument(
        "trace", help=f".jsonl (Mooncake, --request-trace) or .csv (Azure) file, or {generators}"
    )
    parser.add_argument(
        "--speed", type=_bounded(float, 1e-3), default=1.0, help="multiple of the arrival rate"
    )
    parser.add_argument(
        "--requests", type=_bounded(int, 1), help="first requests to use (default: all)"
    )
    parser.add_argument(
        "--keep-batches",
        action="store_true",
        help="keep equal arrival times; else they are spread until the next one",
    )


def _add_fleet_arguments(parser: argparse.ArgumentParser) -> None:
    count, seconds = _bounded(int, 1), _bounded(float, 0.0)
    parser.add_argument(
        "--policies", type=_policies, default=DEFAULT_POLICIES, help=", ".join(POLICIES)
    )
    parser.add_argument("--workers", type=count, default=8, help="number of workers")
    parser.add_argument(
        "--prefill-workers",
        type=_bounded(int, 0),
        default=0,
        help="so many of the workers prefill, and the others decode; 0: all do both",
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a setting of the routers: " + ", ".join(SETTING_NAMES),
    )
    parser.add_argument("--blocks", type=count, default=3000, help="KV blocks of a worker")
    parser.add_argument(
        "--block-size", type=count, default=512, help="tokens of a block: those of one hash id"
    )
    parser.add_argument(
        "--prefill-tokens-per-s",
        type=_bounded(float, 1.0),
        default=12_000.0,
        help="prompt tokens that a worker computes in a second",
    )
    parser.add_argument(
        "--speeds",
        type=_list_of(seconds),
        default=(),
        metavar="X,...",
        help="speed of the first workers against the others; 0: a stuck worker",
    )
    parser.add_argument(
        "--routers", type=_list_of(count), default=(1,), metavar="N,...", help="numbers of routers"
    )
    parser.add_argument(
        "--index-lag-ms", type=seconds, default=20.0, help="delay of KV events and loads"
    )
    parser.add_argument(
        "--sync-lag-ms",
        type=seconds,
        default=5.0,
        help="delay of bookings and prompts between routers",
    )


@dataclass(slots=True)
class _Progress:
    """A progress line on a terminal; nothing elsewhere."""

    label: str
    total: int
    is_terminal: bool

    def __call__(self, done: int) -> None:
        if self.is_terminal and (done % _PROGRESS_REQUESTS == 0 or done == self.total):
            bar = "#" * (30 * done // self.total)
            sys.stderr.write(f"\r{self.label:24} [{bar:30}] {done}/{self.total}")
            if done == self.total:
                sys.stderr.write("\r\x1b[K")


def read_requests(args: argparse.Namespace) -> tuple[list[TraceRequest], list[str]]:
    """Returns the requests at the given speed, and notes on how they differ from the trace."""
    if args.trace in GENERATORS:
        requests = generate(args.trace, args.requests or 4000, args.seed)
    else:
        requests = load_trace(Path(args.trace))[: args.requests]
    notes = []
    batch = largest_batch(requests)
    if batch > 1 and not args.keep_batches:
        requests = spread_arrivals(requests)
        notes.append(f"arrivals spread: up to {batch} requests had the same arrival time")
    return at_speed(requests, args.speed), notes


def mesh_settings(args: argparse.Namespace, routers: int, router: RouterSettings) -> MeshSettings:
    timing = Timing(prefill_token_s=1 / args.prefill_tokens_per_s)
    return MeshSettings(
        workers=args.workers,
        prefill_workers=args.prefill_workers,
        rules=router.rules,
        routers=routers,
        index_lag_s=args.index_lag_ms / 1000,
        sync_lag_s=args.sync_lag_ms / 1000,
        worker=WorkerSettings(args.blocks, args.block_size, timing=timing),
        speeds=args.speeds[: args.workers],
        seed=args.seed,
    )


def policy_of(name: str, router: RouterSettings) -> ReplayPolicy:
    policy = POLICIES[name]
    return replace(policy, cost_settings=router.cost) if name.startswith("kv") else policy


def main(argv: Sequence[str] | None = None) -> int:
    parser = build_parser()
    args = parser.parse_args(argv)
    if len(args.speeds) >= args.workers and not any(args.speeds[: args.workers]):
        parser.error("--speeds: every worker is stuck")
    if args.prefill_workers >= args.workers:
        parser.error("--prefill-workers: no worker is left to decode")
    try:
        router = parse_settings(args.set)
        if args.plot is not None:
            import_matplotlib()
        requests, notes = read_requests(args)
    except (TraceError, PlotUnavailable, ValueError) as error:
        parser.error(str(error))
    runs: list[tuple[Summary, ReplayResult]] = []
    for routers in args.routers:
        for name in args.policies:
            progress = _Progress(f"{name}, routers: {routers}", len(requests), sys.stderr.isatty())
            mesh = ReplayMesh(mesh_settings(args, routers, router), policy_of(name, router))
            result = mesh.run(requests, progress)
            runs.append((summarize(name, routers, result), result))
    summaries = [summary for summary, _ in runs]
    if truncated := summaries[0].truncated:
        notes.append(f"{truncated} requests cut to the KV cache of a worker")
    title = f"{Path(args.trace).name}: {len(requests)} requests at speed {args.speed:g}"
    if args.plot is not None:
        plot(runs, title, args.plot)
    if args.json:
        facts = {"trace": args.trace, "speed": args.speed, "workers": args.workers, "notes": notes}
        sys.stdout.write(json.dumps(to_json(summaries, facts)) + "\n")
        return 0
    lines = [title, *notes, "", table(summaries)]
    lines += [
        f"{summary.policy}: {summary.unanswered} unanswered"
        for summary in summaries
        if summary.unanswered
    ]
    sys.stdout.write("\n".join(lines) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
