"""The actors of a mesh on Ray, and what a command needs of them. Only this module imports Ray.

Actors of a mesh are detached, in the namespace NAMESPACE of Ray: `NAME/controller`, which Ray
restarts, and `NAME/MEMBER.NUMBER` for each replica, which the controller replaces (NAME: the
namespace of the mesh). None is in a placement group: Ray would restart a detached actor for ever
whose group is gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import ray
import structlog
from ray._raylet import GcsClient
from ray.autoscaler.sdk import request_resources
from ray.exceptions import ActorDiedError, GetTimeoutError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from common.errors import MeshError, NotFound, Unavailable
from common.registry.open import open_registry
from meshctl.cluster.controller import Controller, RunnerError
from meshctl.cluster.deployment import (
    Deployment,
    decode_deployment,
    encode_deployment,
    spec_on_node,
)
from meshctl.cluster.reconcile import observed_start
from meshctl.cluster.replica import Replica
from meshctl.cluster.router_recommendations import read_recommendations
from meshctl.cluster.state import CPU, GPU, Needs, Node, Observed, Phase, Start
from meshctl.mesh_file.document import MeshFileError
from meshctl.services import ServiceSpec

LOG = structlog.get_logger(__name__)

NAMESPACE = "kvmesh"
CONTROLLER = "controller"
# Seconds in which a replica responds to the controller before it counts as silent.
REPORT_S = 1.0
CLUSTER_CALL_S = 5.0
# Longest time between two reads that counts as silence: more is a pause of this process.
PASSED_MAX_S = 2.0
DEREGISTER_S = 3.0
# Of a call of a command, and of the start of the controller's actor.
COMMAND_CALL_S = 30.0
_KV_NAMESPACE = NAMESPACE.encode()
_HEAD = "node:__internal_head__"
T = TypeVar("T")


class ReplicaActor:
    """Runs one replica; in its constructor, because Ray calls no method of an actor by itself."""

    def __init__(
        self, observed: Observed, spec: ServiceSpec, address: str, deployment: bytes
    ) -> None:
        mesh = decode_deployment(deployment)
        options = mesh.read_options()
        folder = _log_folder() / NAMESPACE / options.namespace / observed.id
        self._observed = observed
        self._replica = Replica(
            spec_on_node(spec, address, mesh.environ), address, options, mesh.environ, folder
        )
        # Ray runs constructors of actors with async methods on their event loop.
        self._start = asyncio.create_task(self._replica.start())

    async def report(self) -> Observed:
        """Returns the state of the replica."""
        status = self._replica.status()
        return replace(
            self._observed,
            phase=status.phase,
            detail=status.detail,
            instance_id=status.instance_id,
            addresses=status.addresses or {},
            pid=status.pid,
            failures=status.failures,
            log=status.log,
        )

    async def stop(self) -> None:
        """Drains and ends the process."""
        self._replica.stop()

    async def tail(self) -> list[str]:
        """Returns the last lines of its log."""
        return self._replica.tail()


class ControllerActor:
    """Runs the controller of one mesh. name: namespace of the mesh."""

    def __init__(self, name: str) -> None:
        self._runner = RayRunner(name)
        self._controller = Controller(self._runner, read_recommendations)
        self._task = asyncio.create_task(self._controller.run())
        self._task.add_done_callback(_exit_on_failure)

    # Any: JSON.
    async def call(self, command: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Does what a command of meshctl asks for; returns `done` or `error`."""
        try:
            return {"done": await self._call(command, arguments)}
        except (MeshError, MeshFileError, RunnerError) as error:
            return {"error": str(error)}

    async def _call(self, command: str, arguments: Mapping[str, Any]) -> Any:
        match command:
            case "apply":
                await self._controller.apply(decode_deployment(arguments["deployment"]))
            case "scale":
                await self._controller.scale(arguments["counts"])
            case "restart":
                return await self._controller.restart(arguments["names"])
            case "drain":
                await self._controller.drain(arguments["name"], is_forced=arguments["force"])
            case "start":
                await self._controller.undrain(arguments["name"])
            case "stop":
                await self._controller.stop()
        return {**self._controller.status(), "pid": os.getpid()}

    async def tail(self, replica_id: str) -> list[str]:
        """Returns the last lines of the log of a replica."""
        return await self._runner.tail(replica_id)


