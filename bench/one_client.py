"""TTFT of one client: this tree against another commit, to about one percent.

usage: python -m bench.one_client COMMIT [--seconds 30]

Both meshes run, and one client sends BLOCK requests to each in turns. The speed of a machine
changes within seconds, so blocks of 50 ms are compared ten times as precisely as runs of seconds.
The last line is one JSON object: the ratios (this tree to COMMIT) of quantiles and of the mean, and
the median ratio of two blocks that follow each other.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import socket
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from bench.bodies import write_bodies
from bench.gateway import ISL, MODES, OSL
from bench.measure import ROOT, machine_lock, print_report
from bench.stacks import await_response, mesh
from bench.trees import commit_tree
from replay.report import percentile

BLOCK = 20
# After a change of the mesh, not measured: the caches of the processors are cold.
BLOCK_WARM_UP = 2
WARM_UP = 300
QUANTILES = (0.1, 0.25, 0.5, 0.75, 0.9)
TIMEOUT_S = 20.0


class Client:
    """One connection to a frontend."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), TIMEOUT_S)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        head = "POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\n"
        self._head = f"{head}content-type: application/json\r\ncontent-length: ".encode()

    def ttft_ms(self, body: bytes) -> float:
        """Sends a body, and reads the whole stream. Raises RuntimeError unless its status is
        200."""
        request = b"%b%d\r\n\r\n%b" % (self._head, len(body), body)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 1)
        started_at, first_at, received = time.perf_counter(), 0.0, b""
        self._socket.sendall(request)
        while not received.endswith(b"\r\n0\r\n\r\n"):
            part = self._socket.recv(1 << 18)
            received += part
            if not part or not received.startswith(b"HTTP/1.1 200"):
                raise RuntimeError(f"the response is {received[:500]!r}")
            if not first_at and b"\ndata:" in received:
                first_at = time.perf_counter()
        if not first_at:
            raise RuntimeError(f"no event in {received[:500]!r}")
        return (first_at - started_at) * 1000


def compare(ports: Sequence[int], bodies: Sequence[bytes], seconds: float) -> dict[str, object]:
    """ports: of this tree and of the other."""
    clients, body = [Client(port) for port in ports], itertools.cycle(bodies)
    for _ in range(WARM_UP):
        for client in clients:
            client.ttft_ms(next(body))
    all_ms: list[list[float]] = [[], []]
    block_ratios: list[float] = []
    end_at = time.perf_counter() + seconds
    while time.perf_counter() < end_at:
        medians = [0.0, 0.0]
        for which in (0, 1) if len(block_ratios) % 2 == 0 else (1, 0):
            found = [clients[which].ttft_ms(next(body)) for _ in range(BLOCK_WARM_UP + BLOCK)]
            all_ms[which] += found[BLOCK_WARM_UP:]
            medians[which] = statistics.median(found[BLOCK_WARM_UP:])
        block_ratios.append(medians[0] / medians[1])
    quantiles = [[percentile(sorted(sample_ms), q) for q in QUANTILES] for sample_ms in all_ms]
    return {
        "requests": len(all_ms[0]),
        "ttft_ms": dict(zip(map(str, QUANTILES), (round(q, 3) for q in quantiles[0]), strict=True)),
        "quantile_ratios": {
            str(q): round(ours / other, 3)
            for q, ours, other in zip(QUANTILES, *quantiles, strict=True)
        },
        "mean_ratio": round(statistics.mean(all_ms[0]) / statistics.mean(all_ms[1]), 3),
        "block_ratio": round(statistics.median(block_ratios), 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench.one_client")
    parser.add_argument("commit")
    parser.add_argument("--seconds", type=float, default=30)
    args = parser.parse_args()
    with contextlib.ExitStack() as exit_stack:
        exit_stack.enter_context(machine_lock())
        folder = exit_stack.enter_context(tempfile.TemporaryDirectory(prefix="kvmesh-bodies-"))
        path = Path(folder) / "bodies.jsonl"
        write_bodies(path, isl=ISL, osl=OSL)
        bodies = path.read_bytes().splitlines()
        ports = []
        for root in (ROOT, exit_stack.enter_context(commit_tree(args.commit))):
            port, _ = exit_stack.enter_context(mesh(MODES["burst"][0], [], root=root))
            await_response(port, bodies[0])
            ports.append(port)
        result = compare(ports, bodies, args.seconds)
    print_report("one_client", {"against": args.commit, "seconds": args.seconds}, result)


if __name__ == "__main__":
    main()
