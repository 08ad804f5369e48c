"""The token path under load: frontend, router and two sim workers against bench/loadgen.c.

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
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
import urllib.request
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from bench.measure import ROOT, build_loadgen, machine_lock, print_report, run_load

MODEL = "bench"
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
ROLES = {"agg": ("aggregated", "aggregated"), "pd": ("prefill", "decode")}
SHARED_PREFIXES = 16
# What the chat template adds around one user message.
TEMPLATE_TOKENS = 10
TEXT_CHARS = 4_000_000
READY_S = 30.0


@contextlib.contextmanager
def mesh(
    sim_flags: Sequence[str],
    frontend_flags: Sequence[str],
    shape: str = "agg",
    selector: str = "kv",
    root: Path = ROOT,
) -> Iterator[tuple[int, dict[str, int]]]:
    """Yield the HTTP port and the pids of a frontend, a router, an indexer and two sim workers.

    root: the source tree that the services run from.
    """
    with tempfile.TemporaryDirectory(prefix="kvmesh-bench-") as folder:
        common = ["--registry-path", f"{folder}/registry", "--log-level", "warning"]
        worker = [*common, *sim_flags, "--model-name", MODEL, "--notice-s", "0"]
        commands = {
            "indexer": ["indexer_svc", *common, "--notice-s", "0"],
            "router": ["router_svc", *common, "--notice-s", "0", "--selector", selector],
            **{
                f"worker{i}": ["worker_svc", *worker, "--role", role]
                for i, role in enumerate(ROLES[shape])
            },
            "frontend": [
                *("frontend_svc", *common, "--http-port", "0", "--notice-s", "0", *frontend_flags)
            ],
        }
        running: dict[str, subprocess.Popen[bytes]] = {}
        ready: dict[str, dict[str, Any]] = {}
        try:
            for name, command in commands.items():
                running[name], ready[name] = _start(name, command, Path(folder), root)
            port = int(ready["frontend"]["addresses"]["http"].rsplit(":", 1)[1])
            _await_model(port)
            yield port, {name: process.pid for name, process in running.items()}
        finally:
            for process in running.values():
                process.send_signal(signal.SIGTERM)
            for process in running.values():
                process.wait(20)


def _start(
    name: str, command: list[str], folder: Path, root: Path
) -> tuple[subprocess.Popen[bytes], dict[str, Any]]:
    read_fd, write_fd = os.pipe()
    log = (folder / f"{name}.log").open("wb")
    module, *flags = command
    process = subprocess.Popen(
        [sys.executable, "-m", module, *flags, "--ready-fd", str(write_fd)],
        stdout=log,
        stderr=log,
        pass_fds=[write_fd],
        cwd=root,
        env={**os.environ, "PYTHONPATH": f"{root}/protos:{root}"},
    )
    os.close(write_fd)
    with os.fdopen(read_fd) as pipe:
        line = json.loads(pipe.readline() or "{}")
    if "addresses" not in line:
        raise RuntimeError(f"{name} did not start: {(folder / f'{name}.log').read_text()[-2000:]}")
    return process, line


def _await_model(port: int) -> None:
    deadline = time.monotonic() + READY_S
    url = f"http://127.0.0.1:{port}/health"
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=2) as response:
            workers = [i for i in json.load(response)["instances"] if i["service"] == "worker"]
            if len(workers) == 2:
                return
        time.sleep(0.05)
    raise RuntimeError(f"the mesh was not ready within {READY_S:g} s")


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


@contextlib.contextmanager
def worktree(revision: str) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="kvmesh-worktree-") as folder:
        git = ["git", "-C", str(ROOT), "worktree"]
        subprocess.run([*git, "add", "--quiet", "--detach", folder, revision], check=True)
        try:
            yield Path(folder)
        finally:
            subprocess.run([*git, "remove", "--force", folder], check=True)


# name in the report: (key of a run, whether a larger value is better)
RATIOS = {
    "tokens_per_s": ("tokens_per_s", True),
    "ttft_p50": ("ttft_ms.p50", False),
    "gap_p99": ("gap_ms.p99", False),
    "frontend_cpu": ("cpu.frontend.s_per_mtok", False),
    "mesh_cpu": ("mesh_cpu", False),
}


def _figures(run: dict[str, Any]) -> dict[str, float]:
    """The values of RATIOS in one run; mesh_cpu: CPU seconds of all services a million tokens."""
    flat = dict(_flatten(run))
    flat["mesh_cpu"] = sum(v for key, v in flat.items() if key.endswith(".s_per_mtok"))
    return {name: flat[key] for name, (key, _) in RATIOS.items() if flat.get(key)}


def compare(runs: Sequence[tuple[dict[str, Any], dict[str, Any]]]) -> dict[str, dict[str, float]]:
    """Median, lowest and highest ratio of each figure over pairs of runs (this tree, other)."""
    ratios: defaultdict[str, list[float]] = defaultdict(list)
    for ours, theirs in runs:
        ours_figures, their_figures = _figures(ours), _figures(theirs)
        for name in ours_figures.keys() & their_figures.keys():
            ratios[name].append(ours_figures[name] / their_figures[name])
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


def _loads(args: argparse.Namespace) -> list[tuple[str, list[int]]]:
    """Modes with their numbers of connections."""
    if args.against and args.modes == ",".join(MODES):
        return [("burst", [64]), ("paced", [32])]
    connections = [int(number) for number in args.concurrency.split(",")]
    return [(mode, connections) for mode in args.modes.split(",")]


def main() -> None:
    args = _parse_args()
    loadgen = build_loadgen()
    rows: list[dict[str, Any]] = []
    with contextlib.ExitStack() as stack:
        stack.enter_context(machine_lock())
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvmesh-bodies-")))
        roots = [ROOT, stack.enter_context(worktree(args.against))] if args.against else [ROOT]
        for mode, connections in _loads(args):
            rows.extend(_run_mode(args, loadgen, folder, roots, mode, connections))
    settings = {k: str(v) for k, v in vars(args).items() if k != "out"}
    print_report("gateway", settings, {"rows": rows}, args.out)


def _write_bodies(out: Path, args: argparse.Namespace, *, stream: bool) -> None:
    """Write BODIES chat bodies of about --isl prompt tokens, one JSON a line, all different.

    Prompts are random slices of Python's standard library, cut at token offsets.
    """
    rng = random.Random(1)
    model_dir = ROOT / "worker_svc/engines/sim/model"
    tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
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
    folder: Path,
    roots: Sequence[Path],
    mode: str,
    connections: Sequence[int],
) -> Iterator[dict[str, Any]]:
    """Start one mesh for each root, load them in turns, yield one row for each concurrency."""
    sim_flags, stream = MODES[mode]
    bodies = folder / f"{mode}.jsonl"
    _write_bodies(bodies, args, stream=stream)
    with contextlib.ExitStack() as stack:
        meshes = [
            stack.enter_context(
                mesh(sim_flags, args.frontend.split(), args.shape, args.selector, root)
            )
            for root in roots
        ]

        def load(which: int, concurrency: int, repeat: int) -> dict[str, Any]:
            settings = {"offset": 997 * repeat, "tokens_per_request": args.osl}
            port, pids = meshes[which]
            return run_load(loadgen, port, bodies, concurrency, args.seconds, pids, **settings)

        for concurrency in connections:
            if len(meshes) > 1:
                for which in range(2):
                    load(which, concurrency, args.repeat)  # warm up
            pairs: list[dict[int, dict[str, Any]]] = []
            for repeat in range(args.repeat):
                order = sorted(range(len(meshes)), reverse=repeat % 2 == 1)
                pairs.append({which: load(which, concurrency, repeat) for which in order})
            row = _median_row([pair[0] for pair in pairs])
            _print_row(mode, row)
            report: dict[str, Any] = {"mode": mode, "median": row}
            if len(meshes) > 1:
                other = _median_row([pair[1] for pair in pairs])
                _print_row(args.against[:12], other)
                report["against"] = other
                report["ratios"] = compare([(pair[0], pair[1]) for pair in pairs])
                _print_ratios(report["ratios"])
            yield report


def _print_ratios(ratios: dict[str, dict[str, float]]) -> None:
    for name, ratio in ratios.items():
        better = "higher" if RATIOS[name][1] else "lower"
        print(
            f"  ratio {name:14s} {ratio['median']:.3f}  ({ratio['min']:.3f}-{ratio['max']:.3f};"
            f" {better} is better)",
            flush=True,
        )


if __name__ == "__main__":
    main()
