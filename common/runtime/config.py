"""Strict configuration: one frozen dataclass a room; flags and variables follow from its fields.

A field `drain_s` of the room ROUTER is the flag `--drain-s` and the variable
`KVMESH_ROUTER_DRAIN_S`; fields that every room has (`ServiceConfig`) may also be given mesh-wide as
`KVMESH_DRAIN_S`. A flag wins over the room's variable, that over the mesh-wide one, that over the
default. A field `fast` that is true or false has the flags `--fast`, `--fast=on`, `--fast=off` and
`--no-fast`. Whatever is unknown, bad or missing refuses to start: `ConfigError` lists all of it.

The reader takes mappings and sequences, never the process environment, so tests pass their own.
"""

from __future__ import annotations

import difflib
import ipaddress
import math
import re
import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields
from pathlib import Path
from typing import (
    Any,
    Literal,
    NoReturn,
    Protocol,
    TypeVar,
    Union,
    cast,
    get_args,
    get_origin,
    get_type_hints,
    runtime_checkable,
)

from common.errors import InvalidRequest
from common.namespace import check_namespace

SERVICES = ("FRONTEND", "ROUTER", "INDEXER", "WORKER", "MESHCTL")
PREFIX = "KVMESH_"

# A service `kvmesh-router` makes Kubernetes inject KVMESH_ROUTER_PORT=tcp://... and a dozen others.
_KUBERNETES_NAME = re.compile(
    r"_SERVICE_HOST$|_SERVICE_PORT(_[A-Z0-9_]+)?$|_PORT_\d+_(TCP|UDP|SCTP)(_(ADDR|PORT|PROTO))?$"
)
_KUBERNETES_URL = re.compile(r"^(tcp|udp|sctp)://")
_WORD = re.compile(r"(?<![\w-])[a-z]\w*(?![\w-])")

_TRUE = frozenset({"1", "true", "yes", "on"})
_FALSE = frozenset({"0", "false", "no", "off"})

T = TypeVar("T")
Check = Callable[[Any], str | None]


class ConfigError(Exception):
    """The configuration cannot be used. `problems` has one sentence for each thing wrong."""

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(self.problems))


