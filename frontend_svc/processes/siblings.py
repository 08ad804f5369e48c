"""What the processes of one frontend ask each other, over Unix sockets in a folder of their own.

A process answers one line with one JSON document. `<slot>.json` has the counts of a slot at the
last scrape or at the end of its process; the next process of the slot continues them, so that
sums of counters never decrease. The counts of a killed process since the last scrape are lost.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from frontend_svc.processes.metric_sums import (
    Family,
    as_registry,
    monotonic,
    read_families,
    sum_families,
)
from frontend_svc.readiness import Readiness

ANSWER_TIMEOUT_S = 2.0


class Siblings:
    """The processes of a frontend, as one of them uses them. slot: its number, from 0 to count - 1.

    Call `open` once; before that and after `close`, siblings report this process as not running.
    """

    def __init__(self, folder: Path, slot: int, count: int) -> None:
        self._folder = folder
        self.slot = slot
        self._others = [other for other in range(count) if other != slot]
        self._earlier = self._read_counts(slot)
        self._server: asyncio.Server | None = None
        self._metrics = CollectorRegistry()
        self._writing = threading.Lock()

    @property
    def usage_file(self) -> str:
        """Path of the usage records of the processes, which end with the frontend."""
        return str(self._folder / "usage.db")

    async def open(self, metrics: CollectorRegistry, readiness: Callable[[], Readiness]) -> None:
        """Answers the other processes from now on."""

        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            with contextlib.closing(writer), contextlib.suppress(OSError):
                if await reader.readline() == b"metrics\n":
                    writer.write(await asyncio.to_thread(self._write_counts))
                else:
                    now = readiness()
                    writer.write(json.dumps([] if now.is_ready else now.reasons).encode())
                await writer.drain()

        self._metrics = metrics
        path = self._socket_path(self.slot)
        path.unlink(missing_ok=True)
        self._server = await asyncio.start_unix_server(answer, path)

    async def close(self) -> None:
        """Keeps the counts of this process for its successor."""
        if self._server is not None:
            self._server.close()
            await asyncio.to_thread(self._write_counts)

    def encode(self, accept: str) -> tuple[bytes, str]:
        """Returns the metrics of all processes as text, and its media type, by an Accept header.
        Blocks for ANSWER_TIMEOUT_S if a process hangs; then its counts are those of the scrape
        before."""
        processes: list[list[Family]] = [json.loads(self._write_counts())]
        for slot in self._others:
            try:
                processes.append(self._ask(slot, b"metrics\n"))
            except OSError:
                processes.append(self._read_counts(slot))
        encode, media_type = choose_encoder(accept)
        return encode(as_registry(sum_families(processes))), media_type

    async def combine(self, own: Readiness) -> Readiness:
        """Returns the readiness of the frontend: every process that accepts connections must be
        ready."""
        found = await asyncio.gather(
            *(asyncio.to_thread(self._state, other) for other in self._others)
        )
        reasons = [reason for problems, _ in found for reason in problems]
        degraded = [reason for _, problems in found for reason in problems]
        return replace(
            own,
            is_ready=own.is_ready and not reasons,
            reasons=(*own.reasons, *reasons),
            degraded=(*own.degraded, *degraded),
        )

    def _state(self, slot: int) -> tuple[list[str], list[str]]:
        """Reasons for which a process cannot serve; and the news that it does not run, in which
        case clients reach the others."""
        name = f"process {slot}"
        try:
            return [f"{name}: {reason}" for reason in self._ask(slot, b"ready\n")], []
        except ConnectionRefusedError:
            return [], [f"{name} ended and is started again"]
        except FileNotFoundError:
            return [f"{name} starts"], []
        except OSError:
            return [f"{name} does not answer"], []

    # Any: JSON.
    def _ask(self, slot: int, question: bytes) -> Any:
        """Returns the answer of a process. Raises OSError."""
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(ANSWER_TIMEOUT_S)
            connection.connect(str(self._socket_path(slot)))
            connection.sendall(question)
            parts = list(iter(lambda: connection.recv(1 << 16), b""))
        try:
            return json.loads(b"".join(parts))
        except ValueError:
            raise ConnectionResetError(f"process {slot} ended in its answer") from None

    def _write_counts(self) -> bytes:
        """Returns the metrics of this slot as JSON; its counts are kept for when its process has
        ended."""
        path = self._counts_path(self.slot)
        with self._writing:
            families = sum_families([read_families(self._metrics), self._earlier])
            draft = path.with_suffix(".new")
            draft.write_text(json.dumps(monotonic(families)))
            draft.replace(path)
        return json.dumps(families).encode()

    def _read_counts(self, slot: int) -> list[Family]:
        try:
            families: list[Family] = json.loads(self._counts_path(slot).read_bytes())
        except FileNotFoundError:
            return []
        return families

    def _socket_path(self, slot: int) -> Path:
        return self._folder / f"{slot}.sock"

    def _counts_path(self, slot: int) -> Path:
        return self._folder / f"{slot}.json"
