"""Limits of a worker for prompts whose parts are still arriving, and for submits in a frame."""

from __future__ import annotations

import pytest

from common.errors import MeshError, Overloaded
from common.request.preprocessed import FinishReason, PreprocessedRequest, TokenIds
from common.request.token_stream import (
    PROMPT_PART_BYTES,
    SUBMITS_PER_FRAME_MAX,
    AbortSlot,
    ArrivingPrompts,
    Hello,
    LegRequest,
    PromptPart,
    RequestFrame,
    StartSlot,
    WorkerLink,
    worker,
)

WORKER, OF_STREAM, OF_WORKER = 7, 4 * PROMPT_PART_BYTES, 6 * PROMPT_PART_BYTES
PART = b"a" * PROMPT_PART_BYTES


@pytest.fixture(autouse=True)
def _small_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "ARRIVING_BYTES_MAX_PER_STREAM", OF_STREAM)
    monkeypatch.setattr(worker, "ARRIVING_BYTES_MAX", OF_WORKER)


def begun(slot: int, parts: int = 2) -> tuple[int, LegRequest]:
    """A submit with the first of `parts` parts."""
    request = PreprocessedRequest(model="m", token_ids=TokenIds(PART))
    return slot, LegRequest("r", request=request, prompt_bytes=parts * PROMPT_PART_BYTES)


def stream(arriving: ArrivingPrompts | None = None) -> WorkerLink:
    link = WorkerLink(WORKER, 0.0, arriving=arriving)
    link.receive(RequestFrame(hello=Hello(1, WORKER, 1)), 0.0)
    return link


def rejected(link: WorkerLink) -> dict[int, MeshError]:
    frame = link.next_frame(0.0)
    assert frame is not None
    return {one.slot: one.error for one in frame.rejected}


def test_a_prompt_that_begins_above_the_limit_of_a_stream_is_rejected() -> None:
    link = stream()
    assert link.receive(RequestFrame(submits=[begun(slot) for slot in range(1, 8)]), 0.0) == []
    errors = rejected(link)
    assert sorted(errors) == [5, 6, 7]
    assert all(isinstance(error, Overloaded) and error.retryable for error in errors.values())
    assert "327680/262144 bytes on this stream" in errors[5].message


def test_a_part_above_the_limit_rejects_its_prompt_and_later_parts_are_ignored() -> None:
    link = stream()
    link.receive(RequestFrame(submits=[begun(1, 3), begun(2, 3), begun(3, 3), begun(4, 3)]), 0.0)
    more = RequestFrame(prompt_parts=[PromptPart(1, PROMPT_PART_BYTES, PART)])
    assert link.receive(more, 0.0) == []
    assert list(rejected(link)) == [1]
    assert link.receive(more, 0.0) == []
    for offset in (1, 2):  # The rejected prompt has left room for another.
        part = PromptPart(2, offset * PROMPT_PART_BYTES, PART)
        commands = link.receive(RequestFrame(prompt_parts=[part]), 0.0)
        if offset == 1:
            link.receive(RequestFrame(aborts=[AbortSlot(4, "test")]), 0.0)
    assert commands == [StartSlot(2, begun(2, 3)[1], 3 * PART)]


@pytest.mark.parametrize("end", ["close", "abort", "deadline", "complete"])
def test_streams_share_the_limit_of_the_worker_until_their_prompts_end(end: str) -> None:
    arriving = ArrivingPrompts()
    first, second = stream(arriving), stream(arriving)
    first.receive(RequestFrame(submits=[begun(slot) for slot in range(1, 5)]), 0.0)
    second.receive(RequestFrame(submits=[begun(slot) for slot in range(1, 5)]), 0.0)
    assert sorted(rejected(second)) == [3, 4]
    assert arriving.size == OF_WORKER
    second.close()
    assert arriving.size == OF_STREAM
    slots = range(1, 5)
    match end:
        case "close":
            first.close()
        case "abort":
            first.receive(RequestFrame(aborts=[AbortSlot(slot, "test") for slot in slots]), 0.0)
        case "deadline":
            for slot in slots:
                first.end(slot, FinishReason.CANCELLED)
        case "complete":
            parts = [PromptPart(slot, PROMPT_PART_BYTES, PART) for slot in slots]
            first.receive(RequestFrame(aborts=[AbortSlot(4, "test")]), 0.0)
            assert len(first.receive(RequestFrame(prompt_parts=parts[:3]), 0.0)) == 3
    assert arriving.size == 0


def test_a_frame_of_too_many_submits_ends_the_stream() -> None:
    request = PreprocessedRequest(model="m", token_ids=TokenIds.of(()))
    submits = [(slot, LegRequest("r", request=request)) for slot in range(1, 2000)]
    link = stream()
    link.receive(RequestFrame(submits=submits[:SUBMITS_PER_FRAME_MAX]), 0.0)
    with pytest.raises(MeshError, match="1025/1024 submits in one frame"):
        stream().receive(RequestFrame(submits=submits[: SUBMITS_PER_FRAME_MAX + 1]), 0.0)
