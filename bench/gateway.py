"""The token path under load: frontend, router, indexer and two sim workers against bench/loadgen.c.

usage: python -m bench.gateway [--full] [--seconds 4] [--repeat 3] [--out FILE]
                               [--against COMMIT [--self]]
                               [--concurrency 1,16,64,256] [--modes burst,paced,burst-unary,real]
                               [--shape agg|pd] [--selector kv|round_robin|...] [--isl N] [--osl N]
                               [--shared N]

Without --modes and --concurrency it runs the rows named in NAMED (with Dynamo about 15 minutes),
--full all of FULL. All bodies differ; with --shared, the first N tokens are one of SHARED_PREFIXES.
The last line is one JSON object.

burst: steps of the sim take no time, so tokens arrive as fast as the path carries them. paced: the
sim runs in real time (steps of 6 ms and more, prefill nearly free). real: the sim as it is, 12k
prompt tokens a second. even: as paced, and Dynamo's mocker has the same steps instead of those of
its own model. agg: two aggregated workers; pd: one prefill and one decode worker.

--against also starts a mesh of that commit, from a folder of its own and with the same Python
environment, and loads the two meshes in turns (A B, B A, ...). It reports the median ratio, this
tree to COMMIT, of throughput, of TTFT and of the CPU time per token. The default load is then
burst at 64 connections and paced at 32. The commit is compiled if this tree is. --self starts
COMMIT a second time: the ratios of COMMIT to itself show how much of a difference is noise.

With DYNAMO_PYTHON, the Python of an environment with ai-dynamo, it also starts Dynamo (KV router,
mocker with two workers) with its default tokenizer and with fastokens, and loads the three in
turns; the mesh is stopped while it is not loaded, and each is warmed up before it is measured. A
ratio is this tree to the better of the two. Dynamo has no pd rows.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bench.bodies import write_bodies
from bench.extras import (
    idle_cpu_pct,
    keys_ratio,
    long_prompt_gaps,
    processes_ratios,
    slow_readers,
)
from bench.measure import (
    ROOT,
    build_loadgen,
    flatten,
    machine_lock,
    medians,
    print_report,
    run_load,
    spread,
)
from bench.stacks import ROLES, await_response, dynamo, mesh, suspended
from bench.trees import commit_tree, is_compiled

ISL, OSL = 512, 128
# name: (flags of the sim, streaming)
_BURST = ("--speedup", "1000000")
PACED = ("--speedup", "1", "--prefill-tokens-per-s", "10000000")
MODES = {
    "burst": (_BURST, True),
    "burst-unary": (_BURST, False),
    # Prompts cost little, so that the pace of tokens is the load, not the sim's prefill.
    "real": (("--speedup", "1"), True),
    "paced": (PACED, True),
    "even": (PACED, True),
}
# Of the mocker in mode `even`: a step of the sim with 16 streams.
EVEN_STEP_MS = 6.34


def _print_row(mode: str, row: dict[str, float]) -> None:
    cpu = "  ".join(
        f"{name} {row.get(f'cpu.{name}.s_per_mtok', 0):.1f}s/Mtok {row[f'cpu.{name}.pct']:.0f}%"
        for name in ("frontend", "router", "worker0", "worker1")
        if f"cpu.{name}.pct" in row
    )
    errors = row["non200"] + row["broken"] + row["no_done"]
    print(
        f"{mode:12s} c={row['concurrency']:<4.0f} {row['window_rps']:7.1f} req/s "
        f"{row['tokens_per_s']:8.0f} tok/s  ttft p50/p99 {row['ttft_ms.p50']:.1f}/"
        f"{row['ttft_ms.p99']:.1f} ms  gap p50/p99 {row['gap_ms.p50']:.2f}/{row['gap_ms.p99']:.2f}"
        f"  errors {errors:.0f} | {cpu}  client {row['client_cpu_pct']:.0f}%"
        f" other {row['other_cpu_pct']:.0f}%",
        flush=True,
    )


@dataclass(frozen=True, slots=True)
class Stack:
    """A server under load. open: for a mode and a shape, yields the HTTP port and the pids by name.
    gateway: the processes between client and engine."""

    name: str
    open: Callable[[str, str], AbstractContextManager[tuple[int, dict[str, int]]]]
    gateway: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Figure:
    """A figure of a run that is compared. key: in the flattened run."""

    key: str
    is_higher_better: bool = False


FIGURES = {
    "tokens_per_s": Figure("tokens_per_s", is_higher_better=True),
    "ttft_p50": Figure("ttft_ms.p50"),
    "ttft_mean": Figure("ttft_ms.mean"),
    # Beyond the step that computes the prompt, which takes as long as the median gap.
    "added_ttft": Figure("added_ttft_ms"),
    "gap_p99": Figure("gap_ms.p99"),
    "frontend_cpu": Figure("cpu.frontend.s_per_mtok"),
    # Of all processes between client and engine, and of all processes.
    "gateway_cpu": Figure("gateway_cpu"),
    "mesh_cpu": Figure("mesh_cpu"),
}
# After the name of a commit: its second mesh.
AGAIN = " again"
# The figures of one turn, by stack.
_Runs = dict[str, dict[str, Any]]
MESH_GATEWAY = ("frontend", "router", "indexer")
DYNAMO_RATIOS = {
    "burst_c64_tok_s_ratio": ("burst", 64, "tokens_per_s"),
    "burst_c256_tok_s_ratio": ("burst", 256, "tokens_per_s"),
    "burst_c64_cpu_ratio": ("burst", 64, "gateway_cpu"),
    "unary_c64_req_s_ratio": ("burst-unary", 64, "tokens_per_s"),
    "paced_c32_cpu_ratio": ("paced", 32, "gateway_cpu"),
    "paced_c32_added_ttft_ratio": ("even", 32, "added_ttft"),
    "paced_c256_gap_p99_ratio": ("paced", 256, "gap_p99"),
    "c1_ttft_ratio": ("burst", 1, "ttft_p50"),
}
MOCKER_SPEED = {"burst": "1000000", "burst-unary": "1000000"}
WARM_UP_S = 1.5


@dataclass(frozen=True, slots=True)
class Load:
    """One start of the stacks. connections: of each of its rows."""

    mode: str
    connections: tuple[int, ...]
    isl: int = ISL
    shape: str = "agg"


NAMED = (
    Load("burst", (1, 64, 256)),
    Load("burst-unary", (64,)),
    Load("paced", (32, 256)),
    Load("even", (32,)),
)
_SIZES = ((512, (1, 16, 64, 256, 1024)), (8192, (1, 16, 64)), (131_072, (1, 4)))
FULL = tuple(
    Load(mode, connections, isl, shape)
    for shape in ROLES
    for isl, connections in _SIZES
    for mode in ("burst", "burst-unary", "paced", "even")
)
AGAINST = (Load("burst", (64,)), Load("paced", (32,)))


def _figures(run: dict[str, Any]) -> dict[str, float]:
    flat = dict(flatten(run))
    return {name: flat[figure.key] for name, figure in FIGURES.items() if flat.get(figure.key)}


def compare(
    runs: Sequence[Mapping[str, dict[str, Any]]], ours: str, others: Sequence[str]
) -> dict[str, dict[str, float]]:
    """Median, lowest and highest ratio of each figure over runs by stack: `ours` to the better of
    the others."""
    ratios: defaultdict[str, list[float]] = defaultdict(list)
    for run in runs:
        our_figures = _figures(run[ours])
        for name, figure in FIGURES.items():
            values = [_figures(run[other]).get(name) for other in others]
            found = [value for value in values if value]
            if name in our_figures and found:
                best = max(found) if figure.is_higher_better else min(found)
                ratios[name].append(our_figures[name] / best)
    return {name: spread(values) for name, values in sorted(ratios.items())}


def _parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bench.gateway")
    parser.add_argument("--seconds", type=float, default=4)
    parser.add_argument("--repeat", type=int, default=None, help="3; with --against 8")
    parser.add_argument("--full", action="store_true", help="the whole matrix; hours")
    parser.add_argument("--concurrency")
    parser.add_argument("--modes")
    parser.add_argument("--frontend", default="", help="more flags for the frontend")
    parser.add_argument("--shape", choices=sorted(ROLES), default="agg")
    parser.add_argument("--selector", default="kv")
    parser.add_argument("--shared", type=int, default=0, help="prompt tokens of a common prefix")
    parser.add_argument("--isl", type=int, default=ISL)
    parser.add_argument("--osl", type=int, default=OSL)
    parser.add_argument("--against", metavar="COMMIT", help="also run COMMIT and report ratios")
    parser.add_argument("--self", action="store_true", help="also COMMIT against itself")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.repeat is None:
        args.repeat = 8 if args.against else 3
    return args


def _loads(args: argparse.Namespace) -> Sequence[Load]:
    if args.full:
        return FULL
    if not (args.modes or args.concurrency):
        named = AGAINST if args.against else NAMED
        return [replace(load, isl=args.isl, shape=args.shape) for load in named]
    connections = tuple(map(int, (args.concurrency or "1,16,64,256").split(",")))
    modes = (args.modes or ",".join(MODES)).split(",")
    return [Load(mode, connections, args.isl, args.shape) for mode in modes]


def _mesh_stack(args: argparse.Namespace, name: str, root: Path) -> Stack:
    def open_mesh(mode: str, shape: str) -> AbstractContextManager[tuple[int, dict[str, int]]]:
        return mesh(MODES[mode][0], args.frontend.split(), shape, args.selector, root)

    return Stack(name, open_mesh, MESH_GATEWAY)


def _dynamo_stack(name: str, python: str, env: Mapping[str, str]) -> Stack:
    def open_dynamo(mode: str, _: str) -> AbstractContextManager[tuple[int, dict[str, int]]]:
        flags = ("--speedup-ratio", MOCKER_SPEED.get(mode, "1"))
        return dynamo(python, flags, env, EVEN_STEP_MS if mode == "even" else None)

    return Stack(name, open_dynamo, ("frontend",))


def main() -> None:
    args, dynamo_python = _parse_args(), os.environ.get("DYNAMO_PYTHON")
    loadgen = build_loadgen()
    rows: list[dict[str, Any]] = []
    with contextlib.ExitStack() as exit_stack:
        exit_stack.enter_context(machine_lock())
        folder = Path(
            exit_stack.enter_context(tempfile.TemporaryDirectory(prefix="kvmesh-bodies-"))
        )
        stacks = [_mesh_stack(args, "kvmesh", ROOT)]
        if args.against:
            compiled = is_compiled(ROOT)
            root = exit_stack.enter_context(commit_tree(args.against, compiled=compiled))
            commit = args.against[:12]
            names = [commit, f"{commit}{AGAIN}"] if args.self else [commit]
            stacks += [_mesh_stack(args, name, root) for name in names]
        if dynamo_python:
            # Without it, the client's delayed acknowledgements hold back Dynamo's first tokens.
            os.environ["QUICKACK"] = "1"
            stacks += [
                _dynamo_stack("dynamo", dynamo_python, {}),
                _dynamo_stack("dynamo-fastokens", dynamo_python, {"DYN_TOKENIZER": "fastokens"}),
            ]
        for load in _loads(args):
            bodies = folder / "bodies.jsonl"
            stream = MODES[load.mode][1]
            write_bodies(bodies, isl=load.isl, osl=args.osl, shared=args.shared, stream=stream)
            rows.extend(run_stacks(args, loadgen, bodies, stacks, load))
        result: dict[str, object] = {"rows": rows}
        if _loads(args) == list(NAMED) or args.full:
            result |= _extras(args, loadgen, folder, rows)
    settings = {k: str(v) for k, v in vars(args).items() if k != "out"}
    if dynamo_python:
        result |= _dynamo_ratios(rows)
    print_report("gateway", settings, result, args.out)


def _extras(
    args: argparse.Namespace, loadgen: Path, folder: Path, rows: Sequence[Mapping[str, Any]]
) -> dict[str, float]:
    """Figures of this tree alone, by the report's names."""
    rss_mb = next(
        row["medians"]["kvmesh"]["cpu.frontend.rss_mb"]
        for row in rows
        if (row["mode"], row["concurrency"], row["isl"]) == ("burst", 256, ISL)
    )
    found = {"frontend_rss_mb_c256": rss_mb, "idle_mesh_cpu_pct": idle_cpu_pct()}
    found |= processes_ratios(loadgen, folder, _BURST, args.seconds, args.repeat)
    found |= keys_ratio(loadgen, folder, _BURST, args.seconds, args.repeat)
    found |= long_prompt_gaps(loadgen, folder, PACED, args.seconds, args.repeat)
    found |= slow_readers(loadgen, folder, PACED, args.seconds, args.repeat)
    for name, value in found.items():
        print(f"{name}: {value}", flush=True)
    return found


