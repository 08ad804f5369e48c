"""A batch beside streams, and through the death of every process: `make batch-test`.

    python -m tests.batch [--lines 10000] [--rounds 4] [--seconds 30] [--speedup 0.25] [--only CASE]

Cases, each a mesh of its own; each prints a JSON line:

- beside: 32 streams alone and beside a batch, in turns, without kills. The sim computes at a
  quarter of its speed, so that its steps are the limit and not the processors of this host.
- order: a batch in prefix order and one in the order of the file, on caches that are too small for
  all beginnings.
- sqlite, postgresql: a batch of all lines beside the streams; each service is killed while it runs,
  and so is PostgreSQL.

The last line has the figures of all. Exit status 1 if a line is missing or repeated, or a figure
misses its limit.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from common.runtime.free_ports import free_ports
from tests.batch.job import Job, bodies, completeness, hit_rate
from tests.batch.postgres_server import NoServer, PostgresServer, find_programs
from tests.batch.responses import BackgroundResponses
from tests.batch.streams import Streams, saturate
from tests.kit.processes import Mesh
from tests.kit.waiting import wait_for

STREAMS = 32
# Of a user's prompt and response.
PROMPT_WORDS, RESPONSE_TOKENS = 300, 128
LINE_TOKENS = 32
SEATS = 64
WORKERS = 2
SLOW = (f"--max-num-seqs={SEATS}",)
# So that the processors of this host bear the kills of a batch of 10,000 lines.
FAST = ("--speedup=8", f"--max-num-seqs={SEATS}")
# Caches of 16,000 tokens a worker.
SMALL = ("--speedup=20", f"--max-num-seqs={SEATS}", "--total-kv-blocks=1000")
WARM_UP_S = 8.0
KILLED = ("batch", "worker", "router", "indexer", "frontend", "batch")
RATIO_MAX, SHARE_MIN = 1.1, 0.7
# Without a limit of its own.
END_S = 1800.0
# In the background, before each kill.
RESPONSES = 8

# Any: JSON.
Json = dict[str, Any]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--lines", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--speedup", type=float, default=0.25, help="of the sim in `beside`")
    parser.add_argument("--only", choices=tuple(CASES), action="append")
    arguments = parser.parse_args()
    try:
        find_programs()
    except NoServer as error:
        print(json.dumps({"error": str(error)}))
        return 1
    results: dict[str, Json] = {}
    for name in arguments.only or CASES:
        with tempfile.TemporaryDirectory(prefix="batch-test-") as folder:
            Path(folder).chmod(0o755)
            results[name] = CASES[name](Path(folder), arguments)
        print(json.dumps({"case": name, **results[name]}), flush=True)
    summary = summarize(results, arguments.lines)
    print(json.dumps(summary))
    return int(not summary["ok"])


def summarize(results: dict[str, Json], lines: int) -> Json:
    """Returns the last line: what the cases have, with the sums of those with kills."""
    killed = [results[name] for name in ("sqlite", "postgresql") if name in results]
    beside, order = results.get("beside", {}), results.get("order", {})
    missing, repeated, failed = (
        sum(one[name] for one in killed) for name in ("missing", "repeated", "failed")
    )
    background = [one["background"] for one in killed]
    lost = sum(one["failed"] + one["misplaced"] for one in background)
    ratio, share = beside.get("live_ttft_p99_ratio"), beside.get("idle_share")
    return {
        "lines": lines,
        "missing": missing,
        "repeated": repeated,
        "failed": failed,
        "live_ttft_p99_ratio": ratio,
        "idle_share": share,
        "kills": sum(one["kills"] for one in killed),
        "hit_rate": order.get("hit_rate"),
        "responses": sum(one["responses"] for one in background),
        "lost_responses": lost,
        "ok": not (missing or repeated or failed or lost)
        and (ratio is None or ratio <= RATIO_MAX)
        and (share is None or share >= SHARE_MIN),
    }


def run_beside(folder: Path, arguments: argparse.Namespace) -> Json:
    """Measures the streams alone and beside a batch, and the capacity that the streams leave."""
    flags = [*SLOW, f"--speedup={arguments.speedup:g}"]
    with Mesh(folder, workers=WORKERS, batches=1, indexers=1, worker_flags=flags) as mesh:
        return asyncio.run(_beside(mesh, arguments.rounds, arguments.seconds))


async def _beside(mesh: Mesh, rounds: int, seconds: float) -> Json:
    streams = Streams(lambda: mesh.url, count=STREAMS, words=PROMPT_WORDS, tokens=RESPONSE_TOKENS)
    lines = bodies(5_000, groups=50, prefix=128, tokens=LINE_TOKENS)
    alone: list[float] = []
    beside: list[float] = []
    rates: list[float] = []
    idle: list[float] = []
    async with streams.running():
        # Sleep: until the streams are spread over the time of a response.
        await asyncio.sleep(WARM_UP_S)
        for _ in range(rounds):
            start = time.monotonic()
            # Sleep: the interval that is measured.
            await asyncio.sleep(seconds)
            alone += streams.between(start, time.monotonic())
            job = Job(lambda: mesh.url)
            await asyncio.to_thread(job.create, lines)
            await asyncio.to_thread(_await_lines, job, 2 * STREAMS)
            start, before, cpu = time.monotonic(), await asyncio.to_thread(job.done), _cpu()
            # Sleep: the interval that is measured.
            await asyncio.sleep(seconds)
            beside += streams.between(start, time.monotonic())
            done = await asyncio.to_thread(job.done) - before
            rates.append(done * LINE_TOKENS / (time.monotonic() - start))
            idle.append(_idle_share(cpu, _cpu()))
            await asyncio.to_thread(job.cancel)
            job.close()
        seats = WORKERS * SEATS - STREAMS
        # In the order in which the batch sends them: sums of others would be less.
        ordered = sorted(lines, key=lambda body: str(body["prompt"]))
        capacity = await saturate(mesh.url, ordered, seats, WARM_UP_S, seconds)
    p99_alone, p99_beside = _p99(alone), _p99(beside)
    return {
        "streams": STREAMS,
        "chats": [len(alone), len(beside)],
        "ttft_p50_ms": [round(1000 * statistics.median(one)) for one in (alone, beside)],
        "ttft_p99_ms": [round(1000 * one) for one in (p99_alone, p99_beside)],
        "live_ttft_p99_ratio": round(p99_beside / p99_alone, 3),
        "batch_tokens_per_s": round(statistics.mean(rates)),
        "idle_tokens_per_s": round(capacity),
        "idle_share": round(statistics.mean(rates) / capacity, 3),
        "cpu_idle": round(statistics.mean(idle), 2),
        "errors": streams.errors,
    }


def run_order(folder: Path, arguments: argparse.Namespace) -> Json:
    """Runs a batch in prefix order, and one in the order of its file."""
    lines = bodies(min(2_000, arguments.lines), groups=100, prefix=512, tokens=4)
    rates = {}
    for name, flag in (("prefix", "--in-prefix-order"), ("file", "--no-in-prefix-order")):
        (folder / name).mkdir()
        with (
            Mesh(
                folder / name,
                workers=WORKERS,
                indexers=1,
                batches=1,
                worker_flags=SMALL,
                batch_flags=[flag],
            ) as mesh,
            _job(mesh) as job,
        ):
            job.create(lines)
            assert job.wait()["status"] == "completed"
            rates[name] = round(hit_rate(job.rows()), 3)
    return {"lines": len(lines), "hit_rate": rates}


def run_sqlite(folder: Path, arguments: argparse.Namespace) -> Json:
    """Kills each service during a batch whose database is embedded."""
    return asyncio.run(_with_kills(folder, arguments.lines, (), {}))


def run_postgresql(folder: Path, arguments: argparse.Namespace) -> Json:
    """Kills each service, and PostgreSQL, during a batch."""
    server = PostgresServer(folder / "postgresql", free_ports(1))
    server.create()
    server.start()

    def kill_server() -> None:
        server.kill()
        server.restart()

    try:
        flags = [f"--database-url={server.url}"]
        return asyncio.run(_with_kills(folder, arguments.lines, flags, {"server": kill_server}))
    finally:
        server.close()


async def _with_kills(
    folder: Path, lines: int, flags: Sequence[str], more: dict[str, Callable[[], None]]
) -> Json:
    """more: kills of processes that are no service, by name."""
    (folder / "mesh").mkdir()
    shape: Json = {"workers": WORKERS, "routers": 2, "indexers": 1, "frontends": 2, "batches": 2}
    started_at = time.monotonic()
    with Mesh(folder / "mesh", worker_flags=FAST, batch_flags=flags, **shape) as mesh:
        streams = Streams(
            lambda: _url(mesh), count=STREAMS, words=PROMPT_WORDS, tokens=RESPONSE_TOKENS
        )
        async with streams.running():
            with _job(mesh) as job, _responses(mesh) as responses:
                kills = await asyncio.to_thread(_run_and_kill, mesh, job, responses, lines, more)
                batch = await asyncio.to_thread(job.wait)
                rows = await asyncio.to_thread(job.rows)
                background = await asyncio.to_thread(responses.wait)
    missing, repeated, failed = completeness(rows, lines)
    return {
        "lines": lines,
        "status": batch["status"],
        "missing": missing,
        "repeated": repeated,
        "failed": failed,
        "background": background,
        "kills": len(kills),
        "killed": kills,
        "chats": len(streams.samples),
        "seconds": round(time.monotonic() - started_at),
    }


def _run_and_kill(
    mesh: Mesh,
    job: Job,
    responses: BackgroundResponses,
    lines: int,
    more: dict[str, Callable[[], None]],
) -> list[str]:
    """Kills a process after each part of the lines, while responses run in the background, and
    starts it again; returns their names."""
    job.create(bodies(lines, groups=100, prefix=64, tokens=LINE_TOKENS))
    order = [*KILLED, *more]
    for number, name in enumerate(order, 1):
        _await_lines(job, number * lines * 3 // (4 * len(order)))
        responses.start(RESPONSES)
        print(f"kill {number}: {name}", file=sys.stderr, flush=True)
        if name in more:
            more[name]()
            continue
        mesh.running(name)[0].kill()
        mesh.spawn(name).wait_ready()
    return order


def _await_lines(job: Job, count: int) -> None:
    """Waits until so many lines have results."""
    wait_for(lambda: job.done() >= count, f"{count} lines have results", END_S)


def _url(mesh: Mesh) -> str:
    """Returns the URL of the newest frontend that has started."""
    started = [one for one in mesh.running("frontend") if one.addresses]
    return started[-1].addresses["http"]


@contextmanager
def _responses(mesh: Mesh) -> Iterator[BackgroundResponses]:
    responses = BackgroundResponses(lambda: _url(mesh), END_S)
    try:
        yield responses
    finally:
        responses.close()


@contextmanager
def _job(mesh: Mesh) -> Iterator[Job]:
    job = Job(lambda: _url(mesh), END_S)
    try:
        yield job
    finally:
        job.close()


def _p99(values: Sequence[float]) -> float:
    return statistics.quantiles(values, n=100, method="inclusive")[98]


def _cpu() -> list[int]:
    """Returns the times of the processors since the start of the host, in ticks."""
    return [int(field) for field in Path("/proc/stat").read_text().split("\n")[0].split()[1:]]


def _idle_share(before: Sequence[int], after: Sequence[int]) -> float:
    spent = [new - old for new, old in zip(after, before, strict=True)]
    return spent[3] / max(1, sum(spent))


CASES: dict[str, Callable[[Path, argparse.Namespace], Json]] = {
    "beside": run_beside,
    "order": run_order,
    "sqlite": run_sqlite,
    "postgresql": run_postgresql,
}

if __name__ == "__main__":
    sys.exit(main())
