"""What frontends report over HTTP: metrics and readiness."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import httpx

from common.inspection.gateway import api_url, metrics_url, new_http_client
from common.inspection.traffic import Sample, Traffic, sum_traffic, traffic_between
from common.registry.instances import Instance
from common.runtime.config import ServiceConfig
from console_svc.collect.scrape import Scrape, read_scrape

TIMEOUT_S = 3.0
# Of rates and latencies.
WINDOW_S = 10.0
# Of one response; a frontend with 2,000 tenants has 2 MB of metrics.
BODY_BYTES_MAX = 16 << 20
FRONTENDS_MAX = 64
_MODEL = "model "


@dataclass(frozen=True, slots=True)
class Readiness:
    """What `/ready` of a frontend states. canaries, problems: by model."""

    reasons: tuple[str, ...] = ()
    degraded: tuple[str, ...] = ()
    canaries: Mapping[str, str] = field(default_factory=dict)
    problems: Mapping[str, str] = field(default_factory=dict)


class Frontends:
    """Reads the frontends of a mesh."""

    def __init__(self, config: ServiceConfig, key: str | None) -> None:
        """key: that the frontends' metrics need, or None."""
        self._config = config
        self._key = key
        self._clients: dict[str, httpx.AsyncClient] = {}
        # By the URL of the metrics, which the processes of one frontend share.
        self._samples: dict[str, deque[Sample]] = {}
        self.scrapes: dict[str, Scrape] = {}
        self.traffic: dict[int, Traffic] = {}
        """By instance id."""
        self.total = Traffic()
        self.readiness: dict[str, Readiness] = {}
        """By the URL of the API."""
        self.problems: tuple[str, ...] = ()

    async def read(self, instances: Iterable[Instance]) -> None:
        """Reads all frontends at once."""
        frontends = [i for i in instances if i.http_address][:FRONTENDS_MAX]
        urls = {metrics_url(instance): instance.id for instance in reversed(frontends)}
        apis = {api_url(instance) for instance in frontends}
        await self._forget(urls.keys() | apis)
        found = await asyncio.gather(
            *map(self._read_metrics, urls), *map(self._read_readiness, sorted(apis))
        )
        self.problems = tuple(filter(None, found))
        self.traffic = {
            id_: traffic_between(self._samples[url][0], self._samples[url][-1])
            for url, id_ in urls.items()
            if self._samples.get(url)
        }
        windows = [window for window in self._samples.values() if window]
        self.total = sum_traffic([(window[0], window[-1]) for window in windows])

    async def close(self) -> None:
        await self._forget(frozenset())

    async def _forget(self, urls: Iterable[str]) -> None:
        """Closes what belongs to frontends that have left."""
        known = frozenset(urls)
        for of_url in (self._samples, self.scrapes, self.readiness):
            for url in of_url.keys() - known:
                del of_url[url]
        for url in self._clients.keys() - known:
            await self._clients.pop(url).aclose()

    async def _get(self, url: str, path: str, key: str | None) -> httpx.Response:
        client = self._clients.get(url)
        if client is None:
            client = self._clients[url] = new_http_client(key, self._config, url)
        body = bytearray()
        try:
            async with (
                asyncio.timeout(TIMEOUT_S),
                client.stream("GET", url + path, timeout=TIMEOUT_S) as response,
            ):
                async for part in response.aiter_bytes():
                    body += part
                    if len(body) > BODY_BYTES_MAX:
                        raise ValueError(f"more than {BODY_BYTES_MAX} bytes")
        except TimeoutError:
            raise ValueError(f"no whole response within {TIMEOUT_S:g} s") from None
        return httpx.Response(response.status_code, content=bytes(body), request=response.request)

    async def _read_metrics(self, url: str) -> str:
        """Returns why a frontend has no metrics; "" if it has."""
        window = self._samples.setdefault(url, deque())
        try:
            response = await self._get(url, "", self._key)
            now = time.monotonic()
            text = response.raise_for_status().text
            scrape = await asyncio.to_thread(read_scrape, text, now)
        except (httpx.HTTPError, ValueError) as error:
            window.clear()
            self.scrapes.pop(url, None)
            return f"no metrics of {url}: {_describe(error)}"
        self.scrapes[url] = scrape
        window.append(scrape.sample)
        while len(window) > 2 and window[-1].at_s - window[0].at_s > WINDOW_S:
            window.popleft()
        return ""

    async def _read_readiness(self, url: str) -> str:
        try:
            body = (await self._get(url, "/ready", None)).json()
            self.readiness[url] = Readiness(
                tuple(map(str, body["reasons"])),
                tuple(map(str, body["degraded"])),
                {model: _canary(found) for model, found in body.get("canaries", {}).items()},
                dict(filter(None, map(_model_problem, body["reasons"]))),
            )
        except (httpx.HTTPError, ValueError, LookupError, TypeError, AttributeError) as error:
            self.readiness.pop(url, None)
            return f"no readiness of {url}: {_describe(error)}"
        return ""


def _canary(found: Mapping[str, object]) -> str:
    if found["status"] == "ok":
        return "ok"
    return f"{found['status']}: {found['stage']}: {found['reason']}"


def _model_problem(reason: str) -> tuple[str, str] | None:
    """Returns model and problem of a reason `model NAME: PROBLEM`; None for another one."""
    name, colon, problem = reason.removeprefix(_MODEL).partition(": ")
    return (name, problem) if reason.startswith(_MODEL) and colon else None


def _describe(error: Exception) -> str:
    if isinstance(error, httpx.HTTPStatusError):
        status = error.response.status_code
        hint = "; set --frontend-key to a key with the scope admin" if status in (401, 403) else ""
        return f"status {status}{hint}"
    return str(error) or type(error).__name__
