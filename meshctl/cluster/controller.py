"""The controller of a mesh on a cluster: keeps the replicas in their desired state."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import structlog

from common.errors import InvalidRequest, MeshError, NotFound
from common.runtime.suggestion import suggest
from meshctl.cluster.deployment import (
    Deployment,
    decode_deployment,
    desired_member,
    encode_deployment,
)
from meshctl.cluster.recommended import Recommendation, follow
from meshctl.cluster.reconcile import Plan, Policy, Reconciler
from meshctl.cluster.state import Action, Desired, Forget, Needs, Node, Observed, Phase, Start, Stop
from meshctl.services import ServiceSpec, check_counts, worker_groups

LOG = structlog.get_logger(__name__)

STEP_S = 1.0
# While members are started or replaced.
BUSY_STEP_S = 0.25
FOLLOW_S = 5.0


class Runner(Protocol):
    """What the controller needs of a cluster. Calls raise RunnerError, and have a time limit."""

    async def nodes(self) -> Sequence[Node]:
        """Returns the live nodes."""
        ...

    async def replicas(self) -> Sequence[Observed]:
        """Returns all replicas that have not been forgotten."""
        ...

    async def start(self, start: Start, spec: ServiceSpec, deployment: Deployment) -> None:
        """Starts a replica; from then on `replicas` has it."""
        ...

    async def stop(self, replica: Observed) -> None:
        """Asks a replica to drain and end."""
        ...

    async def forget(self, replica: Observed) -> None:
        """Ends what is left of a replica, and its registration."""
        ...

    async def save(self, raw: bytes) -> None:
        """Stores the deployment where the next controller finds it; b"": none."""
        ...

    async def load(self) -> bytes:
        """Returns what `save` stored last; b"": nothing."""
        ...

    async def request_nodes(self, needs: Sequence[Needs]) -> None:
        """Asks the cluster for nodes on which all these fit."""
        ...


class RunnerError(Exception):
    """The cluster did not do what was asked for."""


ReadRecommendations = Callable[
    [Deployment, Sequence[Observed]], Awaitable[Iterable[Recommendation]]
]


class Controller:
    """Runs one mesh.

    - read_recommendations: returns what the routers among the replicas recommend.
    - clock: monotonic seconds.
    """

    def __init__(
        self,
        runner: Runner,
        read_recommendations: ReadRecommendations,
        *,
        policy: Policy = Policy(),  # noqa: B008  # frozen
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._runner = runner
        self._read_recommendations = read_recommendations
        self._reconciler = Reconciler(policy)
        self._clock = clock
        self._deployment: Deployment | None = None
        self._specs: dict[str, ServiceSpec] = {}
        self._counts: Mapping[str, int] = {}
        self._follows_routers = False
        self._desired: list[Desired] = []
        self._observed: Sequence[Observed] = ()
        self._nodes: Sequence[Node] = ()
        self._plan = Plan()
        self._requested: list[Needs] | None = None
        self._problem = ""
        self._steps = 0
        self._wake = asyncio.Event()

    async def run(self) -> None:
        """Reads the stored deployment, then keeps to it until cancelled."""
        await self._restore()
        followed_at = self._clock()
        while True:
            if self._clock() - followed_at >= FOLLOW_S:
                followed_at = self._clock()
                await self._follow()
            await self._try_step()
            pause_s = BUSY_STEP_S if self._is_busy() else STEP_S
            self._wake.clear()
            try:
                async with asyncio.timeout(pause_s):
                    await self._wake.wait()
            except TimeoutError:
                pass

    async def apply(self, deployment: Deployment) -> None:
        """Runs another deployment from now on. Raises RunnerError."""
        if self._deployment is not None and not self._deployment.is_stopping:
            deployment = self._deployment.successor(deployment)
        await self._set(deployment)
        LOG.info("deployment_applied", counts=dict(self._counts))

    async def scale(self, counts: Mapping[str, int]) -> None:
        """Changes numbers of members. Raises InvalidRequest, NotFound, RunnerError."""
        deployment = self._current()
        check_counts(self._counts, counts)
        await self._set(deployment.scaled(counts))
        LOG.info("scaled", counts=dict(counts))

    async def restart(self, names: Sequence[str]) -> list[str]:
        """Replaces members, one at a time; returns their names. names: members, groups or services;
        none: all. Raises InvalidRequest, NotFound, RunnerError."""
        deployment = self._current()
        selected = [spec.name for spec in self._select(names)]
        restarts = dict(deployment.restarts)
        for name in selected:
            restarts[name] = restarts.get(name, 0) + 1
        await self._set(replace(deployment, restarts=restarts))
        LOG.info("restart_requested", members=selected)
        return selected

    async def drain(self, name: str, *, is_forced: bool) -> None:
        """Stops a member, which does not start again. Raises InvalidRequest, NotFound,
        RunnerError.

        is_forced: also the last routable one of its role.
        """
        deployment = self._current()
        if name not in self._specs:
            self._raise_unknown(name, self._specs)
        spec = self._specs[name]
        peers = [
            replica
            for replica in self._observed
            if replica.role == spec.role
            and replica.member != name
            and replica.phase is Phase.ROUTABLE
        ]
        if not peers and not is_forced:
            raise InvalidRequest(f"{name} is the last live {spec.role}")
        await self._set(replace(deployment, drained=[*deployment.drained, name]))

    async def undrain(self, name: str) -> None:
        """Starts a drained member. Raises InvalidRequest, NotFound, RunnerError."""
        deployment = self._current()
        if name not in deployment.drained:
            raise InvalidRequest(f"{name}: is not drained")
        drained = [other for other in deployment.drained if other != name]
        await self._set(replace(deployment, drained=drained))

    async def stop(self) -> None:
        """Ends all members, those that send work before those that receive it. Raises
        RunnerError."""
        if self._deployment is not None:
            await self._set(replace(self._deployment, is_stopping=True))
            LOG.info("mesh_stopping")

    # Any: JSON.
    def status(self) -> dict[str, Any]:
        """Returns the members, the nodes, and what is waited for."""
        addresses = {node.id: node.address for node in self._nodes}
        waiting = self._plan.waiting
        observed = {replica.member for replica in self._observed}
        return {
            "steps": self._steps,
            "problem": self._problem,
            "is_settled": self._is_settled(),
            "is_stopped": self._is_stopped(),
            "counts": dict(self._counts),
            "drained": [] if self._deployment is None else list(self._deployment.drained),
            "members": [
                {
                    "name": replica.member,
                    "replica": replica.id,
                    "role": replica.role,
                    "state": replica.phase.value,
                    "node": addresses.get(replica.node_id, replica.node_id),
                    "pid": replica.pid or None,
                    "instance_id": replica.instance_id or None,
                    "addresses": dict(replica.addresses),
                    "failures": replica.failures,
                    "detail": replica.detail or waiting.get(replica.member, ""),
                    "log": replica.log,
                }
                for replica in sorted(self._observed, key=lambda r: (r.rank, r.member, r.number))
            ],
            "missing": {
                desired.name: waiting.get(desired.name, "starts")
                for desired in self._desired
                if desired.name not in observed
            },
        }

    async def _restore(self) -> None:
        while True:
            try:
                raw = await self._runner.load()
                break
            except RunnerError as error:
                LOG.warning("deployment_not_read", error=str(error))
                await asyncio.sleep(STEP_S)
        if raw and self._deployment is None:
            deployment = decode_deployment(raw)
            self._use(deployment, deployment.specs())
            LOG.info("controller_restored", members=len(self._desired))

    async def _set(self, deployment: Deployment) -> None:
        """Raises RunnerError, or MeshFileError for a deployment that cannot be read; then nothing
        changes."""
        specs = deployment.specs()
        await self._runner.save(encode_deployment(deployment))
        self._use(deployment, specs)
        self._wake.set()

    def _use(self, deployment: Deployment, specs: dict[str, ServiceSpec]) -> None:
        self._desired = [desired_member(spec, deployment) for spec in specs.values()]
        self._deployment, self._specs = deployment, specs
        self._counts = deployment.group_counts()
        self._follows_routers = deployment.follows_routers()

    async def _try_step(self) -> None:
        try:
            await self._step()
            self._problem = ""
        except RunnerError as error:
            if str(error) != self._problem:
                LOG.warning("step_failed", error=str(error))
            self._problem = str(error)

    async def _step(self) -> None:
        deployment = self._deployment
        if deployment is None:
            return
        self._nodes = await self._runner.nodes()
        self._observed = await self._runner.replicas()
        # A request may change the deployment while a replica is being started.
        deployment, specs = self._deployment or deployment, self._specs
        plan = self._reconciler.step(self._desired, self._observed, self._nodes, self._clock())
        self._plan = plan
        results = await asyncio.gather(
            *(self._act(action, specs, deployment) for action in plan.actions),
            return_exceptions=True,
        )
        await self._request_nodes(plan)
        if plan.actions:
            self._observed = await self._runner.replicas()
        self._steps += 1
        # One that fails delays no other one.
        for error in filter(None, results):
            raise error

    async def _act(
        self, action: Action, specs: Mapping[str, ServiceSpec], deployment: Deployment
    ) -> None:
        match action:
            case Start():
                LOG.info("replica_starting", member=action.desired.name, node=action.node.address)
                await self._runner.start(action, specs[action.desired.name], deployment)
            case Stop():
                LOG.info("replica_stopping", replica=action.replica.id, reason=action.reason)
                await self._runner.stop(action.replica)
            case Forget():
                LOG.info("replica_ended", replica=action.replica.id, reason=action.reason)
                await self._runner.forget(action.replica)

    async def _request_nodes(self, plan: Plan) -> None:
        """Asks for nodes while members have none, and takes the request back afterwards."""
        needs = [desired.needs for desired in self._desired] if plan.unplaced else []
        if needs != (self._requested or []):
            await self._runner.request_nodes(needs)
        self._requested = needs

    async def _follow(self) -> None:
        deployment = self._deployment
        if deployment is None or deployment.is_stopping or not self._follows_routers:
            return
        try:
            found = await self._read_recommendations(deployment, self._observed)
            groups = worker_groups(deployment.read_options(), deployment.read_mesh())
            counts = follow(groups, found, self._counts)
            if counts and self._deployment is deployment:
                LOG.info("follows_routers", counts=counts)
                await self._set(deployment.scaled(counts))
        except (MeshError, RunnerError) as error:
            LOG.warning("recommendations_not_followed", error=str(error))

    def _current(self) -> Deployment:
        if self._deployment is None or self._deployment.is_stopping:
            raise NotFound("no mesh runs; start it with meshctl up --on ray")
        return self._deployment

    def _select(self, names: Sequence[str]) -> list[ServiceSpec]:
        found: dict[str, ServiceSpec] = {}
        for name in names:
            fitting = {
                spec.name: spec
                for spec in self._specs.values()
                if name in (spec.name, spec.group, spec.service)
            }
            if not fitting:
                self._raise_unknown(name, [*self._specs, *self._current().group_counts()])
            found |= fitting
        return list(found.values()) if names else list(self._specs.values())

    def _raise_unknown(self, name: str, known: Iterable[str]) -> None:
        raise InvalidRequest(f"{name!r}: no such member or service{suggest(name, known)}")

    def _is_busy(self) -> bool:
        return self._deployment is not None and not (self._is_settled() or self._is_stopped())

    def _is_settled(self) -> bool:
        """Whether each desired member has one routable replica with its settings, and no other
        replica is there."""
        by_member: dict[str, list[Observed]] = {}
        for replica in self._observed:
            by_member.setdefault(replica.member, []).append(replica)
        draining = {node.id for node in self._nodes if node.is_draining}
        return (
            bool(self._desired)
            and len(by_member) == len(self._desired)
            and all(
                len(found := by_member.get(desired.name, [])) == 1
                and found[0].phase is Phase.ROUTABLE
                and found[0].digest == desired.digest
                and found[0].node_id not in draining
                and not found[0].is_unreachable
                for desired in self._desired
            )
        )

    def _is_stopped(self) -> bool:
        is_stopping = self._deployment is not None and self._deployment.is_stopping
        return is_stopping and not self._observed
