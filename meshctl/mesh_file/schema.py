"""The keys of a mesh file (pure)."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ValidationError,
)

from common.errors import InvalidRequest
from common.namespace import check_namespace
from common.runtime.config import MemberRole, Port
from common.runtime.suggestion import suggest
from meshctl.mesh_file.document import Document, KeyPath, MeshFileError

WorkerRole = Literal["aggregated", "prefill", "decode"]
# Arguments without which SGLang cannot start for adapters that it does not have yet.
LORA_SHAPE = ("max_lora_rank", "lora_target_modules")
NAME_PATTERN = r"^[a-z][a-z0-9-]{0,30}$"


def _as_text(value: object) -> str:
    """Returns the text of a value for a variable. Raises ValueError."""
    match value:
        case None:
            return ""
        case bool():
            return "on" if value else "off"
        case str() | int() | float():
            return str(value)
        case list() if all(isinstance(item, str | int | float) for item in value):
            return ",".join(map(_as_text, value))
        case dict():
            return json.dumps(value)
    raise ValueError("must be a text, a number, on or off, or a list of these")


def _texts(values: object) -> object:
    if not isinstance(values, Mapping):
        return {} if values is None else values
    return {name: _as_text(value) for name, value in values.items()}


def _validate_namespace(value: str) -> str:
    try:
        check_namespace(value)
    except InvalidRequest as error:
        raise ValueError(error.message) from None
    return value


Texts = Annotated[dict[str, str], BeforeValidator(_texts)]
# Of an engine: a JSON object for SGLang, any text for an engine of your own.
EngineArgs = Annotated[str, BeforeValidator(_as_text)]


class _Section(BaseModel):
    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        allow_inf_nan=False,
        hide_input_in_errors=True,
        use_attribute_docstrings=True,
    )


class ServiceSection(_Section):
    """What any service may have."""

    settings: Texts = {}
    """Settings of the service, named as its flags without dashes: `queue_threshold: 2`."""
    environment: Texts = {}
    """Variables of the processes, such as OMP_NUM_THREADS."""


class Resources(_Section):
    """What a process needs of a node of a cluster (`--on ray`)."""

    cpus: NonNegativeFloat = 1.0
    """CPU cores that Ray reserves. 0: none."""
    gpus: NonNegativeFloat = 0.0
    """GPUs that Ray reserves; the process sees only these. A fraction shares one."""
    custom: dict[str, PositiveFloat] = {}
    """Custom resources of Ray nodes, by name."""
    labels: dict[str, str] = {}
    """Labels that a node must have."""
    per_node: PositiveInt | None = None
    """Greatest number of processes of the group on one node. Unset: any."""


class ReplicatedSection(ServiceSection):
    """What a service or group with a number of processes may have."""

    resources: Resources = Resources()
    """What each process needs of a node; of --on ray only."""


class RouterSection(ReplicatedSection):
    """Routers."""

    count: PositiveInt = 1


class IndexerSection(ReplicatedSection):
    """Indexers."""

    count: NonNegativeInt = 1


class BatchSection(ReplicatedSection):
    """Batch services, which share one database."""

    count: NonNegativeInt = 0


class PickerSection(ReplicatedSection):
    """Endpoint pickers."""

    count: NonNegativeInt = 0
    ext_proc_port: Port = 9002
    """Of the first picker; further ones use the next ports. 0: any."""


class FrontendSection(ReplicatedSection):
    """Frontends."""

    count: PositiveInt = 1
    http_host: str = "127.0.0.1"
    http_port: Port = 8000
    """Of the first frontend; further ones use the next ports. 0: any."""


class ConsoleSection(ServiceSection):
    """Consoles."""

    count: Annotated[int, Field(ge=0, le=1)] = 0
    http_host: str = "127.0.0.1"
    http_port: Port = 8070
    """0: any."""
    otlp_port: Port = 8071
    """0: any."""


class WorkerOverride(ServiceSection):
    """What differs between the workers of a group."""

    engine_args: EngineArgs = ""
    """Arguments of the engine."""


class WorkerGroup(WorkerOverride, ReplicatedSection):
    """Workers with the same engine, model and role."""

    name: Annotated[str, Field(pattern=NAME_PATTERN)] | None = None
    """First part of the names of its workers. Unset: worker, prefill or decode."""
    role: WorkerRole = "aggregated"
    count: PositiveInt = 1
    engine: str = "sim"
    model: Annotated[str, Field(pattern=r"\S")] = "sim"
    """The `model` of client requests."""
    model_path: Path | None = None
    each: tuple[WorkerOverride, ...] = ()
    """One entry a worker, which adds to the values of the group; the first is for NAME-0."""
    scaling: Literal["fixed", "recommended"] = "fixed"
    """recommended: the number of workers follows what the routers recommend for the model and role;
    of --on ray only. `count` is the first number."""
    transfer_per_node: bool = False
    """The workers of one node are a transfer group, so that KV moves inside of a node only; prefill
    and decode workers are placed in pairs. Of --on ray only."""

    @property
    def member_name(self) -> str:
        """First part of the names of its workers."""
        return self.name or ("worker" if self.role == "aggregated" else self.role)


class Adapter(_Section):
    """A LoRA adapter."""

    name: Annotated[str, Field(pattern=r"\S")]
    """The `model` of client requests."""
    model: Annotated[str, Field(pattern=r"\S")]
    """The model whose workers load it."""
    uri: str = ""
    """Location of its files; the sim engine needs none."""
    copies: PositiveInt | None = None
    """Workers of each role that hold it; they choose, load it when they serve, and replace a lost
    one. Unset: all workers load it at their start."""
    copies_max: PositiveInt | None = None
    """Up to so many workers while it is in much use. Unset: copies."""


class MeshFile(_Section):
    """The services of a mesh."""

    namespace: Annotated[str, AfterValidator(_validate_namespace)] | None = None
    registry: Literal["file", "consul"] | None = None
    registry_path: Path | None = None
    consul_url: str | None = None
    log_dir: Path | None = None
    drain_s: NonNegativeFloat | None = None
    ready_s: PositiveFloat | None = None
    live_failures_max: NonNegativeInt | None = None
    pass_environ: tuple[str, ...] = ()
    settings: Texts = {}
    """Settings of every service: `log_level: debug`."""
    environment: Texts = {}
    """Variables of every service."""
    frontends: FrontendSection = FrontendSection()
    routers: RouterSection = RouterSection()
    indexers: IndexerSection = IndexerSection()
    batches: BatchSection = BatchSection()
    pickers: PickerSection = PickerSection()
    consoles: ConsoleSection = ConsoleSection()
    workers: tuple[WorkerGroup, ...] = ()
    require: tuple[MemberRole, ...] = ()
    """Roles without a live member of which no member is routable."""
    adapters: tuple[Adapter, ...] = ()
    """LoRA adapters of models."""


# The values of `meshctl up` that the file may have at its top level.
OPTION_KEYS = (
    *("namespace", "registry", "registry_path", "consul_url"),
    *("log_dir", "drain_s", "ready_s", "live_failures_max"),
)


def parse_mesh_file(document: Document) -> MeshFile:
    """Returns the content of a mesh file. Raises MeshFileError with all problems."""
    if not isinstance(document.value, dict):
        raise MeshFileError([document.problem((), "must have keys such as `workers:`")])
    try:
        mesh = MeshFile.model_validate(document.value)
    except ValidationError as error:
        problems = [_describe(document, detail) for detail in error.errors()]
        raise MeshFileError(problems) from None
    if problems := [document.problem(path, text) for path, text in _contradictions(mesh)]:
        raise MeshFileError(problems)
    return mesh


# Any: `ErrorDetails` of pydantic.
def _describe(document: Document, detail: Any) -> str:
    path: KeyPath = tuple(detail["loc"])
    if detail["type"] == "extra_forbidden":
        known = _keys_at(path[:-1])
        return document.problem(path, f"no such key{suggest(str(path[-1]), known)}")
    message = str(detail["msg"]).removeprefix("Value error, ")
    return document.problem(path, f"{message[:1].lower()}{message[1:]}")


_SECTIONS: Mapping[str, type[_Section]] = {
    "frontends": FrontendSection,
    "routers": RouterSection,
    "indexers": IndexerSection,
    "batches": BatchSection,
    "pickers": PickerSection,
    "consoles": ConsoleSection,
    "workers": WorkerGroup,
    "each": WorkerOverride,
    "resources": Resources,
    "adapters": Adapter,
}


def _keys_at(path: KeyPath) -> list[str]:
    """Returns the keys of the section at a path."""
    names = [part for part in path if isinstance(part, str)]
    section = _SECTIONS[names[-1]] if names else MeshFile
    return list(section.model_fields)


def _contradictions(mesh: MeshFile) -> list[tuple[KeyPath, str]]:
    found: list[tuple[KeyPath, str]] = []
    names: set[str] = {"frontend", "router", "indexer", "batch", "epp", "console"}
    for i, group in enumerate(mesh.workers):
        if group.member_name in names:
            text = f"{group.member_name!r} is the name of another group; give each its `name`"
            found.append((("workers", i, "name"), text))
        names.add(group.member_name)
        if len(group.each) > group.count:
            text = f"has {len(group.each)} entries for {group.count} workers"
            found.append((("workers", i, "each"), text))
    found += _scaling_contradictions(mesh.workers)
    roles = {group.role for group in mesh.workers}
    if mesh.workers and "aggregated" not in roles and roles != {"prefill", "decode"}:
        text = "needs workers of the other role too, or aggregated ones"
        found.append((("workers", 0, "role"), text))
    found += find_adapter_problems(mesh.adapters, mesh.workers or (WorkerGroup(),))
    present = {"frontend", "router", *(roles or {"aggregated"})}
    if mesh.indexers.count:
        present.add("indexer")
    if mesh.batches.count:
        present.add("batch")
    for i, role in enumerate(mesh.require):
        if role not in present:
            found.append((("require", i), f"the file has no member of the role {role!r}"))
    return found


def _scaling_contradictions(groups: Sequence[WorkerGroup]) -> Iterator[tuple[KeyPath, str]]:
    pools = Counter((group.model, group.role) for group in groups)
    for i, group in enumerate(groups):
        if group.scaling == "recommended" and pools[group.model, group.role] > 1:
            text = "routers recommend a number for a model and role, which has several groups here"
            yield ("workers", i, "scaling"), text


def find_adapter_problems(
    adapters: Sequence[Adapter], groups: Sequence[WorkerGroup]
) -> Iterator[tuple[KeyPath, str]]:
    """Yields the adapters that the workers cannot load, with the reason."""
    models = {group.model for group in groups}
    for i, adapter in enumerate(adapters):
        if adapter.model not in models:
            text = f"no workers have the model {adapter.model!r}{suggest(adapter.model, models)}"
            yield ("adapters", i, "model"), text
        for group in groups:
            if group.model == adapter.model:
                yield from _group_problems(("adapters", i), adapter, group, adapters)
        if group_args := next((g for g in groups if _has_bad_arguments(g, adapter)), None):
            text = f"engine_args of {group_args.member_name} must be a JSON object"
            yield ("adapters", i), text


def _group_problems(
    path: KeyPath, adapter: Adapter, group: WorkerGroup, adapters: Sequence[Adapter]
) -> Iterator[tuple[KeyPath, str]]:
    """Yields why the workers of a group of its model cannot load an adapter."""
    is_by_name = group.engine == "sim" or adapter.copies is None
    if group.engine == "echo":
        yield path, "the echo engine has no adapters"
    elif group.engine == "sglang":
        if not adapter.uri.startswith("file://"):
            yield (*path, "uri"), "SGLang needs the location as file:///FOLDER"
        at_start = any(one.model == group.model and one.copies is None for one in adapters)
        texts = [group.engine_args, *(one.engine_args for one in group.each)]
        missing = [key for key in LORA_SHAPE if not any(f'"{key}"' in text for text in texts)]
        if adapter.copies is not None and missing and not at_start:
            text = f"SGLang loads adapters later only with {' and '.join(missing)} in engine_args"
            yield (*path, "copies"), f"{text} of {group.member_name}"
    elif is_by_name and adapter.uri:
        yield (*path, "uri"), f"the engine {group.engine!r} loads adapters by name only"


def _has_bad_arguments(group: WorkerGroup, adapter: Adapter) -> bool:
    if group.model != adapter.model or group.engine != "sglang":
        return False
    try:
        texts = [group.engine_args, *(override.engine_args for override in group.each)]
        return not all(isinstance(json.loads(text or "{}"), dict) for text in texts)
    except ValueError:
        return True
