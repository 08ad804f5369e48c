"""The adapters that the engine of a worker has loaded. AdminService and placement change them
here."""

from __future__ import annotations

import asyncio
from typing import Protocol

from common.errors import Conflict, InvalidRequest, MeshError, NotFound
from worker_svc.engines.contract import AdapterEngine


class AdvertisedAdapters(Protocol):
    """The worker's entry in discovery."""

    async def advertise_loras(self, loras: frozenset[str]) -> None:
        """Changes the adapters of the entry, or of the next one."""


class LoadedAdapters:
    """The adapters of one engine, and of the worker's entry. Changes run one at a time."""

    def __init__(
        self,
        engine: AdapterEngine,
        entry: AdvertisedAdapters,
        lock: asyncio.Lock,
        *,
        model: str,
        loras: frozenset[str],
        notice_s: float,
    ) -> None:
        """
        - lock: of all operations that change the worker.
        - model: the public name of the base model.
        - loras: loaded at the start.
        - notice_s: seconds until the slowest peer has seen a change in discovery.
        """
        self._engine = engine
        self._entry = entry
        self._lock = lock
        self._model = model
        self._notice_s = notice_s
        self.names = loras

    async def load(self, name: str, uri: str) -> None:
        """Loads and advertises an adapter. Raises InvalidRequest, Conflict if its name is in use,
        and what the engine raises."""
        if not name:
            raise InvalidRequest("name must not be empty", "name")
        async with self._lock:
            if name in self.names or name == self._model:
                raise Conflict(f"the name {name!r} is in use on this worker", field="name")
            self.names = await self._engine.load_lora(name, uri)
            await self._entry.advertise_loras(self.names)

    async def unload(self, name: str) -> None:
        """Withdraws an adapter, and unloads it once peers send no requests for it. Raises NotFound,
        and what the engine raises."""
        async with self._lock:
            if name not in self.names:
                raise NotFound(f"no adapter {name!r} is loaded", field="name")
            await self._entry.advertise_loras(self.names - {name})
            try:
                await asyncio.sleep(self._notice_s)  # until then peers may send requests
                self.names = await self._engine.unload_lora(name)
            except (MeshError, asyncio.CancelledError):
                await self._entry.advertise_loras(self.names)
                raise
