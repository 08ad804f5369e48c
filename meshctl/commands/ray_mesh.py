"""What the commands of meshctl do with a mesh on Ray.

`meshctl up --on ray` writes RAY_FILE into its folder of logs, so that `scale`, `restart`, `drain`,
`start` and `down` find the mesh without flags.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common.errors import InvalidRequest, MeshError, Unavailable
from common.registry.open import open_registry
from common.runtime.hosts import is_loopback
from meshctl.cluster.deployment import new_deployment, spec_on_node
from meshctl.commands.mesh_options import report_problems
from meshctl.mesh_file.document import MeshFileError
from meshctl.mesh_file.load import LoadedMesh, read_mesh_file
from meshctl.mesh_file.placed_adapters import apply_adapters
from meshctl.mesh_file.schema import Adapter, MeshFile
from meshctl.options import UpOptions
from meshctl.process.environment import passed_variables
from meshctl.process.settings_check import check_settings
from meshctl.services import build_service_specs, worker_groups
from meshctl.view.screen import Screen, align, hints, own_command, should_colour

if TYPE_CHECKING:
    from meshctl.cluster.on_ray import RayMesh

RAY_FILE = "ray.json"
POLL_S = 0.3
NOT_READY = 1
NOT_STARTED = 2
# Members that are named in a message.
NAMES_SHOWN_MAX = 8


def up_on_ray(options: UpOptions, environ: Mapping[str, str]) -> int:
    """Runs a mesh on a Ray cluster, and waits until it serves; returns the exit status."""
    screen = Screen(
        sys.stdout,
        sys.stderr,
        colour=should_colour(sys.stdout, environ),
        clock=time.monotonic,
        tail=lambda _name: [],
        log=lambda name: name,
    )
    try:
        loaded = None if options.file is None else read_mesh_file(options.file, environ)
        mesh = MeshFile() if loaded is None else loaded.mesh
        _refuse_unsupported(options)
        own = dict(environ) if loaded is None else loaded.with_shared_settings(environ)
        passed = passed_variables(environ, options.pass_environ)
        # Processes on other nodes have other working folders.
        folder = {"registry_path": options.registry_path.absolute()}
        deployment = new_deployment(options.model_copy(update=folder), mesh, passed, own)
        if options.check:
            specs = build_service_specs(options, mesh)
            _check(options, mesh, environ, loaded, "127.0.0.1")
            screen.print_line(f"{options.file or 'the flags'}: {len(specs)} processes, no problem")
            return 0
        cluster, addresses = _connect(options.ray_address, options.namespace)
        _check_registry(options, addresses)
        _check(options, mesh, environ, loaded, addresses[0])
        screen.print_line(f"on {len(addresses)} nodes of Ray ({', '.join(addresses)})")
        cluster.apply(deployment)
        asyncio.run(_store_adapters(options, mesh.adapters))
    except MeshFileError as error:
        report_problems(error)
        return NOT_STARTED
    except MeshError as error:
        screen.print_error(f"{error.message}; nothing was started")
        return NOT_STARTED
    _write_pointer(options, cluster.address)
    watch = _Watch(cluster, screen.print_progress)
    status = watch.wait(lambda found: bool(found["is_settled"]), options.ready_s)
    if status is None:
        _report_not_ready(screen, options, watch.status)
        return NOT_READY
    _print_mesh(screen, status, _models(options, mesh), environ)
    return 0


async def _store_adapters(options: UpOptions, adapters: Sequence[Adapter]) -> None:
    registry = open_registry(options)
    try:
        await apply_adapters(registry, options.namespace, adapters, "file")
    finally:
        await registry.close()


def requests_of_ray(folder: Path, line: Mapping[str, Any]) -> Iterator[dict[str, Any]] | None:
    """Yields the answers of the controller of a mesh on Ray as the control socket does; None if the
    folder names none. line: see `ControlRequest`."""
    try:
        pointer = json.loads((folder / RAY_FILE).read_text())
    except (OSError, ValueError):
        return None
    return _answers(folder, pointer, line)


def _answers(
    folder: Path, pointer: Mapping[str, Any], line: Mapping[str, Any]
) -> Iterator[dict[str, Any]]:
    progress: list[dict[str, Any]] = []

    def report(name: str, state: str, detail: str) -> None:
        progress.append({"name": name, "state": state, "detail": detail})

    try:
        cluster, _ = _connect(pointer["address"], pointer["namespace"])
        yield from _do(cluster, line, pointer["ready_s"], report, progress)
        if line["command"] == "stop":
            cluster.end()
            (folder / RAY_FILE).unlink(missing_ok=True)
    except MeshError as error:
        yield {"error": error.message}


def _do(
    cluster: RayMesh,
    line: Mapping[str, Any],
    ready_s: float,
    report: Callable[..., None],
    progress: list[dict[str, Any]],
) -> Iterator[dict[str, Any]]:
    """Yields progress, then the result."""
    watch = _Watch(cluster, report)
    watch.look()
    names: Sequence[str] = line.get("names", ())
    done: Any = {}
    is_over: Callable[[Mapping[str, Any]], bool] = lambda found: bool(found["is_settled"])  # noqa: E731
    match line["command"]:
        case "status":
            yield {"done": cluster.call("status")["members"]}
            return
        case "scale":
            cluster.call("scale", counts=line["counts"])
        case "restart":
            if line.get("new_first") is not None:
                raise InvalidRequest("--surge and --no-surge: not on Ray")
            selected = cluster.call("restart", names=list(names))
            done = {"replaced": [{"name": name} for name in selected], "failed": None}
            if not line.get("wait"):
                yield {"done": {"planned": [{"name": name} for name in selected]}}
                return
        case "drain":
            cluster.call("drain", name=names[0], force=line.get("force", False))
        case "start":
            cluster.call("start", name=names[0])
        case "stop":
            cluster.call("stop")
            is_over = lambda found: bool(found["is_stopped"])  # noqa: E731
        case other:
            raise InvalidRequest(f"{other}: not on Ray")
    for _ in watch.steps(is_over, ready_s):
        yield from progress
        progress.clear()
    if watch.is_late:
        yield {"error": f"no progress for {ready_s:g} s: {describe_unsettled(watch.status)}"}
        return
    yield {"done": done}


class _Watch:
    """Follows the members of a mesh. report: receives each change."""

    def __init__(self, cluster: RayMesh, report: Callable[..., None]) -> None:
        self._cluster = cluster
        self._report = report
        self._shown: dict[str, str] = {}
        self.status: dict[str, Any] = {}
        self.is_late = False

    def look(self) -> None:
        """Reads the present state, which counts as reported."""
        self.status = self._cluster.call("status")
        self._shown = {key: f"{line[1]} {line[2]}" for key, line in self._lines().items()}

    def wait(
        self, is_over: Callable[[Mapping[str, Any]], bool], limit_s: float
    ) -> dict[str, Any] | None:
        """Returns the state once a condition holds; None if nothing has changed for `limit_s`."""
        for _ in self.steps(is_over, limit_s):
            pass
        return None if self.is_late else self.status

    def steps(self, is_over: Callable[[Mapping[str, Any]], bool], limit_s: float) -> Iterator[None]:
        """Yields after each look until a condition holds, or nothing has changed for `limit_s`."""
        deadline = time.monotonic() + limit_s
        while True:
            self.status = self._cluster.call("status")
            if self._print_changes():
                deadline = time.monotonic() + limit_s
            yield
            if is_over(self.status):
                return
            if time.monotonic() > deadline:
                self.is_late = True
                return
            time.sleep(POLL_S)

    def _lines(self) -> dict[str, tuple[str, str, str]]:
        lines = {
            member["replica"]: (member["name"], member["state"], _detail(member))
            for member in self.status["members"]
        }
        missing = self.status["missing"].items()
        return lines | {name: (name, "missing", text) for name, text in missing if text != "starts"}

    def _print_changes(self) -> bool:
        lines, changed = self._lines(), False
        for key, (name, state, detail) in lines.items():
            text = f"{state} {detail}"
            if self._shown.get(key) != text:
                changed = True
                self._report(name, state, detail)
            self._shown[key] = text
        for key in self._shown.keys() - lines.keys():
            del self._shown[key]
            changed = True
        return changed


def _detail(member: Mapping[str, Any]) -> str:
    addresses = ", ".join(f"{kind} {at}" for kind, at in sorted(member["addresses"].items()))
    where = f"on {member['node']}"
    parts = (where, addresses if member["state"] == "routable" else "", member["detail"])
    return "; ".join(filter(None, parts))


def describe_unsettled(status: Mapping[str, Any]) -> str:
    """Returns the members that are not routable, with what they wait for."""
    found = [
        f"{member['name']} is {member['state']}"
        + (f" ({member['detail']})" if member["detail"] else "")
        for member in status["members"]
        if member["state"] != "routable"
    ]
    found += [f"{name} {reason}" for name, reason in status["missing"].items()]
    found += [status["problem"]] if status["problem"] else []
    return "; ".join(found[:NAMES_SHOWN_MAX]) or "members are being replaced"


def _connect(address: str, namespace: str) -> tuple[RayMesh, list[str]]:
    """Returns the mesh and the addresses of the nodes. Raises Unavailable."""
    try:
        from meshctl.cluster import on_ray
    except ModuleNotFoundError as error:
        if error.name != "ray":
            raise
        raise Unavailable(
            "Ray is not installed in this environment: pip install 'kvmesh[ray]'"
        ) from None
    on_ray.connect(address)
    addresses = on_ray.node_addresses()
    if not addresses:
        raise Unavailable("the Ray cluster has no live node")
    return on_ray.RayMesh(namespace), addresses


def _refuse_unsupported(options: UpOptions) -> None:
    """Raises InvalidRequest for what a mesh on Ray does not have."""
    refused = {
        "--consoles": bool(options.consoles),
        "--then": bool(options.then),
        "--once": options.once,
        "--sample": options.sample,
    }
    if found := [flag for flag, is_given in refused.items() if is_given]:
        raise InvalidRequest(
            f"{', '.join(found)}: not with --on ray; the command returns when the mesh serves"
        )


def _check_registry(options: UpOptions, addresses: Sequence[str]) -> None:
    """Raises InvalidRequest if the nodes cannot share the registry."""
    is_one_host = all(map(is_loopback, addresses)) or len(addresses) == 1
    if options.registry == "file" and not is_one_host:
        raise InvalidRequest(
            f"registry: a file registry is of one host, and Ray has {len(addresses)} nodes"
            f" ({', '.join(addresses[:NAMES_SHOWN_MAX])}); use registry: consul",
            "registry",
        )


def _check(
    options: UpOptions,
    mesh: MeshFile,
    environ: Mapping[str, str],
    loaded: LoadedMesh | None,
    address: str,
) -> None:
    """Raises MeshFileError with the settings that a service would refuse on a node."""
    specs = build_service_specs(options, mesh)
    check_settings([spec_on_node(spec, address, environ) for spec in specs], environ, loaded)


def _write_pointer(options: UpOptions, address: str) -> None:
    options.log_dir.mkdir(parents=True, exist_ok=True)
    pointer = {
        "address": address,
        "namespace": options.namespace,
        "ready_s": options.ready_s,
    }
    (options.log_dir / RAY_FILE).write_text(json.dumps(pointer))


def _models(options: UpOptions, mesh: MeshFile) -> list[str]:
    return list(dict.fromkeys(group.model for group in worker_groups(options, mesh)))


def _report_not_ready(screen: Screen, options: UpOptions, status: Mapping[str, Any]) -> None:
    problem = describe_unsettled(status)
    screen.print_error(f"no progress for {options.ready_s:g} s: {problem}")
    screen.print_error("the mesh stays on Ray, which goes on to start it; meshctl down ends it")


def _print_mesh(
    screen: Screen, status: Mapping[str, Any], models: Sequence[str], environ: Mapping[str, str]
) -> None:
    rows = [("SERVICE", "STATE", "NODE", "PID", "ADDRESS", "URL")]
    for member in status["members"]:
        addresses = member["addresses"]
        rows.append(
            (
                member["name"],
                member["state"],
                member["node"],
                str(member["pid"] or "-"),
                addresses.get("grpc", "-"),
                addresses.get("http", "-"),
            )
        )
    command = own_command(sys.argv[0], environ.get("PATH", ""))
    urls = [row[-1] for row in rows[1:] if row[-1] != "-"]
    lines = hints(urls[0], models[0], command)[:-1]
    stop = f"stop     {command} down"
    for line in ["", *align(rows), "", *lines, stop]:
        screen.print_line(line)
