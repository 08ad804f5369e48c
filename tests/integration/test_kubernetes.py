"""The manifests of deploy/kubernetes, rendered by kustomize, beside the code of the services."""

from __future__ import annotations

import asyncio
import os
import signal
import stat
import subprocess
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import pytest
import yaml

from common.registry.card import Artifact, ModelCard
from common.registry.consul.registry import ConsulRegistry
from tests.contract.consul_agent import consul_binary
from tests.kit.images import ROOT
from tests.kit.waiting import WAIT_S
from tests.kubernetes import network
from tests.kubernetes.cluster import Cluster
from tests.kubernetes.manifests import (
    COMBINED,
    COMPONENT_LABEL,
    OVERLAYS,
    Manifests,
    copy_with_secrets,
    render,
)
from tests.kubernetes.semantics import CHECKS
from tools.kubernetes.files import FOLDER, generated_files


@pytest.fixture(scope="module")
def kubernetes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return copy_with_secrets(tmp_path_factory.mktemp("kubernetes"))


_rendered = cache(render)


@pytest.mark.parametrize("overlay", [*OVERLAYS, *COMBINED])
def test_rendered_manifests_fit_the_services(kubernetes: Path, overlay: str) -> None:
    manifests = _rendered(kubernetes, overlay)
    found = {name: problems for name, check in CHECKS.items() if (problems := check(manifests))}
    assert not found


def test_every_overlay_and_component_is_checked() -> None:
    assert {path.parent.name for path in FOLDER.glob("overlays/*/kustomization.yaml")} == {
        *OVERLAYS
    }
    used = {component for _, components in COMBINED.values() for component in components}
    used.add("pod")  # of the folders that have Deployments
    for overlay in OVERLAYS:
        document = yaml.safe_load(
            (FOLDER / "overlays" / overlay / "kustomization.yaml").read_text()
        )
        used |= {Path(component).name for component in document["components"]}
    assert used == {path.name for path in (FOLDER / "components").iterdir()}


# By check: an overlay, a part of its text and what replaces it.
DEFECTS: Mapping[str, tuple[str, str, str]] = {
    "settings": ("sim", "KVMESH_WORKER_ROLE", "KVMESH_WORKER_ROLL"),
    "settings/file": ("sim", "METRICS_KEY_FILE: /run/kvmesh/metrics/", "METRICS_KEY_FILE: /run/"),
    "ports": ("sim", "containerPort: 7003", "containerPort: 7004"),
    "ports/metrics": ("sim", 'KVMESH_METRICS_PORT: "9464"', 'KVMESH_METRICS_PORT: "9465"'),
    "probes": ("sim", "port: 7001\n", "port: 7009\n"),
    "probes/service": ("sim", "service: kvmesh.member.v1.MemberService\n", "service: ''\n"),
    "probes/start": ("sglang-gpu", "failureThreshold: 1440", "failureThreshold: 60"),
    "grace": ("sim", "terminationGracePeriodSeconds: 360", "terminationGracePeriodSeconds: 60"),
    "rollouts": ("sim", "maxUnavailable: 0", "maxUnavailable: 1"),
    "selectors": (
        "sim",
        "  selector:\n    app.kubernetes.io/component: frontend\n",
        "  selector:\n    app.kubernetes.io/component: frontends\n",
    ),
    "selectors/budget": (
        "ha",
        f"maxUnavailable: 1\n  selector:\n    matchLabels:\n      {COMPONENT_LABEL}: router\n",
        f"maxUnavailable: 1\n  selector:\n    matchLabels:\n      {COMPONENT_LABEL}: other\n",
    ),
    "references": ("sim", "secretName: kvmesh-service-", "secretName: kvmesh-services-"),
    "addresses": ("sim", "http://consul:8500", "http://consuls:8500"),
    "images": ("sim", "image: kvmesh/router:0.1.0", "image: kvmesh/router:latest"),
    "restricted": ("sim", "readOnlyRootFilesystem: true", "readOnlyRootFilesystem: false"),
    "secrets": ("sim", "KVMESH_METRICS_KEY_FILE: /run/kvmesh/metrics/", "KVMESH_METRICS_KEY: "),
    "writable": ("sim", "mountPath: /tmp", "mountPath: /var/tmp"),
    "registry": ("ha", "consul-2.consul-servers", "consul-2.consul"),
    "scaling": ("sglang-gpu", 'role="decode"', 'role="aggregated"'),
    "scaling/limits": ("sglang-hpa", "maxReplicas: 16", "maxReplicas: 8"),
    "monitoring": ("ha", "replacement: kvmesh", "replacement: mesh"),
    "monitoring/targets": (
        "gateway-istio",
        "//metrics-targets.kvmesh:9464",
        "//frontend.kvmesh:80",
    ),
    "monitoring/adapter": ("gateway-istio", "regex: adapter-.+", "regex: picker-.+"),
    "topology": ("sglang-gpu", "value: zone=$(ZONE)", "value: rack=$(ZONE)"),
    "namespaces": ("sim", "pod-security.kubernetes.io/enforce: restricted", "kvmesh.io/x: y"),
    "gateway": ("gateway", "targetPort: ext-proc", "targetPort: health"),
    "gateway/port": ("gateway", "//model-servers:30000", "//model-servers:30001"),
    "gateway/headless": (
        "gateway",
        "clusterIP: None\n  ports:\n  - name: http",
        "ports:\n  - name: http",
    ),
    "gateway/pool": (
        "gateway",
        "matchLabels:\n      app: model-server",
        "matchLabels:\n      app: model",
    ),
    "gateway/istio": ("gateway-istio", "  host: picker\n", "  host: pickers\n"),
    "settings/picker": ("gateway", "KVMESH_EPP_HEALTH_PORT", "KVMESH_EPP_HEALTHY_PORT"),
    "ports/picker": ("gateway", "containerPort: 9002", "containerPort: 9004"),
    "probes/picker": ("gateway", "service: readiness", "service: ready"),
    "grace/picker": ("gateway", "sleep:\n", "wake:\n"),
    "network/gateway": ("gateway", 'kvmesh.io/gateway: "true"', 'kvmesh.io/gateway: "no"'),
    "network": ("sim", "  - port: 7002\n", "  - port: 7003\n"),
    "network/open": ("sim", "  - Ingress\n  - Egress\n", "  - Egress\n"),
}


