"""File of recorded KV events: messages of a subscription, with the time of each.

The first line is HEADER. Each message after it is a `RecordedMessage` of `indexer.proto`, preceded
by its length: 4 bytes, little endian.

Recordings of earlier versions (`json_recording.py`) are read too.

A file that ends within a message, as after a crash, is valid up to that message
(`RecordingReader.is_cut`). Any other invalid message is an error, which has its number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import BinaryIO, Final

from google.protobuf.message import DecodeError

from common.errors import InvalidRequest
from common.rpc.channel import MESSAGE_BYTES_MAX
from common.wire.kv import (
    batch_from_proto,
    message_parts,
    partition_from_proto,
    snapshot_chunk_from_proto,
    source_from_proto,
    source_status_from_proto,
)
from indexer_svc.core.recording import IndexLost, RecordingEnd, RecordingEntry
from indexer_svc.core.subscriber import StatusUpdate
from indexer_svc.tools import json_recording
from kvmesh.indexer.v1 import indexer_pb2

HEADER: Final = b"kvmesh_kv_events 2\n"
_LENGTH_BYTES: Final = 4
# A message that an indexer can send, and its time.
RECORD_BYTES_MAX: Final = MESSAGE_BYTES_MAX + 64


class BrokenRecording(InvalidRequest):
    """A file is not a recording or has an invalid message."""

    def __init__(self, number: int, reason: str) -> None:
        at = f"message {number}" if number else "header"
        text, metadata = f"{at}: {reason}", {"message": str(number)}
        super().__init__(text, at, reason="BROKEN_RECORDING", metadata=metadata)
        self.number = number
        """Number of the message, from 1. 0: the header."""


def encode_message(message: indexer_pb2.RecordedMessage) -> bytes:
    """Returns a message as in the file."""
    data = message.SerializeToString()
    return len(data).to_bytes(_LENGTH_BYTES, "little") + data


def entries_of(message: indexer_pb2.SubscribeResponse) -> Iterator[RecordingEntry]:
    """Yields the KV entries of a message of a subscription, in order, without loads.

    Raises InvalidRequest.
    """
    for part in message_parts(message):
        if part.HasField("status"):
            yield StatusUpdate(
                source_from_proto(part.source),
                partition_from_proto(part.partition) if part.HasField("partition") else None,
                source_status_from_proto(part.status),
                (part.epoch, part.sequence),
            )
        if part.HasField("batch"):
            yield batch_from_proto(part.batch, source_from_proto(part.source).worker_id)
        if part.HasField("snapshot"):
            yield snapshot_chunk_from_proto(part.snapshot)


class RecordingReader:
    """Reads a recording once, from its header on."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.messages_read = 0
        """Complete messages read."""
        self.is_cut = False
        """Whether the last message is incomplete."""
        self.has_ended = False
        """Whether the recording ended in order."""

    def __iter__(self) -> Iterator[tuple[float, RecordingEntry]]:
        """Yields (seconds since the start, entry), in order. Raises BrokenRecording."""
        for message in self.messages():
            try:
                entries = list(_entries_of_recorded(message))
            except InvalidRequest as error:
                raise BrokenRecording(self.messages_read, error.message) from error
            for entry in entries:
                yield message.time_us / 1e6, entry

    def messages(self) -> Iterator[indexer_pb2.RecordedMessage]:
        """Yields the complete messages, in order. Raises as iteration does."""
        read, decode = self._read_header()
        time_us = 0
        while (data := read()) is not None:
            number = self.messages_read + 1
            if self.has_ended:
                raise BrokenRecording(number, "message after the end")
            try:
                message = decode(data)
            except InvalidRequest as error:
                raise BrokenRecording(number, error.message) from error
            except DecodeError as error:
                raise BrokenRecording(number, str(error)) from error
            if message.time_us < time_us:
                raise BrokenRecording(number, f"time_us is {message.time_us}, after {time_us}")
            self.messages_read, time_us = number, message.time_us
            self.has_ended = message.ended
            yield message

    def _read_header(
        self,
    ) -> tuple[Callable[[], bytes | None], Callable[[bytes], indexer_pb2.RecordedMessage]]:
        """Returns what reads the next message, None at the end, and what decodes it."""
        header = self._file.read(len(HEADER))
        if header == HEADER:
            return self._read_message, indexer_pb2.RecordedMessage.FromString
        if json_recording.HEADER.startswith(header) and header:
            header += self._file.readline(len(json_recording.HEADER))
            if header == json_recording.HEADER:
                return self._read_line, json_recording.message_of
        raise BrokenRecording(0, f"the file starts with {header!r} instead of {HEADER!r}")

    def _read_line(self) -> bytes | None:
        line = self._file.readline(json_recording.LINE_BYTES_MAX + 1)
        if len(line) > json_recording.LINE_BYTES_MAX:
            reason = f"line too long: more than {json_recording.LINE_BYTES_MAX} bytes"
            raise BrokenRecording(self.messages_read + 1, reason)
        # A crash leaves a line without its end.
        self.is_cut = bool(line) and not line.endswith(b"\n")
        return None if self.is_cut else line or None

    def _read_message(self) -> bytes | None:
        """Returns the bytes of the next message; None at the end."""
        prefix = self._file.read(_LENGTH_BYTES)
        if not prefix:
            return None
        length = int.from_bytes(prefix, "little")
        if length > RECORD_BYTES_MAX:
            reason = f"message too long: {length}/{RECORD_BYTES_MAX} bytes"
            raise BrokenRecording(self.messages_read + 1, reason)
        data = self._file.read(length)
        if len(prefix) == _LENGTH_BYTES and len(data) == length:
            return data
        # Left by a crash; the message before it is the last one.
        self.is_cut = True
        return None


def _entries_of_recorded(message: indexer_pb2.RecordedMessage) -> Iterator[RecordingEntry]:
    match message.WhichOneof("content"):
        case "received":
            yield from entries_of(message.received)
        case "index_lost":
            yield IndexLost()
        case "ended":
            yield RecordingEnd()
        case None:
            raise InvalidRequest("no known content", "content")
