"""Strict configuration: one pydantic model per service, read from flags and variables.

The field `drain_s` of the router is the flag `--drain-s` and the variable `KVMESH_ROUTER_DRAIN_S`.
A field of `ServiceConfig` is also the mesh-wide variable `KVMESH_DRAIN_S`. Precedence: flag,
variable of the service, mesh-wide variable, alias, default. Boolean fields also have `--no-x`.
A secret can be read from a file: `--mesh-token-file`, `KVMESH_MESH_TOKEN_FILE`.
An unknown name, a bad value or a missing value stops the start; `ConfigError` lists all problems.

`ConfigCommand` is the command line of a model, for `read_config` and for the commands of `meshctl`.
`read_config` takes mappings and sequences. Only `env.py` reads the process environment.
"""

from __future__ import annotations

import contextlib
import inspect
import re
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Generic, Literal, TypeVar, get_args, get_origin

import click
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    ValidationError,
)
from pydantic.fields import FieldInfo

from common.errors import InvalidRequest
from common.namespace import check_namespace
from common.runtime.certificate_names import OPERATOR, certificate_name, first_dns_names
from common.runtime.hosts import WILDCARD_HOSTS, is_loopback
from common.runtime.otlp import (
    Header,
    OtlpEndpoint,
    check_endpoint,
    check_endpoints,
    endpoints_of,
    header_problem,
    parse_headers,
)
from common.runtime.ready_line import ERROR_CHARS_MAX, write_ready_line
from common.runtime.suggestion import suggest

SERVICES = ("FRONTEND", "ROUTER", "INDEXER", "WORKER", "BATCH", "CONSOLE", "EPP")
# Roles in the certificates of services; each other service has the role of its name.
_CERTIFICATE_ROLES = {"CONSOLE": OPERATOR, "EPP": "frontend"}
PREFIX = "KVMESH_"
# Of variables, in the order of `suggest`.
_BEGINNINGS = (*(f"{PREFIX}{service}_" for service in SERVICES), PREFIX)
# Ends the names of the file of a secret.
FILE_SUFFIX = "_file"
# Variables of other standards, with the lowest precedence.
_ALIASES = {
    "consul_token": "CONSUL_HTTP_TOKEN",
    "jaeger_url": "JAEGER_QUERY_URL",
    "otlp_ca_path": "OTEL_EXPORTER_OTLP_CERTIFICATE",
    "otlp_cert_path": "OTEL_EXPORTER_OTLP_CLIENT_CERTIFICATE",
    "otlp_endpoint": "OTEL_EXPORTER_OTLP_ENDPOINT",
    "otlp_headers": "OTEL_EXPORTER_OTLP_HEADERS",
    "otlp_key_path": "OTEL_EXPORTER_OTLP_CLIENT_KEY",
}

# For a service `kvmesh-router`, Kubernetes injects KVMESH_ROUTER_PORT=tcp://... and a dozen others.
_KUBERNETES_NAME = re.compile(
    r"_SERVICE_HOST$|_SERVICE_PORT(_[A-Z0-9_]+)?$|_PORT_\d+_(TCP|UDP|SCTP)(_(ADDR|PORT|PROTO))?$"
)
_KUBERNETES_URL = re.compile(r"^(tcp|udp|sctp)://")

# Of the context of a parsed command line.
_PROBLEMS = f"{__name__}.problems"
_IS_PARSED = f"{__name__}.is_parsed"


class ConfigError(Exception):
    """The configuration is invalid. `problems` has one sentence per problem."""

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(self.problems))


def flag_name(field_name: str) -> str:
    """Returns the flag of a field: `drain_s` is `--drain-s`."""
    return "--" + field_name.replace("_", "-")


def _split(value: object) -> object:
    if isinstance(value, str):
        return tuple(part for part in (part.strip() for part in value.split(",")) if part)
    return value


def _refuse_empty(path: object) -> object:
    if path == "":
        raise ValueError("is empty")
    return path


def _validate_namespace(value: str) -> str:
    try:
        check_namespace(value)
    except InvalidRequest as error:
        raise ValueError(error.message) from None
    return value


