"""Recorded KV events: round trips, errors with numbers of messages, playback."""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.errors import Unavailable
from common.kv.events import (
    EMPTY_HASHES,
    SNAPSHOT_CHUNK_BLOCKS,
    EventBatch,
    EventKind,
    KvEvent,
    Partition,
    SnapshotChunk,
    Source,
    SourcePosition,
    SourceStatus,
    Tier,
)
from common.kv.index_feed import IndexFeed, run_all_steps
from common.rpc.channel import MESSAGE_BYTES_MAX
from common.wire.kv import BATCH_BLOCKS_MAX
from indexer_svc.core.recording import (
    IndexLost,
    RecordingEnd,
    RecordingEntry,
    SourcePositions,
    play,
)
from indexer_svc.core.subscriber import StatusUpdate
from indexer_svc.tools.playback import write_json_lines
from indexer_svc.tools.record import Recorder
from indexer_svc.tools.recording_file import (
    HEADER,
    RECORD_BYTES_MAX,
    BrokenRecording,
    RecordingReader,
    encode_message,
)
from kvmesh.indexer.v1.indexer_pb2 import RecordedMessage, SubscribeResponse
from kvmesh.types.v1 import load_pb2
from tests.kit.kv_events import array, stored
from tests.kit.recordings import recorded, update_of

SOURCE = Source(2**63 - 1, 3)
PARTITION = Partition("m", 16, 1, 2)
EXACT = StatusUpdate(SOURCE, PARTITION, SourceStatus("exact"))


def batch(sequence: int, *events: KvEvent, epoch: int = 1) -> EventBatch:
    return EventBatch(SOURCE, epoch, sequence, events)


def chunk(sequence: int, *values: int, first: bool = True, last: bool = True) -> SnapshotChunk:
    return SnapshotChunk(SOURCE, 1, sequence, array(values), Tier.HOST, first, last)


def written(*entries: RecordingEntry) -> bytes:
    return HEADER + b"".join(recorded(t, entry) for t, entry in enumerate(entries))


def reader(data: bytes) -> RecordingReader:
    return RecordingReader(io.BytesIO(data))


def facts(entry: RecordingEntry) -> object:
    """Return an entry as comparable values."""
    match entry:
        case EventBatch(source, epoch, sequence, events):
            rows = [(event.kind, event.tier, event.hashes.tolist()) for event in events]
            return source, epoch, sequence, rows
        case SnapshotChunk():
            where = entry.source, entry.epoch, entry.sequence, entry.tier
            return where, entry.hashes.tolist(), entry.first, entry.last
        case _:
            return entry


hashes = st.lists(st.integers(0, 2**64 - 1), max_size=5).map(array)
sources = st.builds(Source, st.integers(1, 2**64 - 1), st.integers(0, 2**32 - 1))
numbers = st.integers(1, 2**64 - 1)
events = st.builds(KvEvent, st.sampled_from(EventKind), hashes, st.sampled_from(Tier))
sizes = st.integers(1, 2**32 - 1)
partitions = st.builds(Partition, st.text(min_size=1), sizes, sizes, sizes)
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
    st.builds(StatusUpdate, sources, st.none() | partitions, statuses, st.tuples(numbers, numbers)),
    st.just(IndexLost()),
)


@pytest.mark.slow
@pytest.mark.row("S1-22")
@settings(max_examples=100, deadline=None)
@given(st.lists(entries, max_size=8))
def test_entries_round_trip_through_a_recording(story: list[RecordingEntry]) -> None:
    reading = reader(written(*story, RecordingEnd()))
    read = list(reading)
    assert [facts(entry) for _, entry in read] == [
        facts(entry) for entry in [*story, RecordingEnd()]
    ]
    assert [t for t, _ in read] == list(range(len(story) + 1))
    assert (reading.has_ended, reading.is_cut) == (True, False)
    assert reading.messages_read == len(story) + 1


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(st.lists(entries, min_size=1, max_size=4), st.data())
def test_a_file_truncated_anywhere_gives_all_complete_messages(
    story: list[RecordingEntry], data: st.DataObject
) -> None:
    whole = written(*story)
    at = data.draw(st.integers(len(HEADER), len(whole)))
    ends = [len(written(*story[:count])) for count in range(len(story) + 1)]
    reading = reader(whole[:at])
    read = list(reading)
    count = sum(end <= at for end in ends) - 1
    assert [facts(entry) for _, entry in read] == [facts(entry) for entry in story[:count]]
    assert reading.is_cut == (at not in ends)
    assert not reading.has_ended


