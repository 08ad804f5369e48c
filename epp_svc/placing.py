"""Placements and bookings of a picker: what it requests of a router for each request."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from random import Random

from common.errors import MeshError, Overloaded, Unavailable
from common.registry.instances import Instance
from common.request.placement import Decision, Query
from common.request.preprocessed import RoutingHints
from epp_svc.core.endpoints import Endpoints, find_endpoints, retry_order, server_model
from epp_svc.core.hints import Hints
from epp_svc.core.messages import Pick
from epp_svc.prompts import PromptTokens, ReadBody, find_model, tokenize_body, tokenized_model
from frontend_svc.models.catalog import ModelCatalog
from frontend_svc.models.variants import VariantChoice, choose, sticky_key
from frontend_svc.request.conversation import affinity_key
from frontend_svc.request.placement_request import (
    PlacementKey,
    PlacementRequest,
    exclusion_reasons,
    new_placement,
)
from frontend_svc.routers.client import RouterClient
from frontend_svc.workers.breaker import Cause
from frontend_svc.workers.client import EngineClient

NOT_PLACED = "PICK_TIMEOUT"


@dataclass(slots=True)
class Booked:
    """A placed request, until it is freed."""

    key: PlacementKey
    placement: PlacementRequest
    decision: Decision
    endpoints: Endpoints
    pick: Pick
    model: str
    """The model or adapter."""

    prompt: PromptTokens
    worker_id: int
    choice: VariantChoice | None = None
    """Of a request to a configured alias."""


class Placing:
    """Places requests by the routers of the mesh, and keeps the bookings of a process."""

    def __init__(
        self,
        router: RouterClient,
        models: ModelCatalog,
        engines: EngineClient,
        fallbacks: int,
        rng: Random,
    ) -> None:
        self._router = router
        self._models = models
        self._engines = engines
        self._fallbacks = fallbacks
        self._rng = rng
        self.open_picks: Counter[int] = Counter()
        """Open bookings by worker."""

    async def place(
        self,
        request_id: str,
        body: ReadBody,
        hints: Hints,
        subset: tuple[str, ...] | None,
        limit_s: float,
        conversation: bytes = b"",
        session: bytes = b"",
    ) -> Booked:
        """Returns a placement with a booking, which `free` ends. A cancelled call leaves none.

        - conversation: the client's name of it; see `conversation_name`.
        - session: its session; b"": the conversation is it.

        Raises Unavailable without an endpoint, UnknownModel, InvalidRequest, and Overloaded if the
        mesh is full, or if the router does not place the request within `limit_s`.
        """
        loop = asyncio.get_running_loop()
        arrived_at = loop.time()
        name = hints.model or body.model
        choice = self._choose(name, hints, session or conversation)
        name = find_model(self._models, name if choice is None else choice.model)
        model = tokenized_model(self._models, name, body)
        workers = self._models.workers(name)
        endpoints = find_endpoints(name, workers, subset)
        prompt = await tokenize_body(body, model)
        base = self._models.served_as(name)
        routing = _routing(body, base, name, endpoints)
        query = Query(
            base,
            prompt.total,
            routing=routing,
            strict_priority=hints.level,
            tenant=hints.tenant,
            affinity_key=affinity_key(hints.tenant, name, conversation),
        )
        placement = PlacementRequest(query, arrived_at)
        if prompt.first is not None and model is not None:
            placement = new_placement(query, prompt.first, model.hasher_for(routing), arrived_at)
        excluded = self._engines.excluded_workers(endpoints.by_id)
        if excluded:
            placement = placement.excluding(
                excluded, exclusion_reasons(self._engines.exclusion_reasons(), {})
            )
        key = (request_id, 0)
        decision = await self._decide(key, placement, arrived_at + limit_s)
        worker_id = decision.worker.worker_id
        worker = next((one for one in workers if one.id == worker_id), None)
        if worker is None or worker_id not in endpoints.by_id:
            # The router may see a worker before this process does.
            self._router.free(key)
            raise Unavailable("the server of the placement is not known yet", 1.0)
        # The stream reports whether its engine works; it is opened again when it was idle.
        self._engines.connect(worker_id, worker.stream_address)
        order = retry_order(endpoints, worker_id, excluded, self.open_picks, self._fallbacks)
        self.open_picks[worker_id] += 1
        pick = Pick(order, _new_body(body, hints, name, base, worker))
        return Booked(key, placement, decision, endpoints, pick, name, prompt, worker_id, choice)

    def prefill_done(self, booked: Booked) -> None:
        self._router.prefill_done(booked.key)

    def move(self, booked: Booked, endpoint: str) -> None:
        """Books the worker that has served in place of the chosen one, which is probed before it
        gets requests again."""
        reason = f"the gateway has used {endpoint} in place of {booked.pick.endpoints[0]}"
        self._engines.failed(booked.worker_id, reason, Cause.FAILING)
        worker_id = booked.endpoints.worker_of(endpoint)
        self.free(booked)
        if worker_id is None:
            return
        query = booked.placement.query
        routing = replace(query.routing or RoutingHints(), backend_instance_id=worker_id)
        pinned = replace(query, routing=routing, excluded_worker_ids=frozenset())
        booked.key = (booked.key[0], booked.key[1] + 1)
        booked.worker_id = worker_id
        self.open_picks[worker_id] += 1
        placement = replace(booked.placement, query=pinned)
        # If the router refuses, nothing is booked, and the request goes on.
        self._router.place(booked.key, placement, _ignore)

    def free(self, booked: Booked) -> None:
        """Ends a booking."""
        self._router.free(booked.key)
        self.open_picks[booked.worker_id] -= 1
        if self.open_picks[booked.worker_id] <= 0:
            del self.open_picks[booked.worker_id]

    def _choose(self, name: str, hints: Hints, session: bytes) -> VariantChoice | None:
        """Returns the variant for a request to a configured alias; None: the name is none. Raises
        Unavailable if no worker has ever served it."""
        alias = self._models.weighted_aliases.get(name)
        if alias is None:
            return None
        key = sticky_key(alias, session, hints.tenant)
        chosen = choose(name, alias, key, self._models.is_served, self._rng)
        self._models.check_choice(chosen)
        return chosen

    async def _decide(
        self, key: PlacementKey, placement: PlacementRequest, until: float
    ) -> Decision:
        reply: asyncio.Future[Decision | MeshError] = asyncio.get_running_loop().create_future()
        self._router.place(key, placement, _setter(reply))
        try:
            async with asyncio.timeout_at(until):
                decision = await reply
        except TimeoutError:
            self._router.free(key)
            text = "the mesh is full: the request was not placed in time"
            raise Overloaded(1.0, text, reason=NOT_PLACED) from None
        except asyncio.CancelledError:
            self._router.free(key)
            raise
        if isinstance(decision, MeshError):
            raise decision
        return decision


def _new_body(body: ReadBody, hints: Hints, name: str, base: str, worker: Instance) -> bytes | None:
    """Returns the body with the name that the server has for the model; None if the client's body
    has it. An adapter has the same name at the server."""
    if body.value is None or (not body.model and not hints.model):
        return None
    wanted = name
    if name == base:
        wanted = server_model(worker) or name
    return None if body.model == wanted else body.with_model(wanted)


def _routing(body: ReadBody, base: str, name: str, endpoints: Endpoints) -> RoutingHints | None:
    """Returns the hints for the router; None without any."""
    salt = None if body.request is None else body.request.cache_salt
    allowed = frozenset(endpoints.by_id) if endpoints.is_restricted else None
    adapter = None if name == base else name
    if salt is None and allowed is None and adapter is None:
        return None
    return RoutingHints(lora_name=adapter, allowed_worker_ids=allowed, cache_salt=salt)


def _setter(
    future: asyncio.Future[Decision | MeshError],
) -> Callable[[Decision | MeshError], None]:
    """Returns a callback that sets a future which may be cancelled."""

    def set_result(reply: Decision | MeshError) -> None:
        if not future.done():
            future.set_result(reply)

    return set_result


def _ignore(_: Decision | MeshError) -> None:
    """Takes a reply that nothing waits for."""
