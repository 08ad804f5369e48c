"""Command lines of meshctl.

The flags configure meshctl itself. Settings of one service are variables (`KVMESH_WORKER_...`),
which every service receives.
"""

from __future__ import annotations

import argparse
import re
import socket
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Literal, NoReturn

from pydantic import (
    AfterValidator,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
)

from common.runtime.config import (
    PREFIX,
    Names,
    Port,
    ServiceConfig,
    read_config_or_exit,
    suggest,
)
from common.runtime.plugins import ENGINES, check_plugin_name

_REGISTRY_FLAGS = ("namespace", "registry", "registry_path", "consul_url")
_COMMANDS = {
    "up": "start a mesh on this host and keep it running",
    "status": "show members, health, load and KV use",
    "health": "request the health of a gRPC port",
    "keys": "create, list, revoke and rotate the API keys of clients",
    "replay": "compare routing policies on a trace, in virtual time",
    "demo": "run a disaggregated mesh, two requests with a common prefix, and show their trace",
}


class StatusConfig(ServiceConfig):
    """Shows the members of a mesh with their health, load and KV use.

    `meshctl status KEY` shows one member, by its key in log events. With `--json` it prints JSON:
    ids are text, KV use is from 0 to 1.
    """

    registry: Literal["file", "consul"] = "file"
    """Service discovery."""

    def problems(self) -> list[str]:
        # It binds nothing. In a container these variables are meant for the service.
        is_bind_problem = re.compile(r"(host|advertise_host|metrics_port):").match
        return [problem for problem in super().problems() if not is_bind_problem(problem)]


class UpOptions(ServiceConfig):
    """Starts a mesh on this host, restarts services that end, and stops all on Ctrl-C or SIGTERM.

    A second signal kills. Services inherit the environment, so KVMESH_<SERVICE>_* configures them;
    the flags below have precedence. `--then CMD...` runs a command once ready, with OPENAI_BASE_URL
    set to the mesh; it takes the rest of the line.
    """

    registry: Literal["file", "consul"] = "file"
    """Service discovery."""
    drain_s: NonNegativeFloat = 10.0
    """Seconds in which streams may end when the mesh stops."""
    routers: PositiveInt = 1
    """Number of routers."""
    frontends: PositiveInt = 1
    """Number of frontends."""
    indexers: NonNegativeInt = 1
    """Number of indexers. 0: routers only use their own decisions."""
    workers: NonNegativeInt | None = None
    """Number of aggregated workers. Unset: 2, or 0 with --prefill or --decode."""
    prefill: NonNegativeInt = 0
    """Number of prefill workers."""
    decode: NonNegativeInt = 0
    """Number of decode workers."""
    engine: Annotated[str, AfterValidator(partial(check_plugin_name, built_in=ENGINES))] = "sim"
    """Engine of the workers: sim, echo, sglang, or module:factory of your own. sglang needs its own
    environment: make setup-sglang."""
    model_path: Path | None = None
    """Folder of the model: for sglang a Hugging Face model (unset: a tiny model with random
    output), for sim a folder with sim.json."""
    model_name: Annotated[str, Field(pattern=r"\S")] = "sim"
    """The `model` of client requests."""
    speedup: NonNegativeFloat | None = None
    """Speed of the sim engine as a multiple of real time. 0: no delays."""
    http_port: Port = 8000
    """HTTP port of the first frontend; further frontends use the next ports. 0: any."""
    log_dir: Path = Path(".run/logs")
    """Folder of the logs: NAME.log, and NAME.log.1 of the previous run."""
    ready_s: PositiveFloat = 60.0
    """Seconds that a service may take to become ready, at first and after a restart. They count
    from the last line of its log, so a slow start that reports progress is not ended."""
    live_failures_max: NonNegativeInt = 20
    """Failed liveness checks in a row, one every 3 s, after which a service that was live is killed
    and started again. 0: never."""
    pass_environ: Names = ()
    """More variables of this environment that the services receive, such as MY_ENGINE_*. By default
    they receive KVMESH_* and what their libraries and engines read: paths, languages, proxies,
    Python, OpenTelemetry, CUDA, NCCL, SGLang and Hugging Face."""
    sample: bool = False
    """Once ready, send one chat request and print the response as it arrives."""
    once: bool = False
    """Stop after the sample request or --then, with its exit status."""
    then: tuple[str, ...] = ()
    """Command to run once ready."""
    http_host: str = "127.0.0.1"
    """Address that the frontends bind for HTTP."""

    def problems(self) -> list[str]:
        found = super().problems()
        if self.http_port and self.http_port + self.frontends - 1 > 65535:
            found.append("http_port: the ports of all --frontends must be below 65536")
        if not (self.worker_count or (self.prefill and self.decode)):
            found.append("workers: a mesh needs a worker, or --prefill and --decode")
        return found

    @property
    def worker_count(self) -> int:
        """Number of aggregated workers."""
        if self.workers is None:
            return 0 if self.prefill or self.decode else 2
        return self.workers

    @property
    def name_prefix(self) -> str:
        """Prefix of stable names: in a shared registry, `worker-0` of another host is another."""
        return f"{socket.gethostname()}-" if self.registry == "consul" else ""


