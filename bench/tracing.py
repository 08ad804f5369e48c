"""What traces cost the token path: a mesh of each of SETTINGS against one without traces.

usage: python -m bench.tracing [--seconds 4] [--repeat 7] [--only NAME,...] [--out FILE]

Two meshes at a time, loaded in turns (A B, B A, ...) by bench/loadgen.c with 64 streams of 128
tokens as fast as the path carries them. The receivers of spans are processes that count bytes and
parse nothing; they share the cores of the machine. A ratio is that of the setting to the mesh
without traces, `off` being another such mesh: its spread is the noise. `cpu` is the CPU time per
token of the frontend, `gateway_cpu` with router and indexer. The goal is a throughput of 0.97 at
1 %. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import contextlib
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from bench.bodies import write_bodies
from bench.gateway import ISL, MESH_GATEWAY, MODES, OSL, Load, Stack, run_stacks
from bench.measure import ROOT, build_loadgen, machine_lock, print_report
from bench.stacks import mesh
from bench.trees import environment

WITHOUT = "without traces"
LOAD = Load("burst", (64,))
GOAL = {"sampled_1pct": 0.97}


@dataclass(frozen=True, slots=True)
class Setting:
    """ratio: share of sampled traces. live, dead: numbers of endpoints; none: no traces."""

    ratio: float = 0.0
    live: int = 0
    dead: int = 0


SETTINGS = {
    "off": Setting(),
    "sampled_1pct": Setting(0.01, live=1),
    "sampled_100pct": Setting(1.0, live=1),
    "dead_1pct": Setting(0.01, dead=1),
    "dead_100pct": Setting(1.0, dead=1),
    "three_1pct": Setting(0.01, live=2, dead=1),
    "three_100pct": Setting(1.0, live=2, dead=1),
}


def _flags(setting: Setting, live: Sequence[str], dead: str) -> list[str]:
    """Returns the flags of every service. live: receivers. dead: an address that refuses."""
    endpoints = [*live[: setting.live], *[dead] * setting.dead]
    if not endpoints:
        return []
    return ["--otlp-endpoint", ",".join(endpoints), "--trace-sample-ratio", str(setting.ratio)]


def _stack(name: str, flags: Sequence[str]) -> Stack:
    return Stack(
        name,
        lambda mode, shape: mesh(MODES[mode][0], [], shape, service_flags=flags),
        MESH_GATEWAY,
    )


@contextlib.contextmanager
def _receiver() -> Iterator[str]:
    """Yields the URL of a receiver, a process of its own."""
    command = [sys.executable, "-m", "bench.tracing", "--receive"]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, cwd=ROOT, env=environment(ROOT), text=True
    )
    assert process.stdout is not None
    try:
        yield process.stdout.readline().strip()
    finally:
        process.kill()
        process.wait()


def _receive() -> None:
    """Accepts exports and drops them, until the process is killed."""
    service = "opentelemetry.proto.collector.trace.v1.TraceService"

    def export(_request: bytes, _context: grpc.ServicerContext) -> bytes:
        return b""

    handler: grpc.RpcMethodHandler[bytes, bytes] = grpc.unary_unary_rpc_method_handler(export)
    server = grpc.server(ThreadPoolExecutor(2))
    server.add_generic_rpc_handlers(
        [grpc.method_handlers_generic_handler(service, {"Export": handler})]
    )
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    print(f"http://127.0.0.1:{port}", flush=True)
    server.wait_for_termination()


def _parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bench.tracing")
    parser.add_argument("--seconds", type=float, default=4)
    parser.add_argument("--repeat", type=int, default=7)
    parser.add_argument("--only", default=",".join(SETTINGS), help="settings, as in SETTINGS")
    parser.add_argument("--receive", action="store_true", help="be a receiver of spans")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    args.osl = OSL
    if unknown := set(args.only.split(",")) - SETTINGS.keys():
        parser.error(f"no such settings: {', '.join(sorted(unknown))}")
    return args


def main() -> None:
    args = _parse_args()
    if args.receive:
        _receive()
        return
    loadgen = build_loadgen()
    # Any: JSON.
    rows: dict[str, Any] = {}
    with contextlib.ExitStack() as stack:
        stack.enter_context(machine_lock())
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvmesh-bodies-")))
        live = [stack.enter_context(_receiver()) for _ in range(2)]
        refusing = stack.enter_context(socket.socket())
        refusing.bind(("127.0.0.1", 0))  # Not listening.
        dead = f"http://127.0.0.1:{refusing.getsockname()[1]}"
        bodies = folder / "bodies.jsonl"
        write_bodies(bodies, isl=ISL, osl=OSL)
        for name in args.only.split(","):
            stacks = [_stack(name, _flags(SETTINGS[name], live, dead)), _stack(WITHOUT, [])]
            (row,) = run_stacks(args, loadgen, bodies, stacks, LOAD)
            rows[name] = {"ratios": row["ratios"][WITHOUT], "medians": row["medians"]}
    figures = {
        f"{name}_{key}_ratio": row["ratios"][figure]["median"]
        for key, figure in (("tok_s", "tokens_per_s"), ("cpu", "frontend_cpu"))
        for name, row in rows.items()
        if figure in row["ratios"]  # Not if a run was too short for it.
    }
    settings = {"seconds": args.seconds, "repeat": args.repeat, "goal": GOAL}
    print_report("tracing", settings, {"rows": rows, **figures}, args.out)


if __name__ == "__main__":
    main()
