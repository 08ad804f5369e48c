"""What the checks of doctor know about a mesh and this host (pure).

A fact that could not be read is None, or has an `error`; "" means that there was none.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from common.registry.instances import Instance


@dataclass(frozen=True, slots=True)
class Limits:
    """Above or below which facts are findings."""

    answer_s: float = 2.0
    """Time for each question to a member or the registry."""

    disk_free_mb: float = 512.0
    """Least free space of a folder that services write to."""

    certificate_days: float = 14.0
    """Least remaining validity of a certificate."""

    call_valid_s: float = 60.0
    """Difference of clocks above which calls with a mesh token are refused."""


@dataclass(frozen=True, slots=True)
class ProcessFacts:
    """A process of this host."""

    pid: int
    command: str
    """Its program and module, without other arguments, which may be secrets."""

    state: str = "S"
    """Its state in /proc: R, S, D, T (stopped), Z (ended), ..."""

    descriptors: int | None = None
    """Open file descriptors; None: they belong to another user."""

    descriptor_limit: int | None = None
    """Its soft limit of them."""

    settings: Mapping[str, str] = field(default_factory=dict)
    """Its settings by field name, from flags and variables; defaults are absent."""

    folder: Path = Path()
    """Its working folder, to which relative paths refer."""


@dataclass(frozen=True, slots=True)
class FolderFacts:
    """A folder that services write to."""

    path: Path
    use: str
    """What is written there, such as `registry`."""

    write_error: str = ""
    """Why a file could not be written there."""

    free_mb: float | None = None
    """Free space for ordinary users."""


@dataclass(frozen=True, slots=True)
class FileFacts:
    """A file that contains secrets."""

    path: Path
    setting: str
    """The flag or variable that names it."""

    mode: int | None = None
    """Its permission bits; None: there is no such file."""

    error: str = ""
    """Why it cannot be used."""


@dataclass(frozen=True, slots=True)
class PortFacts:
    """A port that a setting names."""

    port: int
    setting: str
    error: str = ""
    """Why it cannot be bound."""

    holder: ProcessFacts | None = None
    """The process that listens on it, if that is known."""

    is_of_mesh: bool = False
    """Whether a registered member listens on it."""


@dataclass(frozen=True, slots=True)
class CertificateFacts:
    """A certificate in a file or as a port presents it."""

    place: str
    """The path, or the address of the port."""

    name: str = ""
    """Its subject, or its first alternative name."""

    starts_s: float = 0.0
    """Unix time from which it is valid."""

    ends_s: float = 0.0
    """Unix time until which it is valid."""

    error: str = ""
    """Why it cannot be read, or does not fit its key."""


@dataclass(frozen=True, slots=True)
class RegistryFacts:
    """The registry of the mesh."""

    place: str
    """Its folder or address."""

    kind: str = "file"
    error: str = ""
    """Why it cannot be read."""

    refused: str = ""
    """What its access control refuses."""

    foreign: tuple[Instance, ...] = ()
    """Entries that do not prove that they belong to the mesh."""

    superseded: tuple[Instance, ...] = ()
    """Live instances with the stable name of a newer one."""

    orphans: tuple[str, ...] = ()
    """Names of entries whose processes have ended."""

    unreadable: tuple[str, ...] = ()
    """Names of entries and files that are no instances."""

    card_errors: Mapping[str, str] = field(default_factory=dict)
    """Why the card with a checksum cannot be read, of cards that members name."""


@dataclass(frozen=True, slots=True)
class RankState:
    """The state of a rank of a worker in the index of a router or an indexer."""

    worker_id: int
    rank: int
    state: str
    """exact, degraded, stale, gapped, approx or none."""

    reason: str = ""
    partition: tuple[int, int, int] | None = None
    """Block size, hash scheme and version of the adapter."""


@dataclass(frozen=True, slots=True)
class VerifiedRank:
    """The comparison of a rank's blocks in an index with those of its worker."""

    worker_id: int
    rank: int
    extra: int = 0
    """Blocks in the index only."""

    missing: int = 0
    """Blocks at the worker only."""

    error: str = ""
    """Why they could not be compared."""


