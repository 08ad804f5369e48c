"""`meshctl plan TRACE`: how many workers a trace needs; runs `python -m replay.plan` as a child.

The speed of a worker is measured first, through the API of a frontend, unless a file has it.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from common.errors import Unavailable
from common.inspection.gateway import GatewayError, api_url, find_frontend, new_http_client
from meshctl.commands.replay import run_child
from meshctl.options import REGISTRY_FLAGS, MeshCommand, MeshConfig, json_flag
from meshctl.view.latencies import LatencyProbe
from meshctl.view.members import read_members


async def measure(config: MeshConfig, url: str, model: str, api_key: str | None) -> str:
    """Returns the latencies of a worker as JSON. Raises Unavailable."""
    if not url:
        url = api_url(find_frontend(await read_members(config)))
    async with new_http_client(api_key, config, url) as http:
        try:
            return (await LatencyProbe(http, url.rstrip("/"), model).measure()).to_json()
        except GatewayError as error:
            raise Unavailable(f"cannot measure the speed of {model!r}: {error}") from None


def fit(latencies: str, path: Path) -> int:
    """Writes the speeds of latencies to a file; returns an exit status."""
    command = [sys.executable, "-m", "replay.plan.fit", str(path)]
    return subprocess.run(command, input=latencies.encode(), check=False).returncode


@click.command("plan", cls=MeshCommand, config=MeshConfig, flags=REGISTRY_FLAGS)
@click.argument("trace", type=click.Path(path_type=Path))
@click.option("--ttft-s", type=float, required=True, help="Target of TTFT, p95, in seconds.")
@click.option("--itl-s", type=float, required=True, help="Target of ITL, p95, in seconds.")
@click.option("--model", default="", help="Model to measure the speed of, on an idle mesh.")
@click.option("--url", default="", help="URL of a frontend. By default, one of the registry.")
@click.option(
    "--speeds",
    default=Path("speeds.json"),
    type=click.Path(path_type=Path),
    help="File of speeds; written with --model, else read.",
)
@click.option("--speed", type=float, default=1.0, help="Multiple of the arrival rate.")
@click.option("--requests", type=click.IntRange(1), default=2000, help="First ones to use.")
@click.option("--max-workers", type=click.IntRange(1), default=32, help="Largest fleet to try.")
@click.option("--aggregated", is_flag=True, help="No prefill and decode workers.")
@click.option("--blocks", type=click.IntRange(1), default=3000, help="KV blocks of a worker.")
@click.option("--block-size", type=click.IntRange(1), default=512, help="Tokens of a block.")
@click.option("--plot", type=click.Path(path_type=Path), help="Picture; needs matplotlib.")
@json_flag
@click.pass_obj
def command(
    environ: Mapping[str, str],
    /,
    config: MeshConfig,
    model: str,
    url: str,
    as_json: bool,
    **rest: Any,
) -> int:
    """Finds the fewest prefill and decode workers that meet targets of TTFT and ITL on a trace.

    TRACE is a file as of `meshctl replay`. With --model the speed of a worker is measured first.
    """
    if model:
        latencies = asyncio.run(measure(config, url, model, environ.get("OPENAI_API_KEY")))
        if status := fit(latencies, rest["speeds"]):
            return status
    return run_child("replay.plan", [*_flags(rest), *(["--json"] if as_json else [])])


def _flags(options: Mapping[str, Any]) -> list[str]:
    """Returns the options as flags of `python -m replay.plan`."""
    flags = [str(options["trace"])]
    for name, value in options.items():
        flag = f"--{name.replace('_', '-')}"
        if value is True:
            flags.append(flag)
        elif name != "trace" and value is not None and value is not False:
            flags += [flag, str(value)]
    return flags
