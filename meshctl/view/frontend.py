"""HTTP requests of meshctl to a frontend."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator

import httpx

POLL_S = 0.1
RESPONSE_TIMEOUT_S = 60.0
# The first token may wait in a queue; later gaps are far below this.
READ_TIMEOUT_S = 30.0
ERROR_CHARS_MAX = 500


class GatewayError(Exception):
    """An unexpected response of the gateway; the message describes it."""


def new_http_client(api_key: str | None) -> httpx.AsyncClient:
    """Returns a client that connects directly, without a proxy from the environment."""
    headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
    timeout = httpx.Timeout(5.0, read=READ_TIMEOUT_S)
    return httpx.AsyncClient(headers=headers, trust_env=False, timeout=timeout)


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
    """Yields the pieces of the response text as they arrive.

    Raises GatewayError for an error status, an error event, a truncated stream, or a stream that
    takes longer than RESPONSE_TIMEOUT_S.
    """
    try:
        async with (
            asyncio.timeout(RESPONSE_TIMEOUT_S),
            http.stream("POST", f"{url}/v1/chat/completions", json=body) as response,
        ):
            if response.status_code != 200:
                text = (await response.aread()).decode(errors="replace")
                raise GatewayError(f"status {response.status_code}: {text[:ERROR_CHARS_MAX]}")
            async for line in response.aiter_lines():
                if not line.startswith("data:"):
                    continue
                data = line.removeprefix("data:").strip()
                if data == "[DONE]":
                    return
                yield _parse_chunk_text(data)
    except httpx.HTTPError as error:
        raise GatewayError(f"the connection failed: {error or type(error).__name__}") from error
    except TimeoutError as error:
        raise GatewayError(f"the response did not end within {RESPONSE_TIMEOUT_S:g} s") from error
    raise GatewayError("the stream ended without [DONE]")


def _parse_chunk_text(data: str) -> str:
    try:
        chunk = json.loads(data)
        if "error" in chunk:
            raise GatewayError(f"error in the stream: {data[:ERROR_CHARS_MAX]}")
        # A chunk without choices carries the usage.
        return "".join(choice["delta"].get("content") or "" for choice in chunk["choices"])
    except (ValueError, LookupError, TypeError, AttributeError):
        raise GatewayError(f"not a chat chunk: {data[:ERROR_CHARS_MAX]}") from None
