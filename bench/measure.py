"""What the benchmarks share: the load generator, process CPU, the machine's own state."""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
TICK = os.sysconf("SC_CLK_TCK")
PAGE = os.sysconf("SC_PAGE_SIZE")
_LOAD_1M_BEFORE = os.getloadavg()[0]


def parse_settings(description: str | None, **defaults: int) -> argparse.Namespace:
    """The settings of a benchmark from the command line: an integer flag for each default."""
    parser = argparse.ArgumentParser(description=(description or "").partition("\n")[0])
    for name, default in defaults.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=default)
    return parser.parse_args()


@contextlib.contextmanager
def machine_lock() -> Iterator[None]:
    """One benchmark at a time on a machine."""
    path = os.environ.get("BENCH_LOCK") or os.path.join(tempfile.gettempdir(), "bench.lock")
    with open(path, "a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def build_loadgen() -> Path:
    """Compiles bench/loadgen.c when it is newer than its binary; the binary's path."""
    source, binary = ROOT / "bench/loadgen.c", ROOT / "bench/bin/loadgen"
    if not binary.exists() or binary.stat().st_mtime < source.stat().st_mtime:
        binary.parent.mkdir(exist_ok=True)
        subprocess.run(["cc", "-O2", "-o", binary, source, "-lm"], check=True)
    return binary


def with_descendants(pid: int) -> list[int]:
    """A process, its children, and theirs. Each thread has its own list of children."""
    threads = Path(f"/proc/{pid}/task").iterdir()
    children = [child for thread in threads for child in (thread / "children").read_text().split()]
    return [pid, *(descendant for child in children for descendant in with_descendants(int(child)))]


def cpu_s(pid: int) -> float:
    """CPU seconds of a process and its descendants now, and of those they have waited for."""
    return sum(map(_own_cpu_s, with_descendants(pid)))


def _own_cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return sum(map(int, fields[11:15])) / TICK


def rss_mb(pid: int) -> float:
    """Memory of a process and its descendants; a page that they share counts in each."""
    found = with_descendants(pid)
    return (
        sum(int(Path(f"/proc/{number}/statm").read_text().split()[1]) * PAGE for number in found)
        / 1e6
    )


def _core_sha256_mb_s() -> int:
    """SHA-256 on one core, best of five: shows a machine that changes its speed between runs."""
    data, best = b"x" * (1 << 22), 0.0
    for _ in range(5):
        started_at = time.perf_counter()
        hashlib.sha256(data).digest()
        best = max(best, len(data) / 1e6 / (time.perf_counter() - started_at))
    return round(best)


def machine_busy() -> tuple[int, int]:
    """(busy, all) jiffies of all cores since boot."""
    values = [int(x) for x in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    return sum(values) - values[3] - values[4], sum(values)


# Any: JSON trees of figures.
def flatten(tree: Mapping[str, Any] | list[Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """Yields the numbers of a tree with their paths: `cpu.frontend.pct`, `rows.0.ready_s`."""
    items = enumerate(tree) if isinstance(tree, list) else tree.items()
    for key, value in items:
        if isinstance(value, dict | list):
            yield from flatten(value, f"{prefix}{key}.")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield f"{prefix}{key}", value


def medians(runs: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Returns the median of each figure of the runs."""
    columns: defaultdict[str, list[float]] = defaultdict(list)
    for run in runs:
        for key, value in run.items():
            columns[key].append(value)
    return {key: round(statistics.median(values), 4) for key, values in columns.items()}


def spread(values: Sequence[float]) -> dict[str, float]:
    """Returns the median, the lowest and the highest of the values."""
    found = {"median": statistics.median(values), "min": min(values), "max": max(values)}
    return {name: round(value, 3) for name, value in found.items()}


def print_report(
    bench: str,
    settings: Mapping[str, object],
    result: Mapping[str, object],
    out: Path | None = None,
) -> None:
    """One line of JSON on stdout and in `out`: figures, commit, settings, machine and its load.

    load_1m_before: the machine's load (1 minute) when this module was imported.
    """
    report = {
        "bench": bench,
        "commit": _commit(),
        "machine": {
            "cores": os.cpu_count(),
            "python": platform.python_version(),
            "cpu": _cpu_model(),
            "arch": platform.machine(),
            "core_sha256_mb_s": _core_sha256_mb_s(),
            "load_1m_before": _LOAD_1M_BEFORE,
            "load_1m": os.getloadavg()[0],
        },
        "settings": dict(settings),
        **result,
    }
    line = json.dumps(report) + "\n"
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(line)
    sys.stdout.write(line)


def dynamo_figures(what: str) -> dict[str, object]:
    """The figures of `bench/dynamo_binding.py`, with the Python of DYNAMO_PYTHON; else none."""
    python = os.environ.get("DYNAMO_PYTHON")
    if not python:
        return {}
    command = [python, str(ROOT / "bench/dynamo_binding.py"), what]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    found: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    return found


def _commit() -> str:
    """The checked out commit, with -dirty when files differ from it."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def _cpu_model() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, "unknown")


# Any: the load generator's JSON.
def run_load(
    loadgen: Path,
    port: int,
    bodies: Path,
    concurrency: int,
    seconds: float,
    pids: Mapping[str, int],
    *,
    offset: int,
    tokens_per_request: int,
    path: str = "/v1/chat/completions",
) -> dict[str, Any]:
    """One closed-loop run; client figures, CPU by process, what others used of the machine."""
    command = [str(loadgen), "127.0.0.1", str(port), str(bodies), str(concurrency), str(seconds)]
    command.append(path)
    env = {**os.environ, "BODY_OFFSET": str(offset)}
    load_1m_at_start = os.getloadavg()[0]
    before, busy_before = {name: cpu_s(pid) for name, pid in pids.items()}, machine_busy()
    done = subprocess.run(command, check=True, capture_output=True, env=env)
    result: dict[str, Any] = json.loads(done.stdout)
    busy_after = machine_busy()
    cpu_used_s = {name: cpu_s(pid) - before[name] for name, pid in pids.items()}
    tokens = result["ok"] * tokens_per_request
    machine_cpu_pct = (
        100
        * (busy_after[0] - busy_before[0])
        / max(1, busy_after[1] - busy_before[1])
        * (os.cpu_count() or 1)
    )
    own_cpu_pct = 100 * (sum(cpu_used_s.values()) + result["client_cpu_s"]) / result["wall"]
    result["load1_before"] = round(load_1m_at_start, 2)
    result["tokens_per_s"] = round(result["window_rps"] * tokens_per_request)
    result["other_cpu_pct"] = round(machine_cpu_pct - own_cpu_pct, 1)
    result["cpu"] = {
        name: {
            "pct": round(100 * seconds_used / result["wall"], 1),
            "s_per_mtok": round(seconds_used / tokens * 1e6, 2) if tokens else None,
            "ms_per_request": round(seconds_used / result["ok"] * 1e3, 3) if result["ok"] else None,
            "rss_mb": round(rss_mb(pids[name]), 1),
        }
        for name, seconds_used in cpu_used_s.items()
    }
    return result
