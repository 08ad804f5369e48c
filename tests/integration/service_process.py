"""The life cycle of a service as a process."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from pathlib import Path

from common.registry.file import FileRegistry
from common.registry.instances import Service

# On a busy machine a process starts and ends slowly.
PROCESS_S = 25.0


async def check_life(service: Service, folder: Path) -> None:
    """The service reports ready, is in discovery with that id and address, and exits 0 on SIGTERM.

    folder: for its registry.
    """
    ready, child_end = os.pipe()
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", f"{service}_svc", "--registry-path", str(folder)),
        *("--notice-s", "0", "--ready-fd", str(child_end)),
        env={"PYTHONPATH": os.pathsep.join(sys.path), "PATH": os.environ["PATH"]},
        stderr=asyncio.subprocess.PIPE,
        pass_fds=[child_end],
    )
    os.close(child_end)
    try:
        with os.fdopen(ready) as pipe:
            async with asyncio.timeout(PROCESS_S):
                line = json.loads(await asyncio.to_thread(pipe.readline))
        registry = FileRegistry(folder)
        try:
            (entry,) = (await registry.snapshot("default")).of(service)
        finally:
            await registry.close()
        assert (str(entry.id), entry.address) == (line["instance_id"], line["addresses"]["grpc"])
        process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(PROCESS_S):
            _, log = await process.communicate()
        assert process.returncode == 0, log.decode()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
