"""Recorded KV events: every entry comes back equal; what is broken is named by its line."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.kv.events import (
    EMPTY_HASHES,
    EventBatch,
    EventKind,
    Hashes,
    KvEvent,
    Partition,
    SnapshotChunk,
    Source,
    SourcePosition,
    SourceStatus,
    Tier,
)
from common.kv.index_feed import IndexFeed, run_all_steps
from common.wire.kv import BATCH_BLOCKS_MAX
from indexer_svc.core.recording import (
    LINE_BYTES_MAX,
    BrokenRecording,
    IndexLost,
    RecordingEnd,
    RecordingEntry,
    RecordingReader,
    SourcePositions,
    encode_header,
    encode_line,
    play,
)
from indexer_svc.core.subscriber import StatusUpdate

SOURCE = Source(2**63 - 1, 3)
PARTITION = Partition("m", 16, 1, 2)
EXACT = StatusUpdate(SOURCE, PARTITION, SourceStatus("exact"))


def array(values: Iterable[int]) -> Hashes:
    return np.array(list(values), dtype=np.uint64)


def batch(sequence: int, *events: KvEvent, epoch: int = 1) -> EventBatch:
    return EventBatch(SOURCE, epoch, sequence, events)


def stored(*values: int, tier: Tier = Tier.DEVICE) -> KvEvent:
    return KvEvent(EventKind.STORED, array(values), tier)


def chunk(sequence: int, *values: int, first: bool = True, last: bool = True) -> SnapshotChunk:
    return SnapshotChunk(SOURCE, 1, sequence, array(values), Tier.HOST, first, last)


def written(*entries: RecordingEntry) -> list[bytes]:
    return [encode_header(), *(encode_line(t, entry) for t, entry in enumerate(entries))]


def facts(entry: RecordingEntry) -> object:
    """An entry as plain values, which can be compared."""
    match entry:
        case EventBatch(source, epoch, sequence, events):
            told = [(one.kind, one.tier, one.hashes.tolist()) for one in events]
            return source, epoch, sequence, told
        case SnapshotChunk():
            where = entry.source, entry.epoch, entry.sequence, entry.tier
            return where, entry.hashes.tolist(), entry.first, entry.last
        case _:
            return entry


hashes = st.lists(st.integers(0, 2**64 - 1), max_size=5).map(array)
sources = st.builds(Source, st.integers(1, 2**64 - 1), st.integers(0, 2**32 - 1))
numbers = st.integers(1, 2**64 - 1)
events = st.builds(KvEvent, st.sampled_from(EventKind), hashes, st.sampled_from(Tier))
partitions = st.builds(Partition, st.text(min_size=1), numbers, numbers, numbers)
statuses = st.builds(
    SourceStatus, st.sampled_from(["exact", "gapped", "stale", "degraded", "gone"]), st.text()
)
entries = st.one_of(
    st.builds(EventBatch, sources, numbers, numbers, st.lists(events, max_size=3)),
    st.builds(
        SnapshotChunk,
        sources,
        numbers,
        numbers,
        hashes,
        st.sampled_from(Tier),
        st.booleans(),
        st.booleans(),
    ),
    st.builds(StatusUpdate, sources, st.none() | partitions, statuses),
    st.just(IndexLost()),
)


@pytest.mark.slow
@pytest.mark.row("S1-22")
@settings(max_examples=100, deadline=None)
@given(st.lists(entries, max_size=8))
def test_what_is_written_is_read_back_equal(told: list[RecordingEntry]) -> None:
    reading = RecordingReader(written(*told, RecordingEnd()))
    read = list(reading)
    assert [facts(entry) for _, entry in read] == [
        facts(entry) for entry in [*told, RecordingEnd()]
    ]
    assert [t for t, _ in read] == list(range(len(told) + 1))
    assert (reading.has_ended, reading.is_cut) == (True, False)
    assert reading.lines_read == len(told) + 2


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(st.lists(entries, min_size=1, max_size=4), st.data())
def test_a_file_cut_off_anywhere_gives_all_lines_that_are_whole(
    told: list[RecordingEntry], data: st.DataObject
) -> None:
    whole = b"".join(written(*told))
    at = data.draw(st.integers(len(encode_header()), len(whole)))
    lines = whole[:at].splitlines(keepends=True)
    reading = RecordingReader(lines)
    read = list(reading)
    count = whole[:at].count(b"\n") - 1
    assert [facts(entry) for _, entry in read] == [facts(entry) for entry in told[:count]]
    assert reading.is_cut == (not lines[-1].endswith(b"\n"))
    assert not reading.has_ended


@pytest.mark.parametrize(
    ("lines", "number", "why"),
    [
        ([], 1, "missing"),
        ([b"not JSON\n"], 1, "Expecting value"),
        ([b"[]\n"], 1, "not a JSON object"),
        ([b'{"other": 1}\n'], 1, "kvmesh_kv_events is missing"),
        ([b'{"kvmesh_kv_events": 2}\n'], 1, "supported: 1"),
        ([encode_header(), b"\0\0\0\0\n"], 2, "Expecting value"),
        ([encode_header(), b'{"is":"end"}\n'], 2, "t is missing"),
        ([encode_header(), b'{"t":true,"is":"end"}\n'], 2, "t is not a number"),
        ([encode_header(), b'{"t":NaN,"is":"end"}\n'], 2, "t is nan"),
        ([encode_header(), b'{"t":5,"is":"lost"}\n', b'{"t":4,"is":"lost"}\n'], 3, "t is 4"),
        ([encode_header(), b'{"t":0,"is":"dance"}\n'], 2, "'dance' is unknown"),
        (
            [encode_header(), b'{"t":0,"is":"end"}\n', b'{"t":0,"is":"lost"}\n'],
            3,
            "entry after the end",
        ),
        ([encode_header(), b"x" * (LINE_BYTES_MAX + 1)], 2, "line too long"),
        ([encode_header(), b"[" * 100_000 + b"\n"], 2, ""),
    ],
)
def test_a_line_that_is_wrong_is_named(lines: Sequence[bytes], number: int, why: str) -> None:
    with pytest.raises(BrokenRecording, match=rf"line {number}: .*{why}") as error:
        list(RecordingReader(lines))
    assert error.value.line == number
    assert error.value.reason == "BROKEN_RECORDING"


@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        ("source", [7, 0], "source is not"),
        ("source", ["7", -1], "source is not"),
        ("source", ["0", 0], "source is not"),
        ("source", ["x", 0], "source is not"),
        ("epoch", -1, "epoch is not an integer"),
        ("epoch", 1.5, "epoch is not an integer"),
        ("sequence", 0, "sequence is not an integer of at least 1"),
        ("sequence", 2**64, "sequence is not an integer"),
        ("events", {}, "events is not a list"),
        ("events", [["stored", "device"]], "events: one is not"),
        ("events", [["eaten", "device", ""]], "kind 'eaten'"),
        ("events", [["stored", "tape", ""]], "tier: 'tape'"),
        ("events", [["stored", "device", "AAA="]], "events:"),
        ("events", [["stored", "device", "?"]], "events:"),
    ],
)
def test_a_field_that_is_wrong_is_named_with_its_line(name: str, value: object, why: str) -> None:
    good = json.loads(encode_line(0.0, batch(1, stored(1))))
    line = json.dumps(good | {name: value}).encode() + b"\n"
    with pytest.raises(BrokenRecording, match=f"line 2: .*{why}"):
        list(RecordingReader([encode_header(), line]))


def test_statuses_and_snapshots_are_checked_too() -> None:
    for entry, name, value, why in (
        (EXACT, "state", "fine", "'fine' is unknown"),
        (EXACT, "partition", {"model": "m"}, "block_size is missing"),
        (EXACT, "reason", 1, "reason is not a string"),
        (chunk(1), "first", 1, "first is not true"),
        (chunk(1), "hashes", "A" * 4096 * 8 * 2, "too many hashes"),
        (chunk(1), "tier", "tape", "'tape'"),
    ):
        facts_ = json.loads(encode_line(0.0, entry)) | {name: value}
        line = json.dumps(facts_).encode() + b"\n"
        with pytest.raises(BrokenRecording, match=f"line 2: .*{why}"):
            list(RecordingReader([encode_header(), line]))


@pytest.mark.row("S1-22")
def test_played_into_an_index_it_is_the_index_that_was_recorded() -> None:
    story: list[RecordingEntry] = [
        EXACT,
        chunk(4, 1, 2, first=True, last=False),
        batch(5, stored(9)),
        chunk(4, 3, first=False),
        batch(6, KvEvent(EventKind.REMOVED, array([2]), Tier.HOST)),
    ]
    feed = IndexFeed()
    for t, entry in RecordingReader(written(*story, IndexLost())):
        run_all_steps(play(feed, entry, t))
    index, advertised = feed.advertised(SOURCE)
    held = {(tier, key) for tier, part in index.chunks(advertised) for key in part.tolist()}
    assert held == {(Tier.HOST, 1), (Tier.HOST, 3), (Tier.DEVICE, 9)}
    assert feed.status(SOURCE).state == "stale", "its recorder was lost"
    assert feed.position(SOURCE) == SourcePosition(SOURCE, 1, 6)


def test_a_recorder_resumes_where_a_replica_of_its_file_stands() -> None:
    """Against the replica itself, after every entry and a loss behind it."""
    story: list[RecordingEntry] = [
        EXACT,
        batch(1, stored(1)),
        batch(2, stored(2)),
        chunk(2, 1, first=True, last=False),
        batch(3, stored(3)),
        chunk(2, 2, first=False, last=True),
        batch(1, stored(7), epoch=2),
        SnapshotChunk(SOURCE, 2, 1, EMPTY_HASHES, first=True),
        batch(1, stored(8), epoch=3),
        StatusUpdate(SOURCE, None, SourceStatus("gone")),
    ]
    for end in range(len(story) + 1):
        positions, feed = SourcePositions(), IndexFeed()
        for entry in [*story[:end], IndexLost()]:
            positions.take(entry)
            run_all_steps(play(feed, entry, 0.0))
        told = [state for state in feed.positions() if state.sequence]
        assert positions.states() == told, f"after {end} entries"


def test_the_largest_batch_fits_into_a_line() -> None:
    # Of one hash each, with the longest names.
    event = KvEvent(EventKind.REMOVED, np.array([2**64 - 1], dtype=np.uint64), Tier.DEVICE)
    one, two = (
        len(encode_line(0.0, EventBatch(SOURCE, 2**64 - 1, 2**64 - 1, [event] * n))) for n in (1, 2)
    )
    assert one + (two - one) * (BATCH_BLOCKS_MAX - 1) <= LINE_BYTES_MAX