def test_a_message_with_several_updates_is_read_in_order() -> None:
    received = update_of(EXACT)
    received.more.extend([update_of(batch(1, stored(1))), SubscribeResponse(caught_up=True)])
    received.more.append(update_of(batch(2, stored(2))))
    data = HEADER + encode_message(RecordedMessage(time_us=1500, received=received))
    assert [(t, facts(entry)) for t, entry in reader(data)] == [
        (0.0015, facts(entry)) for entry in (EXACT, batch(1, stored(1)), batch(2, stored(2)))
    ]


def of_length(length: int, data: bytes = b"") -> bytes:
    return length.to_bytes(4, "little") + data


LOST = recorded(5, IndexLost())


@pytest.mark.parametrize(
    ("data", "number", "why"),
    [
        (b"", 0, "header: "),
        (b"not a recording", 0, "starts with b'not a rec"),
        (HEADER[:-3], 0, "instead of"),
        (b"kvmesh_kv_events 3\n", 0, "instead of b'kvmesh_kv_events 2"),
        (b'{"kvmesh_kv_events":2}\n', 0, "instead of b'kvmesh_kv_events 2"),
        (HEADER + of_length(4, b"rust"), 1, "Error parsing message"),
        (HEADER + of_length(0), 1, "no known content"),
        (HEADER + LOST + recorded(4, IndexLost()), 2, "time_us is 4000000, after 5000000"),
        (HEADER + recorded(0, RecordingEnd()) + LOST, 2, "message after the end"),
        (HEADER + of_length(RECORD_BYTES_MAX + 1), 1, "message too long"),
    ],
)
def test_an_invalid_message_is_rejected_with_its_number(data: bytes, number: int, why: str) -> None:
    with pytest.raises(BrokenRecording, match=why) as error:
        list(reader(data))
    assert error.value.number == number
    assert error.value.reason == "BROKEN_RECORDING"
    if number:
        assert error.value.message.startswith(f"message {number}: ")


def test_an_invalid_field_is_rejected_with_the_number_of_its_message() -> None:
    event, tier, hashes = (update_of(batch(1, stored(1))) for _ in range(3))
    event.batch.events[0].kind = 9  # type: ignore[assignment]
    tier.batch.events[0].tier = 9
    hashes.batch.events[0].prefix_hashes = b"\1\2"
    no_worker, no_block_size, no_sequence = (update_of(EXACT) for _ in range(3))
    no_worker.source.worker_id = 0
    no_block_size.partition.block_size = 0
    no_sequence.batch.dp_rank = 1
    long = update_of(chunk(1, *range(SNAPSHOT_CHUNK_BLOCKS + 1)))
    for received, why in (
        (event, "batch.events.kind has the unknown value 9"),
        (tier, "batch.events.tier has the unknown value 9"),
        (hashes, "batch.events.prefix_hashes: "),
        (no_worker, "source.worker_id is required"),
        (no_block_size, "partition.block_size must be at least 1"),
        (no_sequence, "batch.sequence must be at least 1"),
        (long, "too many hashes: 4097/4096"),
    ):
        data = HEADER + LOST + encode_message(RecordedMessage(time_us=9**9, received=received))
        with pytest.raises(BrokenRecording, match=f"message 2: .*{why}"):
            list(reader(data))