@pytest.mark.parametrize("case", DEFECTS)
def test_a_check_finds_its_defect(kubernetes: Path, case: str) -> None:
    overlay, part, replacement = DEFECTS[case]
    text = _rendered(kubernetes, overlay).text
    assert part in text
    assert CHECKS[case.partition("/")[0]](Manifests(overlay, text.replace(part, replacement)))


def test_generated_files_are_current() -> None:
    stale = [
        str(path.relative_to(ROOT))
        for path, content in generated_files().items()
        if not path.exists() or path.read_text() != content
    ]
    assert not stale, "run python -m tools.kubernetes"


def test_no_secret_is_in_the_repository_and_all_are_generated_once(tmp_path: Path) -> None:
    tracked = subprocess.run(
        ["git", "ls-files", "deploy/kubernetes/secrets"],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
    ).stdout.split()
    names = {Path(name).name for name in tracked}
    assert names <= {".gitignore", "kustomization.yaml", "make.sh"}
    assert os.access(FOLDER / "secrets/make.sh", os.X_OK)

    def generate() -> dict[str, str]:
        subprocess.run([FOLDER / "secrets/make.sh", tmp_path], check=True)
        files = [path for path in tmp_path.rglob("*") if path.is_file()]
        assert not [path for path in files if stat.S_IMODE(path.stat().st_mode) & 0o027]
        return {str(path.relative_to(tmp_path)): path.read_text() for path in files}

    made = generate()
    listed = {
        str(path.parent.relative_to(FOLDER / "secrets") / file)
        for path in FOLDER.glob("secrets/**/kustomization.yaml")
        for secret in yaml.safe_load(path.read_text())["secretGenerator"]
        for file in secret["files"]
    }
    assert made.keys() == listed
    assert len(set(made.values())) == len(made)
    assert generate() == made


@pytest.mark.slow
async def test_the_servers_of_consul_keep_their_state(kubernetes: Path, tmp_path: Path) -> None:
    consul_binary()
    objects = _rendered(kubernetes, "sim").objects
    kept = [item for item in objects if item["kind"] in ("Secret", "ConfigMap", "StatefulSet")]
    card = ModelCard(name="m", artifacts={"a": Artifact.of(b"x" * 100_000)})
    with Cluster(Manifests("consul", yaml.safe_dump_all(kept)), tmp_path) as cluster:
        for stored in (False, True):
            for server in cluster.consuls:
                cluster.start_consul(server)
            await asyncio.to_thread(cluster.await_probes, WAIT_S)
            for server in cluster.consuls:
                token = server.pod.files()["/run/kvmesh/service/consul_token"].decode().strip()
                registry = ConsulRegistry(server.environment["CONSUL_HTTP_ADDR"], token=token)
                try:
                    if not stored:
                        await registry.put_card(card)
                    assert await registry.get_card(card.checksum) == card
                finally:
                    await registry.close()
            for server in cluster.consuls:
                server.stop(signal.SIGTERM)
            for server in cluster.consuls:
                assert server.running is not None
                await asyncio.to_thread(server.running.wait, WAIT_S)


def test_a_policy_that_selects_no_pod_permits_nothing() -> None:
    pod = network.Endpoint("a", "router", "kvmesh", {"x": "y"})
    other = network.Endpoint("b", "router", "kvmesh", {"x": "z"})
    port = network.OTHER
    assert network.permits([], pod, other, port)
    deny = {"spec": {"podSelector": {}, "policyTypes": ["Ingress", "Egress"]}}
    assert not network.permits([deny], pod, other, port)
    rule = {"podSelector": {"matchLabels": {"x": "y"}}, "policyTypes": ["Egress"], "egress": [{}]}
    assert not network.permits([deny, {"spec": rule}], pod, other, port)
    ingress = {"podSelector": {}, "policyTypes": ["Ingress"], "ingress": [{}]}
    assert network.permits([deny, {"spec": rule}, {"spec": ingress}], pod, other, port)
    assert not network.permits([deny, {"spec": rule}, {"spec": ingress}], other, pod, port)
