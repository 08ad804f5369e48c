"""`make epp-test`: two endpoint pickers behind a real Envoy, before two servers.

    python -m tests.epp [--envoy PATH] [--sglang] [--conversations N] [--turns N] [--pairs N]
        [--kills N]

Without `--sglang` the servers are stand-ins with a prefix cache (`tests/kit/caching_server.py`);
the report names them. The last line is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx

from tests.epp.cases import CASES, LAST_CASES, Bed
from tests.epp.envoy import Envoy, EnvoyMissing, find_envoy
from tests.epp.load import Outcome, added_ms, conversations, run
from tests.epp.servers import Server, two_servers
from tests.kit.certificates import Authority
from tests.kit.picker_mesh import PickerMesh
from tests.kit.processes import Service
from tests.kit.waiting import WAIT_S, wait_for

PARALLEL = 6
SEED = 11


class Report:
    """What the last line has, and whether the run has failed."""

    def __init__(self) -> None:
        # Any: JSON.
        self.values: dict[str, Any] = {}
        self.failures: list[str] = []

    def add(self, **values: Any) -> None:
        self.values |= values
        print(json.dumps(values), flush=True)

    def require(self, holds: bool, text: str) -> None:
        """Records a goal that was not reached."""
        if not holds:
            self.failures.append(text)
            print(f"FAILED: {text}", flush=True)


class Trial:
    """Loads through each way to a server, with empty caches at the start of each."""

    def __init__(self, bed: Bed, flags: argparse.Namespace, report: Report) -> None:
        self._bed = bed
        self._flags = flags
        self._report = report

    def hit_rates(self) -> None:
        """Measures the hit rates of Envoy's own policies, of the pickers and of the frontend."""
        urls = {
            "round_robin": self._bed.envoy.url("round_robin"),
            "least_request": self._bed.envoy.url("least_request"),
            "picker": self._bed.envoy.url("picked"),
            "frontend": self._bed.mesh.url,
        }
        for name, url in urls.items():
            outcome = self._load(url, self._flags.turns)
            suffix = "" if name == "picker" else f"_{name}"
            self._report.add(**{f"hit_rate{suffix}": outcome.hit_rate})
            self._report.require(not outcome.errors, f"{name}: {dict(outcome.errors)}")
        values = self._report.values
        self._report.require(
            values["hit_rate"] > values["hit_rate_round_robin"],
            "the pickers have no more hits than round robin",
        )

    def _load(self, url: str, turns: int) -> Outcome:
        for server in self._bed.servers:
            server.flush()
        load = conversations(self._flags.conversations, turns, SEED)
        return asyncio.run(run(url, self._bed.model, load, turns=turns, parallel=PARALLEL))

    def added_latency(self) -> None:
        envoy = self._bed.envoy
        found = added_ms(
            envoy.url("picked"), envoy.url("round_robin"), self._bed.model, self._flags.pairs
        )
        self._report.add(**{f"added_ms_{name}": value for name, value in found.items()})

    def picker_kills(self, pickers: list[Service], ports: Sequence[int]) -> None:
        """Kills a picker under load with `kill -9`, several times for each way in which Envoy sends
        bodies to it; then the restarted one serves alone.

        The goal of no error is that of the listener whose bodies Envoy keeps.
        """
        errors: dict[str, Counter[str]] = {"resilient": Counter(), "picked": Counter()}
        for listener, counts in errors.items():
            responses = 0
            for _ in range(self._flags.kills):
                url = self._bed.envoy.url(listener)
                outcome = self._end_one(url, pickers, ports, Service.kill)
                counts.update(outcome.errors)
                responses += outcome.responses
            self._report.add(**{f"killed_{listener}": [counts.total(), responses]})
        lost = errors["resilient"]
        self._report.add(
            errors=lost.total(),
            errors_full_duplex=errors["picked"].total(),
            error_kinds={name: dict(counts) for name, counts in errors.items()},
        )
        self._report.require(not lost, f"a killed picker cost {dict(lost)}")
        self._restarted_alone(pickers, ports)

    def picker_drains(self, pickers: list[Service], ports: Sequence[int]) -> None:
        """Ends a picker under load with SIGTERM, as a rolling update does: no request is lost,
        however Envoy sends bodies."""
        for listener in ("resilient", "picked"):
            url = self._bed.envoy.url(listener)
            outcome = self._end_one(url, pickers, ports, _drain)
            self._report.add(**{f"drained_{listener}": [outcome.errors.total(), outcome.responses]})
            lost = dict(outcome.errors)
            self._report.require(not lost, f"{listener}: a drained picker cost {lost}")

    def _end_one(
        self,
        url: str,
        pickers: list[Service],
        ports: Sequence[int],
        end: Callable[[Service], object],
    ) -> Outcome:
        """Runs a load, meanwhile ends the first picker, and starts it again."""
        bed, turns = self._bed, 4
        for server in bed.servers:
            server.flush()
        load = conversations(self._flags.conversations, turns, SEED)
        before = len(bed.events())

        def end_first() -> None:
            wait_for(lambda: len(bed.events()) > before + 12, "the load has begun")
            end(pickers[0])

        with ThreadPoolExecutor(1) as threads:
            ended = threads.submit(end_first)
            outcome = asyncio.run(run(url, bed.model, load, turns=turns, parallel=PARALLEL))
            ended.result()
        pickers[0] = _start_picker(bed.mesh, ports[0])
        wait_for(lambda: bed.envoy.healthy_pickers() == 2, "Envoy finds it")
        bed.no_bookings()
        return outcome

    def _restarted_alone(self, pickers: list[Service], ports: Sequence[int]) -> None:
        """Measures the hit rate of a picker that has just started, on caches filled before."""
        bed = self._bed
        load = conversations(self._flags.conversations, 4, SEED)
        for server in bed.servers:
            server.flush()
        url = bed.envoy.url("picked")
        first = asyncio.run(run(url, bed.model, load, turns=2, parallel=PARALLEL))
        for picker in pickers:
            picker.kill()
        # Before the start: else the count may be that of one whose end Envoy has not found.
        wait_for(lambda: bed.envoy.healthy_pickers() == 0, "Envoy finds that both ended")
        alone = bed.post("without pickers", "resilient")
        self._report.require(
            alone.status_code == 200, f"without pickers: {alone.status_code} {alone.text}"
        )
        pickers[0] = _start_picker(bed.mesh, ports[0])
        wait_for(lambda: bed.envoy.healthy_pickers() == 1, "Envoy finds the restarted picker only")
        second = asyncio.run(run(url, bed.model, load, turns=2, parallel=PARALLEL))
        self._report.add(hit_rate_after_restart=second.hit_rate)
        errors = first.errors + second.errors
        self._report.require(not errors, f"a restarted picker: {dict(errors)}")
        self._report.require(second.hit_rate >= 0.5, "a restarted picker is not warm")
        pickers[1] = _start_picker(bed.mesh, ports[1])
        wait_for(lambda: bed.envoy.healthy_pickers() == 2, "Envoy finds both pickers")


