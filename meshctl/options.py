"""The command line's flags, and what they mean together.

What concerns a service alone is left to its own variables (`KVMESH_WORKER_...`): the environment
reaches every service as it is, and only what meshctl must know itself are flags here.
"""

from __future__ import annotations

import argparse
import difflib
import socket
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from common.runtime.config import PREFIX, ConfigError, ServiceConfig, read_config
from meshctl.services import MeshOptions

_DEFAULT = MeshOptions()


@dataclass(frozen=True, slots=True, kw_only=True)
class UpOptions:
    """What `meshctl up` is asked to do.

    ready_s: seconds in which all must be ready, and each service after its start.
    sample: send one chat request once ready. then: run this command once ready.
    once: stop after these. http_host: where frontends' HTTP binds. config: what all services of the
    mesh are told, the registry first.
    """

    mesh: MeshOptions
    config: ServiceConfig
    log_dir: Path
    ready_s: float = 60.0
    sample: bool = False
    then: tuple[str, ...] = ()
    once: bool = False
    http_host: str = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class HealthOptions:
    """What `meshctl health` is asked to do."""

    address: str
    service: str = ""


@dataclass(frozen=True, slots=True)
class StatusOptions:
    """What `meshctl status` is asked to do. config: where and how to ask."""

    config: ServiceConfig
    as_json: bool = False


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """What `meshctl demo` is asked to do. registry: file or consul."""

    registry: str


Options = UpOptions | HealthOptions | StatusOptions | DemoOptions


def parse(argv: Sequence[str], environ: Mapping[str, str]) -> Options:
    """The options of a command line; exits 0 for --help, 2 with a message for what is wrong."""
    parser, commands = _build_parsers(environ)
    if argv and not argv[0].startswith("-") and argv[0] not in commands:
        parser.error(f"{argv[0]!r}: no such command{_suggest(argv[0], commands)}")
    args, unknown = parser.parse_known_args(argv)
    if unknown:
        commands[args.command].reject_unknown(unknown[0])
    # Defaults from the environment are not checked against choices.
    registry = getattr(args, "registry", "file")
    if registry not in ("file", "consul"):
        parser.error(f"--registry: {registry!r} is not one of file, consul")
    match args.command:
        case "health":
            return HealthOptions(args.address, args.service)
        case "status":
            return StatusOptions(_service_config(parser, args, environ), args.json)
        case "demo":
            return DemoOptions(args.registry)
        case _:
            return _up_options(commands["up"], args, environ)


def _service_config(
    parser: _Parser, args: argparse.Namespace, environ: Mapping[str, str]
) -> ServiceConfig:
    """How to reach the registry and the services: as they are told, and by flags."""
    for name in sorted(environ):
        if name.startswith(f"{PREFIX}MESHCTL_"):
            parser.error(f"{name}: meshctl is told by flags only")
    flags = ("namespace", "registry", "registry_path", "consul_url")
    argv = [f"--{flag.replace('_', '-')}={getattr(args, flag)}" for flag in flags]
    try:
        config, _ = read_config(ServiceConfig, "MESHCTL", environ, argv)
    except ConfigError as error:
        parser.error("; ".join(error.problems))
    return config


def _up_options(up: _Parser, args: argparse.Namespace, environ: Mapping[str, str]) -> UpOptions:
    config = _service_config(up, args, environ)
    if args.http_port and args.http_port + args.frontends - 1 > 65535:
        up.error("--http-port: the ports of all --frontends must be below 65536")
    if args.then == []:
        up.error("--then: needs a command")
    if not (_workers(args) or (args.prefill and args.decode)):
        up.error("--workers: a mesh needs a worker, or --prefill and --decode")
    return UpOptions(
        mesh=_mesh_options(args, environ),
        config=config,
        log_dir=args.log_dir,
        ready_s=args.ready_s,
        sample=args.sample or (args.once and not args.then),
        then=tuple(args.then or ()),
        once=args.once,
        http_host=environ.get(f"{PREFIX}FRONTEND_HTTP_HOST", "127.0.0.1"),
    )