Names = Annotated[tuple[str, ...], BeforeValidator(_split)]  # From text: A,B,...
OtlpUrls = Annotated[
    tuple[Annotated[str, AfterValidator(check_endpoint)], ...],
    BeforeValidator(_split),
    AfterValidator(check_endpoints),
]
OtlpHeaders = Annotated[tuple[Header, ...], BeforeValidator(parse_headers)]
Descriptors = Annotated[tuple[NonNegativeInt, ...], BeforeValidator(_split)]  # From text: 3,4,...
MemberRole = Literal["frontend", "router", "indexer", "batch", "aggregated", "prefill", "decode"]
Port = Annotated[int, Field(ge=0, le=65535)]
Share = Annotated[float, Field(ge=0, le=1)]


class ServiceConfig(BaseModel):
    """The settings of every service. A service subclasses it and adds its own fields.

    The text below a field is its help. A field with `repr=False` is a secret: errors do not show
    its value.
    """

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        allow_inf_nan=False,
        hide_input_in_errors=True,  # It may be a secret.
        use_attribute_docstrings=True,
    )

    host: str = "127.0.0.1"
    """Address to bind. Use another one if peers run on other hosts."""
    port: Port = 0
    """gRPC port. 0: the system chooses; fix it for firewalls."""
    stream_port: Port = 0
    """Second gRPC port, for the streams between services. 0: the system chooses; fix it for
    firewalls. A frontend has none."""
    advertise_host: str | None = None
    """Host name or address that peers connect to, if it is not the bind address."""
    health_port: Port | None = None
    """Additional port for gRPC health (0: any), served by a thread that a busy event loop cannot
    delay. It needs no token, so checks from other hosts can use it."""
    metrics_port: Port | None = None
    """Port for Prometheus metrics over HTTP, with TLS if the process has certificates (0: any). On
    a frontend /health moves to it too. Unset: none; a frontend serves both on http_port."""
    metrics_host: str | None = None
    """Address that metrics_port binds. Unset: host."""
    metrics_key: str | None = Field(default=None, repr=False)
    """Secret that clients of metrics_port send as a bearer token. Required if metrics_host is open
    to other hosts."""
    stable_name: str = ""
    """Name that survives restarts, one per process: the mesh only uses the newest instance of a
    name. Logs, spans, metrics and meshctl show it beside the id. Empty: none."""
    namespace: Annotated[str, AfterValidator(_validate_namespace)] = "default"
    """Separates meshes that share a registry."""
    registry: Literal["file", "consul", "memory"] = "file"
    """Service discovery. Use consul if the mesh has more than one host."""
    registry_path: Annotated[Path, BeforeValidator(_refuse_empty)] = Path(".run/registry")
    """Folder of the file registry: local, and the same for all services of a mesh."""
    consul_url: str = "http://127.0.0.1:8500"
    """Address of the Consul agent."""
    consul_token: str | None = Field(default=None, repr=False)
    """ACL token for Consul."""
    consul_ca_path: Path | None = None
    """PEM certificate authorities of an https Consul agent. Unset: those of the system."""
    mesh_token: str | None = Field(default=None, repr=False)
    """Secret of all services, never sent: calls and registry entries prove it. Use 32 random bytes.
    Set it if a port is open to other hosts."""
    admin_token: str | None = Field(default=None, repr=False)
    """Secret that callers of AdminService send in place of the mesh token. Unset: its operations
    are refused."""
    operator_token: str | None = Field(default=None, repr=False)
    """Secret that tools such as grpcurl send as a bearer token, in place of a proof of the mesh
    token. It permits the calls that no service makes, except AdminService. Unset: none does."""
    tls_cert_path: Path | None = None
    """PEM certificate chain. With key and CA it enables mutual TLS."""
    tls_key_path: Path | None = None
    """PEM private key of the certificate."""
    tls_ca_path: Path | None = None
    """PEM certificate authorities of the peers' certificates."""
    tls_server_name: str | None = None
    """Name expected in peers' certificates, if they do not contain the peers' addresses."""
    tls_role_domain: str | None = None
    """Binds roles to certificates: the DNS name frontend.DOMAIN, router.DOMAIN, indexer.DOMAIN,
    worker.DOMAIN, batch.DOMAIN or, for tools, operator.DOMAIN. Unset: any certificate of the CA
    may be any service."""
    insecure: bool = False
    """Allow an open bind without token or mutual TLS. For closed test networks."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Lowest severity that is logged."""
    log_format: Literal["json", "console"] = "json"
    """console is for reading the log directly."""
    mesh_key: str = Field(default="", repr=False)
    """Secret input of the block hashes. Must be the same in the whole mesh."""
    otlp_endpoint: OtlpUrls = ()
    """OTLP gRPC collectors, such as http://127.0.0.1:4317. Each receives all spans, and none delays
    another one. Unset: no spans."""
    otlp_headers: OtlpHeaders = Field(default=(), repr=False)
    """Headers of exports: NAME=VALUE; with several collectors ENDPOINT NAME=VALUE, as otlp_endpoint
    has it. Values may be percent-encoded. In a file, one a line."""
    otlp_ca_path: Path | None = None
    """PEM certificate authorities of the https collectors. Unset: those of gRPC."""
    otlp_cert_path: Path | None = None
    """PEM certificate chain that https collectors receive."""
    otlp_key_path: Path | None = None
    """PEM private key of otlp_cert_path."""
    trace_sample_ratio: Share = 0.1
    """Share of the traces started here that are kept, unless OTEL_TRACES_SAMPLER is set."""
    notice_s: NonNegativeFloat = 2.0
    """Seconds of a drain in which new requests are still accepted. Must exceed the time until the
    slowest peer sees the deregistration."""
    drain_s: NonNegativeFloat = 30.0
    """Seconds after the notice in which streams may end. About the longest response."""
    routable_limit_s: NonNegativeFloat = 10.0
    """Seconds after which a peer that does not respond counts as given up: this process is routable
    without it, and ends without it."""
    required_roles: Annotated[tuple[MemberRole, ...], BeforeValidator(_split)] = ()
    """Roles of which a member must be live before peers send work to this process: frontend,
    router, indexer, batch, aggregated, prefill, decode. Others may have no member."""
    ready_fd: NonNegativeInt | None = None
    """File descriptor that receives one JSON line when ready or when the start has failed. Set by
    launchers."""

    @property
    def effective_metrics_host(self) -> str:
        return self.host if self.metrics_host is None else self.metrics_host

    @property
    def otlp_endpoints(self) -> tuple[OtlpEndpoint, ...]:
        """The collectors, each with its headers."""
        return endpoints_of(self.otlp_endpoint, self.otlp_headers)

    @property
    def has_mesh_secret(self) -> bool:
        """Whether processes of the mesh prove the mesh token, or have certificates."""
        return self.mesh_token is not None or self.tls_cert_path is not None

    def problems(self) -> list[str]:
        """Returns contradictions between fields, each as `field: message`.

        `read_config` replaces the field by the flag or variable that set it.
        """
        found = []
        tls = (self.tls_cert_path, self.tls_key_path, self.tls_ca_path)
        if any(tls) and not all(tls):
            found.append(
                "tls_cert_path: set all of --tls-cert-path, --tls-key-path, --tls-ca-path, or none"
            )
        if self.tls_role_domain and (not all(tls) or self.tls_server_name):
            found.append(
                "tls_role_domain: needs the three --tls paths, and excludes --tls-server-name"
            )
        protected = self.mesh_token is not None or all(tls)
        if not (is_loopback(self.host) or protected or self.insecure):
            found.append(
                f"host: {self.host!r} is open to other hosts; set --mesh-token, or the three"
                " --tls paths, or --insecure"
            )
        is_closed = is_loopback(self.effective_metrics_host) or self.metrics_key or self.insecure
        if self.metrics_port is not None and not is_closed:
            found.append(
                f"metrics_port: {self.effective_metrics_host!r} is open to other hosts; set"
                " --metrics-key-file or --insecure"
            )
        if self.admin_token is not None and self.admin_token == self.mesh_token:
            found.append("admin_token: must differ from --mesh-token, which every service has")
        if self.operator_token is not None and self.operator_token in (
            self.mesh_token,
            self.admin_token,
        ):
            found.append("operator_token: must differ from --mesh-token and --admin-token")
        if self.host in WILDCARD_HOSTS and not self.advertise_host:
            found.append(f"advertise_host: required, because peers cannot connect to {self.host!r}")
        if problem := header_problem(self.otlp_endpoint, self.otlp_headers):
            found.append(f"otlp_headers: {problem}")
        if (self.otlp_cert_path is None) != (self.otlp_key_path is None):
            found.append("otlp_cert_path: set both --otlp-cert-path and --otlp-key-path, or none")
        return found


