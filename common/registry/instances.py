"""Members of the mesh: instances, snapshots of them and differences between snapshots (pure).

An instance is one *incarnation* of a process. Its id is drawn at process start, never used again,
and is the key of all other state (routing, in-flight sets, index). An address may come back under a
new id; `stable_name` identifies the same process across restarts.

Invariants: an Instance that exists is valid; a Snapshot never changes; instances in a snapshot are
in order of registration, oldest first, and no two of them share (service, stable_name).
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from random import Random
from types import MappingProxyType
from typing import Literal, TypeVar

from pydantic import TypeAdapter, ValidationError

from common.errors import InvalidRequest
from common.instance_ids import INSTANCE_ID_LIMIT, MEMBER_IDS
from common.namespace import check_namespace

Service = Literal["frontend", "router", "indexer", "worker", "batch"]
Role = Literal["aggregated", "prefill", "decode"]
KvIndex = Literal["events", "approx", "none"]

T = TypeVar("T")

# The endpoint name in the key of an instance: a service has one.
ENDPOINT_NAME = "serve"
# In meta: the host:port of the process for streams between services; optional.
STREAM_META_KEY = "streams"
# In meta: the host:port for Consul's gRPC health checks.
HEALTH_META_KEY = "health"
# In a frontend's meta: the URL of its API without /v1, and that of its metrics; optional.
HTTP_META_KEY = "http"
METRICS_META_KEY = "metrics"
# In meta: the service whose health Consul checks there; "": that of the process, as in versions
# before MemberService.
HEALTH_SERVICE_META_KEY = "health_service"
# In a router's meta: its policy for serving requests aggregated that could be split; optional.
PREFILL_BYPASS_META_KEY = "prefill_bypass"
# In a worker's meta: the options of requests that its engine refuses, joined by commas; optional.
UNSUPPORTED_OPTIONS_META_KEY = "unsupported_options"
# In a worker's meta: "1" if its engine counts output of another worker for penalties; optional.
CONTINUES_PENALTIES_META_KEY = "continues_penalties"
# In a worker's meta: the engine that computes its tokens, for example "vllm"; a started response
# continues only on a worker with the same one. Optional.
ENGINE_META_KEY = "engine"

# In the meta of a worker for a server that runs already: its host:port, and the `model` that it
# expects in bodies; optional. A gateway sends requests there.
SERVER_META_KEY = "server"
SERVER_MODEL_META_KEY = "server_model"

# In meta: a fingerprint of the mesh key, which all members must share; "": none is set. Optional.
HASH_KEY_META_KEY = "mesh_key"
# In meta: version and form of the process (`common/runtime/build.py`); optional.
BUILD_META_KEY = "build"

_NOT_IN_SLUG = re.compile(r"[^a-z0-9._-]")
_ADVERTISED_SIZES = (
    "block_size",
    "total_kv_blocks",
    "max_num_seqs",
    "max_num_batched_tokens",
    "context_length",
    "pid",
    "dp_size",
)


@dataclass(frozen=True, slots=True)
class Instance:
    """One incarnation of one process, as advertised.

    A size of None is not advertised; zero is invalid, since it would mean "no capacity".

    Raises InvalidRequest with the field of a value that is out of range.
    """

    id: int
    """1 … 2^63-1, new at each process start: worker id = lease id. Random (`new_instance_id`), or a
    hash of the key of the instance (`common/runtime/member_key.py`)."""

    namespace: str
    service: Service
    stable_name: str
    """The same across restarts; a new incarnation supersedes the old. "": no name."""

    address: str
    """`host:port` of its gRPC server for peers."""

    http_address: str = ""
    """Address of the frontend's gateway."""

    model: str = ""
    """Empty: it serves no model."""

    card_checksum: str = ""
    """Empty: it serves no model, or one without a card (pass-through engines)."""

    role: Role = "aggregated"
    """Of a worker: the legs of requests that it runs."""

    block_size: int | None = None
    """In tokens."""

    transfer_group: str = ""
    """Of a worker for prefill or decode: workers of one group can exchange KV."""

    bootstrap_host: str | None = None
    """Where a prefill worker listens for decode workers."""

    bootstrap_port: int | None = None
    """Where a prefill worker listens for decode workers."""

    local_prefill: bool = True
    """Whether a decode worker computes prompts that come without a handoff."""

    dp_rank_start: int = 0
    """Its data-parallel ranks are [dp_rank_start, dp_rank_start + dp_size)."""

    dp_size: int = 1
    """Number of its data-parallel ranks."""

    total_kv_blocks: int | None = None
    """In blocks."""

    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    """In tokens."""

    context_length: int | None = None
    """In tokens."""

    taints: frozenset[str] = frozenset()
    """Matched by routing constraints."""

    loras: frozenset[str] = frozenset()
    """Adapters that are loaded."""

    kv_index: KvIndex = "none"
    meta: Mapping[str, str] = field(default_factory=dict, hash=False)
    """Other facts, never read by routing."""

    pid: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "meta", MappingProxyType(dict(self.meta)))
        if not 0 < self.id < INSTANCE_ID_LIMIT:
            raise InvalidRequest(f"id must be in 1 … 2^63-1, not {self.id}", "id")
        check_namespace(self.namespace)
        _check_address("address", self.address)
        if self.http_address:
            _check_address("http_address", self.http_address)
        if self.card_checksum and not self.model:
            raise InvalidRequest("a card_checksum needs a model", "model")
        if (self.bootstrap_host is None) != (self.bootstrap_port is None):
            raise InvalidRequest("bootstrap_host and bootstrap_port go together", "bootstrap_port")
        if self.bootstrap_port is not None:
            _check_port("bootstrap_port", self.bootstrap_port)
        if self.dp_rank_start < 0:
            raise InvalidRequest("dp_rank_start must not be negative", "dp_rank_start")
        for name in _ADVERTISED_SIZES:
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InvalidRequest(f"{name} must be at least 1 or absent, not {value}", name)

    @property
    def endpoint(self) -> EndpointId:
        return EndpointId(self.namespace, self.service, ENDPOINT_NAME)

    @property
    def stream_address(self) -> str:
        """`host:port` for streams of other services: tokens, decisions, KV events."""
        return self.meta.get(STREAM_META_KEY, self.address)

    @property
    def key(self) -> str:
        """Its name in log events, among all instances of all endpoints."""
        return self.endpoint.instance_key(self.id)

    def to_json(self) -> bytes:
        """Returns a JSON object of all fields; `from_json` returns an equal value."""
        raw = {f.name: getattr(self, f.name) for f in fields(self)}
        raw["taints"] = sorted(self.taints)
        raw["loras"] = sorted(self.loras)
        raw["meta"] = dict(self.meta)
        return json.dumps(raw, separators=(",", ":")).encode()

    @staticmethod
    def from_json(raw: bytes | str) -> Instance:
        """Returns the instance in `raw`. Unknown keys are ignored: newer peers may add some.

        Raises InvalidRequest with the field that is missing, wrongly typed or out of range.
        """
        return parse_json(_INSTANCE_ADAPTER, raw, "instance")


