"""HTTP to one server: typed errors that name its URL, bounded connections, streams of events."""

from __future__ import annotations

import socket
import ssl
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any, Final

import httpx
import orjson

from common.errors import (
    InvalidRequest,
    MeshError,
    Overloaded,
    PromptTooLong,
    Unavailable,
    Unimplemented,
    WorkerLost,
)
from worker_svc.engines.openai.config import ServerConfig

CONNECT_TIMEOUT_S: Final = 5.0
# For calls that do not generate.
CALL_TIMEOUT_S: Final = 10.0
# Time for a connection of the pool to become free.
POOL_TIMEOUT_S: Final = 10.0
# Characters of a server's error text that a client gets.
ERROR_CHARS_MAX: Final = 500
# In llama-server's 500 for a prompt above its --ubatch-size, which vectors are computed in.
_TOO_LARGE: Final = b"is too large to process"
# A connection to a host that vanished fails after 30 + 3 * 10 s.
_KEEP_ALIVE: Final = [
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 30),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 10),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
]

# Any, here and below: JSON of a server.
Json = Any


class ServerClient:
    """Calls of one server."""

    def __init__(self, config: ServerConfig) -> None:
        """Raises InvalidRequest if the certificate authorities cannot be read."""
        self.url = config.url.rstrip("/")
        limits = httpx.Limits(
            max_connections=config.connections_max,
            max_keepalive_connections=config.connections_max,
        )
        verify = True if config.ca_path is None else _read_authorities(config)
        self._http = httpx.AsyncClient(
            base_url=self.url,
            headers={"authorization": f"Bearer {config.key}"} if config.key else {},
            timeout=httpx.Timeout(CALL_TIMEOUT_S, connect=CONNECT_TIMEOUT_S, pool=POOL_TIMEOUT_S),
            transport=httpx.AsyncHTTPTransport(
                limits=limits, verify=verify, socket_options=_KEEP_ALIVE
            ),
            trust_env=False,
        )

    async def close(self) -> None:
        """Ends all connections."""
        await self._http.aclose()

    async def get(self, path: str) -> httpx.Response:
        """Returns the response of any status. Raises WorkerLost without one."""
        try:
            return await self._http.get(path)
        except httpx.HTTPError as error:
            raise self._lost(error) from error

    async def get_json(self, path: str) -> Json:
        """Returns the object at a path; None for a 404 or 405, and for what is no JSON object.

        Raises the errors of `error_of`.
        """
        response = await self.get(path)
        if response.status_code in (404, 405):
            return None
        if response.status_code != 200:
            raise error_of(response.status_code, response.content, self.url, response.headers)
        try:
            found = orjson.loads(response.content)
        except orjson.JSONDecodeError:
            return None
        return found if isinstance(found, dict) else None

    async def try_post(self, path: str, body: Mapping[str, Json]) -> httpx.Response:
        """Returns the response of any status. Raises WorkerLost without one."""
        try:
            return await self._http.post(path, json=body)
        except httpx.HTTPError as error:
            raise self._lost(error) from error

    async def post(self, path: str, body: Mapping[str, Json]) -> bytes:
        """Returns the content of a response with status 200. Raises the errors of `error_of`."""
        response = await self.try_post(path, body)
        if response.status_code != 200:
            raise error_of(response.status_code, response.content, self.url, response.headers)
        return response.content

    async def stream(
        self, path: str, body: bytes, *, is_streamed: bool = True
    ) -> AsyncGenerator[bytes, None]:
        """Yields the data of each server-sent event, up to [DONE] or the end of the response; of a
        response that is not streamed its content.

        Closing the generator closes the connection, at which servers abort the request. There is
        no limit for the pause between events: a request may wait in the server's queue. Not every
        server sends [DONE], so the caller decides whether the response is complete.
        Raises the errors of `error_of`, and WorkerLost if the connection breaks.
        """
        timeout = httpx.Timeout(None, connect=CONNECT_TIMEOUT_S, pool=POOL_TIMEOUT_S)
        headers = {"content-type": "application/json"}
        try:
            async with self._http.stream(
                "POST", path, content=body, headers=headers, timeout=timeout
            ) as response:
                if response.status_code != 200:
                    content = await response.aread()
                    raise error_of(response.status_code, content, self.url, response.headers)
                if not is_streamed:
                    yield await response.aread()
                    return
                async with aclosing(_events(response)) as events:
                    async for data in events:
                        if data == b"[DONE]":
                            return
                        yield data
        except httpx.PoolTimeout as error:
            text = f"all connections to {self.url} are in use; retry after 1 s"
            raise Overloaded(1.0, text) from error
        except httpx.HTTPError as error:
            raise self._lost(error) from error

    def _lost(self, error: Exception) -> WorkerLost:
        reason = str(error) or type(error).__name__
        return WorkerLost(f"no response of {self.url}: {reason}", retryable=True)


async def _events(response: httpx.Response) -> AsyncGenerator[bytes, None]:
    """Yields the data of each event; servers write one line of data for each."""
    rest = b""
    async for part in response.aiter_bytes():
        *lines, rest = (rest + part).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield line[5:].strip()


def _read_authorities(config: ServerConfig) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=config.ca_path)
    except OSError as error:
        raise InvalidRequest(f"cannot read {config.ca_path}: {error}", "server_ca_path") from error


def error_of(status: int, content: bytes, url: str, headers: Mapping[str, str]) -> MeshError:
    """Returns the error for a response that is no success."""
    text = f"{url} responded {status}: {_error_text(content)}"
    if status in (401, 403):
        return Unavailable(f"{text}; set --server-key", reason="SERVER_KEY")
    if status == 429:
        return Overloaded(_retry_after_s(headers), text)
    if status == 503:
        return Unavailable(text, _retry_after_s(headers))
    if status in (400, 404, 413, 422):
        return InvalidRequest(_error_text(content), _error_field(content))
    if _TOO_LARGE in content:
        return PromptTooLong(_error_text(content))
    if status == 501:
        return Unimplemented(text)
    return WorkerLost(text, retryable=True)


def _retry_after_s(headers: Mapping[str, str]) -> float | None:
    value = headers.get("retry-after", "")
    return float(value) if value.isdecimal() else None


def _error_text(content: bytes) -> str:
    """Returns the message of an error, or the start of the content."""
    error = _read_error(content)
    message = error.get("message") if isinstance(error, dict) else error
    if isinstance(message, str):
        return message[:ERROR_CHARS_MAX]
    return content[:ERROR_CHARS_MAX].decode(errors="replace")


def _error_field(content: bytes) -> str | None:
    """Returns the field of the request that an error names."""
    error = _read_error(content)
    field = error.get("param") if isinstance(error, dict) else None
    return field[:ERROR_CHARS_MAX] if isinstance(field, str) and field else None


def _read_error(content: bytes) -> Json:
    """Returns the error of a response; servers of FastAPI have it in `detail`. None: it has
    none."""
    try:
        found = orjson.loads(content)
    except orjson.JSONDecodeError:
        return None
    if not isinstance(found, dict):
        return None
    return found.get("error") or found.get("detail") or found
