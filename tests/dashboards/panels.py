"""Every panel of every dashboard on a real Prometheus that scrapes a mesh under load."""

from __future__ import annotations

import asyncio
import io
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path

from meshctl.cli import run_command
from tests.dashboards.load import ADAPTER, Load
from tests.dashboards.prometheus import RATE_WINDOW_S, Prometheus, running_prometheus
from tests.dashboards.report import Report
from tests.kit.processes import MODEL, Mesh
from tests.kit.waiting import wait_for
from tools.dashboards.alerts.rules import rules_document
from tools.dashboards.catalog import catalog
from tools.dashboards.files import BOARDS
from tools.dashboards.promql import VARIABLES, substitute

LOAD_S, CLIENTS = 30.0, 3
# When a decode worker is killed, and how long after that it starts again.
KILL_AFTER_S, RESTART_AFTER_S = 8.0, 3.0
METRICS = "--metrics-port=0"
# Prompts queue at the router: a worker computes about three a second.
WORKER_FLAGS = (
    METRICS,
    f"--loras={ADAPTER}",
    "--prefill-tokens-per-s=1500",
    "--max-num-batched-tokens=256",
    "--max-num-seqs=64",
)
ROUTER_FLAGS = (METRICS, "--queue-threshold=1", "--queue-requests-max=4")
FRONTEND_FLAGS = ("--trust-traceparent", "--canary-interval-s=1")
# Of a tenant, so that requests are refused.
LIMITED = {"small": ("--requests-per-s=2",)}
TENANTS = ("acme", "small")
BATCH_LINES = 2000
# What the load must have caused; else the panels show a mesh without faults.
CAUSED = {
    "handoffs": 'kvmesh_worker_engine_total{name="rooms_handed_over"}',
    "attempts after the first": "kvmesh_frontend_retries_total",
    "refusals of a tenant": 'kvmesh_frontend_failures_total{error_type="rate_limited"}',
    "requests of an adapter": f'kvmesh_frontend_usage_requests_total{{adapter="{ADAPTER}"}}',
    "requests of each tenant": " and on () ".join(
        f'sum(kvmesh_frontend_usage_requests_total{{tenant="{name}"}})' for name in TENANTS
    ),
    "disconnects": "kvmesh_frontend_disconnected_clients_total",
    "cache hits": "kvmesh_frontend_kv_actual_cached_tokens_total",
    "requests in the queue": "kvmesh_router_queue_wait_seconds_count",
}
# Of Prometheus itself, and of its client library.
FOREIGN = ("up", "scrape_", "ALERTS")