class HelpRequested(Exception):
    """`--help` was among the flags; `text` is what to print."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text


@runtime_checkable
class HasCrossFieldChecks(Protocol):
    """A config class whose fields must also fit each other."""

    def problems(self) -> list[str]:
        """One sentence for each contradiction; empty when there is none.

        It begins with the fields at fault and a colon; whoever reads it sees the flags, or the
        variables, that these were given by.
        """
        ...


def setting(
    help: str, *, check: Check | None = None, alias: str | None = None
) -> dict[str, object]:
    """Metadata of a config field: `field(default=0, metadata=setting("..."))`.

    `help` says when to turn it. `check` takes the value (never None) and returns what is wrong with
    it, or None. A field with `repr=False` is a secret: error messages do not show its value.
    `alias` is a variable that others established for the same thing; our own names win over it.
    """
    return {"help": help, "check": check, "alias": alias}


def flag_name(field_name: str) -> str:
    """The flag of a field: `drain_s` is `--drain-s`."""
    return "--" + field_name.replace("_", "-")


def at_least(low: float) -> Check:
    """A check: the number is `low` or more."""
    return lambda value: None if value >= low else f"must be at least {low}"


def between(low: float, high: float) -> Check:
    """A check: the number lies in [low, high]."""
    return lambda value: None if low <= value <= high else f"must be from {low} to {high}"


def _namespace(value: str) -> str | None:
    try:
        check_namespace(value)
    except InvalidRequest as error:
        return error.message
    return None


def is_loopback(host: str) -> bool:
    """Whether an address to bind, or a peer's, stays on this host. Other names do not."""
    if host == "localhost" or host.startswith("unix:"):
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def _is_wildcard(host: str) -> bool:
    return host in ("", "*", "0.0.0.0", "::", "[::]")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceConfig:
    """What every room has. Rooms inherit from it and add their own fields."""

    host: str = field(
        default="127.0.0.1",
        metadata=setting("Address to bind; another one when peers are on other hosts."),
    )
    port: int = field(
        default=0,
        metadata=setting(
            "gRPC port; 0 lets the system choose, fix it for firewalls.", check=between(0, 65535)
        ),
    )
    advertise_host: str | None = field(
        default=None,
        metadata=setting("Name peers reach this process by, when that is not the bind address."),
    )
    health_port: int | None = field(
        default=None,
        metadata=setting(
            "Serve gRPC health on this port too (0: any), from a thread that a busy loop cannot"
            " delay; for checks from other hosts, since it needs no token.",
            check=between(0, 65535),
        ),
    )
    namespace: str = field(
        default="default",
        metadata=setting(
            "Separates meshes that share a registry; change it to run a second one.",
            check=_namespace,
        ),
    )
    registry: Literal["file", "consul", "memory"] = field(
        default="file",
        metadata=setting(
            "Where instances find each other: consul once there is more than one host."
        ),
    )
    registry_path: Path = field(
        default=Path(".run/registry"),
        metadata=setting("Folder of the file registry; one local folder for all of a mesh."),
    )
    consul_url: str = field(
        default="http://127.0.0.1:8500",
        metadata=setting("The Consul agent, when it does not run on this host."),
    )
    consul_token: str | None = field(
        default=None,
        repr=False,
        metadata=setting("ACL token for Consul, once it asks for one.", alias="CONSUL_HTTP_TOKEN"),
    )
    mesh_token: str | None = field(
        default=None,
        repr=False,
        metadata=setting(
            "Secret shared by all services; set it whenever a port is open to others."
        ),
    )
    tls_cert_path: Path | None = field(
        default=None,
        metadata=setting("PEM certificate chain; with key and CA it turns mutual TLS on."),
    )
    tls_key_path: Path | None = field(
        default=None, metadata=setting("PEM private key of the certificate; with mutual TLS.")
    )
    tls_ca_path: Path | None = field(
        default=None, metadata=setting("PEM authorities of peers' certificates; with mutual TLS.")
    )
    tls_server_name: str | None = field(
        default=None,
        metadata=setting("Name expected in peers' certificates, if these lack peers' addresses."),
    )
    insecure: bool = field(
        default=False,
        metadata=setting("Allow an open bind without token or mTLS; for closed test networks."),
    )
    log_level: Literal["debug", "info", "warning", "error"] = field(
        default="info",
        metadata=setting("Least severe line that is written; debug while looking for a fault."),
    )
    log_format: Literal["json", "console"] = field(
        default="json", metadata=setting("console when people read the log directly.")
    )
    mesh_key: str = field(
        default="",
        repr=False,
        metadata=setting("Secret behind block identities; must be the same in the whole mesh."),
    )
    otlp_endpoint: str | None = field(
        default=None,
        metadata=setting("OTLP gRPC collector (http://127.0.0.1:4317); unset makes no spans."),
    )
    trace_sample_ratio: float = field(
        default=0.1,
        metadata=setting(
            "Share of traces started here that are kept; lower it under load.", check=between(0, 1)
        ),
    )
    notice_s: float = field(
        default=2.0,
        metadata=setting(
            "Seconds of drain in which new work is still taken; above the slowest peer's news.",
            check=at_least(0),
        ),
    )
    drain_s: float = field(
        default=30.0,
        metadata=setting(
            "Seconds streams may take to end after that; about the longest answer.",
            check=at_least(0),
        ),
    )
    ready_fd: int | None = field(
        default=None,
        metadata=setting(
            "File descriptor that gets one JSON line when ready; set by launchers.",
            check=at_least(0),
        ),
    )

    def problems(self) -> list[str]:
        """Contradictions between common fields.

        A subclass that adds its own calls `ServiceConfig.problems(self)`: zero-argument super()
        does not work in a slotted dataclass.
        """
        found = []
        tls = (self.tls_cert_path, self.tls_key_path, self.tls_ca_path)
        if any(tls) and not all(tls):
            found.append("tls_cert_path, tls_key_path and tls_ca_path: give all three or none")
        protected = self.mesh_token is not None or all(tls)
        if not (is_loopback(self.host) or protected or self.insecure):
            found.append(
                f"host: {self.host!r} is open to other hosts; set --mesh-token, or the three"
                " --tls paths, or --insecure"
            )
        if _is_wildcard(self.host) and not self.advertise_host:
            found.append(
                f"advertise_host: needed, since peers cannot connect to the wildcard {self.host!r}"
            )
        return found


