"""`meshctl top`: members, load and traffic of a mesh, refreshed each second."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field

import click
import httpx
from rich.console import Console
from rich.live import Live
from rich.table import Table

from common.inspection.gateway import metrics_url, new_http_client
from common.inspection.traffic import Sample, Traffic, read_sample, sum_traffic, traffic_between
from meshctl.commands.status import Row, gather
from meshctl.options import REGISTRY_FLAGS, MeshCommand, MeshConfig, json_flag

INTERVAL_S = 1.0
# Of rates and latencies.
WINDOW_S = 10.0
SCRAPE_TIMEOUT_S = 2.0
# In characters, of a table that is not for a terminal.
PLAIN_WIDTH = 160


@click.command("top", cls=MeshCommand, config=MeshConfig, flags=REGISTRY_FLAGS)
@click.option("--once", is_flag=True, help="Measure for a second, print once, and end.")
@json_flag
@click.pass_obj
def command(environ: Mapping[str, str], config: MeshConfig, once: bool, as_json: bool) -> int:
    """Shows the members of a mesh with their load, and the traffic of frontends, until Ctrl-C.

    Rates and times to the first token cover the last 10 seconds; without requests in them, the
    times are those since the start of the frontend. With API keys, OPENAI_API_KEY must have the
    permission `admin`; KVMESH_METRICS_KEY is used for a metrics port of its own. With `--json` each
    line is one measurement.
    """
    top = _Top(config, config.metrics_key or environ.get("OPENAI_API_KEY"))
    try:
        return asyncio.run(_show(top, once=once, as_json=as_json))
    except KeyboardInterrupt:
        return 0


async def _show(top: _Top, *, once: bool, as_json: bool) -> int:
    console = Console()
    if not console.is_terminal:
        console.width = max(console.width, PLAIN_WIDTH)
    with ExitStack() as stack:
        live = None
        if console.is_terminal and not (once or as_json):
            live = stack.enter_context(Live(console=console, auto_refresh=False))
        await top.measure()
        # Ends: by Ctrl-C, or after the second measurement.
        while True:
            await asyncio.sleep(INTERVAL_S)
            view = await top.measure()
            if as_json:
                sys.stdout.write(json.dumps(view.json_object()) + "\n")
                sys.stdout.flush()
            elif live is None:
                console.print(view.table())
            else:
                live.update(view.table(), refresh=True)
            if once:
                return 0 if view.rows else 1


@dataclass(frozen=True, slots=True)
class _View:
    """One measurement. traffic: of the frontends whose metrics were read, by instance id."""

    rows: Sequence[Row]
    traffic: Mapping[int, Traffic]
    total: Traffic
    problems: Sequence[str]

    def json_object(self) -> dict[str, object]:
        members = []
        for row in self.rows:
            of_frontend = self.traffic.get(row.instance.id)
            fields = row.fields()
            if of_frontend is not None:
                fields |= {k: v for k, v in asdict(of_frontend).items() if v is not None}
            members.append(fields)
        return {"members": members, "total": asdict(self.total), "problems": list(self.problems)}

    def table(self) -> Table:
        table = Table(box=None, pad_edge=False, header_style="bold")
        for name in ("NAME", "SERVICE", "MODEL", "HEALTH"):
            table.add_column(name, no_wrap=True)
        for name in ("RUN", "WAIT", "KV", "REQ/S", "TOKENS/S", "TTFT P50", "P99"):
            table.add_column(name, justify="right", no_wrap=True)
        for row in self.rows:
            columns, instance = row.columns(), row.instance
            traffic = self.traffic.get(instance.id, Traffic())
            role = instance.role if instance.role != "aggregated" else instance.service
            running, waiting = columns["running"], columns["waiting"]
            table.add_row(
                instance.stable_name or str(instance.id),
                role,
                instance.model,
                f"[green]{row.health}[/]" if row.health == "serving" else f"[red]{row.health}[/]",
                _text(traffic.running if running is None else running),
                _text(traffic.waiting if waiting is None else waiting),
                "" if row.kv is None else f"{100 * row.kv:.0f} %",
                *_traffic_cells(traffic),
            )
        table.add_section()
        total = self.total
        table.add_row(
            *("total", "", "", "", _text(total.running), _text(total.waiting), ""),
            *_traffic_cells(total),
        )
        for problem in self.problems:
            table.add_row(f"[yellow]{problem}[/]")
        return table


def _text(value: object) -> str:
    return "" if value is None else str(value)


def _traffic_cells(traffic: Traffic) -> tuple[str, ...]:
    rates = (traffic.requests_per_s, traffic.tokens_per_s)
    times = (traffic.ttft_p50_ms, traffic.ttft_p99_ms)
    return (
        *("" if rate is None else f"{rate:.1f}" for rate in rates),
        *("" if ms is None else f"{ms:.1f} ms" for ms in times),
    )


@dataclass
class _Top:
    """Measures a mesh again and again. samples: of the last WINDOW_S, by the URL of the metrics."""

    config: MeshConfig
    key: str | None
    samples: dict[str, deque[Sample]] = field(default_factory=dict)

    async def measure(self) -> _View:
        """Raises MeshError."""
        rows = await gather(self.config)
        # Processes of one frontend have the same metrics.
        urls = {
            metrics_url(row.instance): row.instance.id
            for row in reversed(rows)
            if row.instance.service == "frontend" and row.instance.http_address
        }
        self.samples = {url: self.samples.get(url, deque()) for url in urls}
        found = await asyncio.gather(*map(self._sample, urls))
        problems = [problem for problem in found if problem]
        traffic = {
            id_: traffic_between(self.samples[url][0], self.samples[url][-1])
            for url, id_ in urls.items()
            if self.samples[url]
        }
        windows = [window for window in self.samples.values() if window]
        total = sum_traffic([(window[0], window[-1]) for window in windows])
        return _View(rows, traffic, total, problems)

    async def _sample(self, url: str) -> str:
        """Adds a sample; returns the problem of a frontend without metrics."""
        window = self.samples[url]
        try:
            async with new_http_client(self.key, self.config, url) as http:
                response = await http.get(url, timeout=SCRAPE_TIMEOUT_S)
                now = time.monotonic()
                window.append(read_sample(response.raise_for_status().text, now))
        except (httpx.HTTPError, ValueError) as error:
            window.clear()
            return f"no metrics of {url}: {error or type(error).__name__}"
        while len(window) > 2 and window[-1].at_s - window[0].at_s > WINDOW_S:
            window.popleft()
        return ""
