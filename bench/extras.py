"""Figures of a mesh that are no rows of a load, such as idle, long prompts, slow readers."""

from __future__ import annotations

import json
import os
import selectors
import socket
import statistics
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from bench.bodies import write_bodies
from bench.measure import cpu_s, rss_mb, run_load
from bench.stacks import API_KEY_VARIABLE, MODEL, demo_mesh, mesh, suspended
from common.api_keys import ApiKey, KeyDocument, Limits, Permission, Tenant, hash_of

IDLE_SETTLE_S, IDLE_S = 5.0, 15.0
CHAT_PATH, PREPROCESS_PATH = "/v1/chat/completions", "/v1/internal/preprocess"
ISL, OSL = 512, 128
LONG_ISL, LONG_OSL, STREAMS = 131_072, 8, 16
# 400 KB each: more than the buffers of a connection.
SLOW_READERS, SLOW_TOKENS, SLOW_LOGPROBS = 1024, 200, 20
FAST_STREAMS, SETTLED_CPU_S, SETTLE_MAX_S = 64, 0.1, 55.0
READ_TIMEOUT_S = 300.0


def idle_cpu_pct() -> float:
    """CPU of all processes of `make run` without requests, in percent of a core."""
    with demo_mesh() as pid:
        time.sleep(IDLE_SETTLE_S)
        before, started_at = cpu_s(pid), time.monotonic()
        time.sleep(IDLE_S)
        return round(100 * (cpu_s(pid) - before) / (time.monotonic() - started_at), 2)


def processes_ratios(
    loadgen: Path, folder: Path, sim_flags: Sequence[str], seconds: float, repeat: int
) -> dict[str, float]:
    """Two frontend processes to one, median of interleaved runs.

    processes2_ratio: requests a second that the frontend alone can preprocess (HTTP, template,
    tokens, hashes), which no other service limits. processes2_burst_ratio: tokens a second of
    streams; the workers need the same cores.
    """
    bodies = folder / "processes.jsonl"
    write_bodies(bodies, isl=ISL, osl=OSL)
    loads = {"processes2_ratio": (PREPROCESS_PATH, 32), "processes2_burst_ratio": (CHAT_PATH, 64)}
    ratios: dict[str, list[float]] = {name: [] for name in loads}
    with mesh(sim_flags, []) as first, mesh(sim_flags, ["--processes", "2"]) as two:

        def rate(which: int, name: str, turn: int) -> float:
            (port, pids), (_, others) = (first, two) if which == 1 else (two, first)
            path, connections = loads[name]
            with suspended(list(others.values())):
                run = run_load(
                    *(loadgen, port, bodies, connections, seconds, pids),
                    offset=997 * turn,
                    tokens_per_request=OSL,
                    path=path,
                )
            return float(run["window_rps"])

        for turn in range(repeat + 1):  # the first warms up
            for name in loads:
                rates = {which: rate(which, name, turn) for which in ((1, 2), (2, 1))[turn % 2]}
                if turn:
                    ratios[name].append(rates[2] / rates[1])
    return {name: round(statistics.median(values), 3) for name, values in ratios.items()}


def keys_ratio(
    loadgen: Path, folder: Path, sim_flags: Sequence[str], seconds: float, repeat: int
) -> dict[str, float]:
    """Tokens a second of 64 burst streams with API keys and limits that are never reached, to
    those without; CPU of the frontend likewise. Medians of interleaved runs."""
    bodies, keys = folder / "keys-bodies.jsonl", folder / "keys.json"
    write_bodies(bodies, isl=ISL, osl=OSL)
    text, now = "a key of the benchmark", datetime.now(UTC)
    key = ApiKey(
        id="bench", sha256=hash_of(text.encode()), scopes=frozenset(Permission), created=now
    )
    limits = Limits(requests_per_s=1e6, tokens_per_min=10**12, concurrency=10**6)
    document = KeyDocument(tenants={"bench": Tenant(keys=(key,), limits=limits)})
    keys.write_text(document.model_dump_json())
    os.environ[API_KEY_VARIABLE] = text
    ratios: dict[str, list[float]] = {"keys_tok_s_ratio": [], "keys_cpu_ratio": []}
    with mesh(sim_flags, []) as first, mesh(sim_flags, ["--api-keys", str(keys)]) as two:

        def run(which: int, turn: int) -> tuple[float, float]:
            (port, pids), (_, others) = (first, two) if which == 1 else (two, first)
            with suspended(list(others.values())):
                result = run_load(
                    *(loadgen, port, bodies, 64, seconds, pids),
                    offset=997 * turn,
                    tokens_per_request=OSL,
                )
            return float(result["window_rps"]), float(result["cpu"]["frontend"]["s_per_mtok"])

        for turn in range(repeat + 1):  # the first warms up
            found = {which: run(which, turn) for which in ((1, 2), (2, 1))[turn % 2]}
            if turn:
                for values, with_keys, without in zip(
                    ratios.values(), found[2], found[1], strict=True
                ):
                    values.append(with_keys / without)
    del os.environ[API_KEY_VARIABLE]
    return {name: round(statistics.median(values), 3) for name, values in ratios.items()}


