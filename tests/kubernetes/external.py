"""Checks of rendered manifests by other programs: schemas of Kubernetes, and security policies."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import jsonschema
import yaml

from tests.kit.images import ROOT
from tests.kubernetes.crds import SCHEMAS
from tests.kubernetes.manifests import Manifests

TOOLS: Final = ROOT / ".venv-k8s" / "bin"
INSTALL: Final = "make .venv-k8s/.ready"
# The releases that Kubernetes maintains.
RELEASES: Final = ("1.35", "1.36", "1.37")
CHECKOV_S: Final = 300.0
# Policies that are not met, with the reason.
EXEMPT: Final[Mapping[str, str]] = {
    "CKV_K8S_11": "no CPU limit: throttling delays every stream of a process; requests are set",
    "CKV_K8S_15": "tags name one version, so that a present image needs no registry",
    "CKV_K8S_43": "operators build the images, and set digests in their overlay (images:)",
}


def tool(name: str) -> Path:
    """Returns the path of a program. Raises FileNotFoundError with the install command."""
    path = TOOLS / name
    if not path.exists():
        raise FileNotFoundError(f"{path} is missing; install it: {INSTALL}")
    return path


def schema_problems(manifests: Manifests, release: str, folder: Path) -> list[str]:
    """Returns what the schemas of a release refuse; unknown fields too."""
    path = folder / f"{manifests.name}-core.yaml"
    core = [item for item in manifests.objects if _key(item) not in SCHEMAS]
    path.write_text(yaml.safe_dump_all(core))
    done = subprocess.run(
        [tool("kubernetes-validate"), "--strict", "-k", release, path],
        capture_output=True,
        text=True,
        check=False,
    )
    lines = (done.stdout + done.stderr).splitlines()
    checked = [line for line in lines if "passed" in line]
    problems = [line for line in lines if "passed" not in line]
    if done.returncode == 0 and not problems and len(checked) != len(core):
        problems.append(f"{len(checked)} of {len(core)} objects were checked")
    return problems or ([f"status {done.returncode}"] if done.returncode else [])


def resource_problems(manifests: Manifests) -> list[str]:
    """Returns what the schemas of custom resources refuse (`crds.py`)."""
    return [
        f"{item['kind']} {item['metadata']['name']}: {error.json_path}: {error.message}"
        for item in manifests.objects
        if (schema := SCHEMAS.get(_key(item)))
        for error in jsonschema.Draft202012Validator(schema).iter_errors(item)
    ]


def policy_problems(rendered: Collection[Manifests], folder: Path) -> list[str]:
    """Returns the policies of checkov that an object violates, except those of EXEMPT. All overlays
    at once, because it takes ten seconds to start."""
    paths = [folder / f"{manifests.name}.yaml" for manifests in rendered]
    for manifests, path in zip(rendered, paths, strict=True):
        path.write_text(manifests.text)
    flags = ("--framework", "kubernetes", "--skip-download", "--quiet", "--output", "json")
    done = subprocess.run(
        [tool("checkov"), *flags, "--skip-check", ",".join(EXEMPT), "--file", *paths],
        capture_output=True,
        text=True,
        check=False,
        timeout=CHECKOV_S,
    )
    try:
        report = json.loads(done.stdout)
    except ValueError:
        return [f"checkov returned no report: {done.stderr[-500:]}"]
    found = list(_failed(report))
    if report["summary"]["passed"] < 100 * len(paths):
        found.append(f"only {report['summary']['passed']} policies were checked")
    return found


# Any: the report of checkov.
def _failed(report: Mapping[str, Any]) -> Iterator[str]:
    for check in report["results"]["failed_checks"]:
        resource = f"{check['file_path']} {check['resource']}"
        yield f"{check['check_id']} {resource}: {check['check_name']}"


# Any: JSON of Kubernetes.
def _key(item: Mapping[str, Any]) -> tuple[str, str]:
    return item["apiVersion"], item["kind"]
