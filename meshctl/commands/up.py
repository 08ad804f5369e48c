"""`meshctl up`: starts a mesh on this host and keeps it running until it is stopped.

Exit status: 0 after a requested stop; 1 if the mesh did not become ready, or a service exhausted
its restarts or failed to stop; 2 if nothing was started; with --once the status of the sample or
the command; 128 + n after a second signal n (see process/stop_requests.py).
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import SystemRandom

import click
import httpx

from common.access.login_links import DEFAULT_FOLDER
from common.errors import MeshError
from common.inspection import gateway
from common.registry.open import describe_registry, open_registry
from common.registry.registry import Registry
from common.rpc.channel import Security, security_from_config
from common.runtime.config import PREFIX, ServiceConfig
from common.runtime.free_ports import free_ports
from common.runtime.tasks import TaskGroup
from meshctl.commands.console import LOGIN_PATH_VARIABLE, new_link
from meshctl.commands.control_handler import ControlHandler
from meshctl.commands.mesh_options import (
    UP_FLAGS,
    MeshFileCommand,
    read_adapters,
    read_counts,
    read_specs,
    report_problems,
)
from meshctl.commands.ray_mesh import up_on_ray
from meshctl.mesh_file.document import MeshFileError
from meshctl.mesh_file.settings import service_prefix
from meshctl.options import UpOptions, file_origin
from meshctl.process.child import ProcessLauncher, with_parent_guard
from meshctl.process.control import control_server
from meshctl.process.file_adapters import FileAdapters
from meshctl.process.listeners import CannotListen, Listeners, check_port, listeners
from meshctl.process.liveness import is_live
from meshctl.process.operations import Operations
from meshctl.process.routable import find_missing
from meshctl.process.stop_requests import StopAction, StopRequests
from meshctl.process.supervise import Child, Event, RestartsExhausted, State, Supervisor
from meshctl.services import NO_COUNTS, ServiceSpec, process_count
from meshctl.view.members import members
from meshctl.view.screen import (
    YELLOW,
    Screen,
    describe_log_line,
    hints,
    http_url,
    own_command,
    should_colour,
    table,
)

SAMPLE_PROMPT = "Say hello to the mesh."
SAMPLE_TOKENS = 32
# Seconds from SIGTERM to SIGKILL of the command of --then.
COMMAND_STOP_TIMEOUT_S = 5.0
# Limit for reading the existing members.
LOOKUP_TIMEOUT_S = 2.0
NAMES_SHOWN_MAX = 8
# A service that starts for longer than the interval shows the last line of its log.
LOG_POLL_S = 1.0
PROGRESS_INTERVAL_S = 10.0
PROGRESS_CHARS_MAX = 120
EXIT_NOT_STARTED = 2

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class CannotStart(Exception):
    """Nothing was started; the message states the reason and the remedy."""


class _ThenCommand(MeshFileCommand):
    """A command of which the flag `--then` takes the rest of the line."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        at = args.index("--then") if "--then" in args else len(args)
        flags, then = args[:at], tuple(args[at + 1 :])
        if at < len(args) and not (then or ctx.resilient_parsing):
            raise click.UsageError("--then: needs a command", ctx)
        rest = super().parse_args(ctx, flags)
        ctx.params["then"] = then
        return rest


@click.command(
    "up",
    cls=_ThenCommand,
    config=UpOptions,
    flags=UP_FLAGS,
)
@click.option("--then", metavar="CMD...", help="Command to run once ready: the rest of the line.")
@click.pass_obj
def command(environ: Mapping[str, str], options: UpOptions, then: tuple[str, ...]) -> int:
    """Starts a mesh on this host, restarts services that end, and stops all on Ctrl-C or SIGTERM.

    A second signal kills. Services inherit the environment, so KVMESH_<SERVICE>_* configures them;
    the flags below have precedence. `--then CMD...` runs a command once ready, with OPENAI_BASE_URL
    set to the mesh.
    """
    sample = options.sample or (options.once and not then)
    options = options.model_copy(update={"then": then, "sample": sample})
    return up(options, environ)


