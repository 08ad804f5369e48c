"""The conformance kit on SGLang, first and in its own process, because it stops its engine."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path

from tests.sglang.sglang_workers import REPOSITORY, START_S


async def test_sglang_keeps_the_engine_contract(tmp_path: Path) -> None:
    from worker_svc.engines.sglang.make_model import write_tiny_model

    write_tiny_model(tmp_path / "tiny")
    arguments = {
        "model": "tiny",
        "model_path": str(tmp_path / "tiny"),
        "engine_args": {"max_total_tokens": 8192},
    }
    process = await asyncio.create_subprocess_exec(
        *(
            sys.executable,
            "-m",
            "worker_svc.conformance",
            "worker_svc.engines.sglang.engine:SglangEngine",
        ),
        *(f"--arg={name}={json.dumps(value)}" for name, value in arguments.items()),
        "--stop-s=30",  # a step may be slow on this machine
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": f"{REPOSITORY / 'protos'}:{REPOSITORY}"},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        async with asyncio.timeout(START_S):
            output, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    lines = output.decode().splitlines()
    print("\n".join(lines))
    assert not [line for line in lines if line.startswith("FAIL ")]
    assert sum(line.startswith("PASS ") for line in lines) >= 23
    assert process.returncode == 0
