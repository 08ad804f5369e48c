"""Runs the pods of the overlay `gateway` as processes, before a stand-in for a model server.

The pickers are asked over TLS with the certificate of `make.sh`, as a gateway does.
"""

from __future__ import annotations

import json
import signal
from functools import partial
from pathlib import Path
from typing import Final

import grpc

from common.runtime.free_ports import free_ports
from tests.epp.servers import StandInServer
from tests.kit.gateways import GatewayStream, Picked
from tests.kit.model_server import MODEL
from tests.kit.waiting import WAIT_S, wait_for
from tests.kubernetes.cluster import Cluster, Process
from tests.kubernetes.manifests import Manifests
from tests.kubernetes.run import AddCheck, connection_problems, consul_problems
from tools.kubernetes.connections import EXT_PROC
from worker_svc.engines.sim.config import SIM_MODEL_DIR

OVERLAY: Final = "gateway"
START_S: Final = 180.0
BODY: Final = {"model": MODEL, "messages": [{"role": "user", "content": "x"}], "max_tokens": 4}


def check_run(check: AddCheck, manifests: Manifests, folder: Path) -> None:
    """Runs all pods: the pickers name the server, whose adapter is lost and comes back."""
    if problems := consul_problems():
        check("run/gateway/consul", lambda: problems)
        return
    folder.mkdir()
    server = StandInServer(folder, free_ports(3))
    names = {
        "//model-servers:30000": f"//{server.address}",
        "/models/model": str(SIM_MODEL_DIR),
    }
    try:
        server.wait_ready()
        with Cluster(manifests, folder / "pods", names) as cluster:
            check("run/gateway/start", partial(start_problems, cluster))
            check("run/gateway/picks", partial(pick_problems, cluster, server.address))
            check("run/gateway/adapter lost", partial(lose_adapter, cluster, server.address))
            check("run/gateway/connections", partial(connection_problems, cluster))
            check("run/gateway/stop", partial(stop_problems, cluster))
    finally:
        server.kill()


def start_problems(cluster: Cluster) -> list[str]:
    """Starts all pods. Raises AssertionError that names the probes that fail."""
    cluster.start()
    cluster.await_probes(START_S)
    return []


def pick_problems(cluster: Cluster, server: str) -> list[str]:
    """Asks each picker for the server of a chat."""
    found = {picker.name: _pick(picker) for picker in cluster.of_component("picker")}
    return [f"{name}: {one}" for name, one in found.items() if one.endpoints != [server]]


def lose_adapter(cluster: Cluster, server: str) -> list[str]:
    """Kills the adapter, and starts it again as a kubelet does."""
    (adapter,) = cluster.of_component("adapter")
    (picker, _) = cluster.of_component("picker")
    adapter.stop(signal.SIGKILL)
    assert adapter.running is not None
    adapter.running.wait(WAIT_S)
    wait_for(lambda: _pick(picker).status == 503, "without its adapter a server is no endpoint")
    cluster.start_service(adapter)
    wait_for(lambda: adapter.is_serving("readinessProbe"), "its worker is routable", START_S)
    return pick_problems(cluster, server)


def stop_problems(cluster: Cluster) -> list[str]:
    """Stops the pickers and the adapter; returns those that fail, or exceed their grace."""
    stopped = [*cluster.of_component("picker"), *cluster.of_component("adapter")]
    for process in stopped:
        process.stop(signal.SIGTERM)
    problems = []
    for process in stopped:
        assert process.running is not None
        status = process.running.wait(process.pod.spec["terminationGracePeriodSeconds"])
        problems += [f"status {status} of {process.tail()}"] * (status != 0)
    return problems


def _pick(picker: Process) -> Picked:
    certificate = Path(f"{picker.folder}/run/kvmesh/picker/tls.crt").read_bytes()
    address = f"{picker.address}:{EXT_PROC.number}"
    options = [("grpc.ssl_target_name_override", "picker")]
    credentials = grpc.ssl_channel_credentials(certificate)
    with GatewayStream(address, grpc.secure_channel(address, credentials, options)) as stream:
        found = stream.pick(json.dumps(BODY).encode())
        if not found.status:
            stream.respond()
        return found
