"""Cross-origin resource sharing: which responses pages of other sites may read (pure).

Source: the Fetch standard, https://fetch.spec.whatwg.org/#http-cors-protocol.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from common.access.browser_policy import ANY_ORIGIN
from frontend_svc.edge.asgi import Headers

_METHODS: Final = (b"GET", b"POST", b"DELETE")
_EXPOSED_HEADERS: Final = (b"x-request-id", b"request-id", b"retry-after", b"retry-after-ms")
_REQUEST_METHOD: Final = b"access-control-request-method"
_REQUEST_HEADERS: Final = b"access-control-request-headers"
_REQUEST_PRIVATE_NETWORK: Final = b"access-control-request-private-network"
# Seconds for which a browser keeps the response to a preflight request.
_MAX_AGE_S: Final = 600


def is_preflight(method: str, headers: Mapping[bytes, bytes]) -> bool:
    """Returns whether a browser sent the request to learn what it may send."""
    return method == "OPTIONS" and b"origin" in headers and _REQUEST_METHOD in headers


@dataclass(frozen=True, slots=True)
class CorsPolicy:
    """The sites that may read responses."""

    origins: frozenset[str]
    """Such as https://chat.example.org; `*`: all."""

    def preflight(self, headers: Mapping[bytes, bytes]) -> tuple[int, Headers, bytes]:
        """Returns status, headers and body of the response to a preflight request."""
        allowed = self._allowed_origin(headers[b"origin"])
        refusals = {
            b"origin": allowed is None,
            b"method": headers[_REQUEST_METHOD] not in _METHODS,
            b"private-network": _REQUEST_PRIVATE_NETWORK in headers,
        }
        vary = b", ".join((b"origin", _REQUEST_METHOD, _REQUEST_HEADERS, _REQUEST_PRIVATE_NETWORK))
        response_headers: Headers = (
            (b"content-type", b"text/plain; charset=utf-8"),
            (b"vary", vary),
            (b"access-control-allow-methods", b", ".join(_METHODS)),
            (b"access-control-max-age", b"%d" % _MAX_AGE_S),
        )
        if allowed is not None:
            response_headers += ((b"access-control-allow-origin", allowed),)
        if _REQUEST_HEADERS in headers:
            # All are allowed.
            response_headers += ((b"access-control-allow-headers", headers[_REQUEST_HEADERS]),)
        reasons = [name for name, is_refused in refusals.items() if is_refused]
        if reasons:
            return 400, response_headers, b"Disallowed CORS " + b", ".join(reasons)
        return 200, response_headers, b"OK"

    def response_headers(self, origin: bytes | None) -> Headers:
        """Returns the headers of other responses.

        - origin: header of the request, or None.
        """
        vary: Headers = ((b"vary", b"Origin"),)
        if origin is None:
            return vary
        exposed: Headers = ((b"access-control-expose-headers", b", ".join(_EXPOSED_HEADERS)),)
        if (allowed := self._allowed_origin(origin)) is None:
            return exposed + vary
        return (*exposed, (b"access-control-allow-origin", allowed), *vary)

    def _allowed_origin(self, origin: bytes) -> bytes | None:
        if ANY_ORIGIN in self.origins:
            return ANY_ORIGIN.encode()
        return origin if origin.decode("latin-1") in self.origins else None
