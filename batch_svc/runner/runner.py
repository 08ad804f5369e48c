"""Runs batches, and responses in the background, while this service has the lease.

The state of a batch is that of the database: a runner that takes the lease over continues there.
Lines in flight when a runner ends run again, since they have no result.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Mapping
from typing import Final, NoReturn

import structlog

from batch_svc.core.batch import BatchRow, Status
from batch_svc.core.pace import Pace
from batch_svc.core.results import Retry, judge
from batch_svc.frontends import Frontends
from batch_svc.runner.batch_run import BatchRun
from batch_svc.runner.responses import ResponseRunner
from batch_svc.runner.results import ResultWriter
from batch_svc.runner.stages import Stages, line_id
from batch_svc.store.batches import BatchStore, StoredLine
from batch_svc.store.lease import LeaseLost, RunnerLease
from common.errors import InternalError, MeshError, Unavailable
from common.runtime.tasks import TaskGroup

LOG = structlog.get_logger(__name__)

# Between two looks at the batches, which also follow at once on a new or cancelled one.
POLL_S: Final = 0.5
RETRY_S: Final = 0.5
# Results that may wait for the database; above it no line is sent.
UNWRITTEN_MAX: Final = 4096
# Renewals in the time of a lease, and tries to take it.
_RENEWALS: Final = 5


class Runner:
    """The runner of one service. Counts are since its start."""

    def __init__(
        self,
        batches: BatchStore,
        stages: Stages,
        lease: RunnerLease,
        frontends: Frontends,
        responses: ResponseRunner,
        *,
        lease_s: float,
        lines_in_flight: int,
        attempts_max: int,
    ) -> None:
        self._batches = batches
        self._stages = stages
        self._lease = lease
        self._frontends = frontends
        self._responses = responses
        self._interval_s = lease_s / _RENEWALS
        self._attempts_max = attempts_max
        self.pace = Pace(lines_in_flight)
        self._runs: dict[str, BatchRun] = {}
        self._writer = ResultWriter(batches, lease, self._on_written)
        # Something that the two loops wait for has happened.
        self._work, self._lines = asyncio.Event(), asyncio.Event()
        self._turn = 0
        self.has_lease = False
        # Lines by outcome: completed, failed, retried.
        self.outcomes: Counter[str] = Counter()

    @property
    def in_flight(self) -> Mapping[str, int]:
        """Lines in flight by batch."""
        return {batch_id: run.in_flight for batch_id, run in self._runs.items()}

    @property
    def unwritten(self) -> int:
        """Results that wait for the database."""
        return len(self._writer)

    def wake(self) -> None:
        """Looks at the batches at once."""
        self._work.set()

    async def run(self) -> NoReturn:
        """Runs batches whenever this service has the lease, until cancelled."""
        while True:
            try:
                if await self._lease.acquire():
                    await self._hold()
            except LeaseLost:
                LOG.warning("batch_lease_lost")
            except Unavailable as error:
                LOG.warning("batch_database_lost", error=error.message)
            await asyncio.sleep(self._interval_s)

    async def release(self) -> None:
        """Lets another service continue at once. Call it after the end of `run`."""
        with contextlib.suppress(Unavailable):
            async with asyncio.timeout(self._interval_s):
                await self._lease.release()

    async def _hold(self) -> None:
        """Runs batches until the lease is lost. Raises LeaseLost or Unavailable."""
        LOG.info("batch_lease_taken", fence=self._lease.fence)
        self._runs.clear()
        self._writer = ResultWriter(self._batches, self._lease, self._on_written)
        self.has_lease = True
        try:
            async with TaskGroup() as group:
                group.create_task(self._renew(), name="lease")
                group.create_task(self._writer.run(), name="results")
                group.create_task(self._follow_batches(), name="batches")
                group.create_task(self._send_lines(group), name="lines")
                group.create_task(self._responses.run(), name="responses")
        finally:
            self.has_lease = False

    async def _renew(self) -> NoReturn:
        """Raises LeaseLost once another service may have the lease."""
        while True:
            await asyncio.sleep(self._interval_s)
            try:
                async with asyncio.timeout(self._interval_s):
                    await self._lease.renew()
            except (Unavailable, TimeoutError) as error:
                LOG.warning(
                    "batch_lease_not_renewed",
                    error=str(error) or f"no response within {self._interval_s:g} s",
                )
            if not self._lease.is_held:
                raise LeaseLost("the lease could not be renewed in time", reason="LEASE_LOST")

    # Batches.

    async def _follow_batches(self) -> NoReturn:
        while True:
            self._work.clear()
            try:
                for batch, has_expired in await self._batches.open_batches():
                    try:
                        await self._advance(batch, has_expired=has_expired)
                    except MeshError:
                        raise
                    except Exception:  # A defect with one batch stops no other.
                        LOG.exception("batch_stage_failed", batch=batch.id, status=batch.status)
            except Unavailable as error:
                LOG.warning("batch_database_lost", error=error.message)
                await asyncio.sleep(RETRY_S)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(POLL_S):
                    await self._work.wait()

    async def _advance(self, batch: BatchRow, *, has_expired: bool) -> None:
        """Does what the state of a batch asks for. Raises Unavailable and LeaseLost."""
        run = self._runs.get(batch.id)
        match batch.status:
            case Status.VALIDATING:
                await self._stages.validate(batch)
                self._work.set()
            case Status.IN_PROGRESS if run is None and not has_expired:
                run = self._runs[batch.id] = BatchRun(batch)
                await run.refill(self._batches)
                self._lines.set()
            case Status.IN_PROGRESS if run is not None and not has_expired:
                await run.refill(self._batches)
                self._lines.set()
                if run.is_done:
                    await self._finish(batch, Status.COMPLETED)
            case Status.IN_PROGRESS:
                await self._stop(batch, Status.EXPIRED)
            case Status.CANCELLING:
                await self._stop(batch, Status.CANCELLED)
            case Status.FINALIZING:
                await self._finish(batch, Status(batch.ends_as or Status.COMPLETED))

    async def _stop(self, batch: BatchRow, ends_as: Status) -> None:
        """Ends a batch as soon as none of its lines is in flight."""
        run = self._runs.get(batch.id)
        if run is not None and not run.is_stopped:
            run.stop()
        if run is None or run.is_idle:
            await self._finish(batch, ends_as)

    async def _finish(self, batch: BatchRow, ends_as: Status) -> None:
        await self._stages.finish(batch, ends_as)
        self._runs.pop(batch.id, None)

    # Lines.

    async def _send_lines(self, group: TaskGroup) -> NoReturn:
        loop = asyncio.get_running_loop()
        while True:
            self._lines.clear()
            tasks = sum(run.in_flight for run in self._runs.values())
            while tasks < self.pace.limit and len(self._writer) < UNWRITTEN_MAX:
                taken = self._next_line(loop.time())
                if taken is None:
                    break
                run, line = taken
                run.start(line, group.create_task(self._run_line(run, line)))
                tasks += 1
            retries = [run.next_retry_at() for run in self._runs.values()]
            at = min((at for at in retries if at is not None), default=None)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(at):
                    await self._lines.wait()

    def _next_line(self, now: float) -> tuple[BatchRun, StoredLine] | None:
        """Returns a line of the batch whose turn it is; None if there is none now."""
        runs = [run for run in self._runs.values() if not run.is_stopped]
        for offset in range(len(runs)):
            run = runs[(self._turn + offset) % len(runs)]
            if (line := run.pop(now)) is not None:
                self._turn = (self._turn + offset + 1) % len(runs)
                if run.needs_lines:
                    self._work.set()
                return run, line
        return None

    async def _run_line(self, run: BatchRun, line: StoredLine) -> None:
        """Sends a line once. Its result, or its next try, is in the run then."""
        loop = asyncio.get_running_loop()
        own_id = line_id(run.batch.id, line.number)
        try:
            reply = await self._frontends.run(
                run.batch.owner, run.batch.endpoint, line.body, own_id
            )
            judged = judge(
                own_id,
                line.custom_id,
                reply,
                failures=run.failures(line),
                attempts_max=self._attempts_max,
            )
            if isinstance(judged, Retry):
                self.outcomes["retried"] += 1
                if judged.is_busy:
                    self.pace.refused(loop.time())
                run.retry(line, loop.time() + judged.pause_s, is_failure=not judged.is_busy)
                return
            self.pace.succeeded()
            self.outcomes["failed" if judged.is_error else "completed"] += 1
            run.ended(line)
            self._writer.put(run.batch.id, line.number, judged)
        except asyncio.CancelledError:
            if not run.is_stopped:
                raise  # The lease is lost, or the service ends.
        except MeshError:
            raise
        except Exception as error:
            raise InternalError(f"the line {own_id} failed: {error!r}") from error
        finally:
            run.finished(line)
            self._lines.set()
            if run.is_stopped or run.is_done:
                self._work.set()

    def _on_written(self, batch_id: str, count: int) -> None:
        run = self._runs.get(batch_id)
        if run is not None:
            run.unwritten -= count
            if run.is_done or run.is_stopped:
                self._work.set()
        self._lines.set()
