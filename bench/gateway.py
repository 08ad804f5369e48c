"""The token path under load: frontend, router and two sim workers against bench/loadgen.c.

usage: python -m bench.gateway [--seconds 4] [--repeat 3] [--concurrency 1,16,64,256]
                               [--modes burst,paced,burst-unary] [--shape agg|pd]
                               [--selector kv|round_robin|...] [--shared N] [--out FILE]

burst: the sim's time costs nothing, tokens come as fast as the path takes them; paced: the sim runs
in real time (steps of 6 ms and more, prompts nearly free); real: the sim as it is, prompts at 12k
tokens a second. agg: two aggregated workers; pd: one prefill and one decode worker. All bodies
differ; with --shared, the first N tokens are one of SHARED_PREFIXES. The last line is one JSON
object.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from bench.bodies import write_bodies
from bench.measure import ROOT, build_loadgen, commit, machine, machine_lock, run_load

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
READY_S = 30.0


@contextlib.contextmanager
def mesh(
    sim_flags: Sequence[str],
    frontend_flags: Sequence[str],
    shape: str = "agg",
    selector: str = "kv",
) -> Iterator[tuple[int, dict[str, int]]]:
    """A frontend, a router, an indexer and two sim workers; the HTTP port and the pids."""
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
                "frontend_svc",
                *common,
                "--http-port",
                "0",
                "--notice-s",
                "0",
                *frontend_flags,
            ],
        }
        running: dict[str, subprocess.Popen[bytes]] = {}
        ready: dict[str, dict[str, Any]] = {}
        try:
            for name, command in commands.items():
                running[name], ready[name] = _start(name, command, Path(folder))
            port = int(ready["frontend"]["addresses"]["http"].rsplit(":", 1)[1])
            _await_model(port)
            yield port, {name: process.pid for name, process in running.items()}
        finally:
            for process in running.values():
                process.send_signal(signal.SIGTERM)
            for process in running.values():
                process.wait(20)


def _start(
    name: str, command: list[str], folder: Path
) -> tuple[subprocess.Popen[bytes], dict[str, Any]]:
    read_fd, write_fd = os.pipe()
    log = (folder / f"{name}.log").open("wb")
    module, *flags = command
    process = subprocess.Popen(
        [sys.executable, "-m", module, *flags, "--ready-fd", str(write_fd)],
        stdout=log,
        stderr=log,
        pass_fds=[write_fd],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{ROOT}/protos:{ROOT}"},
    )
    os.close(write_fd)
    with os.fdopen(read_fd) as pipe:
        line = pipe.readline()
    if not line:
        raise RuntimeError(f"{name} did not start: {(folder / f'{name}.log').read_text()[-2000:]}")
    return process, json.loads(line)


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
    columns: dict[str, list[float]] = {}
    for run in runs:
        for key, value in _flatten(run):
            columns.setdefault(key, []).append(value)
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


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench.gateway")
    parser.add_argument("--seconds", type=float, default=4)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--concurrency", default="1,16,64,256")
    parser.add_argument("--modes", default=",".join(MODES))
    parser.add_argument("--frontend", default="", help="more flags for the frontend")
    parser.add_argument("--shape", choices=sorted(ROLES), default="agg")
    parser.add_argument("--selector", default="kv")
    parser.add_argument("--shared", type=int, default=0, help="tokens of common beginnings")
    parser.add_argument("--isl", type=int, default=ISL)
    parser.add_argument("--osl", type=int, default=OSL)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    loadgen = build_loadgen()
    rows: list[dict[str, Any]] = []
    with machine_lock(), tempfile.TemporaryDirectory(prefix="kvmesh-bodies-") as folder:
        for mode in args.modes.split(","):
            sim_flags, stream = MODES[mode]
            bodies = Path(folder) / f"{mode}.jsonl"
            tokenizer = ROOT / "worker_svc/engines/sim/model/tokenizer.json"
            write_bodies(
                bodies,
                tokenizer,
                model=MODEL,
                isl=args.isl,
                osl=args.osl,
                count=BODIES,
                stream=stream,
                shared=args.shared,
                prefixes=SHARED_PREFIXES,
            )
            flags = args.frontend.split()
            with mesh(sim_flags, flags, args.shape, args.selector) as (port, pids):
                for concurrency in map(int, args.concurrency.split(",")):
                    runs = [
                        run_load(
                            loadgen,
                            port,
                            bodies,
                            concurrency,
                            args.seconds,
                            pids,
                            offset=997 * i,
                            tokens_per_request=args.osl,
                        )
                        for i in range(args.repeat)
                    ]
                    row = _median_row(runs)
                    _print_row(mode, row)
                    rows.append({"mode": mode, "median": row})
    result = {
        "bench": "gateway",
        "commit": commit(),
        "machine": machine(),
        "settings": {k: str(v) for k, v in vars(args).items() if k != "out"},
        "rows": rows,
    }
    line = json.dumps(result)
    if args.out is not None:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(line + "\n")
    print(line)


if __name__ == "__main__":
    main()