@dataclass(slots=True)
class _Known:
    """A replica that the controller has started or found. actor: its handle."""

    actor: Any
    last: Observed
    since: float
    has_reported: bool = False
    call: asyncio.Task[Observed] | None = None
    silent_s: float = 0.0
    """Time of this process during which its call had no response: not that in which the machine let
    this process wait."""

    def is_silent(self) -> bool:
        """Whether its last call has no response yet."""
        return self.call is not None


class RayRunner:
    """`Runner` of a Ray cluster. name: namespace of the mesh."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._known: dict[str, _Known] | None = None
        self._gcs = GcsClient(address=ray.get_runtime_context().gcs_address)
        self._key = name.encode()
        self._read_at = time.monotonic()
        self._deployment: Deployment | None = None

    async def nodes(self) -> Sequence[Node]:
        draining = await self._in_thread(self._gcs.get_draining_nodes)
        now, wall = time.monotonic(), time.time()
        found = []
        for node in await self._in_thread(ray.nodes):
            if not node["Alive"]:
                continue
            ends_ms = draining.get(node["NodeID"])
            found.append(
                Node(
                    node["NodeID"],
                    node["NodeManagerAddress"],
                    dict(node["Resources"]),
                    dict(node["Labels"]),
                    is_draining=ends_ms is not None,
                    drained_at=now + ends_ms / 1000 - wall if ends_ms else None,
                )
            )
        return found

    async def replicas(self) -> Sequence[Observed]:
        known = await self._find_replicas()
        now = time.monotonic()
        passed_s = min(now - self._read_at, PASSED_MAX_S)
        self._read_at = now
        waited = []
        for one in known.values():
            is_waited = one.call is None
            if one.call is None:
                one.call = asyncio.create_task(_report(one.actor))
            if is_waited:
                waited.append(one.call)
        if waited:
            await asyncio.wait(waited, timeout=REPORT_S)
        return [self._observe(one, now, passed_s) for one in known.values()]

    async def start(self, start: Start, spec: ServiceSpec, deployment: Deployment) -> None:
        known = await self._find_replicas()
        observed = observed_start(start)
        amounts = dict(start.desired.needs.amounts)
        self._deployment = deployment
        with _as_runner_error(f"{observed.id} was not started"):
            actor: Any = ray.remote(ReplicaActor)
            handle = actor.options(
                name=f"{self._name}/{observed.id}",
                namespace=NAMESPACE,
                lifetime="detached",
                num_cpus=amounts.pop(CPU, 0),
                num_gpus=amounts.pop(GPU, 0),
                resources=amounts,
                max_restarts=0,
                max_concurrency=16,
                scheduling_strategy=NodeAffinitySchedulingStrategy(start.node.id, soft=False),
            ).remote(observed, spec, start.node.address, encode_deployment(deployment))
        known[observed.id] = _Known(handle, observed, time.monotonic())

    async def stop(self, replica: Observed) -> None:
        known = (await self._find_replicas())[replica.id]
        with _as_runner_error(f"{replica.id} was not stopped"):
            async with asyncio.timeout(CLUSTER_CALL_S):
                await known.actor.stop.remote()

    async def forget(self, replica: Observed) -> None:
        known = (await self._find_replicas()).pop(replica.id)
        if known.call is not None:
            known.call.cancel()
        with contextlib.suppress(RayError, ValueError):
            ray.kill(known.actor, no_restart=True)
        if replica.instance_id and replica.phase is not Phase.STOPPED:
            await self._deregister(int(replica.instance_id))

    async def save(self, raw: bytes) -> None:
        if raw:
            await self._in_thread(
                lambda: self._gcs.internal_kv_put(
                    self._key, raw, True, namespace=_KV_NAMESPACE, timeout=CLUSTER_CALL_S
                )
            )
        else:
            await self._in_thread(
                lambda: self._gcs.internal_kv_del(
                    self._key, False, namespace=_KV_NAMESPACE, timeout=CLUSTER_CALL_S
                )
            )

    async def load(self) -> bytes:
        raw: bytes | None = await self._in_thread(
            lambda: self._gcs.internal_kv_get(
                self._key, namespace=_KV_NAMESPACE, timeout=CLUSTER_CALL_S
            )
        )
        self._deployment = decode_deployment(raw) if raw else None
        return raw or b""

    async def request_nodes(self, needs: Sequence[Needs]) -> None:
        bundles = [dict(one.amounts) for one in needs]
        labels = [dict(one.labels) for one in needs]
        with _as_runner_error("the autoscaler was not asked for nodes"):
            if any(labels):
                request_resources(bundles=bundles, bundle_label_selectors=labels)
            else:
                request_resources(bundles=bundles)

    async def tail(self, replica_id: str) -> list[str]:
        """Returns the last lines of the log of a replica. Raises NotFound."""
        known = (await self._find_replicas()).get(replica_id)
        if known is None:
            raise NotFound(f"{replica_id!r}: no such replica")
        lines: list[str] = await known.actor.tail.remote()
        return lines

    async def _find_replicas(self) -> dict[str, _Known]:
        """Returns the replicas; at first those that an earlier controller has started."""
        if self._known is None:
            found: dict[str, Any] = {}
            for name in await self._in_thread(ray.util.list_named_actors):
                mesh, _, replica_id = name.partition("/")
                if mesh == self._name and replica_id != CONTROLLER:
                    with contextlib.suppress(ValueError):  # It has ended meanwhile.
                        found[replica_id] = ray.get_actor(name, namespace=NAMESPACE)
            known = await asyncio.gather(*(_find(name, actor) for name, actor in found.items()))
            self._known = dict(zip(found, known, strict=True))
        return self._known

    def _observe(self, known: _Known, now: float, passed_s: float) -> Observed:
        """Returns a replica after its last call, which stays open while there is no response."""
        call = known.call
        if call is None or not call.done():
            if not known.has_reported:
                return replace(known.last, pending_s=max(now - known.since, 1e-3))
            known.silent_s += max(passed_s, 1e-3)
            return replace(known.last, silent_s=known.silent_s)
        known.call = None
        try:
            known.last = call.result()
        except ActorDiedError as error:
            return replace(known.last, is_dead=True, detail=_first_line(error))
        except (RayError, asyncio.CancelledError) as error:
            known.silent_s += max(passed_s, 1e-3)
            return replace(known.last, silent_s=known.silent_s, detail=_first_line(error))
        known.has_reported, known.silent_s = True, 0.0
        return known.last

    async def _deregister(self, instance_id: int) -> None:
        """Removes the entry of a process that has ended with its node, which others would see until
        its lease expires."""
        if self._deployment is None:
            return
        try:
            options = self._deployment.read_options()
            registry = open_registry(options)
            try:
                async with asyncio.timeout(DEREGISTER_S):
                    await registry.deregister(options.namespace, instance_id)
            finally:
                await registry.close()
        except (MeshError, TimeoutError) as error:
            LOG.warning("not_deregistered", instance=instance_id, error=str(error))

    async def _in_thread(self, call: Callable[[], T]) -> T:
        """Returns the result of a blocking call to the head. Raises RunnerError."""
        with _as_runner_error("Ray's head does not respond"):
            async with asyncio.timeout(CLUSTER_CALL_S):
                return await asyncio.to_thread(call)


# Any: a handle of an actor.
async def _find(replica_id: str, actor: Any) -> _Known:
    """Returns a replica that an earlier controller has started; one that does not respond is on no
    node, so that it is replaced."""
    member, _, number = replica_id.rpartition(".")
    group = member.rpartition("-")[0]
    observed = Observed(
        replica_id, member, int(number), group, "", 0, 0.0, "", node_id="", needs=Needs()
    )
    with contextlib.suppress(RayError, TimeoutError):
        async with asyncio.timeout(CLUSTER_CALL_S):
            observed = await _report(actor)
    return _Known(actor, observed, time.monotonic(), has_reported=True)


# Any: a handle of an actor.
async def _report(actor: Any) -> Observed:
    observed: Observed = await actor.report.remote()
    return observed


@contextlib.contextmanager
def _as_runner_error(what: str) -> Iterator[None]:
    try:
        yield
    except (RayError, TimeoutError, ValueError, OSError, RuntimeError) as error:
        raise RunnerError(f"{what}: {_first_line(error) or type(error).__name__}") from error


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0]


def _log_folder() -> Path:
    """Returns the folder of the logs of this node's Ray session."""
    node: Any = ray._private.worker._global_node
    return Path(node.get_logs_dir_path())