ConfigT = TypeVar("ConfigT", bound=ServiceConfig)


def read_config(
    cls: type[ConfigT],
    service: str | None,
    environ: Mapping[str, str],
    argv: Sequence[str],
    *,
    name: str = "",
    flags: Collection[str] | None = None,
) -> tuple[ConfigT, list[str]]:
    """Returns the configuration, and warnings for the log. `--help` prints the help and exits with
    0.

    service: one of SERVICES; None for a tool, which only has flags and mesh-wide variables.
    name: the program in `--help`; by default the service. flags: fields that have a flag; None
    means all. Raises ConfigError with every problem, and TypeError for a field without a
    description.
    """
    command = ConfigCommand(cls, service, name=name or _program(service), flags=flags)
    try:
        context = command.make_context(command.name, list(argv))
    except click.exceptions.Exit as end:
        raise SystemExit(end.exit_code) from None
    return command.read(context, environ)


def read_config_or_exit(
    cls: type[ConfigT],
    service: str | None,
    environ: Mapping[str, str],
    argv: Sequence[str],
    *,
    name: str = "",
    flags: Collection[str] | None = None,
) -> tuple[ConfigT, list[str]]:
    """Returns what `read_config` does, but prints problems, also to `--ready-fd`, and exits with
    2."""
    try:
        return read_config(cls, service, environ, argv, name=name, flags=flags)
    except ConfigError as error:
        lines = "".join(f"  {problem}\n" for problem in error.problems)
        program = name or _program(service)
        message = f"{program}: the configuration cannot be used:\n{lines}"
        sys.stderr.write(message)
        # The flag itself may be valid although others are not.
        if fd := re.search(r"--ready-fd[= ](\d+)\b", " ".join(argv)):
            with contextlib.suppress(OSError):
                write_ready_line(int(fd[1]), {"error": message[:ERROR_CHARS_MAX]})
        raise SystemExit(2) from None


