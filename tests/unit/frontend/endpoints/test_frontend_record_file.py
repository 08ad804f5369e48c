"""Files of records: rotation, overflow and disk errors."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path

import pytest

from frontend_svc.endpoints.record_file import OLDER_FILES_KEPT, RecordFile
from tests.kit.waiting import wait_for

LINE_BYTES = len('{"number":10}\n')


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "records.jsonl"


def numbers(path: Path) -> list[int]:
    return [json.loads(line)["number"] for line in path.read_text().splitlines()]


def put(file: RecordFile, number: int, size: int = 1) -> None:
    file.put(size, lambda: {"number": number})


def test_records_are_appended_to_what_the_file_has(path: Path) -> None:
    for number in range(2):
        file = RecordFile(path, 1 << 20)
        put(file, number)
        file.close(5.0)
        assert (file.written, file.dropped) == (1, 0)
    assert numbers(path) == [0, 1]
    assert path.stat().st_mode & 0o777 == 0o600


def test_full_files_are_renamed_and_the_oldest_ones_removed(path: Path) -> None:
    file = RecordFile(path, 2 * LINE_BYTES)
    files = OLDER_FILES_KEPT + 3
    for number in range(10, 10 + 2 * files):
        put(file, number)
        wait_for(lambda: file.written == number - 9, "the record is written")  # noqa: B023
    file.close(5.0)
    newest = 10 + 2 * files - 2
    for age in range(OLDER_FILES_KEPT + 1):
        name = f"{path.name}.{age}" if age else path.name
        assert numbers(path.with_name(name)) == [newest - 2 * age, newest - 2 * age + 1]
    assert len(list(path.parent.iterdir())) == OLDER_FILES_KEPT + 1


def test_a_slow_disk_drops_records_above_the_limit_and_delays_no_caller(
    path: Path,
) -> None:
    released = threading.Event()

    def wait() -> dict[str, object]:
        released.wait(10.0)
        return {"number": 0}

    file = RecordFile(path, 1 << 20, queue_bytes_max=100)
    file.put(50, wait)
    put(file, 1, size=50)
    for number in range(2, 7):
        put(file, number, size=1)
    assert file.dropped == 5
    released.set()
    file.close(5.0)
    assert (file.written, file.dropped) == (2, 5)


def test_a_record_that_the_disk_refuses_is_counted_and_leaves_no_part(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, is_full = os.write, True

    def limited(fd: int, data: memoryview) -> int:
        if is_full and len(data) < 8:
            raise OSError(28, "No space left on device")
        return write(fd, data[:8] if is_full else data)

    monkeypatch.setattr("frontend_svc.endpoints.record_file.os.write", limited)
    file = RecordFile(path, 1 << 20)
    put(file, 1)
    wait_for(lambda: file.dropped == 1, "the record is dropped")
    is_full = False
    put(file, 2)
    file.close(5.0)
    assert (numbers(path), file.written) == ([2], 1)


def test_a_value_that_is_not_json_drops_its_record_only(path: Path) -> None:
    file = RecordFile(path, 1 << 20)
    file.put(1, lambda: {"number": object()})
    put(file, 2)
    file.close(5.0)
    assert (numbers(path), file.written, file.dropped) == ([2], 1, 1)
