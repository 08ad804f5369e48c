"""What commands of meshctl share: settings and flags.

The flags configure meshctl itself. Settings of one service are variables (`KVMESH_WORKER_...`),
which every service receives.
"""

from __future__ import annotations

import re
import socket
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import click
from pydantic import (
    AfterValidator,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
)

from common.runtime.config import (
    ConfigCommand,
    ConfigError,
    ConfigT,
    Names,
    Port,
    ServiceConfig,
)
from common.runtime.plugins import ENGINES, check_plugin_name
from meshctl.usage import UnusableSettings

# Fields with a flag of commands that read a mesh.
REGISTRY_FLAGS = ("namespace", "registry", "registry_path", "consul_url")
LOG_FLAGS = (*REGISTRY_FLAGS, "log_dir")
NO_WORKERS = "a mesh needs a worker, or --prefill and --decode"

json_flag = click.option("--json", "as_json", is_flag=True, help="Print JSON, for programs.")


class MeshCommand(ConfigCommand[ConfigT]):
    """A command with settings. Its function receives them as the first argument, then its own
    options by name, and returns the exit status. `@click.pass_obj` adds the environment before."""

    def invoke(self, ctx: click.Context) -> object:
        try:
            config, _ = self.read(ctx, ctx.obj)
        except ConfigError as error:
            raise UnusableSettings(error.problems, ctx) from None
        assert self.callback is not None
        own = {name: value for name, value in ctx.params.items() if name in self.own_params}
        return ctx.invoke(self.callback, config, **own)


class MeshConfig(ServiceConfig):
    """Settings of a command that reads a mesh."""

    registry: Literal["file", "consul"] = "file"
    """Service discovery."""

    def problems(self) -> list[str]:
        # It binds nothing. In a container these variables are meant for the service.
        is_bind_problem = re.compile(r"(host|advertise_host|metrics_port):").match
        return [problem for problem in super().problems() if not is_bind_problem(problem)]


def file_origin(config: ServiceConfig) -> str:
    """Returns the origin of the adapters of a mesh file. In a shared registry, hosts have files of
    their own."""
    return f"file {socket.gethostname()}" if config.registry == "consul" else "file"


class LogConfig(MeshConfig):
    """Settings of a command that also reads the logs of `meshctl up`."""

    log_dir: Path = Path(".run/logs")
    """Folder of the logs, as of meshctl up."""


class UpOptions(ServiceConfig):
    """Settings of `meshctl up`."""

    file: Path | None = None
    """Mesh file (`-f FILE` too): services, counts and settings, as in deploy/mesh.yaml. Flags have
    precedence over it, and it over variables. Unset: none."""
    check: bool = False
    """Only check the mesh file and the flags."""
    on: Literal["local", "ray"] = "local"
    """Where the services run: local, processes of this command; ray, actors of a Ray cluster, which
    stay when the command ends. ray needs more packages: pip install 'kvmesh[ray]'."""
    ray_address: str = ""
    """Address of the Ray cluster, HOST:PORT of its head. Unset: RAY_ADDRESS, or the cluster of this
    host."""
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
    batches: NonNegativeInt = 0
    """Number of batch services, which serve /v1/files and /v1/batches, and store responses and
    conversations. Further ones take over if the first one ends."""
    pickers: NonNegativeInt = 0
    """Number of endpoint pickers, for gateways that send requests to servers which run already."""
    ext_proc_port: Port = 9002
    """Port of the first picker for gateways; further ones use the next ports. 0: any."""
    consoles: Annotated[int, Field(ge=0, le=1)] = 0
    """1: also start a console, to which the services export their spans. It needs more packages:
    pip install 'kvmesh[console]'; make run installs them."""
    console_port: Port = 8070
    """HTTP port of the console. 0: any."""
    console_otlp_port: Port = 8071
    """Port of the console's OTLP receiver. 0: any."""
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
        # With a mesh file the services are known later (see `services.worker_groups`).
        if self.file is None and not self.has_workers:
            found.append(f"workers: {NO_WORKERS}")
        return found

    @property
    def has_workers(self) -> bool:
        return bool(self.worker_count or (self.prefill and self.decode))

    @property
    def worker_count(self) -> int:
        """Number of aggregated workers."""
        if self.workers is None:
            return 0 if self.prefill or self.decode else 2
        return self.workers

    @property
    def name_prefix(self) -> str:
        """Prefix of stable names: in a shared registry, `worker-0` of another host is another. On
        Ray a mesh has members on several hosts, and each name once."""
        is_of_host = self.registry == "consul" and self.on == "local"
        return f"{socket.gethostname()}-" if is_of_host else ""