def settings_of(config: type[ServiceConfig], service: str | None) -> list[ConfigSetting]:
    """Returns the settings of a model in their order.

    service: one of SERVICES; None for a tool. Raises TypeError for a field without a description.
    """
    return [ConfigSetting.of(config, name, service) for name in config.model_fields]


def _program(service: str | None) -> str:
    return (service or "tool").lower()


@dataclass(frozen=True, slots=True)
class ConfigSetting:
    """A field of a model with its names. variables: in order of precedence."""

    name: str
    field: FieldInfo
    variables: tuple[str, ...]

    @classmethod
    def of(cls, config: type[ServiceConfig], name: str, service: str | None) -> ConfigSetting:
        field = config.model_fields[name]
        if not field.description:
            raise TypeError(f"{config.__name__}.{name} has no description")
        variables = [] if service is None else [f"{PREFIX}{service}_{name.upper()}"]
        if name in ServiceConfig.model_fields:
            variables.append(f"{PREFIX}{name.upper()}")
        if name in _ALIASES:
            variables.append(_ALIASES[name])
        return cls(name, field, tuple(variables))

    @property
    def flag(self) -> str:
        return flag_name(self.name)

    @property
    def is_secret(self) -> bool:
        return not self.field.repr

    @property
    def is_optional(self) -> bool:
        return type(None) in get_args(self.field.annotation)

    @property
    def kind(self) -> Any:
        """The type without None and constraints."""
        kind = get_args(self.field.annotation)[0] if self.is_optional else self.field.annotation
        return get_args(kind)[0] if get_origin(kind) is Annotated else kind

    @property
    def metavar(self) -> str:
        if get_origin(self.kind) is Literal:
            return "|".join(get_args(self.kind))
        return "A,B,..." if get_origin(self.kind) is tuple else str(self.kind.__name__).upper()

    def options(self) -> list[click.Option]:
        """Returns the options that give it: texts, which `_find_problems` checks later."""
        metavar, text = self.metavar, self.description
        found = []
        if self.is_secret:
            of_file = f"File that contains {self.flag}."
            found = [
                _option(flag_name(self.name + FILE_SUFFIX), "PATH", of_file, type=click.Path())
            ]
        if self.kind is bool:
            same = f"The same as {self.flag}=off."
            negated = click.Option([flag_name(f"no_{self.name}")], count=True, help=same)
            return [_option(self.flag, metavar, text, is_flag=False, flag_value="on"), negated]
        completed: dict[str, Any] = {"type": click.Path()} if self.kind is Path else {}
        choices = get_args(self.kind) if get_origin(self.kind) is Literal else ()

        def complete(_ctx: click.Context, _param: click.Parameter, start: str) -> list[str]:
            return [choice for choice in choices if choice.startswith(start)]

        if choices:
            completed["shell_complete"] = complete
        return [*found, _option(self.flag, metavar, text, **completed)]

    @property
    def description(self) -> str:
        return " ".join((self.field.description or "").split())

    @property
    def default_text(self) -> str:
        """As users write it; empty: unset."""
        match self.field.default:
            case None | "" | ():
                return ""
            case bool(is_on):
                return "on" if is_on else "off"
            case tuple(names):
                return ",".join(names)
            case default:
                return str(default)

    def help_lines(self) -> str:
        if self.field.is_required():
            text = "required"
        elif not self.default_text:
            text = "unset by default"
        elif self.kind is bool:
            text = f"{self.default_text} by default"
        else:
            text = f"default {self.default_text}"
        variables = " or ".join(self.variables)
        metavar = f"[={self.metavar}]" if self.kind is bool else self.metavar
        details = "; ".join(filter(None, (variables, text)))
        lines = [f"{self.flag} {metavar}", self.description, details]
        if self.kind is bool:
            lines[0] += f", {flag_name(f'no_{self.name}')}"
        if self.is_secret:
            of_file = " or ".join(name + FILE_SUFFIX.upper() for name in self.variables)
            file = flag_name(self.name + FILE_SUFFIX)
            lines.append(f"{file} PATH or {of_file}: a file that contains it")
        return f"  {lines[0]}\n" + "".join(f"      {line}\n" for line in lines[1:])


