"""The HTTP responses of a picker to requests that go to no endpoint (pure)."""

from __future__ import annotations

from common.errors import MeshError, Overloaded
from epp_svc.core.messages import Refuse
from frontend_svc.errors import http_error

SHED = 429


def refusal(error: MeshError) -> Refuse:
    """Returns the response: that of a frontend, but 429 for a request that is shed, as the protocol
    of pickers requires. 503: no endpoint can serve the request."""
    found = http_error(error)
    status = SHED if isinstance(error, Overloaded) else found.status
    return Refuse(status, found.headers, found.body, error.reason)
