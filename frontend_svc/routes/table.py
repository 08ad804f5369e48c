"""The routes of the HTTP API. To add one, add its entry here, its handler and its row in
docs/http.md."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Final, TypeAlias

from common.api_keys import Permission
from common.usage import USAGE_PATH
from frontend_svc.anthropic.endpoint import CountTokensEndpoint, MessagesApi
from frontend_svc.anthropic.errors import MESSAGES_ERRORS
from frontend_svc.anthropic.schema import MessagesRequest, PromptRequest
from frontend_svc.batches.schema import BatchesQuery, BatchRequest, FilesQuery, UploadFields
from frontend_svc.conversations.schema import (
    ConversationItemQuery,
    ConversationItems,
    ConversationItemsQuery,
    ConversationRequest,
    ConversationUpdate,
)
from frontend_svc.edge.asgi import AsgiApp
from frontend_svc.embeddings.api import EmbeddingApi
from frontend_svc.embeddings.body import EmbeddingRequest
from frontend_svc.endpoints.plain import PlainEndpoint, Respond
from frontend_svc.endpoints.route import Operation, Route
from frontend_svc.generation.api import CHAT_COMPLETIONS, COMPLETIONS, GenerationApi
from frontend_svc.openai.body.schema import ChatRequest, CompletionRequest
from frontend_svc.pooling.endpoint import PoolingApi, PoolingEndpoint, R
from frontend_svc.responses.endpoint import InputTokensEndpoint
from frontend_svc.responses.errors import RESPONSES_ERRORS
from frontend_svc.responses.queries import ItemsQuery, ResponseQuery
from frontend_svc.responses.schema import ResponsesRequest
from frontend_svc.routes.adapters import AdapterRequest, AddAdapterEndpoint
from frontend_svc.routes.api import ApiDependencies
from frontend_svc.routes.dispatch import Dispatcher
from frontend_svc.routes.handlers import (
    DocumentHandler,
    MetricsHandler,
    refuse_compaction,
    refuse_tokenizer_info,
)
from frontend_svc.routes.usage import UsageParameters
from frontend_svc.scores.api import RERANK, SCORE
from frontend_svc.scores.body import RerankRequest, ScoreRequest
from frontend_svc.tokenizing.bodies import DetokenizeRequest, TokenizePromptRequest
from frontend_svc.tokenizing.endpoints import DetokenizeEndpoint, TokenizeEndpoint
from frontend_svc.tokenizing.preprocess import PreprocessApi, PreprocessEndpoint

Handler: TypeAlias = Callable[[Route, ApiDependencies], AsgiApp]

_MESSAGES: Final = [{"role": "user", "content": "Hi"}]


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteEntry(Route):
    """A route, and how its handler is made."""

    handler: Handler


class TokenizeChatRequest(ChatRequest):
    """A conversation to tokenize."""

    add_generation_prompt: bool | None = None
    return_token_strs: bool | None = None


def _generation(api: Callable[[ApiDependencies], GenerationApi]) -> Handler:
    return lambda route, dependencies: dependencies.generation(route, api(dependencies))


def _pooling(api: PoolingApi[R]) -> Handler:
    return lambda route, dependencies: PoolingEndpoint(route, api, dependencies.endpoints)


def _plain(respond: Callable[[ApiDependencies], Respond]) -> Handler:
    return lambda route, dependencies: PlainEndpoint(route, respond(dependencies))


def _rerank(path: str) -> RouteEntry:
    return RouteEntry(
        method="POST",
        path=path,
        handler=_pooling(RERANK),
        permission=Permission.EMBEDDINGS,
        label="rerank",
        span_operation="rerank",
        operation=Operation(
            summary="Orders documents by a query (Cohere, Jina)",
            bodies=(RerankRequest,),
            example={"model": "sim", "query": "Hi", "documents": ["there", "you"]},
            result="the results, the best document first",
        ),
    )


def _score(path: str) -> RouteEntry:
    return RouteEntry(
        method="POST",
        path=path,
        handler=_pooling(SCORE),
        permission=Permission.EMBEDDINGS,
        label="score",
        span_operation="score",
        operation=Operation(
            summary="Scores pairs of texts (vLLM)",
            bodies=(ScoreRequest,),
            example={"model": "sim", "text_1": "Hi", "text_2": ["there", "you"]},
            result="a list of scores, in the order of the pairs",
        ),
    )


def _text_tools(prefix: str) -> tuple[RouteEntry, ...]:
    return (
        RouteEntry(
            method="POST",
            path=f"{prefix}/tokenize",
            handler=lambda route, dependencies: TokenizeEndpoint(route, dependencies.endpoints),
            permission=Permission.INFER,
            label="tokenize",
            span_operation="tokenize",
            operation=Operation(
                summary="Returns the token ids of a text or a conversation",
                bodies=(TokenizePromptRequest, TokenizeChatRequest),
                example={"model": "sim", "prompt": "Hi"},
            ),
        ),
        RouteEntry(
            method="POST",
            path=f"{prefix}/detokenize",
            handler=lambda route, dependencies: DetokenizeEndpoint(route, dependencies.endpoints),
            permission=Permission.INFER,
            label="detokenize",
            span_operation="detokenize",
            operation=Operation(
                summary="Returns the text of token ids",
                bodies=(DetokenizeRequest,),
                example={"model": "sim", "tokens": [300, 301]},
            ),
        ),
        _rerank(f"{prefix}/rerank"),
        _score(f"{prefix}/score"),
        RouteEntry(
            method="GET",
            path=f"{prefix}/tokenizer_info",
            handler=_plain(lambda _: refuse_tokenizer_info),
            operation=Operation(summary="Not implemented: always a 501", result=""),
        ),
    )


METRICS: Final = RouteEntry(
    method="GET",
    path="/metrics",
    handler=lambda route, dependencies: PlainEndpoint(
        route, MetricsHandler(dependencies.encode_metrics, route.path).scrape
    ),
    permission=Permission.ADMIN,
    serves_head=False,
    operation=Operation(summary="Prometheus metrics", media_type="text/plain"),
)
"""Its path is configured: see `routes`."""

ROUTES: Final[tuple[RouteEntry, ...]] = (
    RouteEntry(
        method="POST",
        path="/v1/chat/completions",
        handler=lambda route, dependencies: dependencies.completions(route, CHAT_COMPLETIONS),
        permission=Permission.INFER,
        label="chat_completions",
        span_operation="chat",
        operation=Operation(
            summary="Creates the response to a conversation",
            bodies=(ChatRequest,),
            example={"model": "sim", "messages": _MESSAGES, "max_tokens": 8},
            result="a chat.completion, or a stream of chat.completion.chunk",
            streams=True,
        ),
    ),
    RouteEntry(
        method="POST",
        path="/v1/completions",
        handler=lambda route, dependencies: dependencies.completions(route, COMPLETIONS),
        permission=Permission.INFER,
        label="completions",
        span_operation="text_completion",
        operation=Operation(
            summary="Creates the continuation of a prompt",
            bodies=(CompletionRequest,),
            example={"model": "sim", "prompt": "Hi", "max_tokens": 8},
            result="a text_completion, or a stream of them",
            streams=True,
        ),
    ),
    RouteEntry(
        method="POST",
        path="/v1/messages",
        handler=_generation(lambda _: MessagesApi()),
        permission=Permission.INFER,
        label="messages",
        span_operation="chat",
        errors=MESSAGES_ERRORS,
        operation=Operation(
            summary="Creates a message (Anthropic's Messages API)",
            bodies=(MessagesRequest,),
            example={"model": "sim", "messages": _MESSAGES, "max_tokens": 8},
            result="a message, or a stream of its events",
            streams=True,
        ),
    ),
    RouteEntry(
        method="POST",
        path="/v1/messages/count_tokens",
        handler=lambda route, dependencies: CountTokensEndpoint(route, dependencies.endpoints),
        permission=Permission.INFER,
        label="count_tokens",
        span_operation="count_tokens",
        errors=MESSAGES_ERRORS,
        operation=Operation(
            summary="Counts the tokens of a prompt (Anthropic's Messages API)",
            bodies=(PromptRequest,),
            example={"model": "sim", "messages": _MESSAGES},
            result="the count, as input_tokens",
        ),
    ),
    RouteEntry(
        method="POST",
        path="/v1/embeddings",
        handler=_pooling(EmbeddingApi()),
        permission=Permission.EMBEDDINGS,
        label="embeddings",
        span_operation="embeddings",
        operation=Operation(
            summary="Computes the vectors of texts",
            bodies=(EmbeddingRequest,),
            example={"model": "sim", "input": ["Hi", "there"]},
            result="a list of embeddings, in the order of the input",
        ),
    ),
    RouteEntry(
        method="POST",
        path="/v1/responses",
        handler=_generation(lambda dependencies: dependencies.responses),
        permission=Permission.INFER,
        label="responses",
        span_operation="chat",
        errors=RESPONSES_ERRORS,
        operation=Operation(
            summary="Creates a response (Responses API)",
            bodies=(ResponsesRequest,),
            example={"model": "sim", "input": "Hi", "max_output_tokens": 16},
            result="a response, or a stream of its events",
            streams=True,
        ),
    ),
    RouteEntry(
        method="GET",
        path="/v1/responses",
        handler=lambda route, dependencies: dependencies.websocket(route),
        permission=Permission.INFER,
        errors=RESPONSES_ERRORS,
        serves_head=False,
        operation=Operation(
            summary="Opens a WebSocket, whose events create responses; else a 426", result=""
        ),
    ),
    RouteEntry(
        method="POST",
        path="/v1/responses/input_tokens",
        handler=lambda route, dependencies: InputTokensEndpoint(
            route, dependencies.responses, dependencies.endpoints
        ),
        permission=Permission.INFER,
        label="count_tokens",
        span_operation="count_tokens",
        errors=RESPONSES_ERRORS,
        operation=Operation(
            summary="Counts the tokens of a prompt (Responses API)",
            bodies=(ResponsesRequest,),
            example={"model": "sim", "input": "Hi"},
            result="the count, as input_tokens",
        ),
    ),
    RouteEntry(
        method="POST",
        path="/v1/responses/compact",
        handler=_plain(lambda _: refuse_compaction),
        operation=Operation(summary="Not implemented: always a 501", result=""),
    ),
    RouteEntry(
        method="GET",
        path="/v1/responses/{id}",
        handler=_plain(lambda dependencies: dependencies.stored_responses.get),
        permission=Permission.INFER,
        operation=Operation(summary="Returns a stored response", query=ResponseQuery, streams=True),
    ),
    RouteEntry(
        method="DELETE",
        path="/v1/responses/{id}",
        handler=_plain(lambda dependencies: dependencies.stored_responses.delete),
        permission=Permission.INFER,
        operation=Operation(summary="Deletes a stored response"),
    ),
    RouteEntry(
        method="POST",
        path="/v1/responses/{id}/cancel",
        handler=_plain(lambda dependencies: dependencies.stored_responses.cancel),
        permission=Permission.INFER,
        operation=Operation(
            summary="Ends a response that runs in the background", result="the response"
        ),
    ),
    RouteEntry(
        method="GET",
        path="/v1/responses/{id}/input_items",
        handler=_plain(lambda dependencies: dependencies.stored_responses.list_items),
        permission=Permission.INFER,
        operation=Operation(summary="Lists the input of a stored response", query=ItemsQuery),
    ),
    RouteEntry(
        method="POST",
        path="/v1/conversations",
        handler=_plain(lambda dependencies: dependencies.conversations.create),
        permission=Permission.INFER,
        operation=Operation(
            summary="Begins a conversation",
            bodies=(ConversationRequest,),
            example={"items": [{"type": "message", "role": "user", "content": "Hi"}]},
            result="the conversation",
        ),
    ),
    RouteEntry(
        method="GET",
        path="/v1/conversations/{id}",
        handler=_plain(lambda dependencies: dependencies.conversations.get),
        permission=Permission.INFER,
        operation=Operation(
            summary="Describes a conversation",
            result="the conversation",
        ),
    ),
    RouteEntry(
        method="POST",
        path="/v1/conversations/{id}",
        handler=_plain(lambda dependencies: dependencies.conversations.update),
        permission=Permission.INFER,
        operation=Operation(
            summary="Replaces the metadata of a conversation",
            bodies=(ConversationUpdate,),
            example={"metadata": {"topic": "demo"}},
            result="the conversation",
        ),
    ),
    RouteEntry(
        method="DELETE",
        path="/v1/conversations/{id}",
        handler=_plain(lambda dependencies: dependencies.conversations.delete),
        permission=Permission.INFER,
        operation=Operation(
            summary="Deletes a conversation with its items",
        ),
    ),
    RouteEntry(
        method="POST",
        path="/v1/conversations/{id}/items",
        handler=_plain(lambda dependencies: dependencies.conversations.add_items),
        permission=Permission.INFER,
        operation=Operation(
            summary="Appends items to a conversation",
            bodies=(ConversationItems,),
            query=ConversationItemQuery,
            example={"items": [{"type": "message", "role": "user", "content": "Hi"}]},
            result="a page with these items",
        ),
    ),
    RouteEntry(
        method="GET",
        path="/v1/conversations/{id}/items",
        handler=_plain(lambda dependencies: dependencies.conversations.list_items),
        permission=Permission.INFER,
        operation=Operation(
            summary="Lists the items of a conversation",
            query=ConversationItemsQuery,
            result="a page of items",
        ),
    ),
    RouteEntry(
        method="GET",
        path="/v1/conversations/{id}/items/{item_id}",
        handler=_plain(lambda dependencies: dependencies.conversations.get_item),
        permission=Permission.INFER,
        operation=Operation(
            summary="Returns an item of a conversation",
            query=ConversationItemQuery,
            result="the item",
        ),
    ),
    RouteEntry(
        method="DELETE",
        path="/v1/conversations/{id}/items/{item_id}",
        handler=_plain(lambda dependencies: dependencies.conversations.delete_item),
        permission=Permission.INFER,
        operation=Operation(
            summary="Deletes an item of a conversation",
            result="the conversation",
        ),
    ),
    RouteEntry(
        method="POST",
        path="/v1/files",
        handler=_plain(lambda dependencies: dependencies.batches.upload_file),
        permission=Permission.INFER,
        operation=Operation(
            summary="Stores a file for a batch",
            bodies=(UploadFields,),
            body_type="multipart/form-data",
            result="the file",
        ),
    ),
    RouteEntry(
        method="GET",
        path="/v1/files",
        handler=_plain(lambda dependencies: dependencies.batches.list_files),
        permission=Permission.INFER,
        operation=Operation(
            summary="Lists the files of the tenant", query=FilesQuery, result="a page of files"
        ),
    ),
    RouteEntry(
        method="GET",
        path="/v1/files/{id}",
        handler=_plain(lambda dependencies: dependencies.batches.get_file),
        permission=Permission.INFER,
        operation=Operation(summary="Describes a file"),
    ),
    RouteEntry(
        method="DELETE",
        path="/v1/files/{id}",
        handler=_plain(lambda dependencies: dependencies.batches.delete_file),
        permission=Permission.INFER,
        operation=Operation(summary="Deletes a file"),
    ),
    RouteEntry(
        method="GET",
        path="/v1/files/{id}/content",
        handler=_plain(lambda dependencies: dependencies.batches.read_file),
        permission=Permission.INFER,
        operation=Operation(
            summary="Returns the content of a file", media_type="application/octet-stream"
        ),
    ),
    RouteEntry(
        method="POST",
        path="/v1/batches",
        handler=_plain(lambda dependencies: dependencies.batches.create_batch),
        permission=Permission.INFER,
        operation=Operation(
            summary="Begins a batch: runs the lines of a file on idle capacity",
            bodies=(BatchRequest,),
            example={
                "input_file_id": "file-0",
                "endpoint": "/v1/chat/completions",
                "completion_window": "24h",
            },
            result="the batch",
        ),
    ),
    RouteEntry(
        method="GET",
        path="/v1/batches",
        handler=_plain(lambda dependencies: dependencies.batches.list_batches),
        permission=Permission.INFER,
        operation=Operation(
            summary="Lists the batches of the tenant",
            query=BatchesQuery,
            result="a page of batches",
        ),
    ),
    RouteEntry(
        method="GET",
        path="/v1/batches/{id}",
        handler=_plain(lambda dependencies: dependencies.batches.get_batch),
        permission=Permission.INFER,
        operation=Operation(summary="Describes a batch: its state and progress"),
    ),
    RouteEntry(
        method="POST",
        path="/v1/batches/{id}/cancel",
        handler=_plain(lambda dependencies: dependencies.batches.cancel_batch),
        permission=Permission.INFER,
        operation=Operation(summary="Ends a batch; lines that have a result keep it"),
    ),
    RouteEntry(
        method="POST",
        path="/v1/internal/preprocess",
        handler=lambda route, dependencies: PreprocessEndpoint(
            route,
            PreprocessApi(dependencies.responses),
            dependencies.endpoints,
            dependencies.constraints,
            dependencies.no_media,
        ),
        permission=Permission.EXPLAIN,
        label="preprocess",
        span_operation="preprocess",
        operation=Operation(
            summary="Returns the requests that workers would receive for a body",
            bodies=(ChatRequest, CompletionRequest, ResponsesRequest),
            example={"model": "sim", "messages": _MESSAGES, "max_tokens": 8},
            result="requests: one PreprocessedRequest for each prompt; hashes: those of its blocks",
        ),
    ),
    RouteEntry(
        method="GET",
        path=USAGE_PATH,
        handler=_plain(lambda dependencies: dependencies.usage.list),
        permission=Permission.ADMIN,
        operation=Operation(
            summary="Returns requests and tokens by period, tenant, key, model and adapter",
            query=UsageParameters,
            result="a page of buckets, as in OpenAI's usage API",
        ),
    ),
    *_text_tools(""),
    *_text_tools("/v1"),
    _rerank("/v2/rerank"),
    RouteEntry(
        method="GET",
        path="/v1/models",
        handler=_plain(lambda dependencies: dependencies.models.list),
        anthropic_errors=MESSAGES_ERRORS,
        operation=Operation(summary="Lists the models that can be served now"),
    ),
    RouteEntry(
        method="GET",
        path="/v1/models/{name:path}",
        handler=_plain(lambda dependencies: dependencies.models.get),
        anthropic_errors=MESSAGES_ERRORS,
        operation=Operation(summary="Describes a model, an adapter or an alias"),
    ),
    RouteEntry(
        method="GET",
        path="/v1/adapters",
        handler=_plain(lambda dependencies: dependencies.adapters.list),
        permission=Permission.ADMIN,
        operation=Operation(
            summary="Lists the adapters that workers shall hold, and those that hold them",
            result="a list of adapters",
        ),
    ),
    RouteEntry(
        method="POST",
        path="/v1/adapters",
        handler=lambda route, dependencies: AddAdapterEndpoint(
            route, dependencies.adapters, dependencies.endpoints
        ),
        permission=Permission.ADMIN,
        label="adapters",
        span_operation="add_adapter",
        operation=Operation(
            summary="Has workers load an adapter, in place of one of the same name",
            bodies=(AdapterRequest,),
            example={"name": "example", "model": "sim", "copies": 1},
            result="the adapter",
        ),
    ),
    RouteEntry(
        method="DELETE",
        path="/v1/adapters/{name:path}",
        handler=_plain(lambda dependencies: dependencies.adapters.delete),
        permission=Permission.ADMIN,
        operation=Operation(summary="Has workers unload an adapter"),
    ),
    RouteEntry(
        method="GET",
        path="/health",
        handler=_plain(lambda dependencies: dependencies.health.health),
        permission=Permission.ADMIN,
        operation=Operation(summary="Reports models, members and problems", failure=503),
    ),
    RouteEntry(
        method="GET",
        path="/ready",
        handler=_plain(lambda dependencies: dependencies.health.ready),
        is_open=True,
        operation=Operation(summary="Reports whether requests can be served", failure=503),
    ),
    RouteEntry(
        method="GET",
        path="/live",
        handler=_plain(lambda dependencies: dependencies.health.live),
        is_open=True,
        operation=Operation(summary="Reports that the process runs"),
    ),
    RouteEntry(
        method="GET",
        path="/api/hello",
        handler=_plain(lambda dependencies: dependencies.health.hello),
        is_open=True,
        operation=Operation(summary="Answers clients of Anthropic that test the connection"),
    ),
    METRICS,
    RouteEntry(
        method="GET",
        path="/v1/internal/metrics-targets",
        handler=_plain(lambda dependencies: dependencies.targets.get),
        permission=Permission.ADMIN,
        operation=Operation(
            summary="Lists where the metrics of all members are, for Prometheus", is_list=True
        ),
    ),
    RouteEntry(
        method="GET",
        path="/openapi.json",
        handler=_plain(
            lambda dependencies: (
                DocumentHandler(routes(dependencies.endpoints.config.metrics_path)).get
            )
        ),
        operation=Operation(summary="This document"),
    ),
)


def routes(metrics_path: str) -> tuple[RouteEntry, ...]:
    """Returns all routes.

    - metrics_path: path of the Prometheus metrics.
    """
    metrics = replace(METRICS, path=metrics_path)
    return tuple(metrics if route is METRICS else route for route in ROUTES)


def dispatcher(entries: Iterable[RouteEntry], dependencies: ApiDependencies) -> Dispatcher:
    """Returns the application of these routes."""
    return Dispatcher((route, route.handler(route, dependencies)) for route in entries)
