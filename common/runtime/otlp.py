"""The receivers of spans: their addresses and headers, as settings name them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple
from urllib.parse import SplitResult, unquote, urlsplit

ENDPOINTS_MAX = 8
_HEADER_NAME = re.compile(r"[0-9a-z_.-]+")
_HEADER_VALUE = re.compile(r"[ -~]*")


class Header(NamedTuple):
    """A header of exports. endpoint: the only one that receives it; "": all do."""

    endpoint: str
    name: str
    value: str


@dataclass(frozen=True, slots=True)
class OtlpEndpoint:
    """A receiver of spans. url: as configured. headers: of each export to it."""

    url: str
    headers: tuple[tuple[str, str], ...] = ()

    @property
    def is_secure(self) -> bool:
        """Whether it is reached by TLS."""
        return self.url.lower().startswith("https:")


def check_endpoint(url: str) -> str:
    """Returns the URL of an OTLP gRPC endpoint, without a slash at its end. Raises ValueError."""
    try:
        parts, port = urlsplit(url), urlsplit(url).port
    except ValueError as error:
        raise ValueError(f"{url!r} is no URL: {error}") from None
    if problem := _problem_of(parts, port):
        raise ValueError(f"{problem}; write http://HOST:PORT or https://HOST:PORT")
    return url.rstrip("/")


def _problem_of(parts: SplitResult, port: int | None) -> str:
    """Returns what is wrong with a URL; "" if nothing is."""
    url = parts.geturl()
    if parts.scheme not in ("http", "https"):
        return f"{url!r} does not begin with http:// or https://"
    if not parts.hostname:
        return f"{url!r} has no host"
    if "@" in parts.netloc:
        return f"{url!r} has a user name; what authenticates exports is a header (--otlp-headers)"
    if port is None and parts.scheme == "http":
        return f"{url!r} has no port (OTLP gRPC usually has 4317)"
    if port == 0:
        return f"{url!r} has the port 0"
    if parts.path.strip("/") or parts.query or parts.fragment:
        return f"{url!r} has a path, and OTLP over gRPC has none"
    return ""


def check_endpoints(urls: tuple[str, ...]) -> tuple[str, ...]:
    """Returns several endpoints. Raises ValueError if one is given twice, or if they are more than
    ENDPOINTS_MAX."""
    if len(urls) > ENDPOINTS_MAX:
        raise ValueError(f"{len(urls)} endpoints; at most {ENDPOINTS_MAX} are possible")
    for url in urls:
        if urls.count(url) > 1:
            raise ValueError(f"{url!r} is given {urls.count(url)} times; give it once")
    return urls


def parse_headers(text: object) -> object:
    """Returns the headers of a text: `[ENDPOINT ]NAME=VALUE`, separated by commas or line breaks.
    Values may be percent-encoded. Another object is returned as it is. Raises ValueError, whose
    message has no value of a header."""
    if not isinstance(text, str):
        return text
    entries = [entry.strip() for entry in re.split(r"[,\n]", text)]
    return tuple(_parse_header(n, entry) for n, entry in enumerate(filter(None, entries), 1))


def _parse_header(number: int, entry: str) -> Header:
    head, equals, value = entry.partition("=")
    endpoint, _, name = head.strip().rpartition(" ")
    endpoint, name, value = endpoint.strip().rstrip("/"), name.lower(), unquote(value.strip())
    if not equals or not name:
        raise ValueError(f"header {number} is not NAME=VALUE or ENDPOINT NAME=VALUE")
    if not _HEADER_NAME.fullmatch(name) or name.startswith("grpc-") or name.endswith("-bin"):
        raise ValueError(f"{name!r} cannot be a header of gRPC with a text")
    if not _HEADER_VALUE.fullmatch(value):
        text = "has characters other than printable ASCII; percent-encoded values are decoded"
        raise ValueError(f"the value of the header {name!r} {text}")
    return Header(endpoint, name, value)


def header_problem(urls: Sequence[str], headers: Sequence[Header]) -> str:
    """Returns why headers and endpoints do not fit together; "" if they do."""
    for header in headers:
        if header.endpoint and header.endpoint not in urls:
            return f"{header.endpoint!r}, of the header {header.name!r}, is no --otlp-endpoint"
        if not header.endpoint and len(urls) > 1:
            # Else a secret for one receiver would go to all.
            return f"write ENDPOINT {header.name}=VALUE: there are {len(urls)} endpoints"
    return ""


def endpoints_of(urls: Sequence[str], headers: Sequence[Header]) -> tuple[OtlpEndpoint, ...]:
    """Returns the endpoints, each with its headers."""
    return tuple(
        OtlpEndpoint(url, tuple((h.name, h.value) for h in headers if h.endpoint in ("", url)))
        for url in urls
    )
