"""Measured latencies of a worker, of a gateway in the test."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from common.inspection.gateway import GatewayError
from meshctl.view.latencies import CHUNKED_TOKENS, PROMPT_TOKENS, LatencyProbe, prompt_lengths


# Any, here and below: JSON.
def gateway(model: Any) -> httpx.AsyncClient:
    """Responds with two tokens to each prompt."""
    token = {"choices": [{"text": "a"}]}
    events = [token, token, {"choices": [], "usage": {"completion_tokens": 2}}]
    lines = [json.dumps(event) for event in events] + ["[DONE]"]
    text = "".join(f"data: {line}\n\n" for line in lines)

    def respond(request: httpx.Request) -> httpx.Response:
        if request.method == "GET":
            return httpx.Response(200, json=model)
        return httpx.Response(200, text=text)

    return httpx.AsyncClient(transport=httpx.MockTransport(respond))


async def test_a_model_without_a_context_length_is_measured_with_all_prompts() -> None:
    async with gateway({"id": "m"}) as http:
        found = await LatencyProbe(http, "http://gateway", "m").measure()
    assert [tokens for tokens, _ in found.prompts] == list(PROMPT_TOKENS)
    assert [tokens for tokens, _ in found.pauses] == [CHUNKED_TOKENS[0]]


async def test_what_is_no_model_is_an_error_with_its_url() -> None:
    async with gateway(["m"]) as http:
        with pytest.raises(GatewayError, match="http://gateway/v1/models/m"):
            await LatencyProbe(http, "http://gateway", "m").measure()


def test_prompts_fit_into_the_context_and_have_a_token() -> None:
    assert prompt_lengths(None) == list(PROMPT_TOKENS)
    assert prompt_lengths(600) == [64, 512, 536]
    assert prompt_lengths(20) == [1]
