"""A real Prometheus that scrapes a mesh of processes, and what it found."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

# Any: JSON and YAML.
from typing import Any

import httpx
import yaml

from common.runtime.free_ports import free_ports
from tests.kit.processes import PARENT_GUARD
from tests.kit.waiting import wait_for

SCRAPE_S = 1
# In place of $__rate_interval.
RATE_WINDOW_S = 10
START_S = 60.0
INSTALL = "apt-get install -y --no-install-recommends prometheus"


def missing_programs() -> list[str]:
    """Returns the programs of Prometheus that are not installed."""
    return [name for name in ("prometheus", "promtool") if shutil.which(name) is None]


class Prometheus:
    """The HTTP API of a running Prometheus."""

    def __init__(self, url: str) -> None:
        self._http = httpx.Client(base_url=url, timeout=30.0, trust_env=False)
        self.started_at = time.time()

    def close(self) -> None:
        self._http.close()

    def is_ready(self) -> bool:
        try:
            return self._http.get("/-/ready").status_code == 200
        except httpx.TransportError:
            return False

    def targets(self) -> Mapping[str, str]:
        """Returns the health of each target by its instance; of failing ones, the error."""
        found = self._get("/api/v1/targets")["activeTargets"]
        return {
            one["labels"]["instance"]: one["lastError"] or one["health"]
            for one in found
            if one["health"] != "unknown"
        }

    def firing(self) -> list[Mapping[str, str]]:
        """Returns the labels of the alerts that fire."""
        alerts = self._get("/api/v1/alerts")["alerts"]
        return [one["labels"] for one in alerts if one["state"] == "firing"]

    def has_samples(self, expr: str) -> bool:
        """Returns whether an expression had a number since the start."""
        now = time.time()
        query = {"query": expr, "start": self.started_at, "end": now, "step": SCRAPE_S}
        found = self._get("/api/v1/query_range", **query)["result"]
        return any(value != "NaN" for series in found for _, value in series["values"])

    def exemplars(self, expr: str) -> list[Mapping[str, str]]:
        """Returns the labels of the exemplars behind an expression since the start."""
        span = {"start": self.started_at, "end": time.time()}
        found = self._get("/api/v1/query_exemplars", query=expr, **span)
        return [one["labels"] for series in found for one in series["exemplars"]]

    def metric_names(self) -> set[str]:
        names: list[str] = self._get("/api/v1/label/__name__/values")
        return set(names)

    def label_values(self, label: str, selector: str) -> set[str]:
        """Returns what Grafana's `label_values` returns."""
        values: list[str] = self._get(f"/api/v1/label/{label}/values", **{"match[]": selector})
        return set(values)

    # Any: JSON.
    def _get(self, path: str, **query: Any) -> Any:
        response = self._http.get(path, params=query)
        assert response.status_code == 200, f"{path}: {response.text}"
        return response.json()["data"]


# Any: YAML.
@contextmanager
def running_prometheus(
    folder: Path, targets_url: str, key: str | None, rules: dict[str, Any]
) -> Iterator[Prometheus]:
    """Runs a Prometheus in an empty folder, with the scrape configuration of the compose file but
    for its addresses.

    key: of the metrics; None: they need none.
    rules: content of its file of rules.
    """
    folder.mkdir(parents=True)
    (folder / "alerts.yml").write_text(yaml.safe_dump(rules))
    authorization = {} if key is None else {"authorization": {"type": "Bearer", "credentials": key}}
    source = {"url": targets_url, "refresh_interval": f"{SCRAPE_S}s", **authorization}
    job = {
        "job_name": "kvmesh",
        "http_sd_configs": [source],
        "tls_config": {"insecure_skip_verify": True},
        **authorization,
    }
    interval = {"scrape_interval": f"{SCRAPE_S}s", "evaluation_interval": f"{SCRAPE_S}s"}
    config = {
        "global": {**interval, "scrape_timeout": f"{SCRAPE_S}s"},
        "rule_files": ["alerts.yml"],
        "scrape_configs": [job],
    }
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    port = free_ports(1)
    program = shutil.which("prometheus")
    assert program is not None, "`missing_programs` was called before"
    command = [
        *(sys.executable, "-I", "-S", str(PARENT_GUARD), str(os.getpid())),
        *(program, "--config.file=prometheus.yml", "--storage.tsdb.path=data"),
        *(f"--web.listen-address=127.0.0.1:{port}", "--enable-feature=exemplar-storage"),
    ]
    prometheus = Prometheus(f"http://127.0.0.1:{port}")
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, cwd=folder, stdout=log, stderr=log)
        try:
            wait_for(prometheus.is_ready, f"Prometheus is ready: {folder / 'log'}", START_S)
            yield prometheus
        finally:
            prometheus.close()
            process.kill()
            process.wait()
