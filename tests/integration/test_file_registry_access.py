"""The file registry among files that its owner did not write: modes, links, FIFOs, sizes."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from random import Random
from stat import S_IMODE

import pytest
from structlog.testing import capture_logs

from common.errors import Unavailable
from common.registry.card import CARD_BYTES_MAX, Artifact, ModelCard
from common.registry.file import FileRegistry
from common.registry.file_lock import acquire_lock
from common.registry.file_view import ENTRY_BYTES_MAX
from common.registry.instances import Instance, new_instance_id
from tests.integration.service_process import check_life

NS = "default"
CARD = ModelCard(name="m", artifacts={"tokenizer.json": Artifact.of(b"{}")})
RNG = Random(15)
AT_ONCE_S = 5.0


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "run" / "registry"


@pytest.fixture
async def registry(folder: Path) -> AsyncIterator[FileRegistry]:
    one = FileRegistry(folder)
    yield one
    await one.close()


def worker() -> Instance:
    return Instance(new_instance_id(RNG), NS, "worker", "", "127.0.0.1:9000", model="m")


def entries_folder(folder: Path) -> Path:
    entries = folder / NS / "instances"
    entries.mkdir(parents=True, exist_ok=True)
    return entries


def plant_fifo(path: Path) -> None:
    os.mkfifo(path)


def plant_link(path: Path) -> None:
    path.symlink_to(path.parent.parent.parent / "elsewhere")
    path.resolve().write_bytes(b'{"order":1,"instance":{}}')


def plant_folder(path: Path) -> None:
    path.mkdir()


def modes(folder: Path) -> tuple[set[int], set[int]]:
    """The modes of all folders, and of all files."""
    paths = (folder, *folder.rglob("*"))
    folders = {S_IMODE(path.stat().st_mode) for path in paths if path.is_dir()}
    return folders, {S_IMODE(path.stat().st_mode) for path in paths if path.is_file()}


async def test_folders_are_private_and_an_older_folder_becomes_so(
    registry: FileRegistry, folder: Path
) -> None:
    for each in (entries_folder(folder), folder):
        os.chmod(each, 0o777)
    await registry.put_card(CARD)
    await registry.register(worker())
    assert modes(folder) == ({0o700}, {0o600})


@pytest.mark.parametrize("plant", [plant_fifo, plant_link, plant_folder])
async def test_an_entry_that_is_no_regular_file_is_ignored_and_logged_once(
    registry: FileRegistry, folder: Path, plant: Callable[[Path], None]
) -> None:
    planted = entries_folder(folder) / f"{1:016x}.json"
    plant(planted)
    await registry.register(one := worker())
    with capture_logs() as logs:
        async with asyncio.timeout(AT_ONCE_S):
            for _ in range(3):
                assert (await registry.snapshot(NS)).instances == {one.id: one}
    assert [line["path"] for line in logs] == [planted.name]
    assert planted.is_symlink() or planted.exists()


async def test_an_entry_above_the_size_limit_is_ignored_without_being_read(
    registry: FileRegistry, folder: Path
) -> None:
    planted = entries_folder(folder) / f"{1:016x}.json"
    with planted.open("wb") as file:
        file.truncate(ENTRY_BYTES_MAX + 1)
        acquire_lock(file.fileno())
        with capture_logs() as logs:
            assert not (await registry.snapshot(NS)).instances
    (line,) = logs
    assert line["error"] == f"file too large: {ENTRY_BYTES_MAX + 1}/{ENTRY_BYTES_MAX} bytes"


@pytest.mark.parametrize("plant", [plant_fifo, plant_link, plant_folder])
async def test_a_card_or_a_models_lock_that_is_no_regular_file_is_unavailable(
    registry: FileRegistry, folder: Path, plant: Callable[[Path], None]
) -> None:
    await registry.put_card(CARD)
    card = folder / "cards" / f"{CARD.checksum}.json"
    card.unlink()
    plant(card)
    async with asyncio.timeout(AT_ONCE_S):
        with pytest.raises(Unavailable):
            await registry.get_card(CARD.checksum)
    (folder / NS / "models").mkdir(parents=True)
    plant(folder / NS / "models" / "m")
    instance = Instance(
        new_instance_id(RNG), NS, "worker", "", "127.0.0.1:1", model="m", card_checksum="a" * 64
    )
    async with asyncio.timeout(AT_ONCE_S):
        with pytest.raises(Unavailable):
            await registry.register(instance)


async def test_a_card_above_the_size_limit_is_unavailable(
    registry: FileRegistry, folder: Path
) -> None:
    await registry.put_card(CARD)
    os.truncate(folder / "cards" / f"{CARD.checksum}.json", CARD_BYTES_MAX + 1)
    with pytest.raises(Unavailable, match="too large"):
        await registry.get_card(CARD.checksum)


async def test_deregistering_a_name_that_is_a_fifo_does_not_wait(
    registry: FileRegistry, folder: Path
) -> None:
    plant_fifo(entries_folder(folder) / f"{1:016x}.json")
    async with asyncio.timeout(AT_ONCE_S):
        with pytest.raises(Unavailable):
            await registry.deregister(NS, 1)


@pytest.mark.slow
async def test_a_service_starts_and_ends_beside_a_fifo_in_its_registry(folder: Path) -> None:
    plant_fifo(entries_folder(folder) / f"{1:016x}.json")
    await check_life("router", folder)