# Any: of click.
def _option(flag: str, metavar: str, text: str, **attributes: Any) -> click.Option:
    return click.Option([flag], multiple=True, metavar=metavar, help=text, **attributes)


@dataclass(frozen=True, slots=True)
class _Given:
    """A text for a setting, and the flag or variable it came from."""

    setting: ConfigSetting
    source: str
    text: str

    @property
    def value(self) -> str | None:
        """None if the text is empty and the setting optional."""
        return None if not self.text and self.setting.is_optional else self.text


class ConfigCommand(click.Command, Generic[ConfigT]):
    """A command line whose flags are the fields of a model.

    Its context keeps the problems of the flags, so that `read` can report them with the others. The
    caller may add options and arguments of its own.
    """

    def __init__(
        self,
        config: type[ConfigT],
        service: str | None = None,
        *,
        name: str = "",
        flags: Collection[str] | None = None,
        params: Iterable[click.Parameter] = (),
        # Any: of click.
        **attributes: Any,
    ) -> None:
        """
        - service, name, flags: as of `read_config`.
        - params: options and arguments beside those of the fields.
        """
        self._config = config
        self._service = service
        self._settings = settings_of(config, service)
        self._with_flag = [s for s in self._settings if flags is None or s.name in flags]
        of_fields = [option for setting in self._with_flag for option in setting.options()]
        self._field_options = frozenset(option.name for option in of_fields)
        params = list(params)
        self.own_params = frozenset(param.name for param in params)
        super().__init__(
            name,
            params=[*params, *of_fields],
            help=attributes.pop("help", None) or inspect.cleandoc(config.__doc__ or ""),
            options_metavar="[FLAGS]",
            context_settings={"help_option_names": ["-h", "--help"]},
            **attributes,
        )

    @property
    def settings_with_flag(self) -> tuple[ConfigSetting, ...]:
        """The fields of the model that have a flag."""
        return tuple(self._with_flag)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parses what it can; the context keeps the problems."""
        problems: list[str] = []
        ctx.meta[_PROBLEMS] = problems
        ctx.allow_extra_args = True
        try:
            words = self._parse_known(ctx, args, problems)
        except click.BadOptionUsage as error:
            flag = error.option_name
            text = error.message.removeprefix(f"Option {flag!r} ").removesuffix(".")
            problems.append(f"{flag}: {text}")
            ctx.meta[_IS_PARSED] = False
            return []
        ctx.meta[_IS_PARSED] = True
        problems += [f"{word!r}: not a flag" for word in words]
        return []

    def _parse_known(
        self, ctx: click.Context, args: Sequence[str], problems: list[str]
    ) -> list[str]:
        """Parses the line without its unknown flags; returns the words that belong to no flag."""
        words = list(args)
        known = [name for param in self.get_params(ctx) for name in param.opts]
        # Ends: each turn removes a word.
        while True:
            try:
                return super().parse_args(ctx, list(words))
            except click.NoSuchOption as error:
                at = next(i for i, word in enumerate(words) if _gives(word, error.option_name))
                flag, equals, _ = words.pop(at).partition("=")
                problems.append(f"{flag}: no such flag{suggest(flag, known)}")
                if not equals and at < len(words) and not words[at].startswith("-"):
                    del words[at]  # Probably its value.

    def read(self, ctx: click.Context, environ: Mapping[str, str]) -> tuple[ConfigT, list[str]]:
        """Returns what `read_config` does, of a parsed line. Raises ConfigError with every
        problem."""
        cls, settings = self._config, self._settings
        warnings: list[str] = []
        problems: list[str] = []
        given = list(_read_environ(settings, self._service, environ, problems, warnings))
        problems += ctx.meta[_PROBLEMS]
        if ctx.meta[_IS_PARSED]:
            given = [*_read_flags(ctx, self._with_flag, problems), *given]
            missing = [setting for setting in settings if setting.field.is_required()]
            problems += [
                f"{' or '.join((setting.flag, *setting.variables[:1]))}: required and not given"
                for setting in missing
                if setting not in [item.setting for item in given]
            ]
        # A bad value is a problem even if a source of higher precedence replaces it.
        problems += [problem for item in given for problem in _find_problems(cls, item)]
        if problems:
            raise ConfigError(problems)
        winners = {item.setting.name: item for item in reversed(given)}
        config = cls.model_validate({name: item.value for name, item in winners.items()})
        if contradictions := [*config.problems(), *self._role_problems(config)]:
            found = [problem.partition(":") for problem in contradictions]
            sources = {name: item.source for name, item in winners.items()}
            raise ConfigError(
                [f"{sources.get(field, flag_name(field))}:{text}" for field, _, text in found]
            )
        return config, warnings

    def _role_problems(self, config: ConfigT) -> Iterator[str]:
        """Yields why peers refuse the certificate, as `ServiceConfig.problems`. A file that cannot
        be read is a problem of the start: it may be written later."""
        path, domain = config.tls_cert_path, config.tls_role_domain
        if self._service is None or path is None or domain is None:
            return
        role = _CERTIFICATE_ROLES.get(self._service, self._service.lower())
        wanted = certificate_name(role, domain)
        try:
            names = first_dns_names(path.read_bytes())
        except (OSError, ValueError):
            return
        if wanted not in names:
            others = ", ".join(names) or "no DNS name"
            yield f"tls_cert_path: {path} has {others}; its role here needs the name {wanted}"

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Writes the settings after the other options; a text of a setting is one line."""
        own = [
            param.get_help_record(ctx)
            for param in self.get_params(ctx)
            if isinstance(param, click.Option) and param.name not in self._field_options
        ]
        with formatter.section("Options"):
            formatter.write_dl(list(filter(None, own)))
        is_common = {s.name: s.name in ServiceConfig.model_fields for s in self._with_flag}
        for title, common in (("settings", False), ("settings of every service", True)):
            settings = [s for s in self._with_flag if is_common[s.name] is common]
            if settings:
                with formatter.section(title):
                    formatter.write("".join(map(ConfigSetting.help_lines, settings)))


