"""Loads and unloads the adapters of a worker by the placement."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from random import Random
from typing import Protocol

import structlog

from common.errors import MeshError
from common.registry.adapters import AdapterState, DesiredAdapter
from common.registry.instances import Instance, Snapshot, SnapshotDiff
from common.registry.registry import Registry
from common.streams.backoff import Backoff
from worker_svc.adapters.loaded import LoadedAdapters
from worker_svc.adapters.placement import Candidate, candidates, not_taken_over, plan
from worker_svc.adapters.use import AdapterUse

# Between two reads of the desired adapters: a change of the members needs no read, and is seen at
# once. Workers read less often in a large mesh: READ_S_PER_WORKER for each worker of the model.
READ_S = 1.0
READ_S_PER_WORKER = 0.005
# Workers that start together see each other before they load.
SETTLE_S = 2.0
RETRY_S = 1.0
RETRY_MAX_S = 60.0

log = structlog.get_logger()


class PlacedMember(Protocol):
    """The worker's entry in discovery."""

    async def advertise_adapter_state(self, state: AdapterState) -> None:
        """Changes the state of the entry, or of the next one."""


@dataclass(slots=True)
class _Failure:
    """Of an adapter that could not be loaded or unloaded. reason: "" for the latter."""

    backoff: Backoff
    retry_at: float = 0.0
    reason: str = ""


