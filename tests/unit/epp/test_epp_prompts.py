"""What a picker reads of bodies."""

from __future__ import annotations

import json

import pytest

from epp_svc.prompts import STORED_CONVERSATION, read_body


@pytest.mark.parametrize(
    "stored",
    [
        {"previous_response_id": "resp_1"},
        {"conversation": "conv_1"},
        {"conversation": {"id": "conv_1"}},
    ],
)
async def test_a_conversation_that_the_server_has_is_no_whole_prompt(
    stored: dict[str, object],
) -> None:
    body = {"model": "m", "input": "the last turn"}
    whole = await read_body(json.dumps(body).encode(), "/v1/responses")
    assert whole.request is not None
    part = await read_body(json.dumps(body | stored).encode(), "/v1/responses")
    assert (part.request, part.unread) == (None, STORED_CONVERSATION)
