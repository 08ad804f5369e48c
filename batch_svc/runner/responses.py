"""Runs responses in the background while this service has the lease.

As for lines, the state of a response is that of the database: one that a runner, a frontend or a
worker leaves behind runs again, and its end is written once.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from functools import partial
from typing import Final, NoReturn

import structlog

from batch_svc.core.responses import (
    OpenResponse,
    ResponseRun,
    ResponseStatus,
    ended_response,
    failed_response,
    next_to_run,
)
from batch_svc.core.results import Reply, retry_of
from batch_svc.frontends import Frontends
from batch_svc.runner.streams import OutputWriter, RunOutput
from batch_svc.store.lease import RunnerLease
from batch_svc.store.responses import StoredResponses
from common.errors import InternalError, MeshError, Unavailable
from common.runtime.tasks import TaskGroup

LOG = structlog.get_logger(__name__)

# Between two looks at the responses, which also follow at once on a new or cancelled one.
POLL_S: Final = 0.5
RETRY_S: Final = 0.5
_EXPIRED: Final = "no frontend ran the response within 24 hours"


class ResponseRunner:
    """The responses of one service. Counts are since its start."""

    def __init__(
        self,
        responses: StoredResponses,
        lease: RunnerLease,
        frontends: Frontends,
        output: OutputWriter,
        *,
        in_flight_max: int,
        attempts_max: int,
    ) -> None:
        """
        - output: of responses whose output is stored as it is generated.
        """
        self._output = output
        self._responses = responses
        self._lease = lease
        self._frontends = frontends
        self._in_flight_max = in_flight_max
        self._attempts_max = attempts_max
        self._work = asyncio.Event()
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._tenants: Counter[str] = Counter()
        # Tries that failed, and when the next one begins, in seconds of the loop's clock.
        self._failures: Counter[str] = Counter()
        self._later: dict[str, float] = {}
        # Responses by outcome: their status, and retried.
        self.outcomes: Counter[str] = Counter()

    @property
    def in_flight(self) -> int:
        """Responses that a frontend runs."""
        return len(self._tasks)

    def wake(self) -> None:
        """Looks at the responses at once."""
        self._work.set()

    async def run(self) -> NoReturn:
        """Runs responses under the lease. Raises LeaseLost."""
        self._tasks.clear()
        self._tenants.clear()
        self._failures.clear()
        self._later.clear()
        self._output.clear()
        async with TaskGroup() as group:
            group.create_task(self._output.run(), name="output of responses")
            while True:
                self._work.clear()
                try:
                    self._start_next(group, await self._responses.open_responses())
                except Unavailable as error:
                    LOG.warning("batch_database_lost", error=error.message)
                    await asyncio.sleep(RETRY_S)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(POLL_S):
                        await self._work.wait()

    def _start_next(self, group: TaskGroup, found: list[OpenResponse]) -> None:
        """Ends the runs of responses that have ended otherwise, and begins others."""
        found_ids = {one.id for one in found}
        for response_id in self._tasks.keys() - found_ids:
            self._tasks[response_id].cancel()
        for response_id in self._later.keys() - found_ids:
            del self._later[response_id]
            del self._failures[response_id]
        now = asyncio.get_running_loop().time()
        waiting = [
            one
            for one in found
            if one.id not in self._tasks and self._later.get(one.id, now) <= now
        ]
        room = self._in_flight_max - len(self._tasks)
        for one in next_to_run(waiting, self._tenants, room):
            task = group.create_task(self._run(one))
            self._tasks[one.id] = task
            self._tenants[one.tenant] += 1
            task.add_done_callback(partial(self._ended, one))

    def _ended(self, one: OpenResponse, task: asyncio.Task[None]) -> None:
        self._tasks.pop(one.id, None)
        self._output.drop(one.id)
        self._tenants[one.tenant] -= 1
        self._work.set()

    async def _run(self, one: OpenResponse) -> None:
        """Runs a response once. Raises LeaseLost."""
        try:
            await self._try(one)
        except Unavailable as error:
            LOG.warning("batch_database_lost", error=error.message)
            self._later[one.id] = asyncio.get_running_loop().time() + RETRY_S
        except MeshError:
            raise
        except Exception as error:
            raise InternalError(f"the response {one.id} failed: {error!r}") from error

    async def _try(self, one: OpenResponse) -> None:
        async with self._lease.transaction() as transaction:
            run = await self._responses.begin(transaction, one.id)
        if run is None:
            return
        if one.has_expired:
            expired = failed_response(run.row.response, _EXPIRED)
            await self._finish(run, ResponseStatus.FAILED, expired)
            return
        reply = await self._run_at_frontend(run)
        failures = self._failures[one.id]
        retry = retry_of(reply, failures=failures, attempts_max=self._attempts_max)
        if retry is None:
            await self._finish(run, *ended_response(run.row.response, reply))
            return
        self.outcomes["retried"] += 1
        self._failures[one.id] = failures + (not retry.is_busy)
        self._later[one.id] = asyncio.get_running_loop().time() + retry.pause_s
        async with self._output.lock:  # The next run reads what is stored.
            self._output.drop(one.id)

    async def _run_at_frontend(self, run: ResponseRun) -> Reply:
        if run.output is None:
            return await self._frontends.run_response(run)
        output = RunOutput(self._output, run.row.id, run.output)
        reply = await self._frontends.run_stream(run, output.feed)
        if reply.status < 300:
            output.end()
        return reply

    async def _finish(self, run: ResponseRun, status: ResponseStatus, response: bytes) -> None:
        """Writes the end of a response, as soon as the database responds. Raises LeaseLost."""
        while True:
            try:
                async with self._output.lock, self._lease.transaction() as transaction:
                    await self._output.write(transaction, run.row.id)
                    await self._responses.finish(transaction, run, status, response)
                break
            except Unavailable as error:
                LOG.warning("batch_results_delayed", results=1, error=error.message)
                await asyncio.sleep(RETRY_S)
        self._output.drop(run.row.id)
        self._output.notify(run.row.id)
        self._failures.pop(run.row.id, None)
        self._later.pop(run.row.id, None)
        self.outcomes[str(status)] += 1
