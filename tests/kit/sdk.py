"""Clients of the OpenAI SDK for a mesh, without proxies."""

from __future__ import annotations

import openai

from tests.kit.processes import Mesh
from tests.kit.waiting import WAIT_S


def open_sdk_client(mesh: Mesh, url: str = "") -> openai.AsyncOpenAI:
    """A client of the oldest frontend, or of the one at `url`, without retries; close it, or use it
    as a context manager."""
    return openai.AsyncOpenAI(
        base_url=f"{url or mesh.url}/v1",
        api_key="none",
        max_retries=0,
        timeout=WAIT_S,
        http_client=openai.DefaultAsyncHttpxClient(trust_env=False),
    )


def open_blocking_sdk_client(
    mesh: Mesh, url: str = "", *, key: str = "none", max_retries: int = 0
) -> openai.OpenAI:
    """As `open_sdk_client`, for tests without an event loop."""
    return openai.OpenAI(
        base_url=f"{url or mesh.url}/v1",
        api_key=key,
        max_retries=max_retries,
        timeout=WAIT_S,
        http_client=openai.DefaultHttpxClient(trust_env=False),
    )