def _mesh_options(args: argparse.Namespace, environ: Mapping[str, str]) -> MeshOptions:
    return MeshOptions(
        frontends=args.frontends,
        routers=args.routers,
        indexers=args.indexers,
        workers=_workers(args),
        prefill=args.prefill,
        decode=args.decode,
        engine=args.engine,
        model_name=args.model_name,
        model_path=args.model_path,
        http_port=args.http_port,
        namespace=args.namespace,
        registry=args.registry,
        registry_path=args.registry_path,
        consul_url=args.consul_url,
        speedup=args.speedup,
        drain_s=args.drain_s,
        # Another host's worker-0 is not this one's predecessor.
        name_prefix=f"{socket.gethostname()}-" if args.registry == "consul" else "",
    )


class _Parser(argparse.ArgumentParser):
    def __init__(self, **settings: object) -> None:
        # Abbreviations would change their meaning with every flag that is added.
        super().__init__(allow_abbrev=False, **settings)  # type: ignore[arg-type]

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message} (see {self.prog} --help)\n")

    def reject_unknown(self, argument: str) -> NoReturn:
        """Exits, naming a word of the command line that means nothing, and one that would."""
        flag = argument.partition("=")[0]
        if not flag.startswith("-"):
            self.error(f"{argument!r}: not a flag")
        known_names = (one for action in self._actions for one in action.option_strings)
        self.error(f"{flag}: no such flag{_suggest(flag, known_names)}")


def _suggest(argument: str, known_names: Iterable[str]) -> str:
    # The dashes are no likeness.
    candidates = {one.lstrip("-"): one for one in known_names}
    matches = difflib.get_close_matches(argument.lstrip("-"), candidates, n=1)
    return f"; did you mean {candidates[matches[0]]}?" if matches else ""


def _build_parsers(environ: Mapping[str, str]) -> tuple[_Parser, Mapping[str, _Parser]]:
    """The parser of all, and those of the commands by name."""
    parser = _Parser(prog="meshctl", description="Starts, shows and asks a KVMesh.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    up = commands.add_parser(
        "up",
        help="start a mesh on this host and keep it running",
        description="Starts frontends, routers and workers on this host, restarts what dies, and"
        " ends all in order upon Ctrl-C or SIGTERM (a second one kills). Services inherit the"
        " environment, so KVMESH_<ROOM>_* configures them; the flags here win over it.",
    )
    _add_mesh_flags(up, environ)
    _add_registry_flags(up, environ)
    _add_run_flags(up)
    status = commands.add_parser("status", help="who is in the mesh, health, load and KV use")
    _add_registry_flags(status, environ)
    status.add_argument(
        "--json", action="store_true", help="for programs: ids are text, kv is from 0 to 1"
    )
    health = commands.add_parser("health", help="ask a gRPC port whether it serves")
    health.add_argument("address", type=_address, metavar="HOST:PORT")
    health.add_argument("--service", default="", metavar="NAME", help="one service of the port")
    demo = commands.add_parser(
        "demo", help="a disaggregated mesh, two requests with a common prefix, their trace"
    )
    demo.add_argument(
        "--registry",
        choices=("file", "consul"),
        default="file",
        help="where its services find each other; consul: an agent of its own, fetched if need be",
    )
    return parser, commands.choices


def _add_mesh_flags(up: argparse.ArgumentParser, environ: Mapping[str, str]) -> None:
    mesh = up.add_argument_group("the mesh")
    for name in ("routers", "frontends"):
        default = getattr(_DEFAULT, name)
        mesh.add_argument(
            f"--{name}",
            type=_positive_int,
            default=default,
            metavar="N",
            help=f"how many {name} (default {default})",
        )
    mesh.add_argument(
        "--indexers",
        type=_non_negative_int,
        default=_DEFAULT.indexers,
        metavar="N",
        help="how many indexers; without one, routers go by load alone (default 1)",
    )
    mesh.add_argument(
        "--workers",
        type=_non_negative_int,
        metavar="N",
        help="how many workers that do prefill and decode (default 2; 0 with --prefill, --decode)",
    )
    for name in ("prefill", "decode"):
        mesh.add_argument(
            f"--{name}",
            type=_non_negative_int,
            default=0,
            metavar="N",
            help=f"how many workers for {name} alone (default 0)",
        )
    mesh.add_argument(
        "--engine",
        choices=("sim", "echo", "sglang"),
        default="sim",
        help="of the workers (default sim); sglang needs its own environment: make setup-sglang",
    )
    mesh.add_argument(
        "--model-path",
        type=Path,
        metavar="DIR",
        help="folder of the model: for sglang a Hugging Face one (default: a tiny one that talks "
        "noise), for sim one with a sim.json",
    )
    mesh.add_argument(
        "--model-name",
        type=_non_empty_text,
        default=_DEFAULT.model_name,
        metavar="NAME",
        help="the model clients ask for (default sim)",
    )
    mesh.add_argument(
        "--speedup",
        type=_non_negative_float,
        metavar="X",
        help="how much faster than real time the sim engine runs; 0: infinitely",
    )
    mesh.add_argument(
        "--http-port",
        type=_port,
        default=_DEFAULT.http_port,
        metavar="PORT",
        help="of the first frontend, more of them take the ports after it; 0: any (default 8000)",
    )
    mesh.add_argument(
        "--drain-s",
        type=_non_negative_float,
        default=_DEFAULT.drain_s,
        metavar="S",
        help="seconds that streams may take to end when the mesh is stopped (default 10)",
    )


