"""The servers of `make gpu-test`: SGLang's own, its router, and the workers of a mesh."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import httpx

from common.runtime.free_ports import free_ports
from tests.sglang.sglang_mesh import MODEL
from worker_svc.engines.sglang.server_args import server_arguments

BLOCK_SIZE: Final = 16
START_S: Final = 480.0
END_S: Final = 20.0
_POLL_S: Final = 0.2
_LOG_CHARS: Final = 4000
_HOST: Final = "127.0.0.1"


# Any: arguments of SGLang, by its names.
@asynccontextmanager
async def sglang_server(
    model: Path, arguments: Mapping[str, Any], folder: Path, *, is_cpu: bool
) -> AsyncIterator[int]:
    """Yields the HTTP port of `sglang.launch_server`, with the arguments that a worker gives its
    engine."""
    # Its server imports this package for audio; the environment of workers does not have it.
    (folder / "stubs").mkdir(exist_ok=True)
    (folder / "stubs" / "soundfile.py").touch()
    port = free_ports(1)
    found = server_arguments(
        "aggregated",
        arguments,
        is_cpu=is_cpu,
        block_size=BLOCK_SIZE,
        adapter_arguments={
            **{"model_path": str(model), "served_model_name": MODEL},
            **{"host": _HOST, "port": port},
        },
    )
    command = ["sglang.launch_server", *flags(found)]
    async with _serving(command, port, "/v1/models", folder / "sglang-server.log", folder):
        yield port


@asynccontextmanager
async def sglang_router(servers: Sequence[int], folder: Path) -> AsyncIterator[int]:
    """Yields the HTTP port of SGLang's own router in front of these servers, with its default
    policy."""
    port = free_ports(2)
    command = [
        *("sglang_router.launch_router", "--host", _HOST, "--port", str(port)),
        *("--prometheus-port", str(port + 1), "--log-level", "warn"),
        *("--worker-urls", *(f"http://{_HOST}:{one}" for one in servers)),
    ]
    async with _serving(command, port, "/v1/models", folder / "sglang-router.log", folder):
        yield port


def flags(arguments: Mapping[str, Any]) -> list[str]:
    """Returns arguments of SGLang's engine as flags of its server. Raises ValueError for False,
    which has no flag."""
    found: list[str] = []
    for name, value in arguments.items():
        if value is False:
            raise ValueError(f"{name}: False has no flag")
        found.append(f"--{name.replace('_', '-')}")
        if value is not True:
            found.append(str(value))
    return found


@asynccontextmanager
async def _serving(
    command: Sequence[str], port: int, path: str, log: Path, folder: Path
) -> AsyncIterator[None]:
    """Runs a Python module, waits until `path` responds, and ends it with its children."""
    with log.open("wb") as file:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", *command),
            env=environment(folder),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=file,
            stderr=file,
        )
    try:
        await _until_served(f"http://{_HOST}:{port}{path}", process, log)
        yield
    finally:
        if process.returncode is None:
            process.terminate()
        try:
            await asyncio.wait_for(process.wait(), END_S)
        except TimeoutError:
            process.kill()
            await process.wait()


def environment(folder: Path) -> dict[str, str]:
    """Returns the environment of SGLang's own processes: stubs of packages that it imports."""
    before = os.environ.get("PYTHONPATH", "")
    return {**os.environ, "PYTHONPATH": f"{folder / 'stubs'}{os.pathsep}{before}"}


async def _until_served(url: str, process: asyncio.subprocess.Process, log: Path) -> None:
    try:
        async with asyncio.timeout(START_S), httpx.AsyncClient(trust_env=False) as http:
            while process.returncode is None:
                with contextlib.suppress(httpx.HTTPError):
                    response = await http.get(url)
                    if response.status_code == 200 and response.json()["data"]:
                        return
                await asyncio.sleep(_POLL_S)
    except TimeoutError:
        pass
    text = await asyncio.to_thread(log.read_text)
    raise RuntimeError(f"{url} is not served; the end of {log}:\n{text[-_LOG_CHARS:]}")