def _exit_on_failure(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        LOG.error("controller_failed", exc_info=error)
        # Ray starts it again.
        os._exit(1)


class RayMesh:
    """The mesh of a namespace on Ray, for commands. Create it after `connect`."""

    def __init__(self, name: str) -> None:
        self._name = name
        self.address = str(ray.get_runtime_context().gcs_address)
        """Of the cluster."""

    # Any: JSON.
    def call(self, command: str, **arguments: Any) -> Any:
        """Returns the result of a command of the controller. Raises NotFound without one,
        Unavailable, or what the controller refuses."""
        try:
            actor = ray.get_actor(f"{self._name}/{CONTROLLER}", namespace=NAMESPACE)
        except ValueError:
            raise NotFound(
                f"no mesh {self._name!r} runs on this Ray cluster; start it with meshctl up"
                " --on ray"
            ) from None
        return _result(actor.call.remote(command, arguments))

    def apply(self, deployment: Deployment) -> None:
        """Starts the controller if there is none, and hands it a deployment."""
        actor: Any = ray.remote(ControllerActor)
        handle = actor.options(
            name=f"{self._name}/{CONTROLLER}",
            namespace=NAMESPACE,
            lifetime="detached",
            get_if_exists=True,
            num_cpus=0,
            # Beside the head: the loss of another node does not delay the replacements. Ray places
            # an actor without resources anywhere, whatever its strategy.
            resources={_HEAD: 0.001},
            max_restarts=-1,
            max_concurrency=64,
        ).remote(self._name)
        _result(handle.call.remote("apply", {"deployment": encode_deployment(deployment)}))

    def end(self) -> None:
        """Ends the controller of a mesh whose members have ended."""
        with contextlib.suppress(ValueError):
            ray.kill(ray.get_actor(f"{self._name}/{CONTROLLER}", namespace=NAMESPACE))
        GcsClient(address=ray.get_runtime_context().gcs_address).internal_kv_del(
            self._name.encode(), False, namespace=_KV_NAMESPACE, timeout=CLUSTER_CALL_S
        )


# Any: a reference of Ray, and JSON.
def _result(reference: Any) -> Any:
    try:
        answer = ray.get(reference, timeout=COMMAND_CALL_S)
    except GetTimeoutError:
        raise Unavailable(f"the controller does not respond within {COMMAND_CALL_S:g} s") from None
    except RayError as error:
        raise Unavailable(f"the controller does not respond: {_first_line(error)}") from None
    if "error" in answer:
        raise Unavailable(answer["error"])
    return answer["done"]


def connect(address: str) -> None:
    """Connects this process to a Ray cluster. Raises Unavailable.

    address: "": that of RAY_ADDRESS, or of the cluster of this host.
    """
    try:
        ray.init(
            address=address or "auto",
            namespace=NAMESPACE,
            log_to_driver=False,
            configure_logging=False,
            logging_level=logging.ERROR,
        )
    except (ConnectionError, RayError, RuntimeError, ValueError) as error:
        raise Unavailable(
            f"no Ray cluster responds at {address or 'RAY_ADDRESS'}: {_first_line(error)}; start"
            " one with ray start --head, or name it with --ray-address"
        ) from None


def node_addresses() -> list[str]:
    """Returns the addresses of the live nodes."""
    return sorted({node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]})
