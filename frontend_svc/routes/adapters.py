"""`/v1/adapters`: the adapters that workers shall hold. They decide by themselves which of them
does (`worker_svc/adapters`)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, Any

import orjson
from pydantic import Field, ValidationError

from common.errors import InvalidRequest, NotFound, UnknownModel
from common.registry.adapters import (
    COPIES_MAX,
    NAME_CHARS_MAX,
    NAME_PATTERN,
    URI_CHARS_MAX,
    AdapterState,
    DesiredAdapter,
    check_addition,
    describe_adapters,
)
from common.registry.instances import Instance
from common.registry.registry import Registry, desired_adapters, remove_adapter
from frontend_svc.endpoints.endpoint import EndpointDependencies, PostEndpoint
from frontend_svc.endpoints.plain import PlainRequest, PlainResponse
from frontend_svc.endpoints.request_context import HttpRequest
from frontend_svc.endpoints.route import Route
from frontend_svc.generation.streaming import send_json
from frontend_svc.members import Members
from frontend_svc.metrics.families import RequestMeter
from frontend_svc.openai.body.fields import MODEL_CHARS_MAX, StrictModel
from frontend_svc.openai.body.parsing import parse_json_object
from frontend_svc.openai.body.validation_errors import invalid_value

_Copies = Annotated[int, Field(ge=1, le=COPIES_MAX)]


class AdapterRequest(StrictModel):
    """A LoRA adapter that workers shall hold.

    - model: the base model.
    - uri: the location of its files, such as file:///FOLDER.
    - copies: workers of each role; by default all.
    - copies_max: up to so many while it is in much use.
    """

    name: Annotated[
        str, Field(min_length=1, max_length=NAME_CHARS_MAX, pattern=f"^{NAME_PATTERN}$")
    ]
    model: Annotated[str, Field(min_length=1, max_length=MODEL_CHARS_MAX)]
    uri: Annotated[str, Field(max_length=URI_CHARS_MAX)] = ""
    copies: _Copies | None = None
    copies_max: _Copies | None = None

    @property
    def is_stream(self) -> bool:
        return False


class AdapterDirectory:
    """The desired adapters of a namespace."""

    def __init__(self, registry: Registry, namespace: str, members: Members) -> None:
        self._registry = registry
        self._namespace = namespace
        self._members = members

    async def add(self, adapter: DesiredAdapter) -> None:
        """Stores an adapter. Raises UnknownModel, InvalidRequest, Conflict and Unavailable."""
        workers = self._members.snapshot.serving(adapter.model)
        if not workers:
            raise UnknownModel(adapter.model)
        if not any(map(AdapterState.of, workers)):
            text = f"the workers of {adapter.model!r} load no adapters"
            raise InvalidRequest(text, "model")
        models = {worker.model for worker in self._workers}
        check_addition(adapter, await desired_adapters(self._registry, self._namespace), models)
        await self._registry.put_adapter(self._namespace, adapter)

    async def list(self, _: PlainRequest) -> PlainResponse:
        found = await desired_adapters(self._registry, self._namespace)
        data = describe_adapters(found, self._workers)
        return PlainResponse(orjson.dumps({"object": "list", "data": data}))

    async def delete(self, request: PlainRequest) -> PlainResponse:
        """Workers withdraw it, then unload it; requests that run go on to their end."""
        name = request.parameters["name"]
        if not await remove_adapter(self._registry, self._namespace, name):
            raise NotFound(f"{name!r} is no desired adapter", field="name")
        return PlainResponse(orjson.dumps({"id": name, "object": "adapter", "deleted": True}))

    def describe(self, adapter: DesiredAdapter) -> Mapping[str, Any]:
        """Returns an adapter as an object of JSON."""
        return describe_adapters([adapter], self._workers)[0]

    @property
    def _workers(self) -> Iterable[Instance]:
        return self._members.snapshot.of("worker")


class AddAdapterEndpoint(PostEndpoint[AdapterRequest]):
    """The ASGI application of `POST /v1/adapters`."""

    def __init__(
        self, route: Route, adapters: AdapterDirectory, dependencies: EndpointDependencies
    ) -> None:
        super().__init__(route, dependencies)
        self._adapters = adapters

    async def parse(self, context: HttpRequest, raw: bytes) -> AdapterRequest:
        try:
            body = AdapterRequest.model_validate(parse_json_object(raw))
        except ValidationError as error:
            raise invalid_value(error) from None
        context.progress.body = body
        return body

    async def serve(self, context: HttpRequest, body: AdapterRequest, meter: RequestMeter) -> None:
        adapter = DesiredAdapter(body.name, body.model, body.uri, body.copies, body.copies_max)
        await self._adapters.add(adapter)
        await send_json(context, orjson.dumps(self._adapters.describe(adapter)))
        meter.mark_ok()
