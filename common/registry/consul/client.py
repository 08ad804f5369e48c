"""Calls to a Consul agent: py-consul's API over httpx, with this project's errors."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import time
from collections.abc import Callable, Mapping
from functools import partialmethod
from pathlib import Path
from typing import Any, Final, TypeVar

import httpx
import structlog
from consul.base import Consul, HTTPClient, Response
from consul.exceptions import ConsulException

from common.errors import InvalidRequest, MeshError, PermissionDenied, Unavailable
from common.registry.consul.entries import (
    InstanceReader,
    Listing,
    check_id,
    departure_key,
    parse_listing,
    registration,
    rivals_filter,
    service_id,
    service_name,
)
from common.registry.instances import Instance
from common.registry.signature import EntrySigner

CALL_TIMEOUT_S = 2.0
CONNECT_TIMEOUT_S = 2.0
DEPARTURE_NOTE_TIMEOUT_S = 0.9
# An agent accepts 200 connections per client address.
CONCURRENT_CALLS_MAX = 16

LOG = structlog.get_logger(__name__)

T = TypeVar("T")
# Parameters as py-consul passes them.
Params = list[tuple[str, Any]]
# Reason of a refusal. Tokens are unknown until they are made, and just after an election.
TOKEN_UNKNOWN: Final = "TOKEN_UNKNOWN"
# Paths for which 404 means "does not exist", which py-consul returns as None or False.
_MAY_BE_ABSENT = ("/v1/kv/", "/v1/agent/service/")


class ConsulClient:
    """The calls that a registry needs.

    token: an ACL token, or None. ca_path: certificate authorities of an https agent. signer: of
    own entries, and checks those of others.

    Raises Unavailable if Consul cannot be reached, has no leader or sends an unreadable response,
    PermissionDenied for 403, InvalidRequest for other refusals and for an invalid `url`.
    """

    def __init__(
        self, url: str, token: str | None, signer: EntrySigner, ca_path: Path | None = None
    ) -> None:
        self._signer = signer
        self._reader = InstanceReader(signer)
        self._http = _open_http_client(url, token, ca_path)
        call_slots = asyncio.Semaphore(CONCURRENT_CALLS_MAX)
        self._consul = _HttpxConsul(_HttpxTransport(self._http, call_slots))
        self._stale_consul = _HttpxConsul(_HttpxTransport(self._http, call_slots, stale=True))

    async def close(self) -> None:
        await self._http.aclose()

    async def list_entries(self, namespace: str) -> Listing:
        """Returns all registered instances now."""
        index, services = await self._consul.health.service(service_name(namespace))
        return self._parse(namespace, index, services)

    async def list_rivals(self, instance: Instance) -> Listing:
        """Returns the entry of `instance`, if listed, and those of its model with another card."""
        index, services = await self._consul.health.service(
            service_name(instance.namespace), filter_expr=rivals_filter(instance)
        )
        return parse_listing(instance.namespace, index, services, InstanceReader(self._signer))

    async def wait_for_entries(self, namespace: str, index: int, wait_s: float) -> Listing:
        """Returns instances once `index` is passed, or after `wait_s` (0: at once); needs no
        leader."""
        new_index, services = await self._stale_consul.health.service(
            service_name(namespace), index=index, wait=f"{int(wait_s * 1000)}ms"
        )
        return self._parse(namespace, new_index, services)

    # Any: Consul's JSON.
    def _parse(self, namespace: str, index: str, services: Any) -> Listing:
        listing = parse_listing(namespace, index, services, self._reader)
        self._reader.retain({service_id(namespace, e.instance.id) for e in listing.entries})
        return listing

    async def register(self, instance: Instance, ttl_s: float) -> Mapping[str, str]:
        """Creates or replaces the agent's entry of `instance`; returns its meta values."""
        text = self._signer.seal(instance)
        entry = registration(instance, text, ttl_s, self._signer.sign(text))
        await self._consul.agent.service.register(**entry)
        meta: Mapping[str, str] = entry["meta"]
        return meta

    async def registered_meta(self, namespace: str, instance_id: int) -> Mapping[str, str] | None:
        """Returns the meta values of the agent's entry, or None without an entry."""
        found = await self._consul.agent.service_definition(service_id(namespace, instance_id))
        return None if found is None else found["Meta"] or {}

    async def renew_ttl(self, namespace: str, instance_id: int) -> None:
        await self._consul.agent.check.ttl_pass(check_id(namespace, instance_id))

    async def withdraw(self, namespace: str, instance_id: int) -> None:
        """Records the departure of an instance and removes its entry. Idempotent."""
        try:
            async with asyncio.timeout(DEPARTURE_NOTE_TIMEOUT_S):
                key = departure_key(namespace, instance_id)
                await self._consul.kv.put(key, b"", flags=int(time.time()))
        except (MeshError, TimeoutError) as error:
            # Watches then probe the instance, and drop it once it does not answer.
            reason = str(error) or "timed out"
            LOG.warning("departure_not_recorded", id=instance_id, error=reason)
        await self._consul.agent.service.deregister(service_id(namespace, instance_id))

    async def departures(self, namespace: str) -> dict[str, float]:
        """Returns keys of departure notes, each with the Unix time at which it was written."""
        _, items = await self._consul.kv.get(departure_key(namespace), recurse=True)
        return {item["Key"]: float(item["Flags"]) for item in items or ()}

    async def get(self, key: str) -> bytes | None:
        """Returns the value of a key, None if it does not exist."""
        _, item = await self._consul.kv.get(key)
        return None if item is None else item["Value"] or b""

    async def get_all(self, prefix: str) -> dict[str, bytes]:
        """Returns the values below a prefix, by the rest of their keys."""
        _, items = await self._consul.kv.get(prefix, recurse=True)
        return {item["Key"].removeprefix(prefix): item["Value"] or b"" for item in items or ()}

    async def put(self, key: str, value: bytes) -> None:
        await self._consul.kv.put(key, value)

    async def delete(self, key: str) -> None:
        await self._consul.kv.delete(key)


