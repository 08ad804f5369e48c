"""The events of a response in the background, made of its stored output (pure).

They follow from the output alone, so every frontend writes the same ones, with the same numbers,
while the response runs and after it has ended.
"""

from __future__ import annotations

from typing import Final

import orjson

from frontend_svc.responses.deltas import read_deltas
from frontend_svc.responses.events import EventWriter
from frontend_svc.responses.output import Json
from frontend_svc.responses.tools import names_in_response

# Numbers of the events of one run, so that the number of an event names its run.
RUN_NUMBERS: Final = 10_000_000


def run_of_event(number: int) -> int:
    """Returns the run of an event."""
    return number // RUN_NUMBERS


class StreamEvents:
    """The events of one run of a response."""

    def __init__(self, response: bytes, run: int, after: int | None) -> None:
        """
        - response: its object, as JSON, with any status.
        - after: number of the last event that the client has; None: it has none.
        """
        # Any: JSON.
        found: Json = orjson.loads(response)
        self._start = _at_start(found)
        self._writer = EventWriter(
            found["id"],
            names_in_response(found["tools"]),
            first=run * RUN_NUMBERS,
            after=after,
        )
        self._is_running = False

    def begin(self) -> bytes:
        """Returns the events of a response that waits."""
        queued = self._start | {"status": "queued"}
        return self._writer.state("created", queued) + self._writer.state("queued", queued)

    def output(self, deltas: bytes) -> bytes:
        """Returns the events of a part of the output."""
        return self._running() + self._writer.output(read_deltas(deltas))

    def progress(self, response: bytes) -> bytes:
        """Returns the event of a response that has begun to run, once.

        - response: its object at present.
        """
        is_new = not self._is_running and orjson.loads(response)["status"] == "in_progress"
        return self._running() if is_new else b""

    def _running(self) -> bytes:
        if self._is_running:
            return b""
        self._is_running = True
        return self._writer.state("in_progress", self._start | {"status": "in_progress"})

    def end(self, response: bytes) -> bytes:
        """Returns the last events.

        - response: its object at its end.
        """
        ended: Json = orjson.loads(response)
        status = ended["status"]
        events = self._running()
        if status in ("completed", "incomplete"):
            events += self._writer.close(is_complete=status == "completed")
        # Clients have no event of a cancelled response.
        return events + self._writer.state("failed" if status == "cancelled" else status, ended)


def _at_start(response: Json) -> Json:
    """Returns the object of a response as it was when it began."""
    empty: Json = {"output": [], "usage": None, "error": None, "incomplete_details": None}
    return {name: value for name, value in response.items() if name != "nvext"} | empty
