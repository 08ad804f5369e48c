"""`meshctl logs [NAME]`: the logs of `meshctl up`, for reading."""

from __future__ import annotations

import heapq
import json
import os
import re
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import click

from common.errors import NotFound, Unavailable
from common.runtime.suggestion import suggest
from meshctl.options import LogConfig, MeshCommand, json_flag
from meshctl.request_files import find_request, log_files, parse_line, read_lines, request_ids
from meshctl.view.screen import describe_fields

POLL_S = 0.2
LEVELS = ("debug", "info", "warning", "error")
# An id of an instance. Those of requests and spans are hexadecimal or shorter.
_INSTANCE_ID = re.compile(r"\b[0-9]{15,19}\b")


def _complete_names(ctx: click.Context, _param: click.Parameter, start: str) -> list[str]:
    log_dirs = ctx.params.get("log_dir") or [LogConfig.model_fields["log_dir"].default]
    names = [path.stem for path in Path(log_dirs[0]).glob("*.log")]
    return sorted(name for name in names if name.startswith(start))


@click.command("logs", cls=MeshCommand, config=LogConfig, flags=("log_dir",))
@click.argument("name", default="", shell_complete=_complete_names)
@click.option("-f", "--follow", is_flag=True, help="Wait for further lines until Ctrl-C.")
@click.option("--request", metavar="ID", default="", help="Lines of this request only.")
@click.option(
    "--level", type=click.Choice(LEVELS), default="debug", help="Lowest severity that is shown."
)
@click.option("--lines", metavar="N", type=click.IntRange(0), help="The last N lines only.")
@json_flag
def command(
    config: LogConfig,
    name: str,
    follow: bool,
    request: str,
    level: str,
    lines: int | None,
    as_json: bool,
) -> int:
    """Shows the logs of the services that `meshctl up` has started, merged by time.

    NAME is the stable name of one service, or its id. The request of `--request` is given by its
    id, by that of its response, or by the x-request-id of the client. With `--json` each line is a
    JSON object, with the name of the service.
    """
    with ExitStack() as stack:
        logs = [stack.enter_context(closing(log)) for log in _select(config.log_dir, name)]
        shown = _Filter(level, _ids_of(request, [log.path for log in logs]))
        printer = _Printer(as_json, _read_names(config.log_dir))
        _print_present(logs, shown, lines, printer)
        return _follow(logs, shown, printer) if follow else 0


def _print_present(
    logs: Sequence[_Log], shown: _Filter, lines: int | None, printer: _Printer
) -> None:
    """Prints what the logs have; lines: the last ones only."""
    merged = heapq.merge(*(log.read() for log in logs), key=lambda line: line.time)
    chosen = [line for line in merged if shown.has(line)]
    for line in chosen if lines is None else chosen[max(0, len(chosen) - lines) :]:
        printer.print(line)


def _follow(logs: Sequence[_Log], shown: _Filter, printer: _Printer) -> int:
    """Prints new lines until Ctrl-C."""
    sys.stdout.flush()
    try:
        # Ends: by Ctrl-C.
        while True:
            new = [line for log in logs for line in log.read() if shown.has(line)]
            for line in sorted(new, key=lambda line: line.time):
                printer.print(line)
            sys.stdout.flush()
            time.sleep(POLL_S)
    except KeyboardInterrupt:
        return 0


@dataclass(frozen=True, slots=True)
class _Line:
    """A line of a log. fields: of JSON; of another line, only `event`. time: a line without one has
    that of the line before."""

    name: str
    time: str
    fields: dict[str, Any]


@dataclass(frozen=True, slots=True)
class _Printer:
    """names: stable names of instances by id, which follow the ids."""

    as_json: bool
    names: dict[str, str]

    def print(self, line: _Line) -> None:
        if self.as_json:
            sys.stdout.write(json.dumps({"name": line.name, **line.fields}) + "\n")
            return
        self._note_name(line.fields)
        # Of 2026-11-25T20:19:59.123456Z.
        clock = line.time[11:23]
        level = str(line.fields.get("level", ""))
        text = _INSTANCE_ID.sub(self._with_name, describe_fields(line.fields))
        sys.stdout.write(f"{clock:12}  {level:7}  {line.name:12}  {text}".rstrip() + "\n")

    def _note_name(self, fields: Mapping[str, Any]) -> None:
        if fields.get("name"):
            self.names[str(fields.get("instance"))] = str(fields["name"])

    def _with_name(self, found: re.Match[str]) -> str:
        name = self.names.get(found[0], "")
        return f"{found[0]} ({name})" if name else found[0]