class _HttpxConsul(Consul):  # type: ignore[misc]  # py-consul has no types
    def __init__(self, transport: _HttpxTransport) -> None:
        self._transport = transport
        super().__init__("", 0, scheme="", verify=False)
        # py-consul reads CONSUL_HTTP_TOKEN; here the transport sends the configured token.
        self.token = None

    def http_connect(self, *_: object) -> _HttpxTransport:
        return self._transport


class _HttpxTransport(HTTPClient):  # type: ignore[misc]  # py-consul has no types
    """stale: health queries accept any server's state, for which py-consul has no parameter."""

    def __init__(
        self, http: httpx.AsyncClient, call_slots: asyncio.Semaphore, *, stale: bool = False
    ) -> None:
        self._http = http
        self._call_slots = call_slots
        self._stale = stale

    def close(self) -> None:
        pass  # ConsulClient closes the shared client

    async def _send(
        self,
        method: str,
        callback: Callable[[Response], T],
        path: str,
        params: Params | None = None,
        data: str | bytes = "",
        **_: object,
    ) -> T:
        params = params or []
        wait = next((value for name, value in params if name == "wait"), None)
        if self._stale and path.startswith("/v1/health/"):
            params = [*params, ("stale", "")]
        request = self._http.build_request(
            method, path, params=params, content=data or None, timeout=_timeout(wait)
        )
        # Blocking queries hold their connections: they must not delay the short calls.
        async with contextlib.nullcontext() if wait else self._call_slots:
            try:
                response = await self._http.send(request)
            except (httpx.HTTPError, OSError) as error:
                reason = str(error) or type(error).__name__
                raise Unavailable(
                    f"cannot reach Consul at {self._http.base_url}: {reason}", 1.0
                ) from error
        if response.status_code != 404 or not path.startswith(_MAY_BE_ABSENT):
            self._raise_for_status(response)
        try:
            return callback(Response(response.status_code, response.headers, response.content))
        except (ConsulException, ValueError) as error:
            raise Unavailable(f"unreadable response from Consul: {error}", 1.0) from error

    get = partialmethod(_send, "GET")
    put = partialmethod(_send, "PUT")
    post = partialmethod(_send, "POST")
    delete = partialmethod(_send, "DELETE")

    def _raise_for_status(self, response: httpx.Response) -> None:
        status, text = response.status_code, response.text[:200].strip()
        if response.is_success:
            return
        if status == 403:
            message = f"Consul denied the request: {text}; check consul_token"
            reason = TOKEN_UNKNOWN if "ACL not found" in text else None
            raise PermissionDenied(message, reason=reason)
        if status >= 500 or status == 429:
            raise Unavailable(f"Consul at {self._http.base_url} returned {status}: {text}", 1.0)
        raise InvalidRequest(f"Consul returned {status} for {response.url.path}: {text}")


def _timeout(wait: str | None) -> httpx.Timeout:
    if wait is None:
        return httpx.Timeout(CALL_TIMEOUT_S, connect=CONNECT_TIMEOUT_S)
    # Consul adds up to a sixteenth to the wait.
    wait_s = int(wait.removesuffix("ms")) / 1000
    return httpx.Timeout(wait_s * 1.1 + 5.0, connect=CONNECT_TIMEOUT_S)


def _open_http_client(url: str, token: str | None, ca_path: Path | None) -> httpx.AsyncClient:
    if not url.startswith(("http://", "https://")):
        raise InvalidRequest(f"{url!r} must begin with http:// or https://", "consul_url")
    is_https = url.startswith("https")
    try:
        return httpx.AsyncClient(
            base_url=url,
            headers={} if token is None else {"X-Consul-Token": token},
            limits=httpx.Limits(max_connections=None),
            # Reading the system's certificate authorities takes 20 ms.
            verify=ssl.create_default_context(cafile=ca_path) if is_https else False,
            trust_env=False,
        )
    except httpx.InvalidURL as error:
        raise InvalidRequest(f"{url!r} is not a URL: {error}", "consul_url") from error
    except OSError as error:  # ssl.SSLError is one.
        text = f"cannot use the certificate authorities of {ca_path}: {error}"
        raise InvalidRequest(text, "consul_ca_path") from error