def up(options: UpOptions, environ: Mapping[str, str]) -> int:
    if options.on == "ray":
        return up_on_ray(options, environ)
    if options.consoles and not options.console_otlp_port:
        # All services must have it before the console starts.
        options = options.model_copy(update={"console_otlp_port": free_ports(1)})
    try:
        specs = read_specs(options, environ)
    except MeshFileError as error:
        report_problems(error)
        return EXIT_NOT_STARTED
    if options.check:
        sys.stdout.write(f"{options.file or 'the flags'}: {len(specs)} processes, no problem\n")
        return 0
    screen = Screen(
        sys.stdout,
        sys.stderr,
        colour=should_colour(sys.stdout, environ),
        clock=time.monotonic,
        tail=lambda name: launcher.tail(name),
        log=lambda name: launcher.log_path(name),
    )
    ports = {spec.name: spec.http_port for spec in specs if spec.http_port is not None}
    try:
        with (
            _exclusive_lock(options.log_dir),
            listeners(options.http_host, ports) as frontends,
        ):
            if options.consoles:
                check_port("127.0.0.1", options.console_port, "--console-port")
                check_port("127.0.0.1", options.console_otlp_port, "--console-otlp-port")
            launcher = ProcessLauncher(options.log_dir, environ, options.pass_environ, frontends)
            command = _UpCommand(options, environ, launcher, screen, specs, frontends)
            return asyncio.run(command.run())
    except (CannotStart, CannotListen) as error:
        screen.print_error(f"{error}; nothing was started")
        return EXIT_NOT_STARTED


@contextmanager
def _exclusive_lock(log_dir: Path) -> Iterator[None]:
    """Locks the folder: a second mesh in it would mix logs and take over stable names."""
    path = log_dir / ".lock"
    try:
        log_dir.mkdir(parents=True, exist_ok=True)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise CannotStart(f"--log-dir {log_dir} cannot be used: {error.strerror}") from error
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner_pid = os.pread(fd, 20, 0).decode(errors="replace").strip()
            raise CannotStart(
                f"meshctl (pid {owner_pid}) runs a mesh with its logs in {log_dir}; for another"
                " choose another --log-dir, --http-port and --namespace"
            ) from None
        os.ftruncate(fd, 0)
        os.pwrite(fd, b"%d\n" % os.getpid(), 0)
        yield
    finally:
        os.close(fd)


async def describe_existing_services(registry: Registry, config: ServiceConfig) -> str:
    """Returns a notice about the members already registered; "" if there are none."""
    try:
        async with asyncio.timeout(LOOKUP_TIMEOUT_S):
            found = tuple((await members(registry, config)).instances.values())
    except MeshError as error:
        return f"{error.message}; services wait for it a while"
    except TimeoutError:
        return (
            f"no answer from {describe_registry(config)} for {LOOKUP_TIMEOUT_S:g} s; "
            "services wait for it a while"
        )
    if not found:
        return ""
    names = ", ".join(
        sorted(instance.stable_name or instance.service for instance in found)[:NAMES_SHOWN_MAX]
    )
    names += ", ..." if len(found) > NAMES_SHOWN_MAX else ""
    return (
        f"namespace {config.namespace!r} already has {_pluralize(len(found), 'service')} ({names}):"
        " this mesh joins them, and of two with the same name only the newer counts; for a separate"
        " mesh choose another --namespace"
    )


