"""A worker that fails without dying, among two healthy ones, under a steady load.

    python -m tests.chaos.gray [--rate 25] [--fault-s 14] [CASE ...]

A case is a fault of `tests/kit/gray_engine.py`. Its mesh has three workers. The engine of one of
them has the fault for `--fault-s` seconds, then it is well; the worker stays in the mesh. Every
response is compared with the exact response of the sim model. Prints one JSON line a case:

    requests         requests from the begin of the fault on
    errors           of these, those that failed
    errors_after_5s  of these, those that were sent more than 5 s after the begin of the fault
    wrong            responses without an error that differ from the sim model
    longest_hang_s   longest time in which a client that waited received nothing
    out_s            from the begin of the fault until the worker accepted its last request; null:
                     it accepts requests until the end of the fault
    back_s           from the end of the fault until the worker accepts requests; null: never
    missed           the goals that the case misses

The last line is the sum of the cases, with `error_share`. The exit status is 1 if a goal is missed.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.chaos.cases import GRAY_CASES, GrayCase
from tests.chaos.client import Reply, fetch
from tests.kit.gray_engine import FACTORY
from tests.kit.oracle import Oracle
from tests.kit.processes import Mesh, Service
from tests.kit.waiting import until, wait_for

HEALTHY_WORKERS = 2
RATE_PER_S = 25.0
FAULT_S = 14.0
# Load before the fault, so that the workers have measured their steps.
WARM_S = 2.0
BACK_MAX_S = 30.0
# The worker is out if it accepts no request for this long, up to the end of the fault.
OUT_FOR_S = 2.0
COUNTER_POLL_S = 0.1
SETTLED_AFTER_S = 5.0
# Of the requests of a case, drawn in turns.
OUTPUT_TOKENS = (4, 16, 8, 48)
ERROR_SHARE_MAX = 0.01
_REQUEST_ID = re.compile("[0-9a-f]{32}")


@dataclass(slots=True)
class GrayRun:
    """What was observed in a case. Times: `time.monotonic`."""

    replies: list[Reply] = field(default_factory=list)
    fault_at: float = 0.0
    well_at: float = 0.0
    accepted_at: list[float] = field(default_factory=list)
    """When the bad worker was seen to have accepted a request."""


def run_gray_case(
    case: GrayCase,
    *,
    rate: float = RATE_PER_S,
    fault_s: float = FAULT_S,
    keep_logs: Path | None = None,
) -> dict[str, Any]:
    """Returns the JSON line of a case. keep_logs: folder for the logs; None: not kept."""
    with tempfile.TemporaryDirectory(prefix="kvmesh-gray-") as name:
        folder = Path(name) if keep_logs is None else keep_logs
        fault_file = folder / "fault"
        with Mesh(folder, workers=HEALTHY_WORKERS, worker_flags=[f"--engine={FACTORY}"]) as mesh:
            bad = mesh.spawn("worker", f"--engine-args={fault_file}").wait_ready()
            wait_for(mesh.is_complete, "the frontend uses all workers")
            run = asyncio.run(_GrayLoad(mesh, bad, case, fault_file, rate, fault_s).run())
    return report(case, run, Oracle())


def report(case: GrayCase, run: GrayRun, oracle: Oracle) -> dict[str, Any]:
    """Returns the figures of a case and the goals that it misses."""
    replies = [reply for reply in run.replies if reply.begun_at >= run.fault_at]
    failed = [reply for reply in replies if reply.error]
    late = [reply for reply in failed if reply.begun_at >= run.fault_at + SETTLED_AFTER_S]
    wrong = [reply for reply in replies if not reply.error and not _is_exact(reply, oracle)]
    during = [at for at in run.accepted_at if run.fault_at <= at < run.well_at]
    after = [at for at in run.accepted_at if at >= run.well_at]
    last = max(during, default=run.fault_at)
    line: dict[str, Any] = {
        "case": f"gray/{case.name}",
        "requests": len(replies),
        "errors": len(failed),
        "errors_after_5s": len(late),
        "wrong": len(wrong),
        "longest_hang_s": round(max((_hang_s(reply) for reply in replies), default=0.0), 2),
        "out_s": round(last - run.fault_at, 2) if run.well_at - last >= OUT_FOR_S else None,
        "back_s": round(min(after) - run.well_at, 2) if after else None,
    }
    why = Counter(_REQUEST_ID.sub("ID", reply.error)[:100] for reply in failed).most_common(3)
    return {**line, "missed": _missed(line), **({"why": dict(why)} if why else {})}


def total(lines: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Returns the sum of the cases."""
    lines = list(lines)
    sums = {
        name: sum(line[name] for line in lines)
        for name in ("requests", "errors", "errors_after_5s", "wrong")
    }
    return {
        "requests": sums["requests"],
        "error_share": round(sums["errors"] / max(1, sums["requests"]), 5),
        "errors_after_5s": sums["errors_after_5s"],
        "wrong": sums["wrong"],
        "longest_hang_s": max((line["longest_hang_s"] for line in lines), default=0.0),
    }


