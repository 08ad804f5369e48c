"""Recordings of earlier versions (`kvmesh_kv_events` 1): one JSON object in each line.

The first line is HEADER. Each line after it has `t`, seconds since the start of the recording, and
its kind under `is`: an update of a source (status, batch, snapshot), `lost`, or `end`.
"""

from __future__ import annotations

import json
from typing import Annotated, Final, Literal

from pydantic import Base64Bytes, BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from common.errors import InvalidRequest
from common.kv.events import EventKind, Tier
from kvmesh.indexer.v1 import indexer_pb2
from kvmesh.indexer.v1.indexer_pb2 import RecordedMessage, SubscribeResponse

HEADER: Final = b'{"kvmesh_kv_events":1}\n'
# The largest batch has 2^20 events of one hash each, of at most 36 characters.
LINE_BYTES_MAX: Final = 48 * 2**20

_U32 = Annotated[int, Field(strict=True, ge=0, lt=2**32)]
_U64 = Annotated[int, Field(strict=True, ge=0, lt=2**64)]
_Tier = Literal["device", "host", "disk"]
# The id is text, because many JSON readers round it.
_Source = tuple[Annotated[int, Field(gt=0, lt=2**64)], _U32]
_Event = tuple[Literal["stored", "removed", "cleared"], _Tier, Base64Bytes]


class _Line(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    t: Annotated[float, Field(strict=True, ge=0, allow_inf_nan=False)]


class _Partition(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    model: str
    block_size: _U32
    hash_scheme: _U32
    adapter_version: _U32


class _Status(_Line):
    kind: Literal["status"] = Field(alias="is")
    source: _Source
    state: Literal["exact", "gapped", "stale", "degraded", "gone"]
    reason: str
    partition: _Partition | None = None


class _Batch(_Line):
    kind: Literal["batch"] = Field(alias="is")
    source: _Source
    epoch: _U64
    sequence: _U64
    events: list[_Event]


class _Snapshot(_Line):
    kind: Literal["snapshot"] = Field(alias="is")
    source: _Source
    epoch: _U64
    sequence: _U64
    tier: _Tier
    hashes: Base64Bytes
    first: bool
    last: bool


class _Lost(_Line):
    kind: Literal["lost"] = Field(alias="is")


class _End(_Line):
    kind: Literal["end"] = Field(alias="is")


_LINES: Final[TypeAdapter[_Status | _Batch | _Snapshot | _Lost | _End]] = TypeAdapter(
    Annotated[_Status | _Batch | _Snapshot | _Lost | _End, Field(discriminator="kind")]
)


def message_of(line: bytes) -> RecordedMessage:
    """Returns the message of a line after the header. Raises InvalidRequest."""
    try:
        read = _LINES.validate_python(json.loads(line))
    except ValidationError as error:
        first = error.errors()[0]
        text = f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
        raise InvalidRequest(text, "line") from error
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(str(error), "line") from error
    message = RecordedMessage(time_us=round(read.t * 1e6))
    match read:
        case _Lost():
            message.index_lost = True
        case _End():
            message.ended = True
        case _:
            message.received.CopyFrom(_update_of(read))
    return message


def _update_of(read: _Status | _Batch | _Snapshot) -> SubscribeResponse:
    worker_id, dp_rank = read.source
    source = indexer_pb2.Source(worker_id=worker_id, dp_rank=dp_rank)
    update = SubscribeResponse(source=source)
    match read:
        case _Status():
            update.status.state, update.status.reason = read.state, read.reason
            if read.partition is not None:
                update.partition.CopyFrom(indexer_pb2.Partition(**read.partition.model_dump()))
        case _Batch():
            batch = update.batch
            batch.dp_rank, batch.epoch, batch.sequence = dp_rank, read.epoch, read.sequence
            for kind, tier, hashes in read.events:
                batch.events.add(
                    kind=indexer_pb2.EventKind.ValueType(EventKind[kind.upper()]),
                    tier=Tier[tier.upper()],
                    prefix_hashes=hashes,
                )
        case _Snapshot():
            chunk = update.snapshot
            chunk.source.CopyFrom(source)
            chunk.epoch, chunk.sequence = read.epoch, read.sequence
            chunk.tier, chunk.prefix_hashes = Tier[read.tier.upper()], read.hashes
            chunk.first, chunk.last = read.first, read.last
    return update