def _dynamo_ratios(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """The ratios of DYNAMO_RATIOS, of the rows that were run."""
    found = {
        (row["mode"], row["concurrency"]): row["ratios"]["dynamo"]
        for row in rows
        if row["isl"] == ISL and "dynamo" in row["ratios"]
    }
    return {
        key: found[mode, connections][figure]["median"]
        for key, (mode, connections, figure) in DYNAMO_RATIOS.items()
        if (mode, connections) in found
    }


def run_stacks(
    args: argparse.Namespace, loadgen: Path, bodies: Path, stacks: Sequence[Stack], plan: Load
) -> Iterator[dict[str, Any]]:
    """Starts the stacks, loads them in turns, yields one row for each number of connections.

    Of the same mesh started two and three times, each was 4 % faster than the one before: several
    stacks are started in the reverse order for the second half of the repeats.
    """
    if plan.shape != "agg":
        stacks = [stack for stack in stacks if not stack.name.startswith("dynamo")]
    half = -(-args.repeat // 2) if len(stacks) > 1 else args.repeat
    runs: defaultdict[int, list[_Runs]] = defaultdict(list)
    for started, repeats in (
        (list(stacks), range(half)),
        (list(reversed(stacks)), range(half, args.repeat)),
    ):
        if repeats:
            for connections, run in _in_turns(args, loadgen, bodies, started, plan, repeats):
                runs[connections].append(run)
    for connections in plan.connections:
        yield _row(plan, connections, [stack.name for stack in stacks], runs[connections])


def _in_turns(
    args: argparse.Namespace,
    loadgen: Path,
    bodies: Path,
    stacks: Sequence[Stack],
    plan: Load,
    repeats: Sequence[int],
) -> Iterator[tuple[int, _Runs]]:
    """Starts the stacks in order, and loads them in turns (A B, B A, ...)."""
    has_dynamo = any(stack.name.startswith("dynamo") for stack in stacks)
    with contextlib.ExitStack() as exit_stack:
        first_body = bodies.read_bytes().split(b"\n", 1)[0]
        opened = [exit_stack.enter_context(stack.open(plan.mode, plan.shape)) for stack in stacks]

        def load(which: int, concurrency: int, repeat: int, seconds: float) -> dict[str, Any]:
            settings = {"offset": 997 * repeat, "tokens_per_request": args.osl}
            port, pids = opened[which]
            run = run_load(loadgen, port, bodies, concurrency, seconds, pids, **settings)
            cpu = {name: process["s_per_mtok"] or 0 for name, process in run["cpu"].items()}
            run["gateway_cpu"] = sum(cpu[name] for name in stacks[which].gateway)
            run["mesh_cpu"] = sum(cpu.values())
            run["added_ttft_ms"] = max(0.0, run["ttft_ms"]["mean"] - run["gap_ms"]["p50"])
            return run

        def load_alone(which: int, concurrency: int, repeat: int) -> dict[str, Any]:
            if not has_dynamo:
                return load(which, concurrency, repeat, args.seconds)
            # A Dynamo that is stopped for long loses its workers for good; it uses 1 % of a core.
            others = [
                pids.values()
                for at, (_, pids) in enumerate(opened)
                if at != which and not stacks[at].name.startswith("dynamo")
            ]
            with suspended([pid for pids in others for pid in pids]):
                await_response(opened[which][0], first_body)
                load(which, concurrency, args.repeat + repeat, WARM_UP_S)
                return load(which, concurrency, repeat, args.seconds)

        for concurrency in plan.connections:
            if len(stacks) > 1 and not has_dynamo:
                for which in range(len(stacks)):
                    load(which, concurrency, args.repeat, args.seconds)  # warm up
            for repeat in repeats:
                order = sorted(range(len(stacks)), reverse=repeat % 2 == 1)
                yield (
                    concurrency,
                    {stacks[i].name: load_alone(i, concurrency, repeat) for i in order},
                )


def _row(
    plan: Load, concurrency: int, names: Sequence[str], runs: Sequence[_Runs]
) -> dict[str, Any]:
    """The report of a load: medians by stack, and ratios to each other commit and to Dynamo."""
    rows = {name: medians([dict(flatten(run[name])) for run in runs]) for name in names}
    for name, median in rows.items():
        _print_row(plan.mode if name == names[0] else name, median)
    others = names[1:]
    commits = [name for name in others if not name.startswith("dynamo")]
    rivals = {name: [name] for name in commits if not name.endswith(AGAIN)}
    if dynamos := [name for name in others if name.startswith("dynamo")]:
        rivals["dynamo"] = dynamos
    ratios = {name: compare(runs, names[0], rival) for name, rival in rivals.items()}
    ratios |= {
        name: compare(runs, name, [name.removesuffix(AGAIN)])
        for name in commits
        if name.endswith(AGAIN)
    }
    for name, ratio in ratios.items():
        _print_ratios(f"{name} to itself" if name.endswith(AGAIN) else f"to {name}", ratio)
    facts = {"mode": plan.mode, "concurrency": concurrency, "isl": plan.isl, "shape": plan.shape}
    return {**facts, "medians": rows, "ratios": ratios}


def _print_ratios(rival: str, ratios: dict[str, dict[str, float]]) -> None:
    for name, ratio in ratios.items():
        better = "higher" if FIGURES[name].is_higher_better else "lower"
        print(
            f"  {rival}: {name:12s} {ratio['median']:.3f}"
            f"  ({ratio['min']:.3f}-{ratio['max']:.3f}; {better} is better)",
            flush=True,
        )


if __name__ == "__main__":
    main()
