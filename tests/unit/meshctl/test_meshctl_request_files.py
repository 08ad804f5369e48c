"""Lines about one request in logs and records."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from meshctl.request_files import find_request, log_files, read_lines, record_files

ID = "0123456789abcdef" * 2


def write(path: Path, *lines: object) -> Path:
    path.write_text(
        "".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines)
    )
    return path


@pytest.mark.parametrize(
    "given", [ID, f"chatcmpl-{ID}", f"resp_{ID}0123456789abcdef", "mine", "t1"]
)
def test_a_request_is_found_by_each_of_its_ids(tmp_path: Path, given: str) -> None:
    end = {"event": "request", "request_id": ID, "client_request_id": "mine", "trace_id": "t1"}
    log = write(
        tmp_path / "a.log",
        "Traceback of mine",
        {"event": "request", "request_id": "f" * 32, "client_request_id": "other"},
        {"event": "migrated", "request_id": ID},
        end | {"status": 503},
        end | {"status": 200},
    )
    found = find_request(given, [tmp_path / "missing", log])
    assert found is not None
    assert (found.fields["status"], found.request_id, found.source) == (200, ID, str(log))
    assert find_request("unknown", [log]) is None


def test_a_record_has_the_id_of_the_client_under_its_name(tmp_path: Path) -> None:
    record = write(tmp_path / "r.jsonl", {"request_id": ID, "x_request_id": "mine"})
    found = find_request("mine", [record])
    assert found is not None
    assert found.request_id == ID


def test_files_are_those_of_all_processes_and_of_the_run_before(tmp_path: Path) -> None:
    names = ("t.jsonl", "t-0.jsonl", "t.jsonl.1", "other.jsonl")
    for name in names:
        write(tmp_path / name)
    environ = {"KVMESH_FRONTEND_REQUEST_TRACE": str(tmp_path / "t.jsonl")}
    assert {path.name for path in record_files(environ)} == set(names[:3])
    assert record_files({}) == []
    for name in ("b.log", "a.log.1", "a.log"):
        write(tmp_path / name)
    assert [path.name for path in log_files(tmp_path)] == ["a.log", "b.log", "a.log.1"]


def test_other_lines_and_missing_files_are_skipped(tmp_path: Path) -> None:
    log = write(tmp_path / "a.log", "plain", "[1]", {"a": 1})
    assert list(read_lines(log)) == [{"a": 1}]
    assert list(read_lines(tmp_path / "missing")) == []
