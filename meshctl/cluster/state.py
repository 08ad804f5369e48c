"""The desired and the observed state of a cluster (pure)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

CPU, GPU = "CPU", "GPU"


class Phase(StrEnum):
    """The state of a replica."""

    STARTING = "starting"
    READY = "ready"
    ROUTABLE = "routable"
    STOPPING = "stopping"
    STOPPED = "stopped"
    FAILED = "failed"
    """It ended, and does not start again by itself."""


@dataclass(frozen=True, slots=True)
class Needs:
    """What a replica needs of its node."""

    amounts: Mapping[str, float] = field(default_factory=dict)
    """By resource: CPU, GPU, and custom ones."""
    labels: Mapping[str, str] = field(default_factory=dict)
    per_node: int | None = None
    """Greatest number of replicas of the group on one node."""
    pairs_by: str = ""
    """Replicas of different groups with the same value are placed in pairs; "": not."""


@dataclass(frozen=True, slots=True)
class Desired:
    """A member that shall run."""

    name: str
    group: str
    role: str
    """What its members can replace each other in."""
    rank: int
    """Lower ranks are stopped first, and replaced last."""
    stop_s: float
    """Seconds from the request to stop to the end."""
    digest: str
    """Of what the process runs with; a replica with another one is replaced."""
    needs: Needs = Needs()
    is_surge: bool = False
    """Whether a successor starts before the replica ends although others serve."""
    has_fixed_port: bool = False
    """Whether two replicas of it cannot be on one node."""


@dataclass(frozen=True, slots=True)
class Node:
    """A node that can run replicas."""

    id: str
    address: str
    amounts: Mapping[str, float]
    """All of it, in use or not."""
    labels: Mapping[str, str] = field(default_factory=dict)
    is_draining: bool = False
    drained_at: float | None = None
    """Of one that is draining: time at which it ends; None: not known."""


@dataclass(frozen=True, slots=True)
class Observed:
    """A replica as its supervisor reports it. number: grows with each replica of a member."""

    id: str
    member: str
    number: int
    group: str
    role: str
    rank: int
    stop_s: float
    digest: str
    node_id: str
    needs: Needs
    phase: Phase = Phase.STARTING
    detail: str = ""
    """What it waits for, or why it failed."""
    instance_id: str = ""
    addresses: Mapping[str, str] = field(default_factory=dict)
    pid: int = 0
    failures: int = 0
    """Ends of its process in a row."""
    log: str = ""
    """Path of the log on its node."""
    is_dead: bool = False
    """Its supervisor has ended."""
    silent_s: float = 0.0
    """Seconds since its supervisor does not respond; 0: it does, or has not started yet."""
    pending_s: float = 0.0
    """Seconds since its start without a response of its supervisor; 0: there was one."""

    @property
    def is_live(self) -> bool:
        """Whether it runs, or will, and is not asked to stop."""
        return self.phase in (Phase.STARTING, Phase.READY, Phase.ROUTABLE) and not self.is_dead

    @property
    def is_unreachable(self) -> bool:
        return self.is_dead or self.silent_s > 0


@dataclass(frozen=True, slots=True)
class Start:
    """Start a replica of a member on a node."""

    desired: Desired
    node: Node
    number: int


@dataclass(frozen=True, slots=True)
class Stop:
    """Ask a replica to drain and end."""

    replica: Observed
    reason: str


@dataclass(frozen=True, slots=True)
class Forget:
    """Remove what is left of a replica that has ended or is lost."""

    replica: Observed
    reason: str


Action = Start | Stop | Forget