def _gives(word: str, flag: str) -> bool:
    """Returns whether a word of a command line gives this flag; `-ab` gives two short ones."""
    if flag.startswith("--"):
        return word.partition("=")[0] == flag
    return word.startswith("-") and not word.startswith("--") and flag[1:] in word


def _read_flags(
    ctx: click.Context, settings: Iterable[ConfigSetting], problems: list[str]
) -> Iterator[_Given]:
    for setting in settings:
        texts = [*(ctx.params.get(setting.name) or ())]
        texts += ["off"] * ctx.params.get(f"no_{setting.name}", 0)
        files = ctx.params.get(setting.name + FILE_SUFFIX) or ()
        if (count := len(texts) + len(files)) > 1:
            problems.append(f"{setting.flag}: given {count} times; give it once")
        yield from (_Given(setting, setting.flag, text) for text in texts)
        source = flag_name(setting.name + FILE_SUFFIX)
        yield from _read_secret_files(setting, source, files, problems)


def _read_environ(
    settings: Sequence[ConfigSetting],
    service: str | None,
    environ: Mapping[str, str],
    problems: list[str],
    warnings: list[str],
) -> Iterator[_Given]:
    known = {PREFIX + name.upper() for name in ServiceConfig.model_fields}
    known.update(name for setting in settings for name in setting.variables)
    known.update(
        name + FILE_SUFFIX.upper()
        for setting in settings
        if setting.is_secret
        for name in setting.variables
    )
    others = tuple(f"{PREFIX}{other}_" for other in SERVICES if other != service)
    injected = set()
    for name in sorted(variable for variable in environ if variable.startswith(PREFIX)):
        is_url = name.endswith("_PORT") and _KUBERNETES_URL.match(environ[name])
        if is_url or (name not in known and _KUBERNETES_NAME.search(name)):
            injected.add(name)
        elif name not in known and not name.startswith(others):
            problems.append(f"{name}: no such variable{suggest(name, known, _BEGINNINGS)}")
    warnings += [f"{name} ignored: injected by Kubernetes" for name in sorted(injected)]
    for setting in settings:
        for name in setting.variables:
            if name in environ and name not in injected:
                yield _Given(setting, name, environ[name])
            source = name + FILE_SUFFIX.upper()
            if setting.is_secret and environ.get(source):
                yield from _read_secret_files(setting, source, [environ[source]], problems)


def _read_secret_files(
    setting: ConfigSetting, source: str, paths: Iterable[str], problems: list[str]
) -> Iterator[_Given]:
    for path in paths:
        try:
            text = Path(path).read_text().strip()
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
            problems.append(f"{source}: cannot read {path!r}: {reason}")
            continue
        if not text:
            problems.append(f"{source}: {path!r} is empty")
            continue
        yield _Given(setting, source, text)


def _find_problems(cls: type[ServiceConfig], given: _Given) -> Iterator[str]:
    try:
        cls.model_validate({given.setting.name: given.value})
    except ValidationError as error:
        shown = f" {given.text!r}:" if given.setting.field.repr else ""
        for detail in error.errors():
            if detail["loc"][0] == given.setting.name:
                message = detail["msg"].removeprefix("Value error, ")
                yield f"{given.source}:{shown} {message[:1].lower()}{message[1:]}"