class Keys:
    """A file of API keys. operator: a key for the metrics."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.by_tenant = {name: self._run("create", name) for name in TENANTS}
        for name, limits in LIMITED.items():
            self._run("limits", name, *limits)
        self.operator = self._run("create", "ops", "--scopes=infer,admin")

    def _run(self, *arguments: str) -> str:
        with redirect_stdout(io.StringIO()) as output:
            assert run_command(["keys", f"--api-keys={self.path}", *arguments], {}) == 0
        return output.getvalue().strip()


@contextmanager
def loaded_mesh(folder: Path, keys: Keys) -> Iterator[Mesh]:
    """A mesh with prefill and decode workers, two routers and tenants."""
    with Mesh(
        folder,
        workers=0,
        prefill=2,
        decode=2,
        routers=2,
        indexers=1,
        frontends=0,
        batches=1,
        named=True,
        worker_flags=WORKER_FLAGS,
        router_flags=ROUTER_FLAGS,
        indexer_flags=[METRICS],
        batch_flags=[METRICS],
    ) as mesh:
        mesh.http.headers["authorization"] = f"Bearer {keys.operator}"
        trace = f"--request-trace={folder / 'trace.jsonl'}"
        mesh.spawn("frontend", f"--api-keys={keys.path}", trace, *FRONTEND_FLAGS).wait_ready()
        wait_for(mesh.is_complete, "the frontend uses the routers and all workers")
        wait_for(lambda: {MODEL, ADAPTER} <= mesh.model_names(), "model and adapter are served")
        yield mesh


def check_panels(folder: Path, report: Report) -> None:
    """Runs each query after the load, and checks exemplars, variables and the reference."""
    folder.mkdir(parents=True)
    keys = Keys(folder / "keys.json")
    (folder / "mesh").mkdir()
    with loaded_mesh(folder / "mesh", keys) as mesh:
        url = f"{mesh.url}/v1/internal/metrics-targets"
        with running_prometheus(
            folder / "prometheus", url, keys.operator, rules_document()
        ) as prometheus:
            wait_for(lambda: len(prometheus.targets()) == len(mesh.services), "all are scraped")
            _create_batch(mesh, keys.by_tenant["acme"])
            load = Load(mesh.url, keys.by_tenant, CLIENTS, LOAD_S)
            asyncio.run(_run_load(mesh, load))
            report.note("statuses", dict(sorted(load.statuses.items())))
            # Sleep: the last samples are scraped.
            time.sleep(3.0)
            _check_targets(prometheus, mesh, report)
            for name, expr in CAUSED.items():
                expr = f"sum({expr}) > 0"
                report.check(f"load: {name}", prometheus.has_samples(expr), f"never: {expr}")
            _check_queries(prometheus, load, report)
            _check_variables(prometheus, report)
            _check_reference(prometheus, report)


def _create_batch(mesh: Mesh, key: str) -> None:
    """Creates a batch whose lines the mesh runs beside the load."""
    body = {"model": MODEL, "prompt": "a line", "max_tokens": 4}
    request = {"method": "POST", "url": "/v1/completions", "body": body}
    lines = [json.dumps({"custom_id": str(n), **request}) for n in range(BATCH_LINES)]
    headers = {"authorization": f"Bearer {key}"}
    file = mesh.http.post(
        f"{mesh.url}/v1/files",
        headers=headers,
        data={"purpose": "batch"},
        files={"file": ("lines.jsonl", "\n".join(lines))},
    )
    batch = {
        "input_file_id": file.raise_for_status().json()["id"],
        "endpoint": "/v1/completions",
        "completion_window": "24h",
    }
    mesh.http.post(f"{mesh.url}/v1/batches", headers=headers, json=batch).raise_for_status()


async def _run_load(mesh: Mesh, load: Load) -> None:
    """Runs the load; meanwhile a decode worker dies and another one starts."""

    async def replace_decode() -> None:
        # Sleep: the moment of the fault.
        await asyncio.sleep(KILL_AFTER_S)
        mesh.of_kind("decode")[0].kill()
        # Sleep: the duration of the fault.
        await asyncio.sleep(RESTART_AFTER_S)
        await asyncio.to_thread(mesh.spawn("decode").wait_ready)

    async with asyncio.TaskGroup() as group:
        group.create_task(load.run())
        group.create_task(replace_decode())


def _check_targets(prometheus: Prometheus, mesh: Mesh, report: Report) -> None:
    """All live processes are scraped, and nothing else."""
    live = {one.name for one in mesh.services if one.process.poll() is None}
    expected = dict.fromkeys(live, "up")
    found = dict(prometheus.targets())
    report.check("targets", found == expected, f"targets {found}, expected {sorted(live)}")


def _check_queries(prometheus: Prometheus, load: Load, report: Report) -> None:
    variables = {**VARIABLES, "$__rate_interval": f"{RATE_WINDOW_S}s"}
    for board in BOARDS:
        for panel in board.panels:
            for number, query in enumerate(panel.queries):
                place = f"{board.name}: {panel.title}" + (f" {number + 1}" if number else "")
                expr = substitute(query.expr, variables)
                if prometheus.has_samples(expr):
                    report.check(place, True)
                elif panel.empty:
                    report.skip(place, panel.empty)
                else:
                    report.check(place, False, f"no samples: {expr}")
                if query.exemplars:
                    found = {one.get("trace_id") for one in prometheus.exemplars(expr)}
                    is_known = bool(found) and found <= load.trace_ids
                    report.check(f"{place} exemplars", is_known, f"exemplars {found}")


def _check_variables(prometheus: Prometheus, report: Report) -> None:
    """The variables of the dashboards have the values of this mesh."""
    models = prometheus.label_values("model", "kvmesh_frontend_model_workers")
    report.check("variable model", MODEL in models, f"values {models}")
    roles = prometheus.label_values("role", "kvmesh_instance_info")
    expected = {"frontend", "router", "indexer", "batch", "prefill", "decode"}
    report.check("variable role", roles == expected, f"values {roles}")
    names = prometheus.label_values("instance", 'kvmesh_instance_info{role=~"prefill"}')
    report.check("variable instance", names == {"prefill-1", "prefill-2"}, f"values {names}")


def _check_reference(prometheus: Prometheus, report: Report) -> None:
    """Every scraped metric is in docs/metrics.md."""
    known = {name for metric in catalog() for name in metric.samples}
    scraped = {name for name in prometheus.metric_names() if not name.startswith(FOREIGN)}
    unknown = {name for name in scraped if not name.endswith("_created")} - known
    report.check("reference", not unknown, f"not in docs/metrics.md: {sorted(unknown)}")
    report.note("metrics_scraped", len(scraped))
