"""The life of a service as a process of its own."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from pathlib import Path

from common.registry.file import FileRegistry
from common.registry.instances import Service

# A process starts, and ends, as fast as what a busy machine leaves it allows.
PROCESS_S = 25.0


async def check_life(service: Service, folder: Path) -> None:
    """It says that it is ready, is in discovery as it says, and ends well upon SIGTERM.

    folder: for its registry.
    """
    ready, theirs = os.pipe()
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", f"{service}_svc", "--registry-path", str(folder)),
        *("--notice-s", "0", "--ready-fd", str(theirs)),
        env={"PYTHONPATH": os.pathsep.join(sys.path), "PATH": os.environ["PATH"]},
        stderr=asyncio.subprocess.PIPE,
        pass_fds=[theirs],
    )
    os.close(theirs)
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
