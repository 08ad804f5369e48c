"""Output of meshctl: one line for each event, a table, hints. Colour only on a terminal."""

from __future__ import annotations

import json
import os
import shlex
import signal
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import TextIO

from common.inspection.gateway import chat_body
from meshctl.process.child import ReadyLine
from meshctl.process.supervise import (
    BecameReady,
    Child,
    Died,
    Event,
    KillFailed,
    NotDeregistered,
    RestartsExhausted,
    Stopped,
)

# Of every log line.
_COMMON_FIELDS = frozenset({"level", "timestamp", "service", "instance", "name", "logger"})

_RED, _GREEN, YELLOW, _PLAIN = "31", "32", "33", ""


@dataclass
class Screen:
    """Prints events to `out` with the seconds since the start, fatal errors to `err`.

    tail, log: return the last lines of a service's log, and its path.
    """

    out: TextIO
    err: TextIO
    _: KW_ONLY
    colour: bool
    clock: Callable[[], float]
    tail: Callable[[str], Sequence[str]]
    log: Callable[[str], object]

    def __post_init__(self) -> None:
        self._started_at = self.clock()
        self._printed_errors = {""}

    def print_line(self, text: str = "") -> None:
        """Prints a line without a time."""
        self._write(self.out, f"{text}\n")

    def piece(self, text: str) -> None:
        """Prints a part of a line and flushes."""
        self._write(self.out, text)

    def print_error(self, text: str) -> None:
        """Prints the reason why the mesh stops or did not start."""
        self._write(self.err, f"meshctl: {text}\n")

    def print_progress(
        self, name: str, state: str, detail: str = "", *, colour: str = _PLAIN
    ) -> None:
        label = f"{state:<8}"
        if colour and self.colour:
            label = f"\x1b[{colour}m{label}\x1b[0m"
        elapsed_s = self.clock() - self._started_at
        self.print_line(f"{elapsed_s:7.1f} s  {name:<12}  {label}  {detail}".rstrip())

    def print_start_error(self, name: str, error: str) -> None:
        """Prints why the start of a service failed; if `error` is empty, the end of its log."""
        if not error:
            self._write(self.err, f"the end of {self.log(name)}:\n")
        self._print_quoted(error.splitlines() or self.tail(name) or ["(it is empty)"])

    def event(self, event: Event) -> None:
        match event:
            case BecameReady(name, line, after_s):
                addresses = ", ".join(f"{kind} {at}" for kind, at in sorted(line.addresses.items()))
                detail = f"after {after_s:.1f} s, pid {line.pid}, {addresses}"
                self.print_progress(name, "ready", detail, colour=_GREEN)
            case Died():
                label, colour = ("died", _RED) if event.status else ("ended", YELLOW)
                self.print_progress(event.service, label, self._describe_exit(event), colour=colour)
                error = event.start_error
                # Of a clean exit or a kill from outside, the log has no reason.
                if not error and event.status not in (None, 0, -signal.SIGKILL, -signal.SIGTERM):
                    error = find_crash_reason(self.tail(event.service))
                if error not in self._printed_errors:
                    self._printed_errors.add(error)
                    self._print_quoted(error.splitlines())
            case RestartsExhausted(name, is_retryable=False):
                self.print_error(f"{name} has an invalid configuration")
            case RestartsExhausted(name, attempts, start_error=error):
                self.print_error(f"{name} was started {attempts} times and was never ready")
                self.print_start_error(name, error)
            case Stopped(name, status, after_s, killed=True):
                self.print_progress(name, "killed", f"{after_s:.1f} s after SIGTERM", colour=_RED)
            case Stopped(name, status, after_s):
                detail = f"after {after_s:.1f} s, {describe_status(status)}"
                self.print_progress(
                    name, "stopped", detail, colour=_PLAIN if status == 0 else YELLOW
                )
            case NotDeregistered(name, reason):
                detail = f"its instance stays registered for a while: {reason}"
                self.print_progress(name, "note", detail, colour=YELLOW)
            case KillFailed(name, pid):
                self.print_error(f"{name} (pid {pid}) did not exit after SIGKILL")

    def _print_quoted(self, lines: Sequence[str]) -> None:
        self._write(self.err, "".join(f"  | {line}\n" for line in lines))

    def _describe_exit(self, event: Died) -> str:
        details = f" ({event.reason})" if event.reason else ""
        text = f"{describe_status(event.status)}{details} after {event.uptime_s:.1f} s"
        restart_in_s = event.restart_in_s
        restart_text = "" if restart_in_s is None else f"; again in {restart_in_s:.1f} s"
        return f"{text}, see {self.log(event.service)}{restart_text}"

    def _write(self, stream: TextIO, text: str) -> None:
        try:
            stream.write(text)
            stream.flush()
        except BrokenPipeError:
            # The reader is gone (`meshctl up | head`); the mesh continues without output.
            with open(os.devnull, "wb") as devnull:
                os.dup2(devnull.fileno(), stream.fileno())