@dataclass(frozen=True, slots=True)
class _Filter:
    """level: lowest one. ids: of a request; empty: of all."""

    level: str
    ids: frozenset[str]

    def has(self, line: _Line) -> bool:
        fields = line.fields
        level = fields.get("level", LEVELS[0])
        if level in LEVELS and LEVELS.index(level) < LEVELS.index(self.level):
            return False
        return not self.ids or any(_has_id(value, self.ids) for value in fields.values())


def _has_id(value: object, ids: frozenset[str]) -> bool:
    """Returns whether a field has the id of the request, or that of one of its choices (ID-1)."""
    return isinstance(value, str) and (value in ids or value.rpartition("-")[0] in ids)


@dataclass
class _Log:
    """A log file that services append to; a restart replaces it, and gives it back if it fails."""

    path: Path
    _file: BinaryIO | None = field(default=None, repr=False)
    _earlier: BinaryIO | None = field(default=None, repr=False)
    """The file that this one has replaced."""
    _rest: bytes = b""
    _time: str = ""

    def close(self) -> None:
        for file in (self._file, self._earlier):
            if file is not None:
                file.close()

    @property
    def name(self) -> str:
        return self.path.name.partition(".log")[0]

    def read(self) -> Iterator[_Line]:
        """Yields the lines that are new since the last call."""
        if self._file is not None and self._is_replaced(self._file):
            yield from self._lines(self._file.read())
            earlier, self._earlier = self._earlier, self._file
            if earlier is not None and self._is_replaced(earlier):
                earlier.close()
                earlier = None
            self._file, self._rest = earlier, b""
        if self._file is None:
            try:
                self._file = self.path.open("rb")
            except OSError:
                return
        yield from self._lines(self._file.read())

    def _is_replaced(self, file: BinaryIO) -> bool:
        try:
            return os.fstat(file.fileno()).st_ino != self.path.stat().st_ino
        except OSError:
            return False

    def _lines(self, data: bytes) -> Iterator[_Line]:
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            fields = parse_line(line) or {"event": line.decode(errors="replace")}
            self._time = str(fields.get("timestamp", self._time))
            yield _Line(self.name, self._time, fields)


def _select(log_dir: Path, name: str) -> list[_Log]:
    """Returns all logs, or those of one service, oldest first. Raises Unavailable and NotFound."""
    files = log_files(log_dir)
    if not files:
        raise Unavailable(
            f"no logs in {log_dir}; --log-dir names the folder of `meshctl up --log-dir`"
        )
    logs = [_Log(path) for path in reversed(files)]
    if not name:
        return logs
    chosen = [log for log in logs if log.name == name]
    # In a registry of several hosts the stable name begins with the host.
    chosen = chosen or [log for log in logs if _is_of(log.path, name)]
    if not chosen:
        names = {log.name for log in logs}
        raise NotFound(f"no log of {name!r} in {log_dir}{suggest(name, names)}", field="name")
    return chosen


def _read_names(log_dir: Path) -> dict[str, str]:
    """Returns the stable names of the instances that have become ready, by id."""
    return {
        str(fields.get("instance")): str(fields["name"])
        for path in log_files(log_dir)
        for fields in read_lines(path, ['"ready"'])
        if fields.get("name")
    }


def _is_of(path: Path, name: str) -> bool:
    """Returns whether lines of a log have this stable name or instance id."""
    return any(
        name in (line.get("name"), line.get("instance")) for line in read_lines(path, [name])
    )


def _ids_of(request: str, files: Sequence[Path]) -> frozenset[str]:
    """Returns the ids of a request in log lines; empty for none."""
    if not request:
        return frozenset()
    found = find_request(request, files)
    return request_ids(request) | (frozenset() if found is None else {found.request_id})