def _missed(line: dict[str, Any]) -> list[str]:
    """The share of errors is a goal of the sum only: a single case has few requests."""
    missed = [name for name in ("errors_after_5s", "wrong") if line[name]]
    return missed + ([] if line["back_s"] is not None else ["back_s"])


def _is_exact(reply: Reply, oracle: Oracle) -> bool:
    expected = oracle.completion(reply.prompt, reply.tokens, ignore_eos=True)
    return (reply.text, reply.finish_reason) == (expected.text, expected.finish_reason)


def _hang_s(reply: Reply) -> float:
    first_s = (reply.first_at or reply.ended_at) - reply.begun_at
    last_s = reply.ended_at - reply.last_at if reply.last_at else 0.0
    return max(first_s, reply.pause_s, last_s)


class _GrayLoad:
    """The load of one case, and its fault."""

    def __init__(
        self,
        mesh: Mesh,
        bad: Service,
        case: GrayCase,
        fault_file: Path,
        rate: float,
        fault_s: float,
    ) -> None:
        self._url = mesh.url
        self._bad = bad
        self._case = case
        self._fault_file = fault_file
        self._rate = rate
        self._fault_s = fault_s
        self._run = GrayRun()
        self._stopping = False

    async def run(self) -> GrayRun:
        run = self._run
        async with asyncio.TaskGroup() as tasks:
            load = tasks.create_task(self._send(tasks))
            tasks.create_task(self._poll_accepted())
            # Sleep: the load before the fault.
            await asyncio.sleep(WARM_S)
            run.fault_at = time.monotonic()
            self._fault_file.write_text(self._case.fault)
            # Sleep: the fault lasts for this time.
            await asyncio.sleep(self._fault_s)
            self._fault_file.write_text("")
            run.well_at = time.monotonic()
            with contextlib.suppress(AssertionError):  # the report shows it
                await until(
                    lambda: run.accepted_at[-1] >= run.well_at,
                    "the worker is back",
                    BACK_MAX_S,
                    COUNTER_POLL_S,
                )
            self._stopping = True
            await load
        return run

    async def _send(self, tasks: asyncio.TaskGroup) -> None:
        """Sends requests at the rate until the case stops; each ends within its time limit."""
        began, sent = time.monotonic(), 0
        while not self._stopping:
            tokens = OUTPUT_TOKENS[sent % len(OUTPUT_TOKENS)]
            reply = Reply(f"{self._case.name}, request {sent}: able about above", tokens)
            self._run.replies.append(reply)
            tasks.create_task(fetch(self._url, reply, stream=sent % 3 != 0))
            sent += 1
            # Sleep: the pace of the requests.
            await asyncio.sleep(max(0.0, began + sent / self._rate - time.monotonic()))

    async def _poll_accepted(self) -> None:
        last = 0
        while not self._stopping:
            counters = await asyncio.to_thread(self._bad.counters)
            accepted = counters.get("accepted", 0)
            if accepted > last or not self._run.accepted_at:
                last = accepted
                self._run.accepted_at.append(time.monotonic())
            # Sleep: the interval of the poll.
            await asyncio.sleep(COUNTER_POLL_S)


def main(argv: Sequence[str]) -> int:
    """Runs the cases; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.gray", description=__doc__)
    parser.add_argument("cases", nargs="*", metavar="CASE")
    parser.add_argument("--rate", type=float, default=RATE_PER_S, help="requests a second")
    parser.add_argument("--fault-s", type=float, default=FAULT_S, help="duration of the fault")
    parser.add_argument("--logs", type=Path, help="keep the services' logs in folders under DIR")
    options = parser.parse_args(argv)
    cases = [case for case in GRAY_CASES if not options.cases or case.name in options.cases]
    if not cases:
        parser.error(f"no case of that name; {', '.join(case.name for case in GRAY_CASES)}")
    lines = []
    for case in cases:
        folder = None
        if options.logs is not None:
            folder = options.logs / case.name
            folder.mkdir(parents=True)
        line = run_gray_case(case, rate=options.rate, fault_s=options.fault_s, keep_logs=folder)
        print(json.dumps(line), flush=True)
        lines.append(line)
    last = total(lines)
    print(json.dumps(last), flush=True)
    is_missed = any(line["missed"] for line in lines) or last["error_share"] > ERROR_SHARE_MAX
    return 1 if is_missed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
