"""Whether the ACL token of a service permits what it needs in Consul."""

from __future__ import annotations

import asyncio
import contextlib
import ssl

import httpx

from common.registry.consul.entries import service_name
from common.runtime.config import ServiceConfig

AUTHORIZE_PATH = "/v1/internal/acl/authorize"


async def find_refusal(config: ServiceConfig, limit_s: float) -> str:
    """Returns what Consul would refuse; "" if nothing, or if it has no access control.

    Without the right to read, lists of Consul are empty, and no call fails.
    """
    needed = [
        {"Resource": "service", "Access": "write", "Segment": service_name(config.namespace)},
        {"Resource": "key", "Access": "write", "Segment": f"kvmesh/{config.namespace}/"},
        {"Resource": "key", "Access": "write", "Segment": "kvmesh/cards/"},
    ]
    headers = {"X-Consul-Token": config.consul_token} if config.consul_token else {}
    is_https = config.consul_url.startswith("https")
    verify = ssl.create_default_context(cafile=config.consul_ca_path) if is_https else False
    with contextlib.suppress(httpx.HTTPError, TimeoutError, ValueError, TypeError, KeyError):
        async with (
            asyncio.timeout(limit_s),
            httpx.AsyncClient(
                base_url=config.consul_url, headers=headers, verify=verify, trust_env=False
            ) as http,
        ):
            response = await http.post(AUTHORIZE_PATH, json=needed)
            if response.status_code != 200:
                return ""
            refused = [right for right in response.json() if not right["Allow"]]
            rights = ", ".join(f"{right['Resource']} {right['Segment']!r}" for right in refused)
            return f"the token may not write: {rights}" if refused else ""
    return ""
