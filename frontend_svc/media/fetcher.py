"""Fetches media from URLs of clients, from public addresses only, with a fair share by tenant.

Each connection goes to an address that was checked after the only resolution of its name, so a name
that changes its address between check and use (DNS rebinding) has no effect. This also covers
redirects, unusual forms of addresses and differences between URL parsers. Proxy settings of the
environment are not read.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from contextvars import ContextVar
from typing import Final

import httpcore
import httpx

from common.runtime.fair_slots import FairSlots
from frontend_svc.media.addresses import are_public
from frontend_svc.media.formats import MEDIA_REFUSED, invalid_media, too_large

MEDIA_UNAVAILABLE: Final = "MEDIA_UNAVAILABLE"
# A tenant may use as many as are free: alone it uses half of them.
CONNECTIONS_MAX: Final = 64
REDIRECTS_MAX: Final = 3
_PORTS: Final = {"http": 80, "https": 443}
_REDIRECTS: Final = (301, 302, 303, 307, 308)
_HEADERS: Final = ((b"User-Agent", b"kvmesh"), (b"Accept-Encoding", b"identity"))

# The threads that resolve names: those of uvloop.
RESOLUTIONS_MAX: Final = 4
# Of the fetch that this task runs.
_TENANT: ContextVar[str] = ContextVar("kvmesh_media_tenant", default="")

# (host, port) -> all addresses of the host.
Resolve = Callable[[str, int], Awaitable[Sequence[str]]]


class _Refused(Exception):
    """The URL is not allowed; the text is the cause."""


async def resolve(host: str, port: int) -> Sequence[str]:
    """Returns the addresses of a host. Raises OSError."""
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(address[0]) for *_, address in found))


class _FairResolver:
    """Resolves names, with a fair share of the threads by tenant."""

    def __init__(self, resolve: Resolve) -> None:
        self._resolve = resolve
        self._slots = FairSlots(RESOLUTIONS_MAX)
        self._running: set[asyncio.Task[Sequence[str]]] = set()

    async def addresses(self, host: str, port: int) -> Sequence[str]:
        """Returns the addresses of a host. Raises what `resolve` does."""
        tenant = _TENANT.get()
        await self._slots.take(tenant)
        task = asyncio.create_task(self._run(host, port))
        self._running.add(task)

        def on_end(_: object) -> None:
            self._running.discard(task)
            self._slots.give_back(tenant)

        # The thread of a resolution that is not awaited any more stays busy until its end.
        task.add_done_callback(on_end)
        return await asyncio.shield(task)

    async def _run(self, host: str, port: int) -> Sequence[str]:
        return await self._resolve(host, port)


class _CheckedNetwork(httpcore.AsyncNetworkBackend):
    """Connects to public addresses, and to the hosts of the operator. hosts: `host:port`."""

    def __init__(self, hosts: Collection[str], resolve: Resolve) -> None:
        self._hosts = hosts
        self._resolver = _FairResolver(resolve)
        self._network = httpcore.AnyIOBackend()

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[httpcore.SOCKET_OPTION] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        is_allowed = f"{host}:{port}" in self._hosts
        if not is_allowed and port not in _PORTS.values():
            raise _Refused(f"port {port} is not 80 or 443")
        try:
            addresses = await self._resolver.addresses(host, port)
        except OSError:
            raise httpcore.ConnectError(f"{host!r} has no address") from None
        except UnicodeError:  # a label that is empty or above 63 characters
            raise _Refused(f"{host!r} is not a valid host name") from None
        if not is_allowed and not are_public(addresses):
            raise _Refused(f"{host!r} has an address that is not public")
        for number, address in enumerate(addresses, 1):
            try:
                return await self._network.connect_tcp(address, port, timeout, None, socket_options)
            except httpcore.ConnectError:
                if number == len(addresses):
                    raise
        raise httpcore.ConnectError(f"{host!r} has no address")

    async def connect_unix_socket(
        self,
        path: str,
        timeout: float | None = None,
        socket_options: Iterable[httpcore.SOCKET_OPTION] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        raise _Refused("a URL of media names no socket file")


class MediaFetcher:
    """Fetches over http and https. hosts: `host:port` that may have any address and port.
    timeout_s: of one medium, redirects included. Use it as a context manager."""

    def __init__(
        self, *, hosts: Collection[str], timeout_s: float, resolve: Resolve = resolve
    ) -> None:
        self._timeout_s = timeout_s
        self._slots = FairSlots(CONNECTIONS_MAX)
        self._pool = httpcore.AsyncConnectionPool(
            max_connections=CONNECTIONS_MAX,
            max_keepalive_connections=0,
            network_backend=_CheckedNetwork(hosts, resolve),
        )

    async def fetch(
        self, url: str, bytes_max: int, field: str, tenant: str = ""
    ) -> tuple[str, bytes]:
        """Returns declared media type and content. Raises InvalidRequest with `field`.

        - tenant: takes a connection of its share, and waits for one within the time limit.
        """
        _TENANT.set(tenant)
        try:
            async with asyncio.timeout(self._timeout_s), self._slots.slot(tenant):
                return await self._follow(url, bytes_max, field)
        except TimeoutError:
            text = f"the medium did not arrive within {self._timeout_s:g} s"
            raise invalid_media(field, text, MEDIA_UNAVAILABLE) from None
        except _Refused as error:
            raise invalid_media(field, str(error), MEDIA_REFUSED) from None
        except (httpcore.NetworkError, httpcore.ProtocolError) as error:
            text = f"the medium could not be fetched: {error or type(error).__name__}"
            raise invalid_media(field, text, MEDIA_UNAVAILABLE) from None

    async def _follow(self, text: str, bytes_max: int, field: str) -> tuple[str, bytes]:
        url = _parse(text)
        for _ in range(REDIRECTS_MAX + 1):
            target = httpcore.URL(
                scheme=url.raw_scheme, host=url.raw_host, port=url.port, target=url.raw_path
            )
            async with self._pool.stream("GET", target, headers=_HEADERS) as response:
                headers = {name.lower(): value for name, value in response.headers}
                if response.status not in _REDIRECTS:
                    return await _read(response, headers, bytes_max, field)
                url = _parse(url, headers.get(b"location", b"").decode("latin-1"))
        raise _Refused(f"more than {REDIRECTS_MAX} redirects")


def _parse(url: str | httpx.URL, location: str = "") -> httpx.URL:
    """Returns the URL, or that of a redirect from it. Raises _Refused."""
    try:
        parsed = httpx.URL(url).join(location)
        host = parsed.host
    except (httpx.InvalidURL, ValueError) as error:  # ValueError: of the host's IDNA
        raise _Refused(f"not a valid URL: {error}") from None
    if parsed.scheme not in _PORTS or not host:
        raise _Refused("not a URL of http or https")
    if parsed.userinfo:
        raise _Refused("the URL contains a user name")
    return parsed


async def _read(
    response: httpcore.Response, headers: dict[bytes, bytes], bytes_max: int, field: str
) -> tuple[str, bytes]:
    if response.status != 200:
        text = f"the medium could not be fetched: status {response.status}"
        raise invalid_media(field, text, MEDIA_UNAVAILABLE)
    length = headers.get(b"content-length", b"0")
    if length.isdigit() and int(length) > bytes_max:
        raise too_large(field, bytes_max)
    content = bytearray()
    async for part in response.aiter_stream():
        content += part
        if len(content) > bytes_max:
            raise too_large(field, bytes_max)
    declared = headers.get(b"content-type", b"").decode("latin-1")
    return declared.partition(";")[0].strip().lower(), bytes(content)
