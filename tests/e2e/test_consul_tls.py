"""A mesh whose Consul agent has HTTPS, with a certificate of its own CA, and ACLs."""

from __future__ import annotations

import contextlib
import signal
import ssl
import subprocess
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import httpx
import pytest

from common.runtime.free_ports import free_ports
from tests.contract.consul_agent import PORTS, consul_binary
from tests.kit.certificates import Authority
from tests.kit.processes import ROOT, Mesh, Service
from tests.kit.waiting import wait_for

pytestmark = pytest.mark.slow


@dataclass(frozen=True, slots=True)
class Agent:
    """A running agent. token: a file with the token of the services."""

    url: str
    ca: Path
    token: Path

    def flags(self, *, ca: Path | None = None, token: Path | None = None) -> list[str]:
        return [
            *("--registry=consul", f"--consul-url={self.url}", "--health-port=0"),
            *(f"--consul-ca-path={ca or self.ca}", f"--consul-token-file={token or self.token}"),
        ]

    def has_policy(self) -> bool:
        """Whether the agent accepts the services' token."""
        headers = {"x-consul-token": self.token.read_text().strip()}
        trust = ssl.create_default_context(cafile=self.ca)
        url = f"{self.url}/v1/kv/kvmesh/ready"
        with contextlib.suppress(httpx.TransportError):
            return httpx.put(url, headers=headers, verify=trust, trust_env=False).is_success
        return False


@pytest.fixture(scope="module")
def agent(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Agent]:
    binary, folder = consul_binary(), tmp_path_factory.mktemp("consul")
    authority = Authority(folder / "ca")
    cert, key = authority.issue("consul", ["IP:127.0.0.1"])
    for name in ("management", "service", "unknown"):
        (folder / name).write_text(f"{uuid.uuid4()}\n")
    first = free_ports(len(PORTS) + 1)
    https = first + len(PORTS)
    flags = [f"-{name}-port={first + at}" for at, name in enumerate(PORTS)]
    environ = {
        "PATH": f"{Path(binary).parent}:/usr/bin:/bin",
        "CONSUL_HTTP_ADDR": f"http://127.0.0.1:{first}",
        "CONSUL_MANAGEMENT_SETTING": "master",  # The agent of the tests is older than 1.11.
    }
    command: list[str | Path] = [
        *(ROOT / "deploy/consul.sh", folder / "management", folder / "service"),
        ROOT / "deploy/consul_policy.hcl",
        *("-bind=127.0.0.1", *flags, f"-https-port={https}"),
        *("-hcl", f'cert_file = "{cert}" key_file = "{key}"'),
    ]
    found = Agent(f"https://127.0.0.1:{https}", authority.ca, folder / "service")
    with subprocess.Popen(command, env=environ, stdout=subprocess.DEVNULL) as process:
        try:
            wait_for(found.has_policy, "the agent has the policy")
            yield found
        finally:
            process.send_signal(signal.SIGTERM)


def test_a_mesh_serves_through_an_agent_with_its_own_ca_and_acls(
    agent: Agent, tmp_path: Path
) -> None:
    flags = agent.flags()
    with Mesh(
        tmp_path,
        workers=1,
        worker_flags=[*flags, "--speedup=20"],
        frontend_flags=flags,
        router_flags=flags,
    ) as mesh:
        assert mesh.post_completion("one").status_code == 200
        worker = mesh.workers[0]
        worker.kill()
        wait_for(lambda: not mesh.known_instance_ids("worker"), "the watch reports the death")


def reports(service: Service, text: str) -> bool:
    return text in service.tail()


def test_an_agent_of_another_ca_and_an_unknown_token_are_reported_with_the_setting(
    agent: Agent, tmp_path: Path
) -> None:
    for name, flags, reason in (
        ("ca", agent.flags(ca=Authority(tmp_path / "other").ca), "certificate verify failed"),
        ("token", agent.flags(token=agent.token.with_name("unknown")), "check consul_token"),
    ):
        worker = Service("worker", flags, tmp_path, name)
        try:
            wait_for(partial(reports, worker, reason), reason)
            assert not worker.events("ready")
        finally:
            worker.close()