def test_a_recorder_writes_messages_with_kv_entries_as_they_are() -> None:
    file, now = io.BytesIO(), 10.0
    recorder = Recorder(file, 10_000, lambda: now)
    received = update_of(EXACT)
    received.more.append(update_of(batch(1, stored(1, 2))))
    received.more.append(SubscribeResponse(load=load_pb2.Load(running=3)))
    recorder.add(received)
    recorder.add(SubscribeResponse(caught_up=True))
    now = 12.5
    recorder.mark_index_lost()
    recorder.end()
    assert list(reader(file.getvalue()).messages()) == [
        RecordedMessage(received=received),
        RecordedMessage(time_us=2_500_000, index_lost=True),
        RecordedMessage(time_us=2_500_000, ended=True),
    ]
    totals = recorder.recording_stats
    assert (totals.messages, totals.bytes) == (3, len(file.getvalue()))
    assert (totals.batches, totals.blocks, totals.losses) == (1, 2, 1)


def test_a_full_recording_still_ends_in_order() -> None:
    file = io.BytesIO()
    recorder = Recorder(file, 200, lambda: 0.0)
    recorder.add(update_of(batch(1, stored(1))))
    with pytest.raises(Unavailable, match="recording full: "):
        recorder.add(update_of(batch(2, stored(*range(20)))))
    assert recorder.recording_stats.is_full
    recorder.end()
    assert len(file.getvalue()) <= 200
    reading = reader(file.getvalue())
    list(reading)
    assert reading.has_ended


def test_a_recording_is_printed_as_lines_of_json(tmp_path: Path) -> None:
    path, out = tmp_path / "events", io.StringIO()
    path.write_bytes(written(EXACT, batch(1, stored(1)), IndexLost()))
    write_json_lines(path, out)
    status, event, lost = map(json.loads, out.getvalue().splitlines())
    assert status["received"]["source"]["worker_id"] == str(SOURCE.worker_id)
    assert event["time_us"] == "1000000"
    assert event["received"]["batch"]["events"] == [
        {"kind": "EVENT_KIND_STORED", "prefix_hashes": "AQAAAAAAAAA="}
    ]
    assert lost["index_lost"]


# As the version 39bdc27 wrote it.
JSON_LINES = b"""\
{"kvmesh_kv_events":1}
{"t":0.0,"is":"status","source":["9223372036854775807",3],"state":"exact","reason":"",\
"partition":{"model":"m","block_size":16,"hash_scheme":1,"adapter_version":2}}
{"t":0.25,"is":"snapshot","source":["9223372036854775807",3],"epoch":1,"sequence":4,\
"tier":"host","hashes":"AQAAAAAAAAACAAAAAAAAAA==","first":true,"last":true}
{"t":1.5,"is":"batch","source":["9223372036854775807",3],"epoch":1,"sequence":5,\
"events":[["stored","device","CQAAAAAAAAA="],["removed","host","AgAAAAAAAAA="],\
["cleared","device",""]]}
{"t":2,"is":"lost"}
{"t":2.5,"is":"end"}
"""


def test_a_recording_of_json_lines_is_read() -> None:
    reading = reader(JSON_LINES)
    expected: list[tuple[float, RecordingEntry]] = [
        (0.0, EXACT),
        (0.25, chunk(4, 1, 2)),
        (
            1.5,
            batch(
                5,
                stored(9),
                KvEvent(EventKind.REMOVED, array([2]), Tier.HOST),
                KvEvent(EventKind.CLEARED, EMPTY_HASHES, Tier.DEVICE),
            ),
        ),
        (2.0, IndexLost()),
        (2.5, RecordingEnd()),
    ]
    assert [(t, facts(entry)) for t, entry in reading] == [(t, facts(e)) for t, e in expected]
    assert (reading.messages_read, reading.has_ended, reading.is_cut) == (5, True, False)


def test_lines_of_json_are_read_up_to_the_last_whole_one() -> None:
    reading = reader(JSON_LINES[:-5])
    assert len(list(reading)) == 4
    assert (reading.messages_read, reading.has_ended, reading.is_cut) == (4, False, True)