def read_config(
    cls: type[T],
    service: str | None,
    environ: Mapping[str, str],
    argv: Sequence[str],
    *,
    name: str = "",
) -> tuple[T, list[str]]:
    """The configuration, and warnings for the log (names that were ignored and why).

    room: None for a tool, which has flags and the mesh-wide variables only. name: what `--help`
    calls the program; else its room. Raises ConfigError with every problem, HelpRequested for
    `--help`, TypeError when the dataclass itself is unfit (a field without help or of an unknown
    type).
    """
    if service is not None and service not in SERVICES:
        raise TypeError(f"{service!r} is not one of {', '.join(SERVICES)}")
    settings = _settings_of(cls, service)
    if "--help" in argv or "-h" in argv:
        raise HelpRequested(_help_text(name or _name_of(service), settings))
    problems: list[str] = []
    warnings: list[str] = []
    given = [
        *_from_flags(settings, argv, problems),
        *_from_environ(settings, service, environ, problems, warnings),
    ]
    values = _parse_values(settings, given, problems)
    if problems:
        raise ConfigError(problems)
    config = cls(**values)
    if isinstance(config, HasCrossFieldChecks) and (contradictions := config.problems()):
        names = {setting.name: setting.flag for setting in settings}
        names |= {one.setting.name: one.source for one in reversed(given)}
        raise ConfigError([_with_given_names(one, names) for one in contradictions])
    return config, warnings


def read_config_or_exit(
    cls: type[T],
    service: str | None,
    environ: Mapping[str, str],
    argv: Sequence[str],
    *,
    name: str = "",
) -> tuple[T, list[str]]:
    """`read_config` for a `__main__`: prints help and exits 0, or all problems and exits 2."""
    try:
        return read_config(cls, service, environ, argv, name=name)
    except HelpRequested as request:
        sys.stdout.write(request.text)
        raise SystemExit(0) from None
    except ConfigError as error:
        _exit_with_problems(name or _name_of(service), error)


def _name_of(service: str | None) -> str:
    return (service or "tool").lower()


def _exit_with_problems(name: str, error: ConfigError) -> NoReturn:
    lines = "".join(f"  {problem}\n" for problem in error.problems)
    sys.stderr.write(f"{name}: the configuration cannot be used:\n{lines}")
    raise SystemExit(2) from None


def _with_given_names(problem: str, names: Mapping[str, str]) -> str:
    """The sentence of `HasCrossFieldChecks.problems` with other names for the fields in it.

    After the colon only words that cannot be anything else are taken for fields.
    """
    at_fault = problem.find(":")

    def renamed(word: re.Match[str]) -> str:
        is_field = word.start() < at_fault or "_" in word[0]
        return names.get(word[0], word[0]) if is_field else word[0]

    return _WORD.sub(renamed, problem)


@dataclass(frozen=True, slots=True)
class _Setting:
    """One field, with the names it goes by outside."""

    name: str
    kind: Any  # A typing form: int, Literal[...], str | None, ...
    spec: Field[Any]
    variables: tuple[str, ...]  # The room's own, then the mesh-wide one and the alias, if any.

    @property
    def flag(self) -> str:
        return flag_name(self.name)

    @property
    def negation(self) -> str | None:
        """The flag that switches it off; None for what is more than on or off."""
        return flag_name(f"no_{self.name}") if _without_none(self.kind) is bool else None

    @property
    def is_common(self) -> bool:
        return self.name in _common_names()

    @property
    def required(self) -> bool:
        return self.spec.default is MISSING and self.spec.default_factory is MISSING


@dataclass(frozen=True, slots=True)
class _GivenValue:
    """A text somebody gave for a knob, and where it came from; earlier ones win."""

    setting: _Setting
    source: str
    text: str


