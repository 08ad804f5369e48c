"""Format of recorded KV events: one JSON object per line, as a subscriber received it. Pure.

The first line is the header, `{"kvmesh_kv_events": 1}`. Every other line has `t`, seconds since the
start of the recording, never decreasing, and `is`:

- `status`: source, state, reason, and partition (model, block_size, hash_scheme, adapter_version)
  if the index sent it. The first entry of each source;
- `batch`: source, epoch, sequence, events, each [kind, tier, hashes];
- `snapshot`: source, epoch, sequence, tier, hashes, first, last;
- `lost`: the recorder lost the index and the unfinished snapshots; the missed entries follow;
- `end`: the recording ended in order. The last entry.

A source is [worker id as decimal text, rank]; hashes are base64 of 8 bytes each, little endian;
kinds are stored, removed, cleared; tiers are device, host, disk.

A line is written whole, its newline last. A last line without newline, as after a crash, is no
error (`RecordingReader.is_cut`); any other invalid line is, and the error has its number.
"""

from __future__ import annotations

import binascii
import json
import math
from base64 import b64decode, b64encode
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from enum import Enum
from typing import Any, Final, TypeAlias, TypeVar

from common.errors import InvalidRequest
from common.kv.events import (
    EMPTY_HASHES,
    SNAPSHOT_CHUNK_BLOCKS,
    SOURCE_STATES,
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
from common.kv.hashing import hashes_from_bytes, hashes_to_bytes
from common.kv.index_feed import IndexFeed
from indexer_svc.core.subscriber import StatusUpdate

FORMAT: Final = "kvmesh_kv_events"
VERSION: Final = 1
# Above the largest batch: 2^20 events of one hash each, 36 characters at most.
LINE_BYTES_MAX: Final = 48 * 2**20
_U64_MAX: Final = 2**64 - 1

EnumT = TypeVar("EnumT", bound=Enum)


@dataclass(frozen=True, slots=True)
class IndexLost:
    """Entry: the recorder lost the index."""


@dataclass(frozen=True, slots=True)
class RecordingEnd:
    """Entry: the recording ended in order."""


RecordingEntry: TypeAlias = StatusUpdate | EventBatch | SnapshotChunk | IndexLost | RecordingEnd


class BrokenRecording(InvalidRequest):
    """A file is not a recording or has an invalid line. line: its number, from 1."""

    def __init__(self, line: int, reason: str) -> None:
        text, metadata = f"line {line}: {reason}", {"line": str(line)}
        super().__init__(text, f"line {line}", reason="BROKEN_RECORDING", metadata=metadata)
        self.line = line


# Encoding.


def encode_header() -> bytes:
    return _encode_json_line({FORMAT: VERSION})


def encode_line(t: float, entry: RecordingEntry) -> bytes:
    """Return one line. t: seconds since the start of the recording."""
    return _encode_json_line({"t": round(t, 6), **_entry_fields(entry)})


def _encode_json_line(fields: Mapping[str, object]) -> bytes:
    return json.dumps(fields, separators=(",", ":")).encode() + b"\n"


def _entry_fields(entry: RecordingEntry) -> dict[str, object]:
    fields: dict[str, object]
    match entry:
        case StatusUpdate(source, partition, status):
            fields = {"is": "status", "source": _source_fields(source), **status._asdict()}
            if partition is not None:
                fields["partition"] = asdict(partition)
            return fields
        case EventBatch(_, epoch, sequence, events):
            rows = [
                [e.kind.name.lower(), e.tier.name.lower(), _hash_text(e.hashes)] for e in events
            ]
            fields = {"is": "batch", "source": _source_fields(entry.source)}
            return fields | {"epoch": epoch, "sequence": sequence, "events": rows}
        case SnapshotChunk():
            fields = {"is": "snapshot", "source": _source_fields(entry.source)}
            fields |= {"epoch": entry.epoch, "sequence": entry.sequence}
            fields |= {"tier": entry.tier.name.lower(), "hashes": _hash_text(entry.hashes)}
            return fields | {"first": entry.first, "last": entry.last}
        case IndexLost():
            return {"is": "lost"}
        case RecordingEnd():
            return {"is": "end"}


def _source_fields(source: Source) -> list[object]:
    # As text: many JSON readers cannot represent 63-bit integers.
    return [str(source.worker_id), source.dp_rank]


def _hash_text(hashes: Hashes) -> str:
    return b64encode(hashes_to_bytes(hashes)).decode()


# Decoding.


class RecordingReader:
    """Decodes raw lines, each with its newline; iterate once. Raises BrokenRecording. is_cut: the
    last line is incomplete. has_ended: the recording has its `end`.
    """

    def __init__(self, lines: Iterable[bytes]) -> None:
        self._lines = lines
        self.is_cut = False
        self.has_ended = False
        self.lines_read = 0

    def __iter__(self) -> Iterator[tuple[float, RecordingEntry]]:
        """Return (seconds since the start, entry), in order."""
        last_t = 0.0
        for raw in self._lines:
            number = self.lines_read + 1
            if len(raw) > LINE_BYTES_MAX:
                raise BrokenRecording(number, f"line too long: {len(raw)}/{LINE_BYTES_MAX} bytes")
            if not raw.endswith(b"\n"):
                # Left by a crash; the line before it is the last one.
                self.is_cut = True
                break
            if self.has_ended:
                raise BrokenRecording(number, "entry after the end")
            self.lines_read = number
            try:
                fields = _JsonFields(json.loads(raw.decode("utf-8")))
                if number == 1:
                    if (version := fields.value(FORMAT)) != VERSION:
                        raise ValueError(f"{FORMAT} is {version!r}; supported: {VERSION}")
                    continue
                t = fields.number("t")
                if not last_t <= t < math.inf:
                    raise ValueError(f"t is {t}, after {last_t}")
                entry = _entry_of(fields)
            except (ValueError, RecursionError) as error:
                raise BrokenRecording(number, str(error)) from error
            last_t = t
            self.has_ended = isinstance(entry, RecordingEnd)
            yield t, entry
        if not self.lines_read:
            header = encode_header().decode()
            raise BrokenRecording(1, f"missing: the first line must be {header!r}")


class _JsonFields:
    """Typed access to the values of a JSON object. Raises ValueError with the field."""

    def __init__(self, value: object) -> None:
        if not isinstance(value, dict):
            raise ValueError("not a JSON object")
        self._values = value

    # Any: a JSON value.
    def value(self, name: str) -> Any:
        if name not in self._values:
            raise ValueError(f"{name} is missing")
        return self._values[name]

    def has(self, name: str) -> bool:
        return name in self._values

    def number(self, name: str) -> float:
        value = self.value(name)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError(f"{name} is not a number")
        return float(value)

    def integer(self, name: str, low: int = 0) -> int:
        value = self.value(name)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= _U64_MAX:
            raise ValueError(f"{name} is not an integer of at least {low}")
        return value

    def text(self, name: str) -> str:
        value = self.value(name)
        if not isinstance(value, str):
            raise ValueError(f"{name} is not a string")
        return value

    def flag(self, name: str) -> bool:
        value = self.value(name)
        if not isinstance(value, bool):
            raise ValueError(f"{name} is not true or false")
        return value


def _entry_of(fields: _JsonFields) -> RecordingEntry:
    match fields.text("is"):
        case "status":
            return StatusUpdate(_source_of(fields), _partition_of(fields), _status_of(fields))
        case "batch":
            return EventBatch(
                _source_of(fields),
                fields.integer("epoch"),
                fields.integer("sequence", 1),
                _events_of(fields.value("events")),
            )
        case "snapshot":
            hashes = _hashes_of(fields.text("hashes"), "hashes")
            if len(hashes) > SNAPSHOT_CHUNK_BLOCKS:
                raise ValueError(f"too many hashes: {len(hashes)}/{SNAPSHOT_CHUNK_BLOCKS}")
            return SnapshotChunk(
                _source_of(fields),
                fields.integer("epoch"),
                fields.integer("sequence"),
                hashes,
                _member_of(Tier, fields.text("tier"), "tier:"),
                first=fields.flag("first"),
                last=fields.flag("last"),
            )
        case "lost":
            return IndexLost()
        case "end":
            return RecordingEnd()
        case other:
            raise ValueError(f"is: {other!r} is unknown")


def _source_of(fields: _JsonFields) -> Source:
    match fields.value("source"):
        case [str(worker), int(rank)] if worker.isdecimal() and 0 <= rank < 2**32:
            worker_id = int(worker)
            if 0 < worker_id <= _U64_MAX:
                return Source(worker_id, rank)
    raise ValueError("source is not [worker id as text, rank]")


def _partition_of(fields: _JsonFields) -> Partition | None:
    if not fields.has("partition"):
        return None
    inner = _JsonFields(fields.value("partition"))
    return Partition(
        inner.text("model"),
        inner.integer("block_size", 1),
        inner.integer("hash_scheme"),
        inner.integer("adapter_version"),
    )


def _status_of(fields: _JsonFields) -> SourceStatus:
    state = fields.text("state")
    if state not in SOURCE_STATES:
        raise ValueError(f"state: {state!r} is unknown")
    return SourceStatus(state, fields.text("reason"))


# Any: a JSON value.
def _events_of(value: Any) -> list[KvEvent]:
    if not isinstance(value, list):
        raise ValueError("events is not a list")
    events = []
    for one in value:
        match one:
            case [str(kind), str(tier), str(hashes)]:
                events.append(
                    KvEvent(
                        _member_of(EventKind, kind, "events: kind"),
                        _hashes_of(hashes, "events"),
                        _member_of(Tier, tier, "tier:"),
                    )
                )
            case _:
                raise ValueError("events: one is not [kind, tier, hashes]")
    return events


def _member_of(kind: type[EnumT], name: str, field: str) -> EnumT:
    for member in kind:
        if member.name.lower() == name:
            return member
    raise ValueError(f"{field} {name!r} is unknown")


def _hashes_of(text: str, field: str) -> Hashes:
    if not text:
        return EMPTY_HASHES
    try:
        return hashes_from_bytes(b64decode(text, validate=True))
    except (binascii.Error, ValueError) as error:
        raise ValueError(f"{field}: {error}") from error


def play(feed: IndexFeed, entry: RecordingEntry, now: float) -> Iterator[None]:
    """Apply an entry to a replica; steps as in `IndexFeed.apply`. Raises InvalidRequest."""
    match entry:
        case StatusUpdate(source, partition, status):
            feed.apply_status(partition, source, status, now)
        case EventBatch():
            yield from feed.apply(entry, now)
        case SnapshotChunk():
            yield from feed.load(entry, now)
        case IndexLost():
            feed.mark_all_disconnected(now, "the recorder lost its index")
        case RecordingEnd():
            pass


class SourcePositions:
    """Positions of a replica of the recording, to resume from. A snapshot counts from its last
    chunk, with the batches received since its first.
    """

    def __init__(self) -> None:
        self._positions: dict[Source, tuple[int, int]] = {}
        self._loading: dict[Source, tuple[int, int]] = {}

    def states(self) -> list[SourcePosition]:
        """Return the position of each known source; call after `IndexLost` was taken."""
        return [SourcePosition(source, *at) for source, at in self._positions.items()]

    def is_loading(self, worker_id: int) -> bool:
        """Return whether a snapshot of one of the worker's sources is incomplete."""
        return any(source.worker_id == worker_id for source in self._loading)

    def take(self, entry: RecordingEntry) -> None:
        match entry:
            case StatusUpdate(source, _, status):
                if status.state == "gone":
                    self._positions.pop(source, None)
                    self._loading.pop(source, None)
            case EventBatch(source, epoch, sequence):
                if epoch > self._loading.get(source, self._positions.get(source, (0, 0)))[0]:
                    self._loading.pop(source, None)
                at = self._loading if source in self._loading else self._positions
                at[source] = (epoch, sequence)
            case SnapshotChunk(source):
                if entry.first:
                    self._loading[source] = (entry.epoch, entry.sequence)
                if entry.last and source in self._loading:
                    self._positions[source] = self._loading.pop(source)
            case IndexLost():
                self._loading.clear()
            case RecordingEnd():
                pass