@pytest.mark.parametrize(
    ("line", "number", "why"),
    [
        (b'{"kvmesh_kv_events":1}', 1, "kvmesh_kv_events|tag"),
        (b"[]", 1, "valid dictionary"),
        (b"{", 1, "Expecting"),
        (b"[" * 100_000, 1, "recursion|Expecting"),
        (b'{"t":0,"is":"other"}', 1, "other"),
        (b'{"t":-1,"is":"end"}', 1, "t: "),
        (b'{"t":NaN,"is":"end"}', 1, "t: "),
        (b'{"t":"0","is":"end"}', 1, "t: "),
        (b'{"t":0,"is":"status","source":["x",0],"state":"exact","reason":""}', 1, "source.0"),
        (b'{"t":0,"is":"status","source":["0",0],"state":"exact","reason":""}', 1, "source.0"),
        (b'{"t":0,"is":"status","source":["7",0],"state":"good","reason":""}', 1, "state"),
        (
            b'{"t":0,"is":"batch","source":["7",0],"epoch":1,"sequence":0,"events":[]}',
            1,
            "sequence must be at least 1",
        ),
        (
            b'{"t":0,"is":"batch","source":["7",0],"epoch":1,"sequence":1,'
            b'"events":[["stored","device","AQI="]]}',
            1,
            "prefix_hashes",
        ),
        (b'{"t":1,"is":"lost"}\n{"t":0,"is":"lost"}', 2, "time_us is 0, after 1000000"),
        (b'{"t":1,"is":"end"}\n{"t":1,"is":"lost"}', 2, "message after the end"),
    ],
)
def test_an_invalid_line_of_json_is_rejected_with_its_number(
    line: bytes, number: int, why: str
) -> None:
    with pytest.raises(BrokenRecording, match=why) as error:
        list(reader(b'{"kvmesh_kv_events":1}\n' + line + b"\n"))
    assert error.value.number == number


@pytest.mark.row("S1-22")
def test_playback_into_an_index_rebuilds_the_recorded_index() -> None:
    story: list[RecordingEntry] = [
        EXACT,
        chunk(4, 1, 2, first=True, last=False),
        batch(5, stored(9)),
        chunk(4, 3, first=False),
        batch(6, KvEvent(EventKind.REMOVED, array([2]), Tier.HOST)),
    ]
    feed = IndexFeed()
    for t, entry in reader(written(*story, IndexLost())):
        run_all_steps(play(feed, entry, t))
    index, advertised = feed.advertised(SOURCE)
    held = {(tier, key) for tier, part in index.chunks(advertised) for key in part.tolist()}
    assert held == {(Tier.HOST, 1), (Tier.HOST, 3), (Tier.DEVICE, 9)}
    assert feed.status(SOURCE).state == "stale", "its recorder was lost"
    assert feed.position(SOURCE) == SourcePosition(SOURCE, 1, 6)


def test_a_recorder_resumes_from_the_position_of_a_replica_of_its_file() -> None:
    """Compared with a replica, after every entry followed by a loss."""
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
        recorded = [state for state in feed.positions() if state.sequence]
        assert positions.states() == recorded, f"after {end} entries"


def test_a_replica_of_a_recording_without_a_batch_has_a_gap() -> None:
    exact = StatusUpdate(SOURCE, PARTITION, SourceStatus("exact"), (1, 2))
    feed = IndexFeed()
    for t, entry in reader(written(EXACT, batch(1, stored(1)), exact)):
        run_all_steps(play(feed, entry, t))
    assert feed.status(SOURCE).state == "gapped"


def test_the_largest_batch_fits_into_a_message() -> None:
    # Of one hash each, with the longest numbers.
    event = KvEvent(EventKind.REMOVED, np.array([2**64 - 1], dtype=np.uint64), Tier.DISK)
    sizes_of = [
        len(recorded(0.0, EventBatch(SOURCE, 2**64 - 1, 2**64 - 1, [event] * n))) for n in (1, 2)
    ]
    # Lengths of the outer messages take a few bytes more.
    largest = sizes_of[0] + (sizes_of[1] - sizes_of[0]) * (BATCH_BLOCKS_MAX - 1) + 64
    assert largest <= MESSAGE_BYTES_MAX < RECORD_BYTES_MAX