def _settings_of(cls: type[Any], service: str | None) -> list[_Setting]:
    hints = get_type_hints(cls)
    common = _common_names()
    settings = []
    for spec in fields(cls):
        if not spec.metadata.get("help"):
            raise TypeError(f"{cls.__name__}.{spec.name} does not say when to turn it")
        _check_kind(hints[spec.name], f"{cls.__name__}.{spec.name}")
        upper = spec.name.upper()
        variables = [] if service is None else [f"{PREFIX}{service}_{upper}"]
        if spec.name in common:
            variables.append(f"{PREFIX}{upper}")
        if alias := spec.metadata.get("alias"):
            variables.append(alias)
        settings.append(_Setting(spec.name, hints[spec.name], spec, tuple(variables)))
    return settings


def _common_names() -> frozenset[str]:
    return frozenset(spec.name for spec in fields(ServiceConfig))


def _from_flags(
    settings: Sequence[_Setting], argv: Sequence[str], problems: list[str]
) -> Iterator[_GivenValue]:
    negated = {setting.negation: setting for setting in settings if setting.negation}
    by_flag = negated | {setting.flag: setting for setting in settings}
    seen: set[str] = set()
    rest = list(argv)
    while rest:
        word = rest.pop(0)
        flag, has_value, text = word.partition("=")
        setting = by_flag.get(flag)
        if setting is None:
            problems.append(_unknown(flag, by_flag))
            # Its value, if it is a word of its own, would only be a second complaint.
            if not has_value and flag.startswith("--") and rest and not rest[0].startswith("-"):
                rest.pop(0)
            continue
        if setting.flag in seen:
            problems.append(f"{setting.flag}: given twice")
        seen.add(setting.flag)
        if setting.negation and not has_value:
            text = "off" if flag in negated else "on"
            if rest and not rest[0].startswith("-"):
                problems.append(
                    f"{rest.pop(0)!r}: not a flag; the value of {setting.flag} follows a =, as in "
                    f"{setting.flag}=off"
                )
        elif flag in negated:
            problems.append(f"{flag}: takes no value; say {flag}, or {setting.flag}=off")
            continue
        elif not has_value:
            if not rest or rest[0].startswith("--"):
                problems.append(f"{flag}: needs a value")
                continue
            text = rest.pop(0)
        yield _GivenValue(setting, flag, text)


def _from_environ(
    settings: Sequence[_Setting],
    service: str | None,
    environ: Mapping[str, str],
    problems: list[str],
    warnings: list[str],
) -> Iterator[_GivenValue]:
    by_variable = {name: setting for setting in settings for name in setting.variables}
    mesh_wide = {PREFIX + name.upper() for name in _common_names()}
    others = tuple(f"{PREFIX}{other}_" for other in SERVICES if other != service)
    # The room's own names win over the mesh-wide ones, and these over others' names.
    rank = (f"{PREFIX}{service}_", PREFIX, "")
    for name in sorted(environ, key=lambda n: ([n.startswith(p) for p in rank].index(True), n)):
        if not name.startswith(PREFIX) and name not in by_variable:
            continue
        if _KUBERNETES_URL.match(environ[name]) and name.endswith("_PORT"):
            warnings.append(f"{name} ignored: Kubernetes injects it for a service")
        elif name in by_variable:
            yield _GivenValue(by_variable[name], name, environ[name])
        elif _KUBERNETES_NAME.search(name):
            warnings.append(f"{name} ignored: Kubernetes injects it for a service")
        elif not name.startswith(others) and name not in mesh_wide:
            problems.append(_unknown(name, [*by_variable, *mesh_wide]))


def _unknown(name: str, known: Mapping[str, object] | Sequence[str]) -> str:
    if name.startswith(PREFIX):
        what = f"{name}: no such variable"
    else:
        what = f"{name}: no such flag" if name.startswith("-") else f"{name!r}: not a flag"
    # What all names begin with says nothing about which of them is meant.
    beginnings = (*(f"{PREFIX}{service}_" for service in SERVICES), PREFIX, "--", "")
    beginning = next(one for one in beginnings if name.startswith(one))
    tails = {one.removeprefix(beginning): one for one in known if one.startswith(beginning)}
    near = difflib.get_close_matches(name.removeprefix(beginning), tails, n=1, cutoff=0.75)
    return f"{what}; did you mean {tails[near[0]]}?" if near else what


