"""Slow starts of services, which `meshctl up` permits while their logs grow."""

from __future__ import annotations

import asyncio
import io
from pathlib import Path

import pytest

from meshctl.commands.up import _UpCommand
from meshctl.options import UpOptions
from meshctl.process.child import ProcessLauncher
from meshctl.process.listeners import Listeners
from meshctl.view.screen import Screen
from tests.kit.supervised import FakeProcess, World, becomes_ready, running, silent, spec
from tests.kit.waiting import until

START_S = 0.5
POLL_S = 0.02


class GrowingLogs(ProcessLauncher):
    """Logs that grow in each interval of the watch."""

    def log_bytes(self, name: str) -> int:
        return int(asyncio.get_running_loop().time() / POLL_S)


async def test_a_slow_successor_beside_the_old_process_is_not_killed_while_its_log_grows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("meshctl.commands.up.LOG_POLL_S", POLL_S)

    def born(process: FakeProcess) -> None:
        (becomes_ready if process.pid == 100 else silent)(process)

    world = World(born=born)
    logs = GrowingLogs(tmp_path, {})
    screen = Screen(
        io.StringIO(), io.StringIO(), colour=False, clock=lambda: 0.0, tail=logs.tail, log=Path
    )
    up = _UpCommand(UpOptions(), {}, logs, screen, [spec("a")], Listeners("", {}))
    loop = asyncio.get_running_loop()
    async with running(world, spec("a"), start_s=START_S) as supervisor:
        watch = asyncio.ensure_future(up._watch_slow_starts(supervisor))
        await supervisor.wait_all_ready()
        supervisor.add(spec("a"), after=supervisor.children[0])
        began = loop.time()
        await until(lambda: loop.time() > began + 3 * START_S, "its start takes long")
        assert "KILL a" not in world.log.entries
        watch.cancel()