def find_crash_reason(lines: Sequence[str]) -> str:
    """Returns the last line of a log, or its last error if it is JSON; "" if the log is empty."""
    for line in reversed(lines):
        try:
            fields = json.loads(line)
        except ValueError:
            return line  # of a traceback, or of a crash outside Python
        if isinstance(fields, dict) and fields.get("level") == "error":
            error = str(fields.get("exception") or fields.get("error") or "")
            return ": ".join([str(fields.get("event")), *error.strip().splitlines()[-1:]])
    return describe_log_line(lines[-1]) if lines else ""


def describe_log_line(line: str) -> str:
    """Returns the event of a JSON log line and its own fields; another line as it is."""
    try:
        fields = dict(json.loads(line))
    except (ValueError, TypeError):
        return line
    return describe_fields(fields)


def describe_fields(fields: Mapping[str, object]) -> str:
    """Returns the event of a log line and its own fields."""
    details = [
        f"{key}={value}"
        for key, value in fields.items()
        if key not in _COMMON_FIELDS and key != "event"
    ]
    return " ".join([str(fields.get("event", "")), *details])


def describe_status(status: int | None) -> str:
    if status is None:
        return "could not be started"
    if status >= 0:
        return f"exit status {status}"
    try:
        return f"killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"killed by signal {-status}"


def table(children: Iterable[Child]) -> list[str]:
    """Returns a table of the services with state, pid, address and URL."""
    rows = [("SERVICE", "STATE", "PID", "ADDRESS", "URL")]
    for child in children:
        pid = "-" if child.process is None else str(child.process.pid)
        address = "-" if child.line is None else child.line.addresses.get("grpc", "-")
        rows.append((child.spec.name, child.state.value, pid, address, http_url(child.line) or "-"))
    return align(rows)


def align(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def hints(url: str, model: str, meshctl: str = "meshctl") -> list[str]:
    """Returns what to do with a mesh. meshctl: the command of this program."""
    body = shlex.quote(json.dumps(chat_body(model, "Hello", 32)))
    return [
        f"models   {url}/v1/models",
        f"chat     curl -N {url}/v1/chat/completions -H 'content-type: application/json' -d {body}",
        f"status   {meshctl} status",
        "stop     Ctrl-C drains; a second one kills",
    ]


def own_command(program: str, path: str) -> str:
    """Returns this program as a user types it.

    - program: the first word of the command line, as the process received it.
    - path: the variable PATH.
    """
    file = Path(program)
    if file.name == "__main__.py":
        return "python -m meshctl"
    # A shell passes the absolute path of a command that it finds by PATH.
    is_found = file.is_absolute() and str(file.parent) in path.split(os.pathsep)
    return file.name if is_found else program


def http_url(line: ReadyLine | None) -> str:
    """Returns the URL of a frontend; "" for other services."""
    address = "" if line is None else line.addresses.get("http", "")
    return address if not address or "://" in address else f"http://{address}"


def should_colour(out: TextIO, environ: Mapping[str, str]) -> bool:
    """Returns True on a terminal, unless NO_COLOR is set."""
    return out.isatty() and not environ.get("NO_COLOR") and environ.get("TERM") != "dumb"