def _parse_values(
    settings: Sequence[_Setting], given: Sequence[_GivenValue], problems: list[str]
) -> dict[str, object]:
    values: dict[str, object] = {}
    named = {item.setting.name for item in given}
    # Losing values are read as well: a bad one is a mistake somebody wants to know of.
    for item in given:
        try:
            value = _parse(item.setting.kind, item.text)
        except ValueError as error:
            shown = repr(item.text) if item.setting.spec.repr else "the value"
            problems.append(f"{item.source}: {shown} {error}")
            continue
        check: Check | None = item.setting.spec.metadata["check"]
        if value is not None and check is not None and (wrong := check(value)):
            problems.append(f"{item.source}: {wrong}")
            continue
        values.setdefault(item.setting.name, value)
    problems.extend(
        f"{' or '.join((setting.flag, *setting.variables[:1]))}: required and not given"
        for setting in settings
        if setting.required and setting.name not in named
    )
    return values


def _without_none(kind: Any) -> Any:
    """The type without `| None`."""
    if get_origin(kind) in (Union, types.UnionType):
        others = [arg for arg in get_args(kind) if arg is not types.NoneType]
        if len(others) == 1:
            return others[0]
    return kind


def _check_kind(kind: Any, where: str) -> None:
    bare = _without_none(kind)
    plain = bare in (str, int, float, bool, Path) or bare == tuple[str, ...]
    if not plain and get_origin(bare) is not Literal:
        raise TypeError(f"{where}: fields of type {kind} cannot be read from text")


def _parse(kind: Any, text: str) -> object:
    """The value of a text. ValueError's message continues a sentence: '... is not a number'."""
    bare = _without_none(kind)
    if bare is not kind and text == "":
        return None
    if get_origin(bare) is Literal:
        for choice in get_args(bare):
            if text == str(choice):
                return cast("object", choice)
        raise ValueError(f"is not one of {', '.join(map(str, get_args(bare)))}")
    if bare == tuple[str, ...]:
        return tuple(part for part in (part.strip() for part in text.split(",")) if part)
    if bare is bool:
        return _parse_bool(text)
    if bare is int:
        return _parse_int(text)
    if bare is float:
        return _parse_float(text)
    if bare is Path:
        return _parse_path(text)
    return text


def _parse_bool(text: str) -> bool:
    lowered = text.lower()
    if lowered not in _TRUE | _FALSE:
        raise ValueError("is neither true nor false")
    return lowered in _TRUE


def _parse_int(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ValueError("is not a whole number") from None


def _parse_float(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        raise ValueError("is not a number") from None
    if not math.isfinite(number):
        raise ValueError("is not a finite number")
    return number


def _parse_path(text: str) -> Path:
    if not text:
        raise ValueError("is not a path")
    return Path(text)


def _help_text(name: str, settings: Sequence[_Setting]) -> str:
    lines = [
        f"{name}: flags, the variables they can also be given by, and defaults.",
        "Flags without a value are on or off: --x, --x=on, --x=off, --no-x.",
    ]
    for title, is_common in (("Its own:", False), ("As of every service:", True)):
        lines += ["", title]
        for setting in settings:
            if setting.is_common is is_common:
                lines += _help_lines(setting)
    return "\n".join(lines) + "\n"


def _help_lines(setting: _Setting) -> Iterator[str]:
    flags = f"{setting.flag} {_kind_name(setting.kind)}".rstrip()
    yield f"  {flags}, {setting.negation}" if setting.spec.default is True else f"  {flags}"
    names = [" or ".join(setting.variables)] if setting.variables else []
    yield f"      {'; '.join([*names, _default_text(setting)])}"
    yield f"      {setting.spec.metadata['help']}"


def _kind_name(kind: Any) -> str:
    bare = _without_none(kind)
    if get_origin(bare) is Literal:
        return "|".join(map(str, get_args(bare)))
    if bare == tuple[str, ...]:
        return "A,B,..."
    return "" if bare is bool else bare.__name__.upper()


def _default_text(setting: _Setting) -> str:
    if setting.required:
        return "required"
    match setting.spec.default:
        case default if default is MISSING:
            return "default computed"
        case None | ():
            return "unset by default"
        case "":
            return "empty by default"
        case bool(is_on):
            return f"{'on' if is_on else 'off'} by default"
        case tuple(parts):
            return f"default {','.join(parts)}"
        case default:
            return f"default {default}"
