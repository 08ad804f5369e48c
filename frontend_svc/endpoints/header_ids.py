"""The id of a request, and the headers in which its response has it (pure)."""

from __future__ import annotations

import re
from typing import Final

from frontend_svc.edge.asgi import Headers
from frontend_svc.errors import ErrorForm

_CLIENT_ID: Final = re.compile(rb"[!-~]{1,128}")


def header_id(client_id: bytes, request_id: str) -> bytes:
    """Returns the id that the response has.

    - client_id: the header `x-request-id` of the request; used if it is valid.
    - request_id: that of this server.
    """
    return client_id if _CLIENT_ID.fullmatch(client_id) else request_id.encode()


def id_headers(form: ErrorForm, own_id: bytes) -> Headers:
    """Returns the headers with the id of a response of an API."""
    headers: Headers = ((b"x-request-id", own_id),)
    return (*headers, (b"request-id", own_id)) if form.has_request_id else headers
