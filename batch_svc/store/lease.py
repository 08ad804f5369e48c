"""The lease of the runner: one service at a time runs the lines of a database.

Each change of the owner raises the fence. A statement that writes results renews the lease under
its fence first, in the same transaction: an owner that lost it writes nothing.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Final

from batch_svc.store.database import Database, Transaction
from common.errors import Conflict

_NAME: Final = "runner"
# Part of the lease after which an owner that could not renew it stops on its own.
STOP_SHARE: Final = 0.7


class LeaseLost(Conflict):
    """Another service runs the lines now."""


class RunnerLease:
    """The lease as one service sees it. clock: monotonic seconds."""

    def __init__(
        self, database: Database, owner: str, lease_s: float, clock: Callable[[], float]
    ) -> None:
        self._database = database
        self._owner = owner
        self._lease_s = lease_s
        self._clock = clock
        self.fence = 0
        self._held_until = 0.0

    @property
    def is_held(self) -> bool:
        """Whether no other service can have the lease yet."""
        return self.fence > 0 and self._clock() < self._held_until

    async def acquire(self) -> bool:
        """Takes the lease if it is free or has expired; returns whether this service has it.
        Raises Unavailable."""
        now, started_at = self._database.now, self._clock()
        async with self._database.transaction() as transaction:
            await transaction.execute(
                "INSERT INTO leases (name, owner, fence, expires_at) VALUES ($1, '', 0, 0)"
                " ON CONFLICT (name) DO NOTHING",
                _NAME,
            )
            taken = await transaction.execute(
                f"UPDATE leases SET owner = $1, fence = fence + 1, expires_at = {now} + $2"
                f" WHERE name = $3 AND (expires_at < {now} OR owner = $1)",
                self._owner,
                self._lease_s,
                _NAME,
            )
            if not taken:
                return False
            rows = await transaction.fetch("SELECT fence FROM leases WHERE name = $1", _NAME)
        self.fence = int(rows[0][0])
        self._held_until = started_at + self._lease_s * STOP_SHARE
        return True

    async def renew(self) -> None:
        """Raises LeaseLost, and Unavailable."""
        async with self.transaction():
            pass

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[Transaction]:
        """A transaction that excludes other owners, and whose commit renews the lease. Raises
        LeaseLost, and Unavailable."""
        started_at = self._clock()
        async with self._database.transaction() as transaction:
            await self.check(transaction)
            yield transaction
        self._held_until = max(self._held_until, started_at + self._lease_s * STOP_SHARE)

    async def check(self, transaction: Transaction) -> None:
        """Renews the lease inside of a transaction, which then excludes other owners. Raises
        LeaseLost."""
        changed = await transaction.execute(
            f"UPDATE leases SET expires_at = {self._database.now} + $1"
            " WHERE name = $2 AND owner = $3 AND fence = $4",
            self._lease_s,
            _NAME,
            self._owner,
            self.fence,
        )
        if not changed:
            self.fence = 0
            raise LeaseLost("another batch service has the lease", reason="LEASE_LOST")

    async def release(self) -> None:
        """Lets another service take the lease at once. Raises Unavailable."""
        fence, self.fence = self.fence, 0
        if fence:
            async with self._database.transaction() as transaction:
                await transaction.execute(
                    "UPDATE leases SET expires_at = 0"
                    " WHERE name = $1 AND owner = $2 AND fence = $3",
                    _NAME,
                    self._owner,
                    fence,
                )

    async def holder(self) -> tuple[str, int]:
        """Returns the owner, "" if none has the lease, and the fence. Raises Unavailable."""
        rows = await self._database.fetch(
            "SELECT owner, fence FROM leases"
            f" WHERE name = $1 AND expires_at >= {self._database.now}",
            _NAME,
        )
        return (str(rows[0][0]), int(rows[0][1])) if rows else ("", 0)
