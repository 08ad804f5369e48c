"""The token path under load: frontend, router, indexer and two sim workers against bench/loadgen.c.

usage: python -m bench.gateway [--seconds 4] [--repeat 3] [--concurrency 1,16,64,256]
                               [--modes burst,paced,burst-unary,real] [--shape agg|pd]
                               [--selector kv|round_robin|...] [--shared N] [--out FILE]
                               [--against COMMIT]

burst: steps of the sim take no time, so tokens arrive as fast as the path carries them. paced: the
sim runs in real time (steps of 6 ms and more, prefill nearly free). real: the sim as it is, 12k
prompt tokens a second. agg: two aggregated workers; pd: one prefill and one decode worker. All
bodies differ; with --shared, the first N tokens are one of SHARED_PREFIXES. The last line is one
JSON object.

--against also starts a mesh of that commit, from a worktree of its own and with the same Python
environment, and loads the two meshes in turns (A B, B A, ...). It reports the median ratio, this
tree to COMMIT, of throughput, of TTFT and of the CPU time per token. The default load is then
burst at 64 connections and paced at 32.

With DYNAMO_PYTHON, the Python of an environment with ai-dynamo, it also starts Dynamo (KV router,
mocker with two workers) with its default tokenizer and with fastokens, and loads the three in
turns; those that are not loaded are stopped, and each is warmed up before it is measured. The rows
are DYNAMO_LOADS; a ratio is this tree to the better of the two.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import statistics
import sysconfig
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from bench.measure import ROOT, build_loadgen, machine_lock, print_report, run_load
from bench.stacks import MODEL, ROLES, SIM_MODEL_DIR, dynamo, mesh, suspended, worktree

ISL, OSL, BODIES = 512, 128, 4096
# name: (flags of the sim, streaming)
_BURST = ("--speedup", "1000000")
MODES = {
    "burst": (_BURST, True),
    "burst-unary": (_BURST, False),
    # Prompts cost little, so that the pace of tokens is the load, not the sim's prefill.
    "real": (("--speedup", "1"), True),
    "paced": (("--speedup", "1", "--prefill-tokens-per-s", "10000000"), True),
}
SHARED_PREFIXES = 16
# What the chat template adds around one user message.
TEMPLATE_TOKENS = 10
TEXT_CHARS = 4_000_000


# Any: JSON trees of figures.
def _flatten(tree: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from _flatten(value, f"{prefix}{key}.")
        elif isinstance(value, int | float):
            yield prefix + key, value


def _median_row(runs: list[dict[str, Any]]) -> dict[str, float]:
    columns: defaultdict[str, list[float]] = defaultdict(list)
    for run in runs:
        for key, value in _flatten(run):
            columns[key].append(value)
    return {key: round(statistics.median(values), 4) for key, values in columns.items()}


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
    """A server under load. open: yields the HTTP port and the pids by name. gateway: the processes
    between client and engine."""

    name: str
    open: Callable[[str], AbstractContextManager[tuple[int, dict[str, int]]]]
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
    "gap_p99": Figure("gap_ms.p99"),
    "frontend_cpu": Figure("cpu.frontend.s_per_mtok"),
    # Of all processes between client and engine, and of all processes.
    "gateway_cpu": Figure("gateway_cpu"),
    "mesh_cpu": Figure("mesh_cpu"),
}
MESH_GATEWAY = ("frontend", "router", "indexer")
# Mode and connections; the report's name of each ratio.
DYNAMO_LOADS = [("burst", [1, 64, 256]), ("burst-unary", [64]), ("paced", [32, 256])]
DYNAMO_RATIOS = {
    "burst_c64_tok_s_ratio": ("burst", 64, "tokens_per_s"),
    "burst_c256_tok_s_ratio": ("burst", 256, "tokens_per_s"),
    "burst_c64_cpu_ratio": ("burst", 64, "gateway_cpu"),
    "unary_c64_req_s_ratio": ("burst-unary", 64, "tokens_per_s"),
    "paced_c32_cpu_ratio": ("paced", 32, "gateway_cpu"),
    "paced_c256_gap_p99_ratio": ("paced", 256, "gap_p99"),
    "c1_ttft_ratio": ("burst", 1, "ttft_p50"),
}
MOCKER_FLAGS = {
    "burst": ("--speedup-ratio", "1000000"),
    "burst-unary": ("--speedup-ratio", "1000000"),
    "paced": ("--speedup-ratio", "1"),
    "real": ("--speedup-ratio", "1"),
}
WARM_UP_S = 1.5


def _figures(run: dict[str, Any]) -> dict[str, float]:
    flat = dict(_flatten(run))
    return {name: flat[one.key] for name, one in FIGURES.items() if flat.get(one.key)}


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
    return {
        name: {
            "median": round(statistics.median(values), 3),
            "min": round(min(values), 3),
            "max": round(max(values), 3),
        }
        for name, values in sorted(ratios.items())
    }


def _parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bench.gateway")
    parser.add_argument("--seconds", type=float, default=4)
    parser.add_argument("--repeat", type=int, default=None, help="3; with --against 7")
    parser.add_argument("--concurrency", default="1,16,64,256")
    parser.add_argument("--modes", default=",".join(MODES))
    parser.add_argument("--frontend", default="", help="more flags for the frontend")
    parser.add_argument("--shape", choices=sorted(ROLES), default="agg")
    parser.add_argument("--selector", default="kv")
    parser.add_argument("--shared", type=int, default=0, help="prompt tokens of a common prefix")
    parser.add_argument("--isl", type=int, default=ISL)
    parser.add_argument("--osl", type=int, default=OSL)
    parser.add_argument("--against", metavar="COMMIT", help="also run COMMIT and report ratios")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.repeat is None:
        args.repeat = 7 if args.against else 3
    return args


def _loads(args: argparse.Namespace, *, with_dynamo: bool) -> list[tuple[str, list[int]]]:
    """Modes with their numbers of connections."""
    if args.modes == ",".join(MODES) and (args.against or with_dynamo):
        return DYNAMO_LOADS if with_dynamo else [("burst", [64]), ("paced", [32])]
    connections = [int(number) for number in args.concurrency.split(",")]
    return [(mode, connections) for mode in args.modes.split(",")]


def _mesh_stack(args: argparse.Namespace, name: str, root: Path) -> Stack:
    def open_mesh(mode: str) -> AbstractContextManager[tuple[int, dict[str, int]]]:
        return mesh(MODES[mode][0], args.frontend.split(), args.shape, args.selector, root)

    return Stack(name, open_mesh, MESH_GATEWAY)


def _dynamo_stack(name: str, python: str, env: Mapping[str, str]) -> Stack:
    return Stack(name, lambda mode: dynamo(python, MOCKER_FLAGS[mode], env), ("frontend",))


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
            root = exit_stack.enter_context(worktree(args.against))
            stacks.append(_mesh_stack(args, args.against[:12], root))
        if dynamo_python:
            # Without it, the client's delayed acknowledgements hold back Dynamo's first tokens.
            os.environ["QUICKACK"] = "1"
            stacks += [
                _dynamo_stack("dynamo", dynamo_python, {}),
                _dynamo_stack("dynamo-fastokens", dynamo_python, {"DYN_TOKENIZER": "fastokens"}),
            ]
        for mode, connections in _loads(args, with_dynamo=bool(dynamo_python)):
            _write_bodies(folder / f"{mode}.jsonl", args, stream=MODES[mode][1])
            bench = partial(_run_mode, args, loadgen, folder / f"{mode}.jsonl", stacks, mode)
            rows.extend(bench(connections))
    settings = {k: str(v) for k, v in vars(args).items() if k != "out"}
    result: dict[str, object] = {"rows": rows}
    if dynamo_python:
        result |= _dynamo_ratios(rows)
    print_report("gateway", settings, result, args.out)


def _dynamo_ratios(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """The ratios of DYNAMO_RATIOS, of the rows that were run."""
    found = {(row["mode"], row["concurrency"]): row["ratios"]["dynamo"] for row in rows}
    return {
        key: found[mode, connections][figure]["median"]
        for key, (mode, connections, figure) in DYNAMO_RATIOS.items()
        if (mode, connections) in found
    }


def _write_bodies(out: Path, args: argparse.Namespace, *, stream: bool) -> None:
    """Write BODIES chat bodies of about --isl prompt tokens, one JSON a line, all different.

    Prompts are random slices of Python's standard library, cut at token offsets.
    """
    rng = random.Random(1)
    tokenizer = Tokenizer.from_file(str(SIM_MODEL_DIR / "tokenizer.json"))
    sources = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = "".join(source.read_text("utf-8", "ignore") for source in sources)[:TEXT_CHARS]
    offsets = tokenizer.encode(text).offsets

    def cut(tokens: int) -> str:
        first = rng.randrange(len(offsets) - tokens)
        return text[offsets[first][0] : offsets[first + tokens - 1][1]]

    heads = [cut(args.shared) if args.shared else "" for _ in range(SHARED_PREFIXES)]
    with out.open("w") as file:
        for _ in range(BODIES):
            head = heads[rng.randrange(SHARED_PREFIXES)]
            content = head + cut(args.isl - TEMPLATE_TOKENS - args.shared)
            body = {
                "model": MODEL,
                "messages": [{"role": "user", "content": content}],
                "max_tokens": args.osl,
                "ignore_eos": True,
                "stream": stream,
            }
            file.write(json.dumps(body) + "\n")


def _run_mode(
    args: argparse.Namespace,
    loadgen: Path,
    bodies: Path,
    stacks: Sequence[Stack],
    mode: str,
    connections: Sequence[int],
) -> Iterator[dict[str, Any]]:
    """Starts the stacks, loads them in turns, yields one row for each number of connections."""
    has_dynamo = any(stack.name.startswith("dynamo") for stack in stacks)
    with contextlib.ExitStack() as exit_stack:
        opened = [exit_stack.enter_context(stack.open(mode)) for stack in stacks]

        def load(which: int, concurrency: int, repeat: int, seconds: float) -> dict[str, Any]:
            settings = {"offset": 997 * repeat, "tokens_per_request": args.osl}
            port, pids = opened[which]
            run = run_load(loadgen, port, bodies, concurrency, seconds, pids, **settings)
            cpu = {name: process["s_per_mtok"] or 0 for name, process in run["cpu"].items()}
            run["gateway_cpu"] = sum(cpu[name] for name in stacks[which].gateway)
            run["mesh_cpu"] = sum(cpu.values())
            return run

        def load_alone(which: int, concurrency: int, repeat: int) -> dict[str, Any]:
            if not has_dynamo:
                return load(which, concurrency, repeat, args.seconds)
            others = [pids.values() for one, (_, pids) in enumerate(opened) if one != which]
            with suspended([pid for pids in others for pid in pids]):
                load(which, concurrency, args.repeat + repeat, WARM_UP_S)
                return load(which, concurrency, repeat, args.seconds)

        for concurrency in connections:
            if len(stacks) > 1 and not has_dynamo:
                for which in range(len(stacks)):
                    load(which, concurrency, args.repeat, args.seconds)  # warm up
            runs: list[dict[str, dict[str, Any]]] = []
            for repeat in range(args.repeat):
                order = sorted(range(len(stacks)), reverse=repeat % 2 == 1)
                runs.append({stacks[i].name: load_alone(i, concurrency, repeat) for i in order})
            yield _row(mode, concurrency, [stack.name for stack in stacks], runs)


def _row(
    mode: str, concurrency: int, names: Sequence[str], runs: Sequence[dict[str, dict[str, Any]]]
) -> dict[str, Any]:
    """The report of a load: medians by stack, and ratios to each other commit and to Dynamo."""
    medians = {name: _median_row([run[name] for run in runs]) for name in names}
    for name, median in medians.items():
        _print_row(mode if name == names[0] else name, median)
    others = names[1:]
    rivals = {name: [name] for name in others if not name.startswith("dynamo")}
    if dynamos := [name for name in others if name.startswith("dynamo")]:
        rivals["dynamo"] = dynamos
    ratios = {name: compare(runs, names[0], rival) for name, rival in rivals.items()}
    for name, one in ratios.items():
        _print_ratios(name, one)
    return {"mode": mode, "concurrency": concurrency, "medians": medians, "ratios": ratios}


def _print_ratios(rival: str, ratios: dict[str, dict[str, float]]) -> None:
    for name, ratio in ratios.items():
        better = "higher" if FIGURES[name].is_higher_better else "lower"
        print(
            f"  to {rival}: {name:12s} {ratio['median']:.3f}"
            f"  ({ratio['min']:.3f}-{ratio['max']:.3f}; {better} is better)",
            flush=True,
        )


if __name__ == "__main__":
    main()
