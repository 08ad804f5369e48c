"""`make bench-console`: what a console costs the mesh that it shows; the last line is JSON.

usage: python -m bench.bench_console [--seconds 4] [--repeat 12] [--interval-s 2]

One mesh under 64 streams of 128 tokens as fast as the path carries them, in turns with the console
and while its process is stopped, so that both share every other process. The console measures all
members each `interval_s`, the same for any number of viewers, lists the requests, and receives the
spans of 1 % of them. A ratio is that of the turns with the console to those without: `tokens_per_s`
includes the console's share of the cores, `mesh_cpu` is what the members spend for its queries. The
goal is a throughput of 0.98.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench.bodies import write_bodies
from bench.gateway import ISL, MODES, OSL, compare
from bench.measure import ROOT, build_loadgen, cpu_s, machine_lock, print_report, rss_mb, run_load
from bench.stacks import mesh
from bench.trees import environment

WITH, WITHOUT = "with the console", "without"
CONNECTIONS = 64
GOAL = 0.98
READY_S = 30.0
# After a stop the console catches up before its turn is measured.
SETTLE_S = 3.0


@contextlib.contextmanager
def _console(folder: Path, registry: Path, otlp_port: int, interval_s: float) -> Iterator[int]:
    """Yields the pid of a console of the mesh in a registry."""
    ports = ["--http-port", "0", "--otlp-port", str(otlp_port)]
    paths = ["--registry-path", str(registry), "--login-path", str(folder / "console")]
    command = [sys.executable, "-m", "console_svc", *paths, *ports]
    log = folder / "console.log"
    with log.open("wb") as file:
        process = subprocess.Popen(
            [*command, "--interval-s", str(interval_s)],
            stdout=file,
            stderr=file,
            cwd=ROOT,
            env=environment(ROOT),
        )
    try:
        deadline = time.monotonic() + READY_S
        while b'"ready"' not in log.read_bytes():
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the console did not start: {log.read_text()[-2000:]}")
            time.sleep(0.1)
        yield process.pid
    finally:
        process.send_signal(signal.SIGCONT)
        process.terminate()
        process.wait(30)


def _measure(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    loadgen, bodies = build_loadgen(), folder / "bodies.jsonl"
    write_bodies(bodies, isl=ISL, osl=OSL)
    registry = folder / "registry"
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        otlp_port = int(probe.getsockname()[1])
    receiver = f"http://127.0.0.1:{otlp_port}"
    flags = ["--trace-sample-ratio", "0.01", "--otlp-endpoint", receiver]
    runs: list[dict[str, Any]] = []
    console_cpu: list[float] = []
    with (
        _console(folder, registry, otlp_port, args.interval_s) as console,
        mesh(MODES["burst"][0], [], service_flags=flags, registry=registry) as (port, pids),
    ):

        def load(name: str, turn: int) -> dict[str, Any]:
            os.kill(console, signal.SIGCONT if name == WITH else signal.SIGSTOP)
            time.sleep(SETTLE_S)
            spent, began = cpu_s(console), time.monotonic()
            run = run_load(
                *(loadgen, port, bodies, CONNECTIONS, args.seconds, pids),
                offset=997 * turn,
                tokens_per_request=OSL,
            )
            if name == WITH:
                console_cpu.append((cpu_s(console) - spent) / (time.monotonic() - began))
            run["mesh_cpu"] = sum(one["s_per_mtok"] or 0 for one in run["cpu"].values())
            run["gateway_cpu"] = run["cpu"]["frontend"]["s_per_mtok"] or 0
            run["added_ttft_ms"] = run["ttft_ms"]["mean"]
            return run

        load(WITHOUT, args.repeat)
        for turn in range(args.repeat):
            names = (WITH, WITHOUT) if turn % 2 else (WITHOUT, WITH)
            runs.append({name: load(name, turn) for name in names})
        os.kill(console, signal.SIGCONT)
        memory = rss_mb(console)
    ratios = compare(runs, WITH, [WITHOUT])
    return {
        "tok_s_ratio": ratios["tokens_per_s"]["median"],
        "mesh_cpu_ratio": ratios["mesh_cpu"]["median"],
        "console_cores": sorted(console_cpu)[len(console_cpu) // 2],
        "console_rss_mb": memory,
        "ratios": ratios,
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench.bench_console")
    parser.add_argument("--seconds", type=float, default=4)
    parser.add_argument("--repeat", type=int, default=12)
    parser.add_argument("--interval-s", type=float, default=2)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    with machine_lock(), tempfile.TemporaryDirectory(prefix="kvmesh-bench-console-") as folder:
        figures = _measure(args, Path(folder))
    settings = {"seconds": args.seconds, "repeat": args.repeat, "goal": GOAL}
    print_report("console", settings, figures, args.out)


if __name__ == "__main__":
    main()
