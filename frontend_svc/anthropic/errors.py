"""Maps errors to the responses of the Messages API (pure).

Statuses and headers are those of the OpenAI API (`errors.py`), with one exception: a
mesh at capacity is 529 `overloaded_error`, the status that Anthropic's clients expect. A prompt
that exceeds the context has Anthropic's text, whose numbers clients read. `details` has the invalid
field as `param`, and a code.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import replace
from typing import Final

import orjson

from common.errors import MeshError, PromptTooLong
from frontend_svc import errors as openai
from frontend_svc.anthropic.translation import client_field
from frontend_svc.errors import ErrorForm, ErrorType, HttpError
from frontend_svc.openai.body.preprocessing import CONTEXT_TOKENS, OUTPUT_TOKENS, PROMPT_TOKENS

OVERLOADED_STATUS: Final = 529
_TYPES: Final = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    409: "conflict_error",
    413: "request_too_large",
    429: "rate_limit_error",
    504: "timeout_error",
    OVERLOADED_STATUS: "overloaded_error",
}


def http_error(error: BaseException, request_id: str, headers: Container[bytes] = ()) -> HttpError:
    """Returns the response for an error. request_id: of the response's header. headers: names of
    the request's headers."""
    response = openai.http_error(error, headers)
    is_overload = response.error_type is ErrorType.OVERLOAD
    status = OVERLOADED_STATUS if is_overload else response.status
    message, param, code = openai.error_details(error, headers)
    message, param = _renamed(_own_wording(error) or message, param)
    return replace(
        response, status=status, body=error_body(status, message, param, code, request_id)
    )


def client_message(error: MeshError, headers: Container[bytes]) -> tuple[str, str | None]:
    """Returns message and `param` of an error with the client's field names. headers: see
    `http_error`."""
    message, param = openai.client_message(error, headers)
    return _renamed(_own_wording(error) or message, param)


def _own_wording(error: BaseException) -> str | None:
    """Returns Anthropic's text for an error; None for the text that it has. Agents read the numbers
    of this text: they ask for fewer tokens, or shorten the conversation."""
    if not isinstance(error, PromptTooLong) or PROMPT_TOKENS not in error.metadata:
        return None
    prompt, output, context = map(
        error.metadata.__getitem__, (PROMPT_TOKENS, OUTPUT_TOKENS, CONTEXT_TOKENS)
    )
    if output == "0":
        return f"prompt is too long: {prompt} tokens > {int(context) - 1} maximum"
    return (
        f"input length and `max_tokens` exceed context limit: {prompt} + {output} > {context}, "
        "decrease input length or `max_tokens` and try again"
    )


def _renamed(message: str, param: str | None) -> tuple[str, str | None]:
    if param is None or (field := client_field(param)) == param:
        return message, param
    return message.replace(f"'{param}'", f"'{field}'"), field


def error_body(
    status: int, message: str, param: str | None, code: str | None, request_id: str
) -> bytes:
    """Returns the JSON of an error."""
    default_type = "api_error" if status >= 500 else "invalid_request_error"
    error = {
        "type": _TYPES.get(status, default_type),
        "message": message,
        "details": {"error_code": code, "param": param},
    }
    return orjson.dumps({"type": "error", "error": error, "request_id": request_id})


MESSAGES_ERRORS: Final = ErrorForm(
    http_error=http_error,
    client_message=client_message,
    route_error=lambda status, message, code, request_id: error_body(
        status, message, None, code, request_id
    ),
    schema={
        "type": "object",
        "required": ["type", "error"],
        "properties": {
            "type": {"const": "error"},
            "error": {
                "type": "object",
                "required": ["type", "message"],
                "properties": {"type": {"type": "string"}, "message": {"type": "string"}},
            },
            "request_id": {"type": "string"},
        },
    },
    has_request_id=True,
)
"""The form of the Messages API."""
