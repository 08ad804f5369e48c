"""Changes of a folder that the kernel reports, and a file registry that relies on them."""

from __future__ import annotations

import asyncio
import sys
from contextlib import closing
from pathlib import Path

import pytest

from common.registry import file
from common.registry.file import FileRegistry
from common.registry.folder_changes import FolderChanges
from common.registry.instances import Instance
from tests.kit.waiting import WAIT_S, until

OWNER = """
import asyncio, sys
from pathlib import Path
from common.registry.file import FileRegistry
from common.registry.instances import Instance

async def main():
    registry = FileRegistry(Path(sys.argv[1]))
    await registry.register(Instance(7, "ns", "worker", "owner", address="127.0.0.1:1"))
    await asyncio.sleep(600)

asyncio.run(main())
"""


def write(folder: Path) -> None:
    (folder / "one").write_text("1")


def rename(folder: Path) -> None:
    (folder / "one").rename(folder / "two")


def delete(folder: Path) -> None:
    (folder / "two").unlink()


async def test_each_change_ends_a_wait(tmp_path: Path) -> None:
    with closing(FolderChanges()) as changes:
        assert changes.observe(tmp_path)
        for change in (write, rename, delete):
            count = changes.count
            asyncio.get_running_loop().call_later(0.01, change, tmp_path)
            assert await changes.wait(count, WAIT_S)
            # Sleep: later reports of the same change must not end the next wait.
            await asyncio.sleep(0.01)


async def test_a_change_before_the_wait_ends_it(tmp_path: Path) -> None:
    with closing(FolderChanges()) as changes:
        assert changes.observe(tmp_path)
        count = changes.count
        write(tmp_path)
        await until(lambda: changes.count > count, "the change is reported")
        assert await changes.wait(count, WAIT_S)


async def test_a_wait_without_a_change_ends_in_time(tmp_path: Path) -> None:
    with closing(FolderChanges()) as changes:
        assert changes.observe(tmp_path)
        assert not await changes.wait(changes.count, 0.01)


async def test_a_missing_folder_is_not_observed(tmp_path: Path) -> None:
    with closing(FolderChanges()) as changes:
        assert not changes.observe(tmp_path / "missing")


async def test_nothing_is_observed_after_the_close(tmp_path: Path) -> None:
    changes = FolderChanges()
    assert changes.observe(tmp_path)
    changes.close()
    assert not changes.observe(tmp_path)


@pytest.mark.slow
async def test_members_are_seen_without_polls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Arrival, update, and the end of a killed owner."""
    monkeypatch.setattr(file, "RECHECK_INTERVAL_S", 600.0)
    registry = FileRegistry(tmp_path)
    async with asyncio.timeout(WAIT_S), registry.watch("ns") as watch:

        async def shows(*worker_ids: int) -> None:
            # Ends: the caller has a time limit.
            while set(watch.current.instances) != set(worker_ids):
                await watch.next()

        lease = await registry.register(Instance(8, "ns", "worker", "other", address="127.0.0.1:2"))
        await shows(8)
        owner = await asyncio.create_subprocess_exec(sys.executable, "-c", OWNER, tmp_path)
        await shows(7, 8)
        owner.kill()
        await shows(8)
        await owner.wait()
        await lease.close()
        await shows()
    await registry.close()
