"""The store of responses: bounds in size and time; ids; pages of input items."""

from __future__ import annotations

import json

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import InvalidRequest, Unsupported
from frontend_svc.endpoints.query import parse_query
from frontend_svc.responses import ids
from frontend_svc.responses.queries import (
    ItemsQuery,
    ResponseQuery,
    items_page,
)
from frontend_svc.responses.store import ResponseStore, StoredResponse

ITEMS = [orjson.dumps({"id": f"msg_{number}"}) for number in range(25)]


def stored(size: int, tenant: str = "") -> StoredResponse:
    return StoredResponse(b"x" * size, (b"item",), tenant)


def test_a_response_expires_after_its_time() -> None:
    store = ResponseStore(10_000, 60.0)
    store.put("a", stored(1), 100.0)
    assert store.get("a", 159.9) == stored(1)
    assert store.get("a", 160.0) is None
    assert (len(store), store.bytes) == (0, 0)


def test_the_oldest_responses_are_removed_when_the_store_is_full() -> None:
    store = ResponseStore(3 * stored(1000).size, 60.0)
    for name in "abcd":
        store.put(name, stored(1000), 0.0)
    assert [name for name in "abcd" if store.get(name, 1.0)] == ["b", "c", "d"]
    store.put("huge", stored(100_000), 1.0)
    assert (len(store), store.bytes) == (0, 0)


def test_a_tenant_that_stores_more_than_its_part_removes_its_own_oldest_responses() -> None:
    store = ResponseStore(10 * stored(1000).size, 60.0)
    for number in range(4):
        store.put(f"quiet-{number}", stored(1000, "quiet"), 0.0)
    for number in range(100):
        store.put(f"flood-{number}", stored(1000, "flood"), 1.0)
    assert all(store.get(f"quiet-{number}", 2.0) for number in range(4))
    assert [n for n in range(100) if store.get(f"flood-{n}", 2.0)] == [94, 95, 96, 97, 98, 99]

    # A tenant that stores more than the others takes back no more than its equal part.
    for number in range(4, 8):
        store.put(f"quiet-{number}", stored(1000, "quiet"), 3.0)
    assert [n for n in range(8) if store.get(f"quiet-{n}", 4.0)] == [3, 4, 5, 6, 7]
    assert [n for n in range(100) if store.get(f"flood-{n}", 4.0)] == [95, 96, 97, 98, 99]

    # One response above the limit removes none of another tenant.
    store.put("huge", stored(100_000, "third"), 5.0)
    assert (len(store), store.get("huge", 5.0)) == (10, None)


def test_a_deleted_response_is_gone() -> None:
    store = ResponseStore(10_000, 60.0)
    store.put("a", stored(1), 0.0)
    assert store.delete("a", 1.0)
    assert not store.delete("a", 1.0)
    assert (store.get("a", 1.0), store.bytes) == (None, 0)


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 3000), st.floats(0, 20))))
def test_the_store_never_exceeds_its_limit(steps: list[tuple[int, int, float]]) -> None:
    store, now = ResponseStore(8000, 60.0), 0.0
    for number, (name, size, passed_s) in enumerate(steps):
        now += passed_s
        if name < 7:
            store.put(f"{number}", stored(size, f"tenant-{name % 3}"), now)
        else:
            store.delete(f"{number - name}", now)
        assert 0 <= store.bytes <= 8000
        assert (store.bytes == 0) == (len(store) == 0)


def test_ids_name_the_frontend_and_the_response() -> None:
    response_id = ids.response_id("ab" * 16, 2**63 - 1)
    assert ids.frontend_of(response_id) == 2**63 - 1
    for is_input in (False, True):
        item_id = ids.item_id("msg", response_id, 12, is_input=is_input)
        assert ids.response_of_item(item_id) == response_id
        assert len(item_id) <= 64
    for other in ("", "resp_", "resp_1", "msg_1", f"{response_id}0", "chatcmpl-1"):
        assert ids.frontend_of(other) is None
        assert ids.response_of_item(other) is None


def test_items_are_listed_in_pages() -> None:
    pages, after = [], ""
    while True:
        pairs = [("limit", "10"), *([("after", after)] if after else [])]
        page = json.loads(items_page(ITEMS, parse_query(ItemsQuery, pairs)))
        pages.append([one["id"] for one in page["data"]])
        assert (page["first_id"], page["last_id"]) == (pages[-1][0], pages[-1][-1])
        if not page["has_more"]:
            break
        after = page["last_id"]
    assert list(map(len, pages)) == [10, 10, 5]
    assert [*pages[0], *pages[1], *pages[2]] == [f"msg_{n}" for n in reversed(range(25))]


def test_items_are_listed_oldest_first_on_request() -> None:
    query = parse_query(ItemsQuery, [("order", "asc")])
    page = json.loads(items_page(ITEMS, query))
    assert [one["id"] for one in page["data"]] == [f"msg_{number}" for number in range(20)]
    assert json.loads(items_page([], query))["data"] == []


@pytest.mark.parametrize(
    ("pairs", "param"),
    [
        ([("limit", "0")], "limit"),
        ([("limit", "101")], "limit"),
        ([("limit", "x")], "limit"),
        ([("order", "up")], "order"),
        ([("before", "msg_1")], "before"),
        ([("include[]", "file_search_call.results")], "include[0]"),
    ],
)
def test_an_invalid_query_is_refused_by_name(pairs: list[tuple[str, str]], param: str) -> None:
    with pytest.raises(InvalidRequest) as raised:
        parse_query(ItemsQuery, pairs)
    assert raised.value.field == param


def test_a_page_after_an_unknown_item_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="no input item 'msg_99'"):
        items_page(ITEMS, parse_query(ItemsQuery, [("after", "msg_99")]))


def test_a_query_of_events_has_the_number_of_the_last_one() -> None:
    query = parse_query(ResponseQuery, [("stream", "true"), ("starting_after", "1")])
    assert (query.stream, query.starting_after) == (True, 1)
    assert not parse_query(ResponseQuery, [("stream", "false")]).stream
    with pytest.raises(Unsupported) as raised:
        parse_query(ResponseQuery, [("include_obfuscation", "true")])
    assert raised.value.field == "include_obfuscation"
