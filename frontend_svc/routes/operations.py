"""The operations of the HTTP API, as /openapi.json describes them. Each route has one."""

from __future__ import annotations

from typing import Any, Final

from frontend_svc.anthropic.schema import MessagesRequest, PromptRequest
from frontend_svc.embeddings.body import EmbeddingRequest
from frontend_svc.openai.body.schema import ChatRequest, CompletionRequest
from frontend_svc.responses.queries import ItemsQuery, ResponseQuery
from frontend_svc.responses.schema import ResponsesRequest
from frontend_svc.routes.document import Operation
from frontend_svc.tokenizing.bodies import DetokenizeRequest, TokenizePromptRequest

DOCUMENT_PATH: Final = "/openapi.json"
_MESSAGES: Final = [{"role": "user", "content": "Hi"}]
# Any: a JSON schema.
_MESSAGES_ERROR: Final[dict[str, Any]] = {
    "type": "object",
    "required": ["type", "error"],
    "properties": {
        "type": {"const": "error"},
        "error": {
            "type": "object",
            "required": ["type", "message"],
            "properties": {"type": {"type": "string"}, "message": {"type": "string"}},
        },
        "request_id": {"type": ["string", "null"]},
    },
}


def operations(metrics_path: str) -> tuple[Operation, ...]:
    """All operations. metrics_path: of the Prometheus metrics."""
    return (
        Operation(
            "POST",
            "/v1/chat/completions",
            "Creates the response to a conversation",
            bodies=(ChatRequest,),
            example={"model": "sim", "messages": _MESSAGES, "max_tokens": 8},
            result="a chat.completion, or a stream of chat.completion.chunk",
            streams=True,
        ),
        Operation(
            "POST",
            "/v1/completions",
            "Creates the continuation of a prompt",
            bodies=(CompletionRequest,),
            example={"model": "sim", "prompt": "Hi", "max_tokens": 8},
            result="a text_completion, or a stream of them",
            streams=True,
        ),
        Operation(
            "POST",
            "/v1/messages",
            "Creates a message (Anthropic's Messages API)",
            bodies=(MessagesRequest,),
            example={"model": "sim", "messages": _MESSAGES, "max_tokens": 8},
            result="a message, or a stream of its events",
            streams=True,
            error=_MESSAGES_ERROR,
        ),
        Operation(
            "POST",
            "/v1/messages/count_tokens",
            "Counts the tokens of a prompt (Anthropic's Messages API)",
            bodies=(PromptRequest,),
            example={"model": "sim", "messages": _MESSAGES},
            result="the count, as input_tokens",
            error=_MESSAGES_ERROR,
        ),
        Operation(
            "POST",
            "/v1/embeddings",
            "Computes the vectors of texts",
            bodies=(EmbeddingRequest,),
            example={"model": "sim", "input": ["Hi", "there"]},
            result="a list of embeddings, in the order of the input",
        ),
        Operation(
            "POST",
            "/v1/responses",
            "Creates a response (Responses API)",
            bodies=(ResponsesRequest,),
            example={"model": "sim", "input": "Hi", "max_output_tokens": 16},
            result="a response, or a stream of its events",
            streams=True,
        ),
        Operation(
            "POST",
            "/v1/responses/input_tokens",
            "Counts the tokens of a prompt (Responses API)",
            bodies=(ResponsesRequest,),
            example={"model": "sim", "input": "Hi"},
            result="the count, as input_tokens",
        ),
        Operation("GET", "/v1/responses/{id}", "Returns a stored response", query=ResponseQuery),
        Operation("DELETE", "/v1/responses/{id}", "Deletes a stored response"),
        Operation(
            "GET",
            "/v1/responses/{id}/input_items",
            "Lists the input of a stored response",
            query=ItemsQuery,
        ),
        Operation(
            "POST",
            "/v1/internal/preprocess",
            "Returns the requests that workers would receive for a body",
            bodies=(ChatRequest, CompletionRequest, ResponsesRequest),
            example={"model": "sim", "messages": _MESSAGES, "max_tokens": 8},
            result="requests: one PreprocessedRequest for each prompt; hashes: those of its blocks",
        ),
        *(one for prefix in ("", "/v1") for one in _text_tools(prefix)),
        Operation("GET", "/v1/models", "Lists the models that can be served now"),
        Operation("GET", "/v1/models/{name}", "Describes a model, an adapter or an alias"),
        Operation("GET", "/health", "Reports models, members and problems", failure=503),
        Operation("GET", "/ready", "Reports whether requests can be served", failure=503),
        Operation("GET", "/live", "Reports that the process runs"),
        Operation("GET", metrics_path, "Prometheus metrics", media_type="text/plain"),
        Operation("GET", DOCUMENT_PATH, "This document"),
    )


class TokenizeChatRequest(ChatRequest):
    """A conversation to tokenize."""

    add_generation_prompt: bool | None = None
    return_token_strs: bool | None = None


def _text_tools(prefix: str) -> tuple[Operation, ...]:
    return (
        Operation(
            "POST",
            f"{prefix}/tokenize",
            "Returns the token ids of a text or a conversation",
            bodies=(TokenizePromptRequest, TokenizeChatRequest),
            example={"model": "sim", "prompt": "Hi"},
        ),
        Operation(
            "POST",
            f"{prefix}/detokenize",
            "Returns the text of token ids",
            bodies=(DetokenizeRequest,),
            example={"model": "sim", "tokens": [300, 301]},
        ),
        Operation("POST", f"{prefix}/rerank", "Not implemented: always a 501", result=""),
        Operation("POST", f"{prefix}/score", "Not implemented: always a 501", result=""),
    )
