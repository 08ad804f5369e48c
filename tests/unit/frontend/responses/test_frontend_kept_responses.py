"""The responses that a connection keeps for its next event."""

from __future__ import annotations

from frontend_svc.responses.kept import KeptResponses
from frontend_svc.responses.store import ResponseStore, StoredResponse

FIRST, SECOND = StoredResponse(b"{}", ()), StoredResponse(b"[]", ())


def open_two() -> tuple[ResponseStore, KeptResponses, KeptResponses]:
    """A store, and two connections that share it."""
    store = ResponseStore(1 << 20, 60.0)
    return store, KeptResponses(store, lambda: 0.0), KeptResponses(store, lambda: 0.0)


def test_a_lane_keeps_its_newest_response() -> None:
    store, kept, _ = open_two()
    kept.put(None, "a", FIRST)
    kept.put("lane", "b", SECOND)
    assert (kept.get("a"), kept.get("b")) == (FIRST, SECOND)
    kept.put(None, "c", SECOND)
    assert (kept.get("a"), kept.get("b"), kept.get("c")) == (None, SECOND, SECOND)
    assert len(store) == 2


def test_a_connection_has_only_its_own_responses() -> None:
    _, kept, other = open_two()
    kept.put(None, "a", FIRST)
    assert other.get("a") is None


def test_the_end_of_a_connection_removes_its_responses() -> None:
    store, kept, other = open_two()
    kept.put(None, "a", FIRST)
    other.put(None, "b", SECOND)
    kept.close()
    kept.put(None, "c", FIRST)
    assert (kept.get("a"), kept.get("c"), other.get("b")) == (None, None, SECOND)
    assert len(store) == 1


def test_a_full_store_forgets_the_response() -> None:
    kept = KeptResponses(ResponseStore(1, 60.0), lambda: 0.0)
    kept.put(None, "a", FIRST)
    assert kept.get("a") is None
    kept.put(None, "b", SECOND)
    kept.close()
