"""`meshctl plan TRACE`: how many workers a trace needs; runs `python -m replay.plan` as a child.

The speed of a worker is measured first, through the API of a frontend, unless a file has it. The
trace may be made from the metrics of the running mesh, and the prediction checked on it.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import httpx

from common.errors import MeshError, Unavailable
from common.inspection.gateway import (
    GatewayError,
    api_url,
    find_frontend,
    metrics_url,
    new_http_client,
)
from common.registry.instances import Snapshot
from meshctl.commands.replay import run_child
from meshctl.options import REGISTRY_FLAGS, MeshCommand, MeshConfig, json_flag
from meshctl.view.latencies import LatencyProbe
from meshctl.view.live_traffic import LiveSample, read_live_sample, sum_samples
from meshctl.view.members import read_members
from meshctl.view.trace_player import Played, PlayedRequest, play

SCRAPE_TIMEOUT_S = 10.0
# Fields of a capacity, and what a worker advertises.
_CAPACITY = {
    "blocks": "total_kv_blocks",
    "block_size": "block_size",
    "requests": "max_num_seqs",
    "chunk_tokens": "max_num_batched_tokens",
}
_CACHE = {"blocks", "block_size"}
_UNKNOWN_CACHE = (
    "no worker of the registry advertises its KV blocks: the size of its cache is that of --blocks"
)


@dataclass(frozen=True, slots=True)
class _Mesh:
    """A running mesh, and the model that is planned for."""

    config: MeshConfig
    url: str
    model: str
    api_key: str | None

    async def api_url(self) -> str:
        if self.url:
            return self.url.rstrip("/")
        return api_url(find_frontend(await read_members(self.config)))

    async def measure(self) -> str:
        """Returns the latencies of a worker and its size as JSON. Raises Unavailable."""
        url, capacity = await self.api_url(), await self._capacity()
        async with new_http_client(self.api_key, self.config, url) as http:
            probe = new_probe(http, url, self.model, capacity)
            try:
                found = await probe.measure()
            except GatewayError as error:
                text = f"cannot measure the speed of {self.model!r}: {error}"
                raise Unavailable(text) from None
        return json.dumps({**found.to_json(), "capacity": capacity})

    async def _capacity(self) -> dict[str, int]:
        """Returns what the workers advertise. A frontend of --url may be of another registry."""
        found: dict[str, int] = {}
        try:
            found = capacity_of(await read_members(self.config), self.model)
        except MeshError:
            if not self.url:
                raise
        if not found.keys() >= _CACHE:
            click.echo(_UNKNOWN_CACHE, err=True)
        return found

    async def watch(self, seconds: float) -> str:
        """Returns the lengths of the requests of so many seconds as JSON. Raises Unavailable."""
        snapshot = await read_members(self.config)
        # Processes of one frontend have the same metrics.
        urls = {metrics_url(one) for one in snapshot.of("frontend") if one.http_address}
        old, began = await self._sample(urls), time.monotonic()
        await asyncio.sleep(seconds)
        new = await self._sample(urls)
        return json.dumps(new.since(old).to_json(time.monotonic() - began))

    async def _sample(self, urls: set[str]) -> LiveSample:
        samples: list[LiveSample] = []
        for url in sorted(urls):
            async with new_http_client(self.api_key, self.config, url) as http:
                try:
                    response = await http.get(url, timeout=SCRAPE_TIMEOUT_S)
                    text = response.raise_for_status().text
                    samples.append(read_live_sample(text, self.model))
                except (httpx.HTTPError, ValueError) as error:
                    reason = str(error) or type(error).__name__
                    raise Unavailable(f"no metrics of {url}: {reason}") from None
        return sum_samples(samples)

    async def play(self, requests: Sequence[PlayedRequest], block_size: int) -> Played:
        url = await self.api_url()
        async with new_http_client(self.api_key, self.config, url) as http:
            return await play(http, url, self.model, requests, block_size)


def capacity_of(snapshot: Snapshot, model: str) -> dict[str, int]:
    """Returns the smallest sizes of the workers of a model that decode, as fields of
    `replay.plan.speeds.Capacity`; of all workers, if none decodes."""
    workers = [one for one in snapshot.of("worker") if one.model == model]
    decoding = [one for one in workers if one.role != "prefill"] or workers
    found: dict[str, int] = {}
    for field, name in _CAPACITY.items():
        values = [value for one in decoding if (value := getattr(one, name)) is not None]
        if values:
            found[field] = min(values)
    return found


def new_probe(
    http: httpx.AsyncClient, url: str, model: str, capacity: Mapping[str, int]
) -> LatencyProbe:
    """Returns the probe of a worker. capacity: of `capacity_of`."""
    has_cache = capacity.keys() >= _CACHE
    return LatencyProbe(
        *(http, url, model),
        requests_max=capacity.get("requests"),
        cache_tokens=capacity["blocks"] * capacity["block_size"] if has_cache else None,
    )


def fleet_of(snapshot: Snapshot, model: str) -> dict[str, int]:
    """Returns the number of workers of a model by role. Raises Unavailable without any."""
    roles = [one.role for one in snapshot.of("worker") if one.model == model]
    if not roles:
        raise Unavailable(f"no worker serves {model!r}")
    return {role: roles.count(role) for role in ("aggregated", "prefill", "decode")}


def run_tool(module: str, *arguments: str, text: str = "") -> str | None:
    """Runs a module of `replay.plan`; returns what it prints, None if it failed."""
    done = subprocess.run(
        [sys.executable, "-m", f"replay.plan.{module}", *arguments],
        input=text.encode(),
        stdout=subprocess.PIPE,
        check=False,
    )
    return done.stdout.decode() if done.returncode == 0 else None


async def check(
    mesh: _Mesh,
    trace: Path,
    speeds: Path,
    seconds: float,
    blocks: int | None,
    block_size: int,
) -> str:
    """Plays the trace for so many seconds on the running mesh; returns what `replay.plan.check`
    compares, "" if there is nothing to play. blocks, block_size: as the options. Raises
    Unavailable."""
    fleet = fleet_of(await read_members(mesh.config), mesh.model)
    sizes = (str(seconds), "" if blocks is None else str(blocks), str(block_size))
    rows = await asyncio.to_thread(
        run_tool, "sample", str(trace), str(speeds), json.dumps(fleet), *sizes
    )
    if rows is None:
        return ""
    found = json.loads(rows)
    requests = [PlayedRequest(at_s, n, m, tuple(names)) for at_s, n, m, names in found]
    played = await mesh.play(requests, block_size)
    courses = [course for course in played.courses if course is not None]
    if not courses:
        raise Unavailable(f"every request of the check failed: {played.error}")
    if failed := len(requests) - len(courses):
        text = (
            f"{failed} of {len(requests)} requests of the check failed, the first: {played.error}"
        )
        click.echo(text, err=True)
    return json.dumps(
        {
            "fleet": fleet,
            "requests": found,
            "ttfts": [course.first_s for course in courses],
            "itls": [course.itl_s for course in courses if course.itl_s is not None],
        }
    )


@click.command("plan", cls=MeshCommand, config=MeshConfig, flags=REGISTRY_FLAGS)
@click.argument("trace", type=click.Path(path_type=Path))
@click.option("--ttft-s", type=float, help="Target of TTFT, p95, in seconds.")
@click.option("--itl-s", type=float, help="Target of ITL, p95, in seconds.")
@click.option("--model", default="", help="Model to measure the speed of, on an idle mesh.")
@click.option("--url", default="", help="URL of a frontend. By default, one of the registry.")
@click.option(
    "--speeds",
    default=Path("speeds.json"),
    type=click.Path(path_type=Path),
    help="File of speeds; written with --model, else read.",
)
@click.option(
    "--live-s",
    type=click.FloatRange(1),
    help="Watch the running mesh for so many seconds and write TRACE like its traffic.",
)
@click.option("--live-model", default="", help="Model whose traffic is watched.")
@click.option(
    "--check-s",
    type=click.FloatRange(1),
    help="Play the trace on the idle mesh for so many seconds; print how far the plan is from it.",
)
@click.option("--speed", type=float, default=1.0, help="Multiple of the arrival rate.")
@click.option("--requests", type=click.IntRange(1), default=2000, help="First ones to use.")
@click.option("--max-workers", type=click.IntRange(1), default=32, help="Largest fleet to try.")
@click.option("--aggregated", is_flag=True, help="No prefill and decode workers.")
@click.option(
    "--blocks",
    type=click.IntRange(1),
    help="KV blocks of a worker, of --block-size tokens. By default, those that it advertises.",
)
@click.option(
    "--block-size", type=click.IntRange(1), default=512, help="Tokens of a block of the trace."
)
@click.option("--plot", type=click.Path(path_type=Path), help="Picture; needs matplotlib.")
@json_flag
@click.pass_obj
def command(
    environ: Mapping[str, str],
    /,
    config: MeshConfig,
    model: str,
    url: str,
    live_s: float | None,
    live_model: str,
    check_s: float | None,
    as_json: bool,
    **rest: Any,
) -> int:
    """Finds the fewest prefill and decode workers that meet targets of TTFT and ITL on a trace.

    TRACE is a file as of `meshctl replay`; with --live-s it is written first, like the traffic of
    the running mesh. With --model the speed of a worker is measured first, and with --check-s the
    prediction is compared with the mesh.
    """
    key = environ.get("OPENAI_API_KEY")
    mesh = _Mesh(config, url, model, key)
    blocks, block_size = rest["blocks"], rest["block_size"]
    if live_s is not None:
        if not (live_model or model):
            raise click.UsageError("--live-s needs --live-model or --model")
        live = asyncio.run(_Mesh(config, url, live_model or model, key).watch(live_s))
        if run_tool("traffic", str(rest["trace"]), str(block_size), text=live) is None:
            return 2
    if check_s is not None and not model:
        raise click.UsageError("--check-s needs --model")
    if model and run_tool("fit", str(rest["speeds"]), text=asyncio.run(mesh.measure())) is None:
        return 2
    flags = [*_flags(rest), *(["--json"] if as_json else [])]
    if check_s is None:
        return run_child("replay.plan", flags)
    measured = asyncio.run(check(mesh, rest["trace"], rest["speeds"], check_s, blocks, block_size))
    if not measured:
        return 2
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "check.json"
        path.write_text(measured)
        return run_child("replay.plan", [*flags, "--check", str(path)])


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