@dataclass(frozen=True, slots=True)
class IndexerFacts:
    ranks: tuple[RankState, ...] = ()
    used_bytes: int = 0
    budget_bytes: int = 0
    """0: no limit."""

    verified: tuple[VerifiedRank, ...] = ()


@dataclass(frozen=True, slots=True)
class FrontendFacts:
    """The response of a frontend's `/ready`."""

    is_ready: bool = False
    reasons: tuple[str, ...] = ()
    degraded: tuple[str, ...] = ()
    failing_models: Mapping[str, str] = field(default_factory=dict)
    """Models whose canaries fail, with stage and reason."""

    error: str = ""
    """Why there is no response."""


@dataclass(frozen=True, slots=True)
class MemberFacts:
    """A registered instance, and what it answered."""

    instance: Instance
    health: str = "serving"
    """`health` of `common/inspection/members.py`."""

    detail: str = ""
    """The text of the error."""

    clock_ahead_s: float | None = None
    """Its clock minus the clock of this host."""

    clock_error_s: float = 0.0
    """Largest error of this difference: half of the round trip."""

    is_routable: bool | None = None
    """Whether its peers send it work; None: unknown, as of earlier versions."""

    missing_peers: tuple[str, ...] = ()
    """Peers that have not acknowledged it, with their reasons, and for which it waits."""

    given_up_peers: tuple[str, ...] = ()
    """Those for which it does not wait any more: they do not respond."""

    engine_failure: str = ""
    """Of a worker: why its probes fail."""

    ranks: tuple[RankState, ...] | None = None
    """Of a router: the index of each worker."""

    indexer: IndexerFacts | None = None
    frontend: FrontendFacts | None = None
    process: ProcessFacts | None = None
    """Its process, if it runs on this host."""


@dataclass(frozen=True, slots=True)
class ServiceFacts:
    """A service of a `meshctl up`."""

    name: str
    state: str
    """starting, ready, waiting, stopping, stopped or failed."""

    failures: int = 0
    """Ends in a row without becoming ready."""

    error: str = ""
    """Why it ended."""


@dataclass(frozen=True, slots=True)
class SupervisorFacts:
    """The `meshctl up` of a folder of logs; without services if there is none."""

    services: tuple[ServiceFacts, ...] = ()
    error: str = ""
    """Why it does not report them."""


@dataclass(frozen=True, slots=True)
class HostFacts:
    """This host and the environment of doctor."""

    python: str = ""
    build: str = ""
    """Version and form of this installation, as members advertise theirs."""

    cores: int = 1
    descriptor_limit: int = 0
    """Hard limit of file descriptors (ulimit -Hn)."""


@dataclass(frozen=True, slots=True)
class Facts:
    """All that the checks read."""

    now_s: float
    """Unix time."""

    limits: Limits = Limits()
    namespace: str = "default"
    has_token: bool = False
    """Whether doctor has a mesh token."""

    has_tls: bool = False
    """Whether doctor calls members by TLS."""

    setting_problems: tuple[str, ...] = ()
    """Invalid settings, as `name: problem`."""

    expected: tuple[str, ...] = ()
    """Stable names of the services of the mesh file."""

    required: tuple[str, ...] = ()
    """Roles that the mesh file requires."""

    supervisor: SupervisorFacts = SupervisorFacts()
    host: HostFacts = HostFacts()
    registry: RegistryFacts | None = None
    """None: the settings do not name one."""

    members: tuple[MemberFacts, ...] = ()
    folders: tuple[FolderFacts, ...] = ()
    secret_files: tuple[FileFacts, ...] = ()
    ports: tuple[PortFacts, ...] = ()
    certificates: tuple[CertificateFacts, ...] = ()

    def of(self, service: str) -> tuple[MemberFacts, ...]:
        """Returns the members of a service."""
        return tuple(member for member in self.members if member.instance.service == service)