def long_prompt_gaps(
    loadgen: Path, folder: Path, sim_flags: Sequence[str], seconds: float, repeat: int
) -> dict[str, float]:
    """How much prompts of LONG_ISL tokens, one at a time, delay the tokens of STREAMS streams."""
    short, long = folder / "short.jsonl", folder / "long.jsonl"
    write_bodies(short, isl=ISL, osl=OSL)
    write_bodies(long, isl=LONG_ISL, osl=LONG_OSL)
    gaps: dict[bool, list[float]] = {False: [], True: []}
    with mesh(sim_flags, []) as (port, pids):

        def p99_ms(turn: int) -> float:
            # Any: JSON of the load generator.
            run: dict[str, Any] = run_load(
                *(loadgen, port, short, STREAMS, seconds, pids),
                offset=997 * turn,
                tokens_per_request=OSL,
            )
            return float(run["gap_ms"]["p99"])

        p99_ms(0)
        for turn in range(repeat):
            gaps[False].append(p99_ms(2 * turn + 1))
            command = [str(loadgen), "127.0.0.1", str(port), str(long), "1", str(seconds)]
            with subprocess.Popen(command, stdout=subprocess.DEVNULL):
                gaps[True].append(p99_ms(2 * turn + 2))
    alone, beside = (statistics.median(gaps[with_long]) for with_long in (False, True))
    return {
        "paced_c16_gap_p99_ms": round(alone, 3),
        "long_prompt_gap_p99_added_ms": round(beside - alone, 3),
    }


def slow_readers(
    loadgen: Path, folder: Path, sim_flags: Sequence[str], seconds: float, repeat: int
) -> dict[str, float]:
    """Gaps (p99) of FAST_STREAMS streams beside SLOW_READERS clients, to those alone, medians.

    slow_readers_gap_p99_ratio: the clients have read nothing, and their responses are complete.
    slow_readers_resume_gap_p99_ratio: then they read all. slow_readers_rss_mb: of the frontend.
    None of them if the machine is too busy to complete the responses in SETTLE_MAX_S.
    """
    bodies = folder / "slow.jsonl"
    write_bodies(bodies, isl=128, osl=OSL)
    gaps: dict[str, list[float]] = {"alone": [], "beside": [], "resume": []}
    memory: list[float] = []
    with mesh([*sim_flags, "--max-num-seqs", "4096"], []) as (port, pids):

        def p99_ms(number: int) -> float:
            run = run_load(
                *(loadgen, port, bodies, FAST_STREAMS, seconds, pids),
                offset=997 * number,
                tokens_per_request=OSL,
            )
            return float(run["gap_ms"]["p99"])

        p99_ms(0)
        for turn in range(repeat):
            gaps["alone"].append(p99_ms(3 * turn + 1))
            clients = [_slow_reader(port) for _ in range(SLOW_READERS)]
            if not _is_idle_in_time(pids):
                for client in clients:
                    client.close()
                return {}
            gaps["beside"].append(p99_ms(3 * turn + 2))
            memory.append(rss_mb(pids["frontend"]))
            reading = threading.Thread(target=_read_all, args=(clients,))
            reading.start()
            gaps["resume"].append(p99_ms(3 * turn + 3))
            reading.join()
    medians = {name: statistics.median(values) for name, values in gaps.items()}
    return {
        "slow_readers_gap_p99_ratio": round(medians["beside"] / medians["alone"], 3),
        "slow_readers_resume_gap_p99_ratio": round(medians["resume"] / medians["alone"], 3),
        "slow_readers_rss_mb": round(statistics.median(memory), 1),
    }


def _slow_reader(port: int) -> socket.socket:
    """A client that has sent a request, and reads nothing."""
    body = json.dumps(
        {
            "model": MODEL,
            "messages": [{"role": "user", "content": "Count."}],
            "max_tokens": SLOW_TOKENS,
            "ignore_eos": True,
            "stream": True,
            "logprobs": True,
            "top_logprobs": SLOW_LOGPROBS,
        }
    ).encode()
    head = f"POST {CHAT_PATH} HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\n"
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.connect(("127.0.0.1", port))
    client.sendall(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
    return client


def _read_all(clients: Sequence[socket.socket]) -> None:
    with selectors.DefaultSelector() as selector:
        for client in clients:
            selector.register(client, selectors.EVENT_READ, client)
        deadline = time.monotonic() + READ_TIMEOUT_S
        while selector.get_map():
            if (left_s := deadline - time.monotonic()) <= 0:
                left = len(selector.get_map())
                raise RuntimeError(f"{left} responses have not ended in {READ_TIMEOUT_S:g} s")
            for key, _ in selector.select(left_s):
                readable: socket.socket = key.data
                if not readable.recv(1 << 20):
                    selector.unregister(readable)
                    readable.close()


def _is_idle_in_time(pids: Mapping[str, int]) -> bool:
    """Waits until no process computes."""
    deadline = time.monotonic() + SETTLE_MAX_S
    while time.monotonic() < deadline:
        before = {name: cpu_s(pid) for name, pid in pids.items()}
        time.sleep(1.5)
        if all(cpu_s(pid) - before[name] < SETTLED_CPU_S for name, pid in pids.items()):
            return True
    return False
