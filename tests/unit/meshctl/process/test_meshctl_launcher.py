"""The logs of services that are replaced."""

from __future__ import annotations

import os
from pathlib import Path

from meshctl.process.child import ProcessLauncher
from tests.kit.supervised import spec


async def run(launcher: ProcessLauncher, name: str) -> None:
    """Runs a service that prints one line, its name, and ends."""
    process = launcher.start(spec(name))
    assert await process.wait() == 0


async def test_failed_successors_leave_the_old_process_its_log(tmp_path: Path) -> None:
    (tmp_path / "module.py").write_text("import os; print(os.environ['KVMESH_TEXT'])\n")
    environ = {**os.environ, "PYTHONPATH": str(tmp_path), "KVMESH_TEXT": "old"}
    launcher = ProcessLauncher(tmp_path, environ)
    log = launcher.log_path("a")
    await run(launcher, "a")
    for number in ("first", "second"):
        environ["KVMESH_TEXT"] = number
        launcher.rotate_log("a")
        await run(launcher, "a")
        assert launcher.tail("a") == [number]
        launcher.restore_log("a")
        assert log.read_text() == "old\n"
        assert log.with_name("a.log.1").read_text() == f"{number}\n"
    # The old process starts again.
    environ["KVMESH_TEXT"] = "again"
    await run(launcher, "a")
    assert log.read_text() == "old\nagain\n"
