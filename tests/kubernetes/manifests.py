"""The manifests of deploy/kubernetes, rendered by kustomize with generated secrets."""

from __future__ import annotations

import base64
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import yaml

from tests.kit.images import ROOT

# JSON of Kubernetes.
Json = dict[str, Any]

OVERLAYS: Final = ("sim", "ha", "sglang-gpu", "existing-consul", "gateway")
_GATEWAY: Final = ("gateway", "secrets/picker")
# Overlays of the checks: those that no overlay of the repository has. Resources beside base and
# secrets, and components.
COMBINED: Final[Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]]] = {
    "sglang-hpa": ((), ("sglang", "ha", "hpa")),
    "gateway-istio": (_GATEWAY, ("ha", "monitoring", "istio", "stock-servers")),
}
NAMESPACE: Final = "kvmesh"
COMPONENT_LABEL: Final = "app.kubernetes.io/component"
WORKLOADS: Final = ("Deployment", "StatefulSet")


def kubectl() -> Path:
    """Returns the path of kubectl, which contains kustomize. Raises FileNotFoundError."""
    found = Path(sys.executable).parent / "kubectl"
    if not found.exists():
        raise FileNotFoundError(f"{found} is missing: make setup")
    return found


def copy_with_secrets(folder: Path) -> Path:
    """Copies deploy into a folder and generates the secrets there; returns that of Kubernetes."""
    target = folder / "deploy"
    secrets = ("service", "metrics", "api-keys")
    kubernetes = target / "kubernetes"
    shutil.copytree(ROOT / "deploy", target, ignore=shutil.ignore_patterns(*secrets))
    shutil.rmtree(kubernetes / "secrets" / "consul", ignore_errors=True)
    for path in (kubernetes / "secrets" / "picker").glob("tls.*"):
        path.unlink()
    subprocess.run([kubernetes / "secrets" / "make.sh"], check=True)
    for name, (resources, components) in COMBINED.items():
        overlay = kubernetes / "overlays" / name
        overlay.mkdir()
        document = {
            "apiVersion": "kustomize.config.k8s.io/v1beta1",
            "kind": "Kustomization",
            "namespace": NAMESPACE,
            "resources": [f"../../{path}" for path in ("base", "secrets", *resources)],
            "components": [f"../../components/{component}" for component in components],
        }
        (overlay / "kustomization.yaml").write_text(yaml.safe_dump(document))
    return kubernetes