def _add_registry_flags(command: argparse.ArgumentParser, environ: Mapping[str, str]) -> None:
    registry_group = command.add_argument_group("where services find each other")
    registry_group.add_argument(
        "--registry",
        default=environ.get(f"{PREFIX}REGISTRY", _DEFAULT.registry),
        choices=("file", "consul"),
        help="default file",
    )
    registry_group.add_argument(
        "--registry-path",
        type=Path,
        default=environ.get(f"{PREFIX}REGISTRY_PATH", str(_DEFAULT.registry_path)),
        metavar="DIR",
        help="folder of the file registry (default .run/registry)",
    )
    registry_group.add_argument(
        "--consul-url",
        default=environ.get(f"{PREFIX}CONSUL_URL", _DEFAULT.consul_url),
        metavar="URL",
        help=f"the Consul agent (default {_DEFAULT.consul_url})",
    )
    registry_group.add_argument(
        "--namespace",
        default=environ.get(f"{PREFIX}NAMESPACE", _DEFAULT.namespace),
        metavar="NAME",
        help="separates meshes that share a registry (default 'default')",
    )


def _add_run_flags(up: argparse.ArgumentParser) -> None:
    run_group = up.add_argument_group("what to do with it")
    run_group.add_argument(
        "--log-dir",
        type=Path,
        default=Path(".run/logs"),
        metavar="DIR",
        help="logs go to DIR/SERVICE.log, those of the run before to SERVICE.log.1"
        " (default .run/logs)",
    )
    run_group.add_argument(
        "--ready-s",
        type=_positive_float,
        default=60.0,
        metavar="S",
        help="seconds in which all must be ready, else it is given up (default 60)",
    )
    run_group.add_argument(
        "--sample",
        action="store_true",
        help="once ready, send one chat request and print the answer as it comes",
    )
    run_group.add_argument(
        "--once",
        action="store_true",
        help="stop after the sample request, or after --then; the exit status is theirs",
    )
    run_group.add_argument(
        "--then",
        nargs=argparse.REMAINDER,
        metavar="CMD",
        help="once ready, run this command, with OPENAI_BASE_URL naming the mesh; takes the rest"
        " of the line",
    )


def _workers(args: argparse.Namespace) -> int:
    if args.workers is not None:
        return int(args.workers)
    return 0 if args.prefill or args.decode else _DEFAULT.workers


def _non_negative_int(text: str) -> int:
    number = _parse_int(text)
    if number < 0:
        raise argparse.ArgumentTypeError(f"{text}: must be 0 or more")
    return number


def _positive_int(text: str) -> int:
    number = _parse_int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text}: must be 1 or more")
    return number


def _port(text: str) -> int:
    number = _parse_int(text)
    if not 0 <= number <= 65535:
        raise argparse.ArgumentTypeError(f"{text}: must be from 0 to 65535")
    return number


def _positive_float(text: str) -> float:
    number = _parse_float(text)
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"{text}: must be above 0")
    return number


def _non_negative_float(text: str) -> float:
    number = _parse_float(text)
    if not 0 <= number < float("inf"):
        raise argparse.ArgumentTypeError(f"{text}: must be 0 or more")
    return number


def _non_empty_text(text: str) -> str:
    if not text.strip():
        raise argparse.ArgumentTypeError("must not be empty")
    return text


def _address(text: str) -> str:
    host, colon, port = text.rpartition(":")
    if not (host and colon and port.isascii() and port.isdigit()):
        raise argparse.ArgumentTypeError(f"{text!r}: must be HOST:PORT")
    return text


def _parse_int(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: must be a whole number") from None


def _parse_float(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: must be a number") from None
