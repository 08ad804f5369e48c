"""Replays of traces, each in a process of its own with limits of time and output."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from common.errors import InvalidRequest, Overloaded, Unavailable
from console_svc.state.actions import ReplayReport, ReplayRequest, ReplayRun

TIMEOUT_S: Final = 120.0
OUTPUT_BYTES_MAX: Final = 4 << 20
TRACES_MAX: Final = 200
WORKERS_MAX: Final = 64
REQUESTS_MAX: Final = 20_000
_NICE: Final = 10


class Replays:
    """Runs `python -m replay`, one at a time. The package may be absent, as in an image."""

    def __init__(self, folder: Path | None, environ: Mapping[str, str]) -> None:
        """
        - folder: of trace files; None: only generated workloads.
        - environ: of the process.
        """
        self._folder = folder
        self._environ = dict(environ)
        self._is_running = False
        self._choices: tuple[tuple[str, ...], tuple[str, ...]] | None = None
        self.is_available = find_spec("replay") is not None

    async def load(self) -> None:
        """Reads which policies and workloads there are."""
        if self.is_available and self._choices is None:
            raw = await self._run(["-c", _CHOICES])
            policies, workloads = json.loads(raw)
            self._choices = (tuple(policies), tuple(workloads))

    @property
    def policies(self) -> Sequence[str]:
        return self._choices[0] if self._choices else ()

    @property
    def workloads(self) -> Sequence[str]:
        return self._choices[1] if self._choices else ()

    @property
    def traces(self) -> Sequence[str]:
        """Names of the trace files."""
        if self._folder is None or not self.is_available:
            return ()
        try:
            return sorted(path.name for path in self._folder.glob("*.jsonl*"))[:TRACES_MAX]
        except OSError:
            return ()

    async def replay(self, request: ReplayRequest) -> ReplayReport:
        """Raises InvalidRequest, Overloaded and Unavailable."""
        arguments = self._arguments(request)
        if self._is_running:
            raise Overloaded(5.0, "another replay runs; wait for its end")
        self._is_running = True
        try:
            report: dict[str, Any] = json.loads(await self._run(["-m", "replay", *arguments]))
            runs = report.pop("runs")
        except (ValueError, LookupError) as error:
            raise Unavailable("the replay printed no report") from error
        finally:
            self._is_running = False
        return ReplayReport(
            request.trace,
            report,
            tuple(
                ReplayRun(
                    run["policy"],
                    {k: v for k, v in run.items() if v is None or isinstance(v, int | float)},
                    tuple((s, n / 100) for n, s in enumerate(run["ttft_percentiles_s"])),
                )
                for run in runs
            ),
        )

    def _arguments(self, request: ReplayRequest) -> list[str]:
        if not self.is_available:
            raise Unavailable("this installation has no replay")
        if not 1 <= request.workers <= WORKERS_MAX:
            raise InvalidRequest(f"workers must be in 1 … {WORKERS_MAX}", "workers")
        if not 1 <= request.requests <= REQUESTS_MAX:
            raise InvalidRequest(f"requests must be in 1 … {REQUESTS_MAX}", "requests")
        unknown = [policy for policy in request.policies if policy not in self.policies]
        if unknown or not request.policies:
            raise InvalidRequest(f"no such policy: {unknown[:1] or 'none is named'}", "policies")
        if request.trace in self.workloads:
            source = request.trace
        elif request.trace in self.traces and self._folder is not None:
            source = str(self._folder / request.trace)
        else:
            raise InvalidRequest(f"no trace has the name {request.trace!r}", "trace")
        return [
            *("--policies", ",".join(request.policies)),
            *("--workers", str(request.workers)),
            *("--requests", str(request.requests)),
            *("--json", "--", source),
        ]

    async def _run(self, arguments: Sequence[str]) -> bytes:
        """Returns the output of a Python process. Raises InvalidRequest with its last line if it
        fails, and Unavailable after TIMEOUT_S."""
        process = await asyncio.create_subprocess_exec(
            *("nice", "-n", str(_NICE), sys.executable, *arguments),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=self._environ,
            start_new_session=True,
        )
        assert process.stdout is not None
        assert process.stderr is not None
        try:
            async with asyncio.timeout(TIMEOUT_S):
                output, errors = await asyncio.gather(_read(process.stdout), _read(process.stderr))
                status = await process.wait()
        except TimeoutError:
            text = f"the replay did not end within {TIMEOUT_S:g} s; use fewer requests"
            raise Unavailable(text) from None
        finally:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                await process.wait()
        if status != 0:
            lines = errors.decode(errors="replace").strip().splitlines() or [f"status {status}"]
            raise InvalidRequest(f"the replay failed: {lines[-1][:300]}")
        return output


_CHOICES: Final = (
    "import json; from replay.policies import POLICIES; from replay.workloads import GENERATORS; "
    "print(json.dumps([list(POLICIES), list(GENERATORS)]))"
)


async def _read(stream: asyncio.StreamReader) -> bytes:
    """Returns the output to its end. Raises Unavailable above OUTPUT_BYTES_MAX."""
    parts, size = [], 0
    while part := await stream.read(1 << 16):
        parts.append(part)
        size += len(part)
        if size > OUTPUT_BYTES_MAX:
            raise Unavailable(f"the replay printed more than {OUTPUT_BYTES_MAX} bytes")
    return b"".join(parts)
