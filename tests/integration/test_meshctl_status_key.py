"""`meshctl status KEY`: the lookup of one member of a mesh by its key."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from common.registry.file import FileRegistry
from common.registry.instances import Instance, Service

NUMBER = 0x694D967CA5EFD804
# Of a command on a busy machine.
PROCESS_S = 60.0
KEY = "ns.worker.serve-694d967ca5efd804"


def member(number: int, service: Service = "worker", namespace: str = "ns") -> Instance:
    """A registration whose process does not run."""
    return Instance(number, namespace, service, "", "127.0.0.1:1")


@asynccontextmanager
async def registered(folder: Path, *members: Instance) -> AsyncIterator[None]:
    registry = FileRegistry(folder)
    try:
        leases = [await registry.register(one) for one in members]
        yield
        for lease in leases:
            await lease.close()
    finally:
        await registry.close()


def status(folder: Path, *words: str, namespace: str = "ns") -> subprocess.CompletedProcess[str]:
    flags = [f"--registry-path={folder}", f"--namespace={namespace}", "--json"]
    return subprocess.run(
        [sys.executable, "-m", "meshctl", "status", *words, *flags],
        capture_output=True,
        text=True,
        timeout=PROCESS_S,
        check=False,
        env={"PYTHONPATH": os.pathsep.join(sys.path), "PATH": os.environ["PATH"]},
    )


# Any: JSON.
def shown(folder: Path, *words: str, namespace: str = "ns") -> list[dict[str, Any]]:
    """The members that it shows."""
    done = status(folder, *words, namespace=namespace)
    assert not done.stderr
    rows: list[dict[str, Any]] = json.loads(done.stdout)
    return rows


@pytest.mark.row("S0-03", "S0-10", "S0-11", "S0-14", "S0-16")
async def test_the_key_of_a_member_finds_it_and_it_alone(tmp_path: Path) -> None:
    async with registered(tmp_path, member(NUMBER), member(7), member(NUMBER + 1, "router")):
        (row,) = shown(tmp_path, KEY)
        assert (row["key"], row["id"]) == (KEY, str(NUMBER))
        assert row["endpoint"] == {"namespace": "ns", "component": "worker", "name": "serve"}
        rows = {row["key"]: row["service"] for row in shown(tmp_path)}
        router = "ns.router.serve-694d967ca5efd805"
        assert rows == {KEY: "worker", "ns.worker.serve-7": "worker", router: "router"}


@pytest.mark.row("S0-17")
@pytest.mark.parametrize("key", ["ns.worker.serve-07", KEY[:-1], KEY.upper()])
async def test_a_key_without_a_member_is_an_error_that_names_it(tmp_path: Path, key: str) -> None:
    async with registered(tmp_path, member(7), member(NUMBER)):
        done = status(tmp_path, key)
        assert (done.returncode, done.stdout) == (1, "")
        assert f"no instance with the key {key!r} in namespace 'ns'" in done.stderr


@pytest.mark.row("S0-12", "S0-15")
@pytest.mark.parametrize(
    ("namespace", "number", "key"),
    [
        ("My.Ns-1_a", 1, "my.ns-1_a.worker.serve-1"),
        ("a-b.c_d.0", 2**63 - 1, "a-b.c_d.0.worker.serve-7fffffffffffffff"),
    ],
)
async def test_a_key_is_in_lower_case_with_the_id_in_hex(
    tmp_path: Path, namespace: str, number: int, key: str
) -> None:
    async with registered(tmp_path, member(number, namespace=namespace)):
        (row,) = shown(tmp_path, key, namespace=namespace)
        assert (row["key"], row["id"]) == (key, str(number))


@pytest.mark.row("S0-21")
async def test_a_member_that_registers_again_keeps_its_key(tmp_path: Path) -> None:
    keys = []
    for number in (1, 2, 1):
        async with registered(tmp_path, member(number)):
            keys += [row["key"] for row in shown(tmp_path)]
    assert keys == [f"ns.worker.serve-{number}" for number in (1, 2, 1)]