def render(kubernetes: Path, overlay: str) -> Manifests:
    """Renders an overlay of a folder of `copy_with_secrets`. Raises AssertionError with the message
    of kustomize."""
    done = subprocess.run(
        [kubectl(), "kustomize", kubernetes / "overlays" / overlay],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert not done.stderr, done.stderr
    return Manifests(overlay, done.stdout)


@dataclass(frozen=True, slots=True)
class Pod:
    """The pods of a Deployment or StatefulSet."""

    workload: Json
    secrets: Mapping[str, Mapping[str, bytes]]
    config_maps: Mapping[str, Mapping[str, str]]

    @property
    def name(self) -> str:
        name: str = self.workload["metadata"]["name"]
        return name

    @property
    def replicas(self) -> int:
        """Those that it states: 1 if an autoscaler sets them."""
        return int(self.workload["spec"].get("replicas", 1))

    @property
    def spec(self) -> Json:
        spec: Json = self.workload["spec"]["template"]["spec"]
        return spec

    @property
    def labels(self) -> Mapping[str, str]:
        labels: Mapping[str, str] = self.workload["spec"]["template"]["metadata"]["labels"]
        return labels

    @property
    def component(self) -> str:
        return self.labels[COMPONENT_LABEL]

    @property
    def container(self) -> Json:
        (container,) = self.spec["containers"]
        found: Json = container
        return found

    @property
    def containers(self) -> list[Json]:
        return [*self.spec.get("initContainers", []), *self.spec["containers"]]

    @property
    def ports(self) -> dict[str, Json]:
        """The declared ports of its container, by name."""
        return {port["name"]: port for port in self.container["ports"]}

    @property
    def target(self) -> str:
        """The target of the Dockerfile that makes its image; "" for an image of others."""
        name = str(self.container["image"]).partition(":")[0]
        return name.removeprefix("kvmesh/") if name.startswith("kvmesh/") else ""

    def variables(self, fields: Mapping[str, str], container: Json | None = None) -> dict[str, str]:
        """Returns the environment of a container; by default that of the service.

        fields: values of fields of the pod, by path.
        """
        container = self.container if container is None else container
        found: dict[str, str] = {}
        for source in container.get("envFrom", []):
            found |= self.config_maps[source["configMapRef"]["name"]]
        for variable in container.get("env", []):
            value = variable.get("value")
            if value is None:
                value = fields[variable["valueFrom"]["fieldRef"]["fieldPath"]]
            for name, known in found.items():
                value = value.replace(f"$({name})", known)
            found[variable["name"]] = value
        return found

    def files(self) -> dict[str, bytes]:
        """Returns the content of the files that volumes bring into its container, by path."""
        volumes = {volume["name"]: volume for volume in self.spec["volumes"]}
        found: dict[str, bytes] = {}
        for mount in self.container["volumeMounts"]:
            volume = volumes.get(mount["name"], {})
            if "secret" in volume:
                source = volume["secret"]
                content = dict(self.secrets[source["secretName"]])
            elif "configMap" in volume:
                source = volume["configMap"]
                texts = self.config_maps[source["name"]]
                content = {key: text.encode() for key, text in texts.items()}
            else:
                continue
            items = source.get("items") or [{"key": key, "path": key} for key in content]
            found |= {f"{mount['mountPath']}/{i['path']}": content[i["key"]] for i in items}
        return found

    def writable_folders(self) -> list[str]:
        """Returns where its container may write."""
        volumes = {volume["name"]: volume for volume in self.spec["volumes"]}
        return [
            mount["mountPath"]
            for mount in self.container["volumeMounts"]
            if not mount.get("readOnly")
            and (
                mount["name"] not in volumes
                or not {"emptyDir", "persistentVolumeClaim"}.isdisjoint(volumes[mount["name"]])
            )
        ]


@dataclass(frozen=True)
class Manifests:
    """The rendered objects of an overlay."""

    name: str
    text: str

    @cached_property
    def objects(self) -> Sequence[Json]:
        return tuple(yaml.load_all(self.text, Loader=yaml.CSafeLoader))

    def of_kind(self, *kinds: str) -> Iterator[Json]:
        return (found for found in self.objects if found["kind"] in kinds)

    def names(self, kind: str) -> set[str]:
        return {found["metadata"]["name"] for found in self.of_kind(kind)}

    @cached_property
    def pods(self) -> Sequence[Pod]:
        """The pods, one for each Deployment or StatefulSet."""
        secrets = {
            found["metadata"]["name"]: {
                key: base64.b64decode(value) for key, value in found["data"].items()
            }
            for found in self.of_kind("Secret")
        }
        maps = {found["metadata"]["name"]: found["data"] for found in self.of_kind("ConfigMap")}
        return tuple(Pod(found, secrets, maps) for found in self.of_kind(*WORKLOADS))

    @cached_property
    def services(self) -> Sequence[Pod]:
        """The pods of this project's images."""
        return tuple(pod for pod in self.pods if pod.target)

    def selected(self, selector: Json) -> list[Pod]:
        """Returns the pods that a label selector selects."""
        return [pod for pod in self.pods if selects(selector, pod.labels)]


def selects(selector: Json, labels: Mapping[str, str]) -> bool:
    """Returns whether a label selector of Kubernetes selects labels."""
    exact = selector.get("matchLabels", {}).items() <= labels.items()
    return exact and all(_matches(e, labels) for e in selector.get("matchExpressions", []))


def _matches(expression: Json, labels: Mapping[str, str]) -> bool:
    value = labels.get(expression["key"])
    match expression["operator"]:
        case "In":
            return value in expression["values"]
        case "NotIn":
            return value not in expression["values"]
        case "Exists":
            return value is not None
        case "DoesNotExist":
            return value is None
    raise ValueError(f"operator {expression['operator']!r} is not known")
