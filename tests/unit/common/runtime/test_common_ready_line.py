"""The line with which a process reports that it is ready."""

from __future__ import annotations

import json
import os

import pytest

from common.runtime import ready_line
from common.runtime.ready_line import ReadyLineReader, write_ready_line


def test_a_written_line_is_read_whole() -> None:
    read_fd, write_fd = os.pipe()
    reader = ReadyLineReader(read_fd)
    assert not reader.read()
    write_ready_line(write_fd, {"pid": 7})
    assert reader.read()
    reader.close()
    assert json.loads(reader.received) == {"pid": 7}


def test_a_line_that_arrives_in_parts_is_complete_at_its_end() -> None:
    read_fd, write_fd = os.pipe()
    reader = ReadyLineReader(read_fd)
    for part, is_complete in ((b'{"pid"', False), (b": 7}", False), (b"\n", True)):
        os.write(write_fd, part)
        assert reader.read() == is_complete
    reader.close()
    os.close(write_fd)
    assert reader.received == b'{"pid": 7}\n'


def test_a_process_that_ends_without_a_line_leaves_nothing() -> None:
    read_fd, write_fd = os.pipe()
    reader = ReadyLineReader(read_fd)
    os.close(write_fd)
    assert reader.read()
    reader.close()
    assert reader.received == b""


def test_a_line_above_the_limit_ends_the_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ready_line, "BYTES_MAX", 8)
    read_fd, write_fd = os.pipe()
    reader = ReadyLineReader(read_fd)
    os.write(write_fd, b"x" * 32)
    assert not reader.read()
    assert reader.read()
    reader.close()
    os.close(write_fd)