@dataclass
class _UpCommand:
    options: UpOptions
    environ: Mapping[str, str]
    launcher: ProcessLauncher
    screen: Screen
    specs: Sequence[ServiceSpec]
    frontends: Listeners
    session_status: int = 0
    kill_signal: int | None = None
    # Until all services are ready.
    mesh_limit: asyncio.Timeout | None = None

    async def run(self) -> int:
        mesh = self.options
        try:
            registry = open_registry(mesh)
        except MeshError as error:
            raise CannotStart(f"--registry {mesh.registry}: {error.message}") from error
        try:
            security = security_from_config(mesh)
        except MeshError as error:
            raise CannotStart(error.message) from error
        supervisor = Supervisor(
            self.specs,
            self.launcher.start,
            registry.deregister,
            namespace=mesh.namespace,
            on_event=lambda event: self._on_event(event, supervisor),
            clock=time.monotonic,
            rng=SystemRandom(),
            start_s=mesh.ready_s,
            is_live=partial(is_live, security=security),
            live_failures_max=mesh.live_failures_max,
        )
        adapters = FileAdapters(
            registry,
            mesh.namespace,
            file_origin(mesh),
            lambda text: self.screen.print_progress("mesh", "adapters", text),
            partial(read_adapters, mesh, self.environ),
        )
        self._install_signal_handlers(supervisor)
        kinds = Counter(spec.role.partition(" of ")[0] for spec in self.specs)
        service_counts = ", ".join(
            _pluralize(count, noun.removeprefix("aggregated ")) for noun, count in kinds.items()
        )
        engines = ", ".join(dict.fromkeys(spec.engine for spec in self.specs if spec.engine))
        self.screen.print_line(f"starting {service_counts} ({engines}); logs in {mesh.log_dir}")
        try:
            if notice := await describe_existing_services(registry, mesh):
                self.screen.print_progress("mesh", "note", notice, colour=YELLOW)
            adapters.read()
            async with TaskGroup() as group:
                group.create_task(supervisor.run())
                tasks = [
                    group.create_task(self._run_session(supervisor)),
                    group.create_task(self._watch_slow_starts(supervisor)),
                    group.create_task(self._serve_control(supervisor, security, adapters)),
                    group.create_task(adapters.run()),
                ]
                await supervisor.wait_for_stop()
                for task in tasks:
                    task.cancel()
        finally:
            await registry.close()
        if self.kill_signal is not None:
            return 128 + self.kill_signal
        return self.session_status or (0 if supervisor.is_clean else 1)

    def _on_event(self, event: Event, supervisor: Supervisor) -> None:
        self.screen.event(event)
        if isinstance(event, RestartsExhausted) and supervisor.is_given_up(event.service):
            self.frontends.close(event.service)

    def _undo_start(self, spec: ServiceSpec) -> None:
        self.launcher.restore_log(spec.name)
        self.frontends.keep(spec.name, process_count(spec, self.environ))

    def _install_signal_handlers(self, supervisor: Supervisor) -> None:
        requests = StopRequests()

        def on_signal(number: signal.Signals) -> None:
            match requests.receive(number, time.monotonic()):
                case StopAction.STOP:
                    self.screen.print_progress(
                        "mesh", "draining", f"{number.name} received; send it again to kill"
                    )
                    supervisor.stop()
                case StopAction.KILL:
                    self.kill_signal = number
                    self.screen.print_progress("mesh", "killed", f"{number.name} received")
                    supervisor.kill()

        for number in _SIGNALS:
            # Under `nohup` the mesh outlives its terminal.
            if number is signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN:
                continue
            asyncio.get_running_loop().add_signal_handler(number, on_signal, number)

    async def _run_session(self, supervisor: Supervisor) -> None:
        """Waits until the mesh is ready, prints it, runs the sample and the command of --then."""
        client = gateway.new_http_client(
            self.environ.get("OPENAI_API_KEY"), own_certificates=self._http_certificates()
        )
        async with client as http:
            url = await self._await_ready(supervisor, http)
            if url is None:
                self.session_status = 1
                supervisor.stop()
                return
            command_name = own_command(sys.argv[0], self.environ.get("PATH", ""))
            found = hints(url, self._models[0], command_name)
            hint_lines = [] if self.options.once else [*found, ""]
            for line in ["", *table(supervisor.children), "", *hint_lines]:
                self.screen.print_line(line)
            status = 0
            if self.options.sample:
                status = await self._sample(http, url)
            if self.options.consoles and not self.options.once:
                await self._print_login(supervisor)
            if self.options.then:
                status = await self._run(url) or status
            if self.options.once:
                self.session_status = status
                supervisor.stop()

    def _http_certificates(self) -> set[Path]:
        """Returns the certificates of frontends with HTTPS."""
        frontends = [spec for spec in self.specs if spec.service == "frontend"]
        environs = [spec.with_environ(self.environ) for spec in frontends]
        names = [f"{prefix}HTTP_TLS_CERT_PATH" for prefix in (service_prefix("frontend"), PREFIX)]
        found = [environ.get(names[0]) or environ.get(names[1]) for environ in environs]
        return {Path(path) for path in found if path}

    async def _print_login(self, supervisor: Supervisor) -> None:
        """Prints a link to the console, once it is ready."""
        child = next(c for c in supervisor.children if c.spec.is_observer)
        if problem := await supervisor.wait_ready(child):
            self.screen.print_error(f"{child.spec.name} did not start: {problem}")
            return
        environ = child.spec.with_environ(self.environ)
        folder = Path(environ.get(LOGIN_PATH_VARIABLE) or DEFAULT_FOLDER)
        try:
            link = new_link(folder, http_url(child.line))
        except (OSError, MeshError) as error:
            self.screen.print_error(f"no link to the console: {error}")
            return
        self.screen.print_line(f"console  {link}   (once, within ten minutes)")

    def _read_file(
        self, adapters: FileAdapters, counts: Mapping[str, int] = NO_COUNTS
    ) -> list[ServiceSpec]:
        """Reads the mesh file again. Raises MeshFileError."""
        specs = read_specs(self.options, self.environ, counts, is_restart=True)
        adapters.read()
        return specs

    async def _serve_control(
        self, supervisor: Supervisor, security: Security, adapters: FileAdapters
    ) -> None:
        """Serves `meshctl restart`, `drain`, `start` and `status`."""
        operations = Operations(
            supervisor,
            specs=partial(self._read_file, adapters),
            counts=partial(read_counts, self.options, self.environ),
            rotate_log=self.launcher.rotate_log,
            undo_start=self._undo_start,
            last_log_line=self._last_log_line,
            find_missing=partial(find_missing, security),
            stop_listening=self.frontends.close,
            environ=self.environ,
            routable_s=self.options.ready_s,
        )
        async with TaskGroup() as background:
            handle = ControlHandler(supervisor, operations, self.screen, background).handle
            try:
                async with control_server(self.options.log_dir, handle):
                    await asyncio.get_running_loop().create_future()
            except OSError as error:
                detail = f"no control socket in {self.options.log_dir}: {error.strerror}"
                self.screen.print_progress("mesh", "note", detail, colour=YELLOW)

    async def _watch_slow_starts(self, supervisor: Supervisor) -> None:
        """Extends the limits of starting services while their logs grow; shows last lines."""
        # By process: old and new one of a service that is replaced have the same log.
        log_bytes: dict[Child, int] = {}
        shown_at: dict[Child, float] = {}
        while True:
            await asyncio.sleep(LOG_POLL_S)
            now = asyncio.get_running_loop().time()
            starting = [c for c in supervisor.children if c.state is State.STARTING]
            known = log_bytes
            log_bytes = {child: self.launcher.log_bytes(child.spec.name) for child in starting}
            shown_at = {child: shown_at.get(child, now) for child in starting}
            for child in starting:
                if known.get(child) != log_bytes[child]:
                    supervisor.extend_start(child)
                    # A service that starts again and again makes no progress.
                    if self.mesh_limit is not None and not child.restarts.failures:
                        self.mesh_limit.reschedule(now + self.options.ready_s)
                if now - shown_at[child] >= PROGRESS_INTERVAL_S:
                    shown_at[child] = now
                    name = child.spec.name
                    self.screen.print_progress(name, "starting", self._last_log_line(name))

    def _last_log_line(self, name: str) -> str:
        line = describe_log_line("".join(self.launcher.tail(name)[-1:]))
        return line[:PROGRESS_CHARS_MAX]

    async def _await_ready(self, supervisor: Supervisor, http: httpx.AsyncClient) -> str | None:
        """Returns the URL of the first frontend when all frontends serve the model; None on
        timeout."""
        missing = ""
        try:
            async with asyncio.timeout(self.options.ready_s) as self.mesh_limit:
                while True:
                    await supervisor.wait_all_ready()
                    served = [c for c in supervisor.children if not c.spec.is_observer]
                    urls = [url for child in served if (url := http_url(child.line))]
                    found = [
                        await gateway.find_serving_problem(http, url, model)
                        for url in urls
                        for model in self._models
                    ]
                    missing = next(filter(None, found), "" if urls else "no frontend has a URL")
                    if not missing:
                        self.screen.print_progress(
                            "mesh", "ready", f"{', '.join(self._models)} is served"
                        )
                        return urls[0]
                    await asyncio.sleep(gateway.POLL_S)
        except TimeoutError:
            self._report_not_ready(supervisor, missing)
            return None
        finally:
            self.mesh_limit = None

    @property
    def _models(self) -> list[str]:
        """The models that workers serve, in the order of the mesh file."""
        return list(dict.fromkeys(spec.model for spec in self.specs if spec.model))

    def _report_not_ready(self, supervisor: Supervisor, missing: str) -> None:
        not_ready = [child for child in supervisor.children if child.state is not State.READY]
        problem = ", ".join(f"{child.spec.name} is {child.state}" for child in not_ready) or missing
        self.screen.print_error(f"not ready within {self.options.ready_s:g} s: {problem}")
        for child in not_ready:
            self.screen.print_start_error(child.spec.name, child.start_error)

    async def _sample(self, http: httpx.AsyncClient, url: str) -> int:
        body = gateway.chat_body(self._models[0], SAMPLE_PROMPT, SAMPLE_TOKENS)
        note = "   (the sim engine runs no model: its words are random)"
        self.screen.print_line(f"> {SAMPLE_PROMPT}{note if self.options.engine == 'sim' else ''}")
        try:
            async with aclosing(gateway.chat(http, url, body)) as pieces:
                async for piece in pieces:
                    self.screen.piece(piece)
        except gateway.GatewayError as error:
            self.screen.print_line()
            self.screen.print_error(f"the sample request failed: {error}")
            return 1
        self.screen.print_line()
        return 0

    async def _run(self, url: str) -> int:
        """Runs the command of --then on this terminal; it ends when the mesh is stopped."""
        environ = {"OPENAI_API_KEY": "unused", **self.environ, "OPENAI_BASE_URL": f"{url}/v1"}
        command = with_parent_guard(self.options.then)
        process = await asyncio.create_subprocess_exec(*command, env=environ)
        try:
            status = await process.wait()
        except asyncio.CancelledError:
            process.terminate()
            try:
                async with asyncio.timeout(COMMAND_STOP_TIMEOUT_S):
                    await process.wait()
            except TimeoutError:
                process.kill()
                await process.wait()
            raise
        if status != 0:
            self.screen.print_error(f"{self.options.then[0]} ended with {status}")
        return status if status >= 0 else 128 - status


def _pluralize(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
