"""What the handlers of the routes share."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from dataclasses import replace

from common.registry.registry import Registry
from common.trials.fair_trials import FairTrials
from common.trials.trials import Trials
from frontend_svc.batches.client import BatchClient
from frontend_svc.batches.conversations import Conversations
from frontend_svc.batches.handlers import BatchHandlers
from frontend_svc.conversations.handlers import ConversationHandlers
from frontend_svc.endpoints.endpoint import EndpointDependencies
from frontend_svc.endpoints.route import Route
from frontend_svc.generation.api import CompletionApi, GenerationApi
from frontend_svc.generation.constraints import ConstraintChecks
from frontend_svc.generation.endpoint import GenerationEndpoint
from frontend_svc.generation.pass_through_endpoint import CompletionEndpoint, PassThroughEndpoint
from frontend_svc.media.loader import MediaLoader
from frontend_svc.members import Members
from frontend_svc.readiness import Readiness
from frontend_svc.responses.endpoint import ResponsesApi, StoredResponseHandlers
from frontend_svc.responses.follow import ResponseStreams
from frontend_svc.responses.stored import StoredResponses
from frontend_svc.routes.adapters import AdapterDirectory
from frontend_svc.routes.handlers import (
    EncodeMetrics,
    HealthHandlers,
    ModelHandlers,
    TargetsHandler,
)
from frontend_svc.routes.usage import UsageHandlers
from frontend_svc.websocket.endpoint import SocketEndpoint, SocketResponses


class ApiDependencies:
    """The objects from which `table.py` makes the handlers of one API.

    - endpoints: what endpoints with a body share.
    - no_media: loads only media that are in the body.
    """

    def __init__(
        self,
        endpoints: EndpointDependencies,
        trials: Trials,
        stored: StoredResponses,
        readiness: Callable[[], Readiness],
        combine: Callable[[Readiness], Awaitable[Readiness]],
        encode_metrics: EncodeMetrics,
        members: Members,
        batches: BatchClient,
        registry: Registry,
        is_draining: Callable[[], bool],
    ) -> None:
        """
        - readiness: of this process.
        - combine: adds the readiness of the other processes of this frontend.
        - encode_metrics: of the frontend.
        - registry: has the desired adapters.
        - is_draining: whether this process is about to end.
        """
        config = endpoints.config
        fetcher = None
        if config.media_urls:
            # Imported here: its HTTP client delays each start.
            from frontend_svc.media.fetcher import MediaFetcher

            fetcher = MediaFetcher(hosts=config.media_hosts, timeout_s=config.media_timeout_s)
        self.endpoints = endpoints
        self.encode_metrics = encode_metrics
        self.constraints = ConstraintChecks(FairTrials(trials), config.grammar_compile_s)
        self.media = MediaLoader(fetcher, config.media_limit_mb << 20)
        self.no_media = MediaLoader(None, config.media_limit_mb << 20)
        conversations = Conversations(batches)
        streams = ResponseStreams(stored, is_draining)
        self.responses = ResponsesApi(stored, streams, conversations)
        self.conversations = ConversationHandlers(conversations)
        self.stored_responses = StoredResponseHandlers(stored, streams)
        self.health = HealthHandlers(endpoints.models, readiness, combine)
        self.models = ModelHandlers(endpoints.models, readiness)
        self.usage = UsageHandlers(endpoints.usage.store, time.time)
        self.targets = TargetsHandler(members)
        self.batches = BatchHandlers(batches)
        self.adapters = AdapterDirectory(registry, config.namespace, members)

    def websocket(self, route: Route) -> SocketEndpoint:
        """Returns the endpoint of a WebSocket, whose events count as requests of `POST` there."""
        post = replace(route, method="POST", label="responses", span_operation="chat")
        serve = SocketResponses(post, self.responses, self.endpoints, self.constraints, self.media)
        metrics = self.endpoints.state.frontend
        return SocketEndpoint(route, serve, self.endpoints.config, metrics)

    def generation(self, route: Route, api: GenerationApi) -> GenerationEndpoint:
        """Returns the endpoint of a generation API."""
        return GenerationEndpoint(route, api, self.endpoints, self.constraints, self.media)

    def completions(self, route: Route, api: CompletionApi) -> CompletionEndpoint:
        """Returns the endpoint of an API that also takes bodies for pass-through models."""
        pass_through = PassThroughEndpoint(route, api.table, self.endpoints)
        return CompletionEndpoint(self.generation(route, api), pass_through, self.endpoints)
