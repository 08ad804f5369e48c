"""The readiness of frontends over HTTP."""

from __future__ import annotations

import asyncio

import httpx

from common.registry.instances import HTTP_META_KEY, Instance
from meshctl.doctor.facts import FrontendFacts


async def read_frontend(instance: Instance, limit_s: float) -> FrontendFacts:
    """Returns the response of `/ready`, which needs no key.

    With TLS, the certificate is not checked here: a check of certificates reports it.
    """
    address = instance.http_address
    own_url = instance.meta.get(HTTP_META_KEY)
    # Earlier versions do not advertise the scheme.
    urls = [own_url] if own_url else [f"http://{address}", f"https://{address}"]
    async with httpx.AsyncClient(verify=False, trust_env=False) as http:
        error = ""
        for url in urls:
            try:
                async with asyncio.timeout(limit_s):
                    response = await http.get(f"{url}/ready", timeout=limit_s)
            except (TimeoutError, httpx.TimeoutException):
                return FrontendFacts(error=f"no response within {limit_s:g} s")
            except httpx.HTTPError as raised:
                # A TLS port ends a plain request without a response.
                error = error or str(raised) or type(raised).__name__
                continue
            return _parse(response)
    return FrontendFacts(error=error)


def _parse(response: httpx.Response) -> FrontendFacts:
    try:
        body = response.json()
        # Earlier versions have no canaries.
        failing = {
            model: f"stage {canary['stage']}: {canary['reason']}"
            for model, canary in body.get("canaries", {}).items()
            if canary["status"] == "failing"
        }
        return FrontendFacts(
            bool(body["ready"]), tuple(body["reasons"]), tuple(body["degraded"]), failing
        )
    except (ValueError, LookupError, TypeError, AttributeError):
        return FrontendFacts(error=f"status {response.status_code} without a readiness")
