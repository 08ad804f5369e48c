"""Batches of all tenants (pure)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BatchView:
    """A batch. Times are Unix seconds."""

    id: str
    tenant: str
    """"": the frontends have no API keys."""

    status: str
    endpoint: str
    total: int
    """Lines; 0 before the file is checked."""

    completed: int
    failed: int
    in_flight: int
    """Lines that a frontend has, and that may wait there for idle capacity."""

    created_s: float
    expires_s: float
    problem: str = ""
    """Why its file was refused."""

    @property
    def done(self) -> float | None:
        """The share of lines with a result; None: it has no lines yet."""
        return (self.completed + self.failed) / self.total if self.total else None


@dataclass(frozen=True, slots=True)
class ResponseCountView:
    """Responses in the background of one tenant with one status."""

    tenant: str
    """"": the frontends have no API keys."""

    status: str
    count: int


@dataclass(frozen=True, slots=True)
class Batches:
    """The newest batches."""

    has_service: bool = False
    """Whether the mesh has a batch service."""

    runner: str = ""
    """The service that runs them; "": none has the lease."""

    batches: tuple[BatchView, ...] = ()
    problem: str = ""
    """Why they may be old."""

    responses: tuple[ResponseCountView, ...] = ()