class AdapterPlacer:
    """The placement of one worker. `run` in a task; `on_snapshot` gets the members."""

    def __init__(
        self,
        registry: Registry,
        own_id: int,
        adapters: LoadedAdapters,
        member: PlacedMember,
        *,
        namespace: str,
        model: str,
        role: str,
        open_requests: Callable[[], Mapping[str, int]],
        rng: Random,
        clock: Callable[[], float] = time.monotonic,
        on_load: Callable[[bool], object] = lambda _: None,
    ) -> None:
        """
        - adapters: of the engine.
        - open_requests: returns the requests of this worker that have not ended, by adapter.
        - on_load: called with the success of each load.
        """
        self._registry = registry
        self._own_id = own_id
        self._adapters = adapters
        self._member = member
        self._namespace = namespace
        self._model = model
        self._role = role
        self._open_requests = open_requests
        self._rng = rng
        self._clock = clock
        self._on_load = on_load
        self._desired: tuple[DesiredAdapter, ...] = ()
        self._workers: Sequence[Instance] = ()
        self._own: Instance | None = None
        self._joined_at: float | None = None
        self._use = AdapterUse()
        self._state = AdapterState()
        self._is_leaving = False
        self._failures: dict[str, _Failure] = {}
        self._is_unreadable = False
        self._changed = asyncio.Event()
        # Adapters that a plan has loaded, with their locations.
        self.placed: dict[str, str] = {}

    def on_snapshot(self, snapshot: Snapshot, _changes: SnapshotDiff) -> None:
        self._workers = snapshot.serving(self._model)
        self._own = snapshot.instances.get(self._own_id)
        if self._own is None:
            self._joined_at = None
        elif self._joined_at is None:
            self._joined_at = self._clock()
        self._changed.set()

    async def run(self) -> None:
        """Loads and unloads, until cancelled."""
        while True:
            pause_s = max(READ_S, READ_S_PER_WORKER * len(self._workers))
            await self._wait(pause_s * self._rng.uniform(0.8, 1.2))
            await self._read()
            await self._advertise()
            if not self._is_leaving:
                await self._act()

    async def leave(self, limit_s: float) -> None:
        """Advertises that the worker ends, and returns once others hold what it holds, after
        `limit_s` at most."""
        self._is_leaving = True
        if self._own is None or not self.placed:
            return
        missing: list[str] = []
        try:
            async with asyncio.timeout(limit_s):
                await self._advertise()
                while missing := self._not_taken_over():
                    await self._wait(READ_S)
        except TimeoutError:
            log.warning("adapters_not_taken_over", adapters=missing, limit_s=limit_s)
        except MeshError as error:
            log.warning("adapters_not_taken_over", adapters=missing, error=error.message)

    async def stay(self) -> None:
        """Ends `leave`: the worker is about to register again."""
        self._is_leaving = False
        await self._advertise()

    @property
    def state(self) -> AdapterState:
        """What the worker shall advertise."""
        failed = {name: one.reason for name, one in self._failures.items() if one.reason}
        busy = tuple(sorted(self._use.busy & self._adapters.names))
        return AdapterState(self._is_leaving, failed, busy)

    async def _wait(self, limit_s: float) -> None:
        """Returns when the members change, after `limit_s` at most."""
        with suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                await self._changed.wait()
        self._changed.clear()

    async def _read(self) -> None:
        """Reads the desired adapters; those of the last read stay if that fails. A store that has
        lost some of them, which differs from a removal, gets them again."""
        try:
            stored = await self._registry.stored_adapters(self._namespace)
            names = {adapter.name for adapter in stored}
            lost = [adapter for adapter in self._desired if adapter.name not in names]
            for adapter in lost:
                await self._registry.put_adapter(self._namespace, adapter)
                log.warning("desired_adapter_restored", adapter=adapter.name)
        except MeshError as error:
            if not self._is_unreadable:
                log.warning("desired_adapters_unknown", error=error.message)
            self._is_unreadable = True
            return
        self._is_unreadable = False
        found = (adapter for adapter in (*stored, *lost) if not adapter.is_removed)
        self._desired = tuple(adapter for adapter in found if adapter.model == self._model)
        names = {adapter.name for adapter in self._desired} | self.placed.keys()
        self._failures = {name: one for name, one in self._failures.items() if name in names}

    async def _advertise(self) -> None:
        self._use.update(self._open_requests(), self._clock())
        state = self.state
        if state == self._state:
            return
        try:
            await self._member.advertise_adapter_state(state)
        except MeshError as error:
            log.warning("adapter_state_not_advertised", error=error.message)
        else:
            self._state = state

    async def _act(self) -> None:
        """Loads and unloads what is due."""
        if self._own is None or self._joined_at is None:
            return
        if self._clock() - self._joined_at < SETTLE_S:
            return
        members = candidates(self._workers, self._role)
        own = next((one for one in members if one.id == self._own_id), None)
        if own is None:
            return
        held = self._adapters.names
        self.placed = {name: uri for name, uri in self.placed.items() if name in held}
        todo = plan(self._desired, members, replace(own, loras=held), self.placed)
        for adapter in todo.load:
            if self._is_due(adapter.name) and not self._is_leaving:
                await self._load(adapter)
        for name in todo.unload:
            if self._is_due(name) and not self._is_leaving:
                await self._unload(name)

    def _is_due(self, name: str) -> bool:
        failure = self._failures.get(name)
        return failure is None or self._clock() >= failure.retry_at

    async def _load(self, adapter: DesiredAdapter) -> None:
        started_at = self._clock()
        try:
            await self._adapters.load(adapter.name, adapter.uri)
        except Exception as error:  # an engine may raise anything
            self._on_load(False)
            self._fail(adapter.name, error, "adapter_load_failed")
            await self._advertise()
            return
        self._on_load(True)
        self.placed[adapter.name] = adapter.uri
        log.info("adapter_placed", adapter=adapter.name, s=round(self._clock() - started_at, 3))
        if self._failures.pop(adapter.name, None) is not None:
            await self._advertise()

    async def _unload(self, name: str) -> None:
        try:
            await self._adapters.unload(name)
        except Exception as error:  # an engine may raise anything
            self._fail(name, error, "adapter_unload_failed")
            return
        self.placed.pop(name, None)
        self._failures.pop(name, None)
        log.info("adapter_withdrawn", adapter=name)

    def _fail(self, name: str, error: Exception, event: str) -> None:
        """Logs a failure and sets the time of the next attempt."""
        failure = self._failures.setdefault(
            name, _Failure(Backoff(RETRY_S, RETRY_MAX_S, self._rng))
        )
        pause_s = failure.backoff.next_s()
        failure.retry_at = self._clock() + pause_s
        text = error.message if isinstance(error, MeshError) else repr(error)
        failure.reason = text if event == "adapter_load_failed" else ""
        is_typed = isinstance(error, MeshError)
        log.warning(
            event,
            adapter=name,
            error=text,
            pause_s=round(pause_s, 3),
            exc_info=None if is_typed else error,
        )

    def _not_taken_over(self) -> list[str]:
        others: list[Candidate] = [
            one for one in candidates(self._workers, self._role) if one.id != self._own_id
        ]
        return not_taken_over(self._desired, others, self.placed)
