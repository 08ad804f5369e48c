"""Stores the output of responses as it is generated, many in one transaction.

Clients receive what is stored, and nothing else: so they have the same output at every frontend,
also after a run or this service is lost. All writes are under the fence of the lease.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final, NoReturn

import structlog

from batch_svc.core.streams import Addition, RepeatedOutput, StoredOutput, merged
from batch_svc.store.database import Transaction
from batch_svc.store.lease import RunnerLease
from batch_svc.store.responses import StoredResponses
from common.errors import Unavailable

LOG = structlog.get_logger(__name__)

# Between two writes.
FLUSH_S: Final = 0.1
RETRY_S: Final = 0.5


class OutputSignals:
    """New output of responses, as readers in this process wait for it."""

    def __init__(self) -> None:
        self._waiting: dict[str, list[asyncio.Event]] = {}

    def notify(self, response_id: str) -> None:
        """Wakes the readers of a response."""
        for signal in self._waiting.get(response_id, ()):
            signal.set()

    @contextmanager
    def awaited(self, response_id: str) -> Iterator[asyncio.Event]:
        """An event that is set by `notify`."""
        signal = asyncio.Event()
        self._waiting.setdefault(response_id, []).append(signal)
        try:
            yield signal
        finally:
            self._waiting[response_id].remove(signal)
            if not self._waiting[response_id]:
                del self._waiting[response_id]


class OutputWriter:
    """The output that is not stored yet. lock: held while it is written."""

    def __init__(
        self, responses: StoredResponses, lease: RunnerLease, signals: OutputSignals
    ) -> None:
        self._responses = responses
        self._lease = lease
        self._signals = signals
        self._pending: dict[str, list[Addition]] = {}
        self._has_pending = asyncio.Event()
        self.lock = asyncio.Lock()

    def put(self, response_id: str, addition: Addition | None) -> None:
        if addition is not None:
            self._pending.setdefault(response_id, []).append(addition)
            self._has_pending.set()

    def drop(self, response_id: str) -> None:
        """Forgets the output of a run that is lost, or whose response has ended."""
        self._pending.pop(response_id, None)

    def clear(self) -> None:
        self._pending.clear()

    def notify(self, response_id: str) -> None:
        """Wakes the readers of a response."""
        self._signals.notify(response_id)

    async def write(self, transaction: Transaction, response_id: str) -> None:
        """Stores the rest of the output of a response, with `lock`. `drop` it after the commit."""
        for addition in merged(self._pending.get(response_id, ())):
            await self._responses.add_output(transaction, response_id, addition)

    async def run(self) -> NoReturn:
        """Writes until cancelled. A lost database delays the output. Raises LeaseLost."""
        while True:
            await self._has_pending.wait()
            try:
                async with self.lock:
                    await self._write_all()
            except Unavailable as error:
                LOG.warning("response_output_delayed", error=error.message)
                await asyncio.sleep(RETRY_S)
                continue
            if not self._pending:
                self._has_pending.clear()
            await asyncio.sleep(FLUSH_S)

    async def _write_all(self) -> None:
        # Runs may add to them, or end, meanwhile.
        writing = [(one, found, len(found)) for one, found in sorted(self._pending.items())]
        async with self._lease.transaction() as transaction:
            for response_id, additions, count in writing:
                for addition in merged(additions[:count]):
                    await self._responses.add_output(transaction, response_id, addition)
        for response_id, additions, count in writing:
            del additions[:count]
            if not additions and self._pending.get(response_id) is additions:
                del self._pending[response_id]
            self._signals.notify(response_id)


class RunOutput:
    """The output of one run, which its frontend sends."""

    def __init__(self, writer: OutputWriter, response_id: str, stored: StoredOutput) -> None:
        """
        - stored: of the run before.
        """
        self._writer = writer
        self._response_id = response_id
        self._repeated = RepeatedOutput(stored)

    def feed(self, deltas: bytes) -> None:
        self._writer.put(self._response_id, self._repeated.feed(deltas))

    def end(self) -> None:
        """The run has ended, as will the response."""
        self._writer.put(self._response_id, self._repeated.end())
