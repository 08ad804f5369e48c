"""What meshctl says: one line an event, a table, hints. Plain text unless on a terminal."""

from __future__ import annotations

import json
import os
import shlex
import signal
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TextIO

from meshctl.process.child import ReadyLine
from meshctl.process.failure_reason import reason
from meshctl.process.supervise import (
    BecameReady,
    Child,
    Died,
    Ended,
    Event,
    GivenUp,
    NotDeregistered,
    Undying,
)
from meshctl.view.frontend import chat_body

_RED, _GREEN, YELLOW, _PLAIN = "31", "32", "33", ""


class Screen:
    """Lines with the seconds since the start. Events go to `out`; what stops us, to `err`.

    tail, log: the last lines of a service's log, and its path.
    """

    def __init__(
        self,
        out: TextIO,
        err: TextIO,
        *,
        colour: bool,
        clock: Callable[[], float],
        tail: Callable[[str], Sequence[str]],
        log: Callable[[str], object],
    ) -> None:
        self._out = out
        self._err = err
        self._colour = colour
        self._clock = clock
        self._began = clock()
        self._tail = tail
        self._log = log
        self._told: set[tuple[str, ...]] = set()

    def say(self, text: str = "") -> None:
        """A line without a time."""
        self._write(self._out, f"{text}\n")

    def piece(self, text: str) -> None:
        """A part of a line, at once."""
        self._write(self._out, text)

    def complain(self, text: str) -> None:
        """Says why the mesh is being stopped, or was not started."""
        self._write(self._err, f"meshctl: {text}\n")

    def step(self, name: str, state: str, detail: str = "", *, colour: str = _PLAIN) -> None:
        """A line of progress."""
        shown = f"{state:<8}"
        if colour and self._colour:
            shown = f"\x1b[{colour}m{shown}\x1b[0m"
        elapsed_s = self._clock() - self._began
        self.say(f"{elapsed_s:7.1f} s  {name:<12}  {shown}  {detail}".rstrip())

    def why(self, name: str) -> None:
        """Why a service did not start; the end of its log where that does not say."""
        if lines := reason(self._tail(name)):
            self._quote(lines)
            return
        self._write(self._err, f"the end of {self._log(name)}:\n")
        self._quote(self._tail(name) or ["(it is empty)"])

    def event(self, event: Event) -> None:
        """What the supervisor has to tell."""
        match event:
            case BecameReady(name, line, after_s):
                detail = f"after {after_s:.1f} s, pid {line.pid}, {_addresses(line)}"
                self.step(name, "ready", detail, colour=_GREEN)
            case Died():
                self.step(event.service, "died", self._death(event), colour=_RED)
                self._tell_why_once(event)
            case GivenUp(name, can_heal=False):
                self.complain(f"{name} cannot be used as it is configured")
            case GivenUp(name, tries):
                self.complain(f"{name} was started {tries} times and was never ready")
                self.why(name)
            case Ended(name, status, after_s, killed=True):
                self.step(name, "killed", f"{after_s:.1f} s after SIGTERM", colour=_RED)
            case Ended(name, status, after_s):
                detail = f"after {after_s:.1f} s, {status_text(status)}"
                self.step(name, "stopped", detail, colour=_PLAIN if status == 0 else YELLOW)
            case NotDeregistered(name, why):
                detail = f"its instance stays registered for a while: {why}"
                self.step(name, "note", detail, colour=YELLOW)
            case Undying(name, pid):
                self.complain(f"{name} (pid {pid}) does not end although killed")

    def _tell_why_once(self, event: Died) -> None:
        """The reason, unless it was told before: of this service, or of one like it."""
        lines = tuple(reason(self._tail(event.service)))
        # Killed, it had no last words.
        if (event.status or -1) > 0 and lines and lines not in self._told:
            self._told.add(lines)
            self._quote(lines)

    def _quote(self, lines: Sequence[str]) -> None:
        self._write(self._err, "".join(f"  | {line}\n" for line in lines))

    def _death(self, event: Died) -> str:
        why = status_text(event.status)
        if event.why:
            why = f"{why} ({event.why})"
        again = "" if event.again_in_s is None else f"; again in {event.again_in_s:.1f} s"
        return f"{why} after {event.ran_s:.1f} s, see {self._log(event.service)}{again}"

    def _write(self, stream: TextIO, text: str) -> None:
        try:
            stream.write(text)
            stream.flush()
        except BrokenPipeError:
            # The reader went away (`meshctl up | head`): the mesh goes on, with nobody to tell.
            with open(os.devnull, "wb") as nobody:
                os.dup2(nobody.fileno(), stream.fileno())


def status_text(status: int | None) -> str:
    """An exit status in words."""
    if status is None:
        return "could not be started"
    if status >= 0:
        return f"exit status {status}"
    try:
        return f"killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"killed by signal {-status}"


def table(children: Iterable[Child]) -> list[str]:
    """Lines that show each service with its state, pid, address and URL."""
    rows = [("SERVICE", "STATE", "PID", "ADDRESS", "URL")]
    for child in children:
        pid = "-" if child.process is None else str(child.process.pid)
        address = "-" if child.line is None else child.line.addresses.get("grpc", "-")
        rows.append((child.spec.name, child.state.value, pid, address, http_url(child.line) or "-"))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def hints(url: str, model: str) -> list[str]:
    """What to do with a mesh that is up."""
    body = shlex.quote(json.dumps(chat_body(model, "Hello", 32)))
    return [
        f"models   {url}/v1/models",
        f"chat     curl -N {url}/v1/chat/completions -H 'content-type: application/json' -d {body}",
        "stop     Ctrl-C drains; a second one kills",
    ]


def http_url(line: ReadyLine | None) -> str:
    """The URL of a frontend, "" of others."""
    address = "" if line is None else line.addresses.get("http", "")
    return address if not address or "://" in address else f"http://{address}"


def wants_colour(out: TextIO, environ: Mapping[str, str]) -> bool:
    """Whether to colour: on a terminal, unless NO_COLOR is set."""
    return out.isatty() and not environ.get("NO_COLOR") and environ.get("TERM") != "dumb"


def _addresses(line: ReadyLine) -> str:
    return ", ".join(f"{kind} {address}" for kind, address in sorted(line.addresses.items()))
