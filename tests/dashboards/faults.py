"""Alerts on a mesh that is broken on purpose: each fires, and resolves after the repair.

The rules are those of deploy/observability/alerts.yml with windows of seconds.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tests.dashboards.prometheus import Prometheus, running_prometheus
from tests.dashboards.report import Report
from tests.kit.certificates import Authority
from tests.kit.processes import MODEL, Mesh, Service
from tests.kit.waiting import wait_for
from tools.dashboards.alerts.rules import rules_document

METRICS = "--metrics-port=0"
FIRES_S, RESOLVES_S = 60.0, 120.0
# The prefill worker computes five prompts a second.
SLOW_PROMPT_TOKENS, TOKENS_PER_S = 8000, 40_000
SLOW_PROMPTS = 150
# More than a megabyte of the index: a block has 16 tokens and takes about 110 bytes.
CACHED_PROMPTS, CACHED_TOKENS = 30, 8000


@dataclass(slots=True)
class Bed:
    """A mesh, its Prometheus, and what the faults share."""

    mesh: Mesh
    prometheus: Prometheus
    report: Report
    authority: Authority
    certified: Service
    """A frontend with a certificate."""

    def fires(self, name: str, **labels: str) -> bool:
        """Returns whether an alert fires with these labels."""
        expected = {"alertname": name, **labels}.items()
        return any(expected <= one.items() for one in self.prometheus.firing())

    def is_silent(self, name: str, **labels: str) -> bool:
        return not self.fires(name, **labels)


@dataclass(frozen=True, slots=True)
class Fault:
    """What breaks the mesh, and what repairs it. alerts: with labels, that fire meanwhile."""

    name: str
    alerts: Sequence[tuple[str, dict[str, str]]]
    break_: Callable[[Bed], None]
    repair: Callable[[Bed], None]


def _role_absent(bed: Bed) -> None:
    bed.mesh.of_kind("prefill")[0].kill()


def _start_prefill(bed: Bed) -> None:
    bed.mesh.spawn("prefill").wait_ready()


def _send_all(kind: str, number: signal.Signals) -> Callable[[Bed], None]:
    def send(bed: Bed) -> None:
        for service in bed.mesh.of_kind(kind):
            service.send(number)

    return send


def _short_certificate(bed: Bed) -> None:
    bed.authority.issue("http", days=5)


def _long_certificate(bed: Bed) -> None:
    bed.authority.issue("http", days=300)


def _fill_queue(bed: Bed) -> None:
    """Sends more long prompts than the prefill worker computes in a while."""
    pool = ThreadPoolExecutor(SLOW_PROMPTS)
    for number in range(SLOW_PROMPTS):
        prompt = _unique_prompt(number, SLOW_PROMPT_TOKENS)
        pool.submit(bed.mesh.post_completion, f"slow-{number}", prompt, max_tokens=1)
    pool.shutdown(wait=False)


def _nothing(_: Bed) -> None:
    """Does nothing: the queue empties by itself."""


def _kill_workers(bed: Bed) -> None:
    for worker in bed.mesh.workers:
        worker.kill()
    wait_for(lambda: not bed.mesh.known_instance_ids("worker"), "the workers have left")
    pool = ThreadPoolExecutor(1)
    pool.submit(bed.mesh.post_completion, "waits", "Hi")
    pool.shutdown(wait=False)


def _start_workers(bed: Bed) -> None:
    for kind in ("prefill", "decode", "decode"):
        bed.mesh.spawn(kind)
    for worker in bed.mesh.workers:
        worker.wait_ready()


def _replace_indexer(*flags: str) -> Callable[[Bed], None]:
    def replace(bed: Bed) -> None:
        for indexer in bed.mesh.running("indexer"):
            indexer.kill()
        bed.mesh.spawn("indexer", *flags).wait_ready()

    return replace


def _overfill_index(bed: Bed) -> None:
    """Fills the caches beyond the memory of an indexer with one megabyte."""
    _replace_indexer("--budget-mb=1")(bed)
    for number in range(CACHED_PROMPTS):
        prompt = _unique_prompt(1000 + number, CACHED_TOKENS)
        response = bed.mesh.post_completion(f"fill-{number}", prompt, max_tokens=1)
        assert response.status_code == 200, response.text


def _hide_registry(bed: Bed) -> None:
    """Puts a file in the place of the folder of the registry."""
    registry = bed.mesh.folder / "registry"
    registry.rename(bed.mesh.folder / "hidden")
    registry.write_text("in the way")


def _show_registry(bed: Bed) -> None:
    registry = bed.mesh.folder / "registry"
    registry.unlink()
    (bed.mesh.folder / "hidden").rename(registry)


FAULTS = (
    Fault(
        "a certificate is about to expire",
        [("CertificateExpires", {"certificate": "http_tls_cert_path"})],
        _short_certificate,
        _long_certificate,
    ),
    Fault(
        "the only prefill worker is killed",
        [("RoleAbsent", {"role": "prefill"})],
        _role_absent,
        _start_prefill,
    ),
    Fault(
        "the decode workers are stopped",
        [
            ("ModelNotServed", {"model": MODEL}),
            ("ScrapeFails", {}),
            ("IndexDegraded", {"state": "stale"}),
        ],
        _send_all("decode", signal.SIGSTOP),
        _send_all("decode", signal.SIGCONT),
    ),
    Fault(
        "the indexer is stopped",
        [("IndexNotFollowed", {"instance": "router-1"})],
        _send_all("indexer", signal.SIGSTOP),
        _send_all("indexer", signal.SIGCONT),
    ),
    Fault(
        "the index exceeds its memory",
        [("IndexFull", {})],
        _overfill_index,
        _replace_indexer(),
    ),
    Fault(
        "more prompts arrive than are computed",
        [("QueueOld", {"instance": "router-1"})],
        _fill_queue,
        _nothing,
    ),
    Fault(
        "all workers are killed",
        [("NoWorker", {}), ("RequestsAwaitWorker", {"model": MODEL})],
        _kill_workers,
        _start_workers,
    ),
    Fault(
        "the registry cannot be read",
        [("RegistryUnreachable", {"instance": name}) for name in ("frontend-1", "router-1")],
        _hide_registry,
        _show_registry,
    ),
)


def check_faults(folder: Path, report: Report) -> None:
    """Breaks and repairs a mesh, one fault after the other."""
    with _bed(folder, report) as bed:
        for fault in FAULTS:
            report.run(fault.name, partial(_check, bed, fault))


def _check(bed: Bed, fault: Fault) -> None:
    alerts = fault.alerts
    for name, labels in alerts:
        wait_for(partial(bed.is_silent, name, **labels), f"{name} is silent before", RESOLVES_S)
    began = time.monotonic()
    fault.break_(bed)
    for name, labels in alerts:
        wait_for(partial(bed.fires, name, **labels), f"{name} fires", FIRES_S)
        bed.report.check(f"{name} fires", True)
    fired_s = round(time.monotonic() - began, 1)
    fault.repair(bed)
    for name, labels in alerts:
        wait_for(partial(bed.is_silent, name, **labels), f"{name} ends", RESOLVES_S)
        bed.report.check(f"{name} resolves", True)
    print(f"  {fault.name}: fired after {fired_s} s, resolved", flush=True)


@contextmanager
def _bed(folder: Path, report: Report) -> Iterator[Bed]:
    (folder / "mesh").mkdir(parents=True)
    authority = Authority(folder / "tls")
    cert, key = authority.issue("http", days=300)
    with Mesh(
        folder / "mesh",
        workers=0,
        prefill=1,
        decode=2,
        indexers=1,
        named=True,
        worker_flags=[
            METRICS,
            f"--prefill-tokens-per-s={TOKENS_PER_S}",
            "--no-local-prefill",
            "--context-length=16384",
            "--total-kv-blocks=32768",
        ],
        router_flags=[METRICS, "--queue-threshold=0.1"],
        indexer_flags=[METRICS],
        frontend_flags=["--canary-interval-s=0.5", "--canary-timeout-s=4"],
    ) as mesh:
        targets = f"{mesh.url}/v1/internal/metrics-targets"
        certified = mesh.spawn(
            "frontend", f"--http-tls-cert-path={cert}", f"--http-tls-key-path={key}"
        )
        certified.wait_ready()
        rules = rules_document(is_short=True)
        with running_prometheus(folder / "prometheus", targets, None, rules) as prometheus:
            expected = dict.fromkeys((one.name for one in mesh.services), "up")
            wait_for(lambda: dict(prometheus.targets()) == expected, "all are scraped")
            yield Bed(mesh, prometheus, report, authority, certified)


def _unique_prompt(number: int, tokens: int) -> list[int]:
    """Returns a prompt that shares no block with any other."""
    return [300 + (number * 7919 + place * place) % 2000 for place in range(tokens)]
