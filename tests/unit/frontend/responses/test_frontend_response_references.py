"""References of an input to stored items."""

from __future__ import annotations

from typing import Any, cast

import orjson
import pytest

from common.errors import InvalidRequest
from frontend_svc.responses import endpoint
from frontend_svc.responses.endpoint import ResponsesApi
from frontend_svc.responses.ids import item_id, response_id
from frontend_svc.responses.schema import ResponsesRequest
from frontend_svc.responses.store import StoredResponse
from frontend_svc.responses.translation import parse_responses

ID = response_id("ab" * 16, 5)


def message(own_id: str, text: str) -> dict[str, Any]:
    return {"type": "message", "id": own_id, "role": "user", "content": text}


class FakeStored:
    """One stored response with two items."""

    is_available = True

    def __init__(self) -> None:
        self.reads = 0

    async def get(self, response_id: str, tenant: str) -> StoredResponse:
        self.reads += 1
        item = orjson.dumps(message(item_id("msg", ID, 0, is_input=True), "in"))
        output = [message(item_id("msg", ID, 0), "out")]
        return StoredResponse(orjson.dumps({"output": output}), (item,))


def request_of(*ids: str) -> ResponsesRequest:
    references = [{"type": "item_reference", "id": one} for one in ids]
    return parse_responses(orjson.dumps({"model": "m", "input": references}))


async def test_a_response_is_read_and_parsed_once_for_all_references(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    parsed: list[StoredResponse] = []
    conversation_of = endpoint._conversation

    def counting(stored: StoredResponse) -> tuple[bytes, ...]:
        parsed.append(stored)
        return conversation_of(stored)

    monkeypatch.setattr(endpoint, "_conversation", counting)
    stored = FakeStored()
    # Any: of the stored responses only `get` is used.
    api = ResponsesApi(cast(Any, stored), cast(Any, None), cast(Any, None))
    ids = [item_id("msg", ID, 0, is_input=True), item_id("msg", ID, 0)] * 3
    found = await api._referenced(request_of(*ids), "acme", (), None)
    assert [cast(Any, found[index]).content for index in range(6)] == ["in", "out"] * 3
    assert (stored.reads, len(parsed)) == (1, 1)
    unknown = item_id("msg", ID, 7)
    with pytest.raises(InvalidRequest, match="no stored item") as raised:
        await api._referenced(request_of(ids[0], unknown), "acme", (), None)
    assert raised.value.field == "input[1].id"
