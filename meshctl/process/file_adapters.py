"""Stores the adapters of a mesh file that workers place themselves."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from random import SystemRandom

from common.errors import MeshError
from common.registry.registry import Registry
from common.streams.backoff import Backoff
from meshctl.mesh_file.placed_adapters import apply_adapters
from meshctl.mesh_file.schema import Adapter

# Between attempts.
RETRY_S = 0.5
RETRY_MAX_S = 10.0


class FileAdapters:
    """The adapters of the file, stored at the start and each time that the file is read."""

    def __init__(
        self,
        registry: Registry,
        namespace: str,
        origin: str,
        report: Callable[[str], None],
        read: Callable[[], Sequence[Adapter]],
    ) -> None:
        """
        - origin: see DesiredAdapter.
        - report: receives what was changed, and why nothing could be.
        - read: returns the adapters of the file now. Raises MeshFileError.
        """
        self._registry = registry
        self._namespace = namespace
        self._origin = origin
        self._report = report
        self._read_file = read
        self._loop = asyncio.get_running_loop()
        self._was_read = asyncio.Event()
        self._adapters: Sequence[Adapter] = ()

    def read(self) -> None:
        """Reads the file; in any thread. Raises MeshFileError."""
        self._adapters = self._read_file()
        self._loop.call_soon_threadsafe(self._was_read.set)

    async def run(self) -> None:
        """Stores what was read, until cancelled."""
        backoff = Backoff(RETRY_S, RETRY_MAX_S, SystemRandom())
        while True:
            await self._was_read.wait()
            self._was_read.clear()
            try:
                changes = await apply_adapters(
                    self._registry, self._namespace, self._adapters, self._origin
                )
            except MeshError as error:
                if not backoff.failures:
                    self._report(error.message)
                self._was_read.set()
                await asyncio.sleep(backoff.next_s())
                continue
            backoff.reset()
            if names := ", ".join(changes.stored):
                self._report(f"{names}: stored; workers load them")
            if names := ", ".join(changes.removed):
                self._report(f"{names}: not in the mesh file any more")