_INSTANCE_ADAPTER: TypeAdapter[Instance] = TypeAdapter(Instance)


def parse_json(adapter: TypeAdapter[T], raw: bytes | str, subject: str) -> T:
    """Returns the value in `raw`, without type coercion. Raises InvalidRequest with `subject` and
    field."""
    try:
        return adapter.validate_json(raw, strict=True)
    except ValidationError as error:
        first_error = error.errors(include_url=False, include_input=False)[0]
        path = ".".join(str(part) for part in first_error["loc"]) or None
        location = subject if path is None else f"{subject}.{path}"
        raise InvalidRequest(f"{location}: {first_error['msg']}", path) from error


def new_instance_id(rng: Random) -> int:
    """Returns a random id, which logs write as text, for an instance without a key. `rng` is seeded
    by the system."""
    return rng.randrange(MEMBER_IDS.stop, INSTANCE_ID_LIMIT)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All members of a namespace at one moment: id → Instance, oldest registration first.

    revision: grows with every change; comparable within one Registry object and namespace. 0 =
    the store was never read; 1 = also a namespace that was read and is empty.
    has_unauthenticated: whether the store has live entries that are not proved to be of this mesh;
    they are no members.
    """

    revision: int = 0
    instances: Mapping[int, Instance] = field(default_factory=dict, hash=False)
    has_unauthenticated: bool = False
    # Service -> its members, and model -> its workers.
    _members: Mapping[str, tuple[Instance, ...]] = field(init=False, repr=False, compare=False)
    _workers: Mapping[str, tuple[Instance, ...]] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "instances", MappingProxyType(dict(self.instances)))
        members: defaultdict[str, list[Instance]] = defaultdict(list)
        workers: defaultdict[str, list[Instance]] = defaultdict(list)
        for instance in self.instances.values():
            members[instance.service].append(instance)
            if instance.service == "worker":
                workers[instance.model].append(instance)
        for name, groups in (("_members", members), ("_workers", workers)):
            object.__setattr__(self, name, {key: tuple(group) for key, group in groups.items()})

    def of(self, service: Service) -> tuple[Instance, ...]:
        return self._members.get(service, ())

    def serving(self, model: str) -> tuple[Instance, ...]:
        """Returns the workers that serve `model`."""
        return self._workers.get(model, ())

    def next_snapshot(
        self, members: Iterable[Instance], *, has_unauthenticated: bool = False
    ) -> Snapshot:
        """Returns the snapshot with `members` (oldest first); `self` if read before and nothing
        changed."""
        instances = {i.id: i for i in newest_incarnations(members)}
        before = (self.instances, self.has_unauthenticated)
        if self.revision and (instances, has_unauthenticated) == before:
            return self
        return Snapshot(self.revision + 1, instances, has_unauthenticated)


@dataclass(frozen=True, slots=True)
class SnapshotDiff:
    """The difference of two snapshots; `changed` has the new values."""

    joined: tuple[Instance, ...] = ()
    left: tuple[Instance, ...] = ()
    changed: tuple[Instance, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.joined or self.left or self.changed)


def diff_snapshots(old: Snapshot, new: Snapshot) -> SnapshotDiff:
    """Returns the changes from `old` to `new`. A restart is one `left` and one `joined`."""
    old_instances, new_instances = old.instances, new.instances
    return SnapshotDiff(
        joined=tuple(i for key, i in new_instances.items() if key not in old_instances),
        left=tuple(i for key, i in old_instances.items() if key not in new_instances),
        changed=tuple(
            i
            for key, i in new_instances.items()
            if key in old_instances and old_instances[key] != i
        ),
    )


def role_of(instance: Instance) -> str:
    """Returns the role of a worker, and of another member its service."""
    return instance.role if instance.service == "worker" else instance.service


def newest_incarnations(instances: Iterable[Instance]) -> tuple[Instance, ...]:
    """Returns `instances` (oldest registration first) without superseded incarnations.

    Two are incarnations of one process if namespace, service and non-empty stable_name are equal.
    """
    instances = tuple(instances)
    newest = {_incarnation_key(i): i.id for i in instances}
    return tuple(i for i in instances if newest[_incarnation_key(i)] == i.id)


def find_card_conflict(members: Iterable[Instance], candidate: Instance) -> Instance | None:
    """Returns the live instance, other than its predecessor, with another card of the model, or
    None."""
    if not candidate.card_checksum:
        return None
    others = (i for i in members if i.id != candidate.id)
    for member in newest_incarnations((*others, candidate)):
        is_same_model = member.namespace == candidate.namespace and member.model == candidate.model
        if is_same_model and member.card_checksum not in ("", candidate.card_checksum):
            return member
    return None


def slugify(text: str) -> str:
    """Returns `text` in lower case, each character outside a-z 0-9 `.` `_` `-` replaced by `_`."""
    return _NOT_IN_SLUG.sub("_", text.lower())


@dataclass(frozen=True, slots=True)
class EndpointId:
    namespace: str
    component: str
    name: str

    def instance_key(self, instance_id: int) -> str:
        """Returns the key of one instance: the slug of `namespace.component.name-<id in hex>`.

        Raises InvalidRequest unless the id fits 64 bits, with or without a sign.
        """
        if not -(2**63) <= instance_id < 2**64:
            raise InvalidRequest(f"instance_id {instance_id} does not fit 64 bits", "instance_id")
        unsigned_id = instance_id & (2**64 - 1)
        return slugify(f"{self.namespace}.{self.component}.{self.name}-{unsigned_id:x}")


def _incarnation_key(instance: Instance) -> tuple[str, str, str, int]:
    unique_part = 0 if instance.stable_name else instance.id
    return (instance.namespace, instance.service, instance.stable_name, unique_part)


def _check_address(name: str, address: str) -> None:
    host, colon, port = address.rpartition(":")
    if not (host and colon and port.isascii() and port.isdigit()):
        raise InvalidRequest(f"{name} must be host:port, not {address!r}", name)
    _check_port(name, int(port))


def _check_port(name: str, port: int) -> None:
    if not 0 < port < 65536:
        raise InvalidRequest(f"{name} has port {port}, outside 1 … 65535", name)