def command_error(argv: Sequence[str]) -> SystemExit:
    """Returns the exit for a missing or unknown command, after its message; status 0 for --help."""
    match argv:
        case ["-h" | "--help", *_]:
            lines = [f"  {name:8}{text}\n" for name, text in _COMMANDS.items()]
            sys.stdout.write(f"usage: meshctl COMMAND [FLAGS]\n\n{''.join(lines)}")
            return SystemExit(0)
        case [command, *_]:
            message = f"{command!r}: no such command{suggest(command, _COMMANDS)}"
        case _:
            message = f"a command is required: {', '.join(_COMMANDS)}"
    return _failure("meshctl", message)


def _failure(program: str, message: str) -> SystemExit:
    sys.stderr.write(f"{program}: {message} (see {program} --help)\n")
    return SystemExit(2)


def parse_up(argv: list[str], environ: Mapping[str, str]) -> UpOptions:
    """Exits 0 for --help, 2 with a message for a bad argument, as the others below."""
    at = argv.index("--then") if "--then" in argv else len(argv)
    flags, then = argv[:at], tuple(argv[at + 1 :])
    if at < len(argv) and not then:
        raise _failure("meshctl up", "--then: needs a command")
    with_flag = (UpOptions.model_fields.keys() - ServiceConfig.model_fields.keys()).union(
        _REGISTRY_FLAGS, ["drain_s"]
    )
    options, _ = read_config_or_exit(
        UpOptions, None, environ, flags, name="meshctl up", flags=with_flag - {"then", "http_host"}
    )
    http_host = environ.get(f"{PREFIX}FRONTEND_HTTP_HOST", "127.0.0.1")
    sample = options.sample or (options.once and not then)
    return options.model_copy(update={"then": then, "http_host": http_host, "sample": sample})


def parse_status(argv: list[str], environ: Mapping[str, str]) -> tuple[StatusConfig, str, bool]:
    """Returns the configuration, the key of the member to show ("": all), and whether the output is
    JSON."""
    flags = [word for word in argv if word != "--json"]
    key = flags.pop(0) if flags and not flags[0].startswith("-") else ""
    config, _ = read_config_or_exit(
        StatusConfig, None, environ, flags, name="meshctl status", flags=_REGISTRY_FLAGS
    )
    return config, key, "--json" in argv


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise _failure(self.prog, message)


def parse_demo(argv: list[str]) -> str:
    """Returns the registry."""
    parser = _Parser(prog="meshctl demo", description=_COMMANDS["demo"], allow_abbrev=False)
    parser.add_argument(
        "--registry",
        choices=("file", "consul"),
        default="file",
        help="service discovery; consul starts its own agent, downloaded if necessary",
    )
    registry: str = parser.parse_args(argv).registry
    return registry