def _drain(picker: Service) -> None:
    """Ends a picker in order. Raises AssertionError if it fails."""
    picker.send(signal.SIGTERM)
    status = picker.wait()
    assert status == 0, f"status {status}\n{picker.tail()}"


def _start_picker(mesh: PickerMesh, port: int) -> Service:
    name = f"picker-{port}-{len(mesh.services)}"
    return mesh.add_picker(name, f"--ext-proc-port={port}", "--objectives=high=5,batch=-1")


def _run_cases(bed: Bed, cases: Sequence[Any], report: Report) -> int:
    passed = 0
    for case in cases:
        name = case.__name__.replace("_", " ")
        try:
            case(bed)
            passed += 1
            print(f"PASS {name}", flush=True)
        except Exception:  # A case may raise anything.
            print(f"FAIL {name}\n{traceback.format_exc()}{bed.envoy.tail()}", flush=True)
            report.require(False, name)
    return passed


def _measure(
    envoy_path: Path, folder: Path, servers: Sequence[Server], model: str, flags: Any
) -> Report:
    report = Report()
    with PickerMesh(folder, [server.url for server in servers]) as mesh:
        pickers = [mesh.add_picker(f"picker-{at}", "--objectives=high=5") for at in range(2)]
        limited = mesh.add_picker("limited", "--requests-max=1", "--body-limit-mb=1")
        cert, key = Authority(folder / "tls").issue("picker", ["DNS:picker"])
        tls = (f"--ext-proc-tls-cert-path={cert}", f"--ext-proc-tls-key-path={key}")
        secure = mesh.add_picker("secure", *tls)
        addresses = [one.addresses["ext_proc"] for one in (*pickers, limited, secure)]
        clusters = {"pickers": addresses[:2], "limited": addresses[2:3], "secure": addresses[3:]}
        endpoints = [server.address for server in servers]
        with Envoy(envoy_path, folder, endpoints, clusters) as envoy:
            report.add(envoy=envoy.version())
            wait_for(lambda: envoy.healthy_pickers() == 2, f"pickers\n{envoy.tail()}", WAIT_S)
            with httpx.Client(timeout=120.0, trust_env=False) as http:
                bed = Bed(envoy, mesh, list(servers), http, model)
                passed = _run_cases(bed, CASES, report)
                trial = Trial(bed, flags, report)
                trial.hit_rates()
                trial.added_latency()
                ports = [int(one.rpartition(":")[2]) for one in addresses]
                trial.picker_drains(pickers, ports)
                trial.picker_kills(pickers, ports)
                passed += _run_cases(bed, LAST_CASES, report)
                report.add(cases=passed, cases_of=len(CASES) + len(LAST_CASES))
    return report


def main() -> int:
    """Returns 0 if all cases pass and all goals are reached."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--envoy", type=Path)
    parser.add_argument("--sglang", action="store_true")
    parser.add_argument("--conversations", type=int, default=24)
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--pairs", type=int, default=300)
    parser.add_argument("--kills", type=int, default=3)
    flags = parser.parse_args()
    try:
        envoy_path = find_envoy(flags.envoy)
    except EnvoyMissing as error:
        print(json.dumps({"error": str(error)}))
        return 1
    with tempfile.TemporaryDirectory(prefix="kvmesh-epp-") as name:
        folder = Path(name)
        with two_servers(folder, is_sglang=flags.sglang) as (servers, model):
            report = _measure(envoy_path, folder, servers, model, flags)
    kind = "SGLang" if flags.sglang else "stand-ins for SGLang, with a prefix cache"
    report.values |= {"servers": kind, "failed": report.failures}
    print(json.dumps(report.values))
    return 1 if report.failures else 0


if __name__ == "__main__":
    sys.exit(main())
