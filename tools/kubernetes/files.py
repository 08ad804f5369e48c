"""The generated files of deploy/kubernetes, and what they are generated from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from tools.dashboards.alerts.rules import rules_document
from tools.kubernetes import connections
from tools.kubernetes.policies import policies_file

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "deploy" / "kubernetes"
_HEAD = "# python -m tools.kubernetes writes this file from {}.\n"


def generated_files() -> dict[Path, str]:
    """Returns the content of each file."""
    policy = ROOT / "deploy" / "consul_policy.hcl"
    components, name = FOLDER / "components", "network-policies.yaml"
    return {
        FOLDER / "base" / name: policies_file(connections.MESH, denies_others=True),
        FOLDER / "base" / "consul" / name: policies_file(connections.REGISTRY, "-registry"),
        components / "existing-consul" / name: policies_file(
            connections.EXISTING_REGISTRY, "-existing-registry"
        ),
        components / "monitoring" / name: policies_file(connections.MONITORING, "-metrics"),
        components / "sglang" / name: policies_file(connections.SGLANG, "-transfer"),
        FOLDER / "gateway" / name: policies_file(connections.GATEWAY, "-gateway"),
        components / "monitoring" / "prometheus-rule.yaml": _rule_file(),
        # Kustomize reads no file outside of its folder.
        FOLDER / "base" / "consul" / "policy.hcl": (
            _HEAD.format("deploy/consul_policy.hcl") + policy.read_text()
        ),
    }


def _rule_file() -> str:
    # Any: YAML.
    document: dict[str, Any] = {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PrometheusRule",
        "metadata": {"name": "kvmesh"},
        "spec": rules_document(),
    }
    text = yaml.safe_dump(document, sort_keys=False, width=100)
    return _HEAD.format("tools/dashboards/alerts") + text
