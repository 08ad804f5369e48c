"""HTTP requests of tools to a frontend."""

from __future__ import annotations

import asyncio
import json
import re
import ssl
from collections.abc import AsyncGenerator, Collection, Iterable, Mapping
from contextlib import aclosing
from pathlib import Path

# Any: JSON.
from typing import Any

import httpx

from common.errors import InvalidRequest, Unavailable
from common.registry.instances import HTTP_META_KEY, METRICS_META_KEY, Instance, Snapshot
from common.runtime.config import ServiceConfig

POLL_S = 0.1
RESPONSE_TIMEOUT_S = 60.0
# The first token may wait in a queue; later gaps are far below this.
READ_TIMEOUT_S = 30.0
ERROR_CHARS_MAX = 500
_PEM = re.compile(rb"-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----", re.DOTALL)


class GatewayError(Exception):
    """An unexpected response of the gateway; the message describes it. status: its HTTP status, if
    that is unexpected."""

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status


def new_http_client(
    api_key: str | None,
    config: ServiceConfig | None = None,
    url: str = "",
    *,
    own_certificates: Collection[Path] = (),
) -> httpx.AsyncClient:
    """Returns a client that connects directly, without a proxy from the environment.

    - config: its certificate authorities are trusted beside those of the system.
    - url: what the client will request; only https needs the authorities.
    - own_certificates: files of the services that the client requests, whose first certificates
      are trusted as they are: they are for the names that clients use, not for the address of the
      service. Raises InvalidRequest for one that cannot be read.
    """
    headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
    # Requests that wait for a connection here would be measured, or fail, as if the gateway did.
    timeout = httpx.Timeout(5.0, read=READ_TIMEOUT_S, pool=None)
    limits = httpx.Limits(max_connections=None)
    verify: ssl.SSLContext | bool = True
    if config is not None and url.startswith("https"):
        verify = ssl.create_default_context()
        if config.tls_ca_path is not None:
            verify.load_verify_locations(config.tls_ca_path)
    if own_certificates:
        verify = _only_trusting(own_certificates)
    return httpx.AsyncClient(
        headers=headers, trust_env=False, timeout=timeout, limits=limits, verify=verify
    )


def _only_trusting(certificates: Iterable[Path]) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    # A certificate that an authority issued is trusted without the authority.
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    for path in certificates:
        try:
            # Of a chain, only its own: each that is loaded is trusted for all that it issued.
            leaf = _PEM.search(path.read_bytes())
            if leaf is None:
                raise ValueError("it has no certificate as PEM")
            context.load_verify_locations(cadata=leaf.group().decode())
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            raise InvalidRequest(
                f"{path} cannot be read: {reason}", "http_tls_cert_path"
            ) from error
    return context


def api_url(frontend: Instance) -> str:
    """Returns the URL of its API, without /v1."""
    return frontend.meta.get(HTTP_META_KEY, f"http://{frontend.http_address}")


def metrics_url(frontend: Instance) -> str:
    return frontend.meta.get(METRICS_META_KEY, f"{api_url(frontend)}/metrics")


def admin_url(frontend: Instance) -> str:
    """Returns the URL of its routes of administrators, without a path: that of the metrics."""
    url = httpx.URL(metrics_url(frontend))
    return str(url.copy_with(path="")).removesuffix("/")


def find_frontend(snapshot: Snapshot) -> Instance:
    """Returns a registered frontend. Raises Unavailable."""
    for instance in snapshot.of("frontend"):
        if instance.http_address:
            return instance
    raise Unavailable("no frontend is registered; `meshctl status` lists the members")


def chat_body(model: str, prompt: str, max_tokens: int) -> dict[str, object]:
    return {
        "model": model,
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": max_tokens,
        "stream": True,
    }


async def find_serving_problem(http: httpx.AsyncClient, url: str, model: str) -> str:
    """Returns "" if the gateway at `url` is healthy and lists `model`; else what is missing."""
    try:
        ready = await http.get(f"{url}/ready", timeout=2.0)
        if ready.status_code != 200:
            return f"GET {url}/ready returned {ready.status_code}"
        models = await http.get(f"{url}/v1/models", timeout=2.0)
        if models.status_code == 401:
            return f"{url} needs an API key: set OPENAI_API_KEY"
        if models.status_code != 200:
            return f"GET {url}/v1/models returned {models.status_code}"
        listed = [entry["id"] for entry in models.json()["data"]]
    except httpx.HTTPError as error:
        return f"{url} does not answer: {error or type(error).__name__}"
    except (ValueError, LookupError, TypeError):
        return f"GET {url}/v1/models is not a list of models"
    return "" if model in listed else f"GET {url}/v1/models lists {listed}, not {model!r}"


async def chat(
    http: httpx.AsyncClient, url: str, body: dict[str, object]
) -> AsyncGenerator[str, None]:
    """Yields the pieces of the response text as they arrive. Raises as `chat_chunks`."""
    async with aclosing(chat_chunks(http, url, body, RESPONSE_TIMEOUT_S)) as chunks:
        async for chunk in chunks:
            yield chunk_text(chunk)


async def chat_chunks(
    http: httpx.AsyncClient, url: str, body: dict[str, object], timeout_s: float | None = None
) -> AsyncGenerator[dict[str, Any], None]:
    """Yields the events of a streamed chat. Raises as `stream_events`, and for another event."""
    events = stream_events(http, f"{url}/v1/chat/completions", body, timeout_s, kind="chat")
    async with aclosing(events):
        async for chunk in events:
            try:
                chunk_text(chunk)
            except (LookupError, TypeError, AttributeError):
                text = json.dumps(chunk)[:ERROR_CHARS_MAX]
                raise GatewayError(f"not a chat chunk: {text}") from None
            yield chunk


async def stream_events(
    http: httpx.AsyncClient,
    url: str,
    body: Mapping[str, object],
    timeout_s: float | None = None,
    *,
    kind: str,
) -> AsyncGenerator[dict[str, Any], None]:
    """Yields the events of the streamed response to a POST. kind: names them in errors.

    Raises GatewayError for an error status, an error event, a truncated stream, or a stream that
    takes longer than `timeout_s`.
    """
    try:
        async with (
            asyncio.timeout(timeout_s),
            http.stream("POST", url, json=body) as response,
        ):
            if response.status_code != 200:
                text = (await response.aread()).decode(errors="replace")
                message = f"status {response.status_code}: {text[:ERROR_CHARS_MAX]}"
                raise GatewayError(message, response.status_code)
            async for line in response.aiter_lines():
                if not line.startswith("data:"):
                    continue
                data = line.removeprefix("data:").strip()
                if data == "[DONE]":
                    return
                yield _parse_event(data, kind)
    except httpx.HTTPError as error:
        raise GatewayError(f"the connection failed: {error or type(error).__name__}") from error
    except TimeoutError as error:
        raise GatewayError(f"the response did not end within {timeout_s:g} s") from error
    raise GatewayError("the stream ended without [DONE]")


def chunk_text(chunk: dict[str, Any]) -> str:
    """Returns the text of an event of a chat; one with the usage has no choices."""
    return "".join(choice["delta"].get("content") or "" for choice in chunk["choices"])


def _parse_event(data: str, kind: str) -> dict[str, Any]:
    try:
        event = json.loads(data)
    except ValueError:
        event = None
    if not isinstance(event, dict):
        raise GatewayError(f"not a {kind} chunk: {data[:ERROR_CHARS_MAX]}")
    if "error" in event:
        raise GatewayError(f"error in the stream: {data[:ERROR_CHARS_MAX]}")
    return event
