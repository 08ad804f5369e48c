"""What log files and record files have about one request."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

# Any: JSON.
from typing import Any, NamedTuple

# Of a frontend: the files of its request trace and of its audit log.
RECORD_VARIABLES = ("KVMESH_FRONTEND_REQUEST_TRACE", "KVMESH_FRONTEND_AUDIT_LOG")

# The id of a request in that of its response, such as `chatcmpl-ID`.
_REQUEST_ID = re.compile(r"[0-9a-f]{32}")
_ID_FIELDS = ("request_id", "client_request_id", "x_request_id", "trace_id")


class FoundWorker(NamedTuple):
    """The name and the role of a worker."""

    name: str
    role: str


@dataclass(frozen=True, slots=True)
class FoundRequest:
    """A request of a log line or a record. fields: those of a log line. source: has it."""

    fields: Mapping[str, Any]
    source: str
    workers: Mapping[str, FoundWorker] = field(default_factory=dict)
    """By id, as far as the source has them."""

    @property
    def request_id(self) -> str:
        return str(self.fields["request_id"])


def log_files(log_dir: Path) -> list[Path]:
    """Returns the logs of `meshctl up`, those of the run before last."""
    return [*sorted(log_dir.glob("*.log")), *sorted(log_dir.glob("*.log.1"))]


def record_files(environ: Mapping[str, str]) -> list[Path]:
    """Returns the files of records that variables name, with those of several processes of a
    frontend and the older ones."""
    found: list[Path] = []
    for path in (Path(environ[name]) for name in RECORD_VARIABLES if environ.get(name)):
        pattern = f"{path.stem}*{path.suffix}*"
        found += sorted(path.parent.glob(pattern))
    return found


def find_request(request_id: str, files: Iterable[Path]) -> FoundRequest | None:
    """Returns the newest line about the end of a request in the first file that has one.

    request_id: of the mesh, of the client (`x-request-id`), of the response, or of the trace.
    """
    ids = request_ids(request_id)
    for file in files:
        newest = None
        for fields in read_lines(file, ids):
            is_end = fields.get("event", "request") == "request" and "request_id" in fields
            if is_end and ids & {fields.get(name) for name in _ID_FIELDS}:
                newest = FoundRequest(fields, str(file))
        if newest is not None:
            return newest
    return None


def request_ids(text: str) -> frozenset[str]:
    """Returns a text, and the id of a request in it."""
    found = _REQUEST_ID.search(text)
    return frozenset({text} if found is None else {text, found[0]})


def read_lines(file: Path, texts: Iterable[str] = ("",)) -> Iterator[dict[str, Any]]:
    """Yields the JSON objects of the lines that contain one of the texts; nothing of an unreadable
    file."""
    needles = [text.encode() for text in texts]
    try:
        with file.open("rb") as lines:
            for line in lines:
                if any(needle in line for needle in needles):
                    fields = parse_line(line)
                    if fields is not None:
                        yield fields
    except OSError:
        return


def parse_line(line: bytes) -> dict[str, Any] | None:
    """Returns the fields of a JSON line; None for another line."""
    try:
        fields = json.loads(line)
    except ValueError:
        return None
    return fields if isinstance(fields, dict) else None
