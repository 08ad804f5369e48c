"""Which requests of web pages are served (pure).

A page of any site can make a browser send requests to this host: directly, or by a name that the
site's DNS later points here (rebinding). Browsers name the page's site in `Origin`, and the name
that the page used in `Host`. Other clients send no `Origin`.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from urllib.parse import urlsplit

from common.errors import InvalidRequest, MeshError, PermissionDenied

ANY_ORIGIN = "*"
INVALID_HOST = "INVALID_HOST"
UNSUPPORTED_MEDIA_TYPE = "UNSUPPORTED_MEDIA_TYPE"

Headers = Iterable[tuple[bytes, bytes]]


@dataclass(frozen=True, slots=True)
class BrowserPolicy:
    """What it permits."""

    origins: frozenset[str]
    """Sites whose pages may send requests, such as https://chat.example.org; `*`: all."""

    hosts: frozenset[str]
    """Names of this server, besides addresses and localhost."""

    checks_host: bool
    """Whether other names are refused, also without `Origin`."""

    is_json_only: bool = True
    """Whether pages may only POST JSON, which they cannot send to other sites unasked."""

    def refusal(self, method: str, header_pairs: Headers) -> MeshError | None:
        """Returns the error for a request; None if it is served. header_pairs: with lower-case
        names."""
        headers = dict(header_pairs)
        host = headers.get(b"host", b"").decode("latin-1")
        if self.checks_host and host and not self._is_own_name(host):
            text = f"Invalid header 'host': {host[:256]!r} is not in --allowed-hosts."
            return InvalidRequest(text, "host", reason=INVALID_HOST)
        raw = headers.get(b"origin")
        if raw is None:
            return None
        origin = raw.decode("latin-1")
        if not self._allows(origin, host):
            text = f"pages of {origin[:256]!r} may not send requests: it is not in --cors-origins"
            return PermissionDenied(text, field="origin")
        if not self.is_json_only:
            return None
        media_type = headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
        if method == "POST" and media_type != b"application/json":
            text = "Invalid header 'content-type': pages must send application/json."
            return InvalidRequest(text, "content-type", reason=UNSUPPORTED_MEDIA_TYPE)
        return None

    def _allows(self, origin: str, host: str) -> bool:
        if ANY_ORIGIN in self.origins or origin in self.origins:
            return True
        own_origins = (f"{scheme}://{host}".lower() for scheme in ("http", "https"))
        return self._is_own_name(host) and origin.lower() in own_origins

    def _is_own_name(self, host: str) -> bool:
        """Returns whether no other site's DNS can make a name stand for this server. host: may
        have a port."""
        name, is_local = _host_name(host)
        return is_local or name in self.hosts


@lru_cache(maxsize=1024)
def _host_name(host: str) -> tuple[str, bool]:
    """Returns the name without a port, and whether it is an address or a name of this machine."""
    name = ""
    try:
        name = urlsplit(f"//{host}").hostname or ""
        if name == "localhost" or name.endswith(".localhost"):
            return name, True
        ipaddress.ip_address(name)
    except ValueError:
        return name, False
    return name, True
