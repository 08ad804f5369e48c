"""Checks of rendered manifests beside the code: what no schema finds. Each returns problems."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final
from urllib.parse import urlsplit

import promql_parser
import yaml

from batch_svc.config import BatchConfig
from common.runtime.config import ConfigError, ServiceConfig
from common.service.health import MEMBER_SERVICE
from common.service.lifecycle import (
    CANCEL_TIMEOUT_S,
    CLOSE_TIMEOUT_S,
    DEREGISTER_TIMEOUT_S,
    DRAIN_MARGIN_S,
    FLUSH_TIMEOUT_S,
    LEFT_MARGIN_S,
)
from epp_svc.app import LIVE_SERVICE, READY_SERVICES
from epp_svc.config import EppConfig
from frontend_svc.config import FrontendConfig
from frontend_svc.routes.table import ROUTES
from router_svc.config import RouterConfig
from tests.kit.images import CONFIGS, ROOT, read_container_config
from tests.kubernetes import network
from tests.kubernetes.manifests import COMPONENT_LABEL, NAMESPACE, Manifests, Pod, selects
from tools.dashboards.catalog import catalog
from tools.kubernetes import connections
from worker_svc.config import WorkerConfig

Check = Callable[[Manifests], list[str]]

# Values of fields of pods, as the services get them.
FIELDS: Final[Mapping[str, str]] = {
    "status.podIP": "10.1.2.3",
    "metadata.name": "pod-0",
    "metadata.labels['topology.kubernetes.io/zone']": "zone-a",
}
_HOST_FIELDS: Final = ("hostNetwork", "hostPID", "hostIPC", "hostUsers")
# Volumes that the restricted level of Kubernetes permits, and manifests here have.
_VOLUMES: Final = {"secret", "configMap", "emptyDir", "persistentVolumeClaim"}
# Longest stop of a process beyond its notice and drain.
_CLOSING_S: Final = (
    DEREGISTER_TIMEOUT_S
    + LEFT_MARGIN_S
    + DRAIN_MARGIN_S
    + 2 * CLOSE_TIMEOUT_S
    + 3 * CANCEL_TIMEOUT_S
    + FLUSH_TIMEOUT_S
)
_SCALED: Final = "kvmesh_router_recommended_workers"


def read_config_of(pod: Pod, folder: Path) -> tuple[ServiceConfig, list[str]]:
    """Returns what the service of a pod reads at its start, and its warnings. folder: for its
    files. Raises ConfigError, and KeyError for a file that no volume has."""
    variables = pod.variables(FIELDS)
    files = pod.files()
    for variable, value in variables.items():
        if value.startswith("/run/kvmesh/") and variable.startswith("KVMESH_"):
            path = folder / value.lstrip("/")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(files[value])
            variables[variable] = str(path)
    known = {name: value for name, value in variables.items() if name.startswith("KVMESH_")}
    return read_container_config(pod.target, known | _of_stand_in(pod, known))


def _of_stand_in(pod: Pod, variables: Mapping[str, str]) -> dict[str, str]:
    """Returns settings in the place of those that need a filled volume, or an image with SGLang."""
    found = {}
    if path := variables.get("KVMESH_WORKER_MODEL_PATH"):
        mounts = [mount["mountPath"] for mount in pod.container["volumeMounts"]]
        assert any(Path(path).is_relative_to(mount) for mount in mounts), f"no volume has {path}"
        found["KVMESH_WORKER_MODEL_PATH"] = str(ROOT / "worker_svc/engines/sim/model")
    if pod.target == "worker-sglang":
        assert isinstance(json.loads(variables["KVMESH_WORKER_ENGINE_ARGS"]), dict)
        found |= {"KVMESH_WORKER_ENGINE": "sim", "KVMESH_WORKER_ENGINE_ARGS": ""}
    return found


@cache
def _configs(manifests: Manifests) -> tuple[tuple[Pod, ServiceConfig], ...]:
    with TemporaryDirectory() as folder:
        return tuple(
            (pod, read_config_of(pod, Path(folder) / pod.name)[0]) for pod in manifests.services
        )


def settings(manifests: Manifests) -> list[str]:
    """Every variable is a setting, and the parsers of the services accept all of them."""
    found = []
    with TemporaryDirectory() as folder:
        for pod in manifests.services:
            try:
                config, warnings = read_config_of(pod, Path(folder) / pod.name)
            except ConfigError as error:
                found += [f"{pod.name}: {problem}" for problem in error.problems]
                continue
            except KeyError as error:
                found.append(f"{pod.name}: no volume has the file {error}")
                continue
            found += [f"{pod.name}: {warning}" for warning in warnings]
            expected = (FIELDS["status.podIP"], FIELDS["metadata.name"], "consul")
            if (config.advertise_host, config.stable_name, config.registry) != expected:
                found.append(f"{pod.name} must advertise its address, its name, in Consul")
            if not (config.mesh_token and config.operator_token and config.consul_token):
                found.append(f"{pod.name} lacks a token")
            if config.insecure:
                found.append(f"{pod.name} must not be insecure")
            role = "aggregated" if pod.component == "adapter" else pod.component
            if isinstance(config, WorkerConfig) and config.role != role:
                found.append(f"{pod.name} is the component {pod.component}")
    return found


def _ports_of(config: ServiceConfig) -> dict[str, int | None]:
    """Returns the ports that a service binds, by the name that its manifest has."""
    has_streams = not isinstance(config, FrontendConfig | BatchConfig | EppConfig)
    streams = config.stream_port if has_streams else None
    found = {
        "grpc": config.port,
        "health": config.health_port,
        "streams": streams,
        "metrics": config.metrics_port,
    }
    names = {"http_port": "http", "otlp_port": "otlp", "bootstrap_port": "bootstrap"}
    names |= {"ext_proc_port": "ext-proc"}
    return found | {port: getattr(config, name, None) for name, port in names.items()}


def ports(manifests: Manifests) -> list[str]:
    """Declared ports are those that the services bind, and those that the policies have."""
    found = network.undeclared_ports(manifests)
    for pod, config in _configs(manifests):
        bound = {name: port for name, port in _ports_of(config).items() if port}
        if pod.component == "console":
            # It serves no gRPC, and its pages on the loopback of the pod.
            bound = {name: bound[name] for name in ("health", "metrics", "otlp")}
        declared = {name: port["containerPort"] for name, port in pod.ports.items()}
        if declared != bound:
            found.append(f"{pod.name} declares {declared} and binds {bound}")
    return found


def probes(manifests: Manifests) -> list[str]:
    """Probes ask a port that the service binds for a health service that it has."""
    found = []
    for pod, config in _configs(manifests):
        container, is_picker = pod.container, isinstance(config, EppConfig)
        for kind in ("startupProbe", "readinessProbe", "livenessProbe"):
            probe = container[kind]
            grpc = probe["grpc"]
            declared = {port["containerPort"] for port in pod.ports.values()}
            if grpc["port"] not in {config.health_port, config.port} & declared:
                found.append(f"{pod.name}: {kind} asks port {grpc['port']}")
            # Readiness is that of the whole process: routable.
            ready, live = (READY_SERVICES[1], LIVE_SERVICE) if is_picker else ("", MEMBER_SERVICE)
            expected = ready if kind == "readinessProbe" else live
            if pod.component != "console" and grpc.get("service", "") != expected:
                found.append(f"{pod.name}: {kind} asks for {grpc.get('service', '')!r}")
            if probe["timeoutSeconds"] > probe["periodSeconds"]:
                found.append(f"{pod.name}: {kind} has a timeout above its period")
        start = container["startupProbe"]
        start_s = start["periodSeconds"] * start["failureThreshold"]
        if start_s < (14_400 if pod.target == "worker-sglang" else 300):
            found.append(f"{pod.name} has {start_s} s to start")
    return found


def grace(manifests: Manifests) -> list[str]:
    """A pod has time for its preStop hook and the whole drain."""
    found = []
    for pod, config in _configs(manifests):
        hook_s = pod.container.get("lifecycle", {}).get("preStop", {}).get("sleep", {})
        needed_s = hook_s.get("seconds", 0) + config.notice_s + config.drain_s + _CLOSING_S
        if pod.spec["terminationGracePeriodSeconds"] < needed_s:
            found.append(f"{pod.name} needs {needed_s:g} s to stop")
        if isinstance(config, FrontendConfig | EppConfig) and not hook_s:
            found.append(f"{pod.name} stops before load balancers have removed it")
    return found


def rollouts(manifests: Manifests) -> list[str]:
    """A rolling update takes no pod away before its successor is ready, or has others left."""
    found = []
    for pod in manifests.services:
        strategy = pod.workload["spec"]["strategy"]
        if pod.component == "batch":
            # Its volume is attached to one node at a time.
            if strategy != {"type": "Recreate"} or pod.replicas != 1:
                found.append(f"{pod.name} is replaced with {strategy}, {pod.replicas} pods")
            continue
        update = strategy["rollingUpdate"]
        change = (update["maxUnavailable"], update["maxSurge"])
        is_scaled = "replicas" not in pod.workload["spec"]
        if change != (0, 1) and not (change == (1, 0) and (pod.replicas > 1 or is_scaled)):
            found.append(f"{pod.name} is replaced with {update}")
    return found


def selectors(manifests: Manifests) -> list[str]:
    """Selectors of workloads, services, budgets, policies, monitors and spreads hit pods."""
    found = []
    for pod in manifests.pods:
        selector = pod.workload["spec"]["selector"]
        if [hit.name for hit in manifests.selected(selector)] != [pod.name]:
            found.append(f"{pod.name} does not select its own pods only")
        spreads = pod.spec.get("topologySpreadConstraints", [])
        if not all(selects(spread["labelSelector"], pod.labels) for spread in spreads):
            found.append(f"{pod.name}: a spread constraint counts other pods")
    for service in manifests.of_kind("Service"):
        labels, name = service["spec"]["selector"], service["metadata"]["name"]
        if labels == {connections.MODEL_SERVERS.key: connections.MODEL_SERVERS.value}:
            continue  # Its pods are those of the operator; see `gateway`.
        hits = manifests.selected({"matchLabels": labels})
        if len(hits) != 1:
            found.append(f"service {name} selects {[hit.name for hit in hits]}")
        targets = {port["targetPort"] for port in service["spec"]["ports"]}
        if any(targets - hit.ports.keys() for hit in hits):
            found.append(f"service {name}: a pod lacks one of the ports {targets}")
    budgets: dict[str, int] = {}
    for budget in manifests.of_kind("PodDisruptionBudget"):
        hits = manifests.selected(budget["spec"]["selector"])
        for hit in hits:
            budgets[hit.name] = budgets.get(hit.name, 0) + 1
        if len(hits) != 1:
            found.append(f"budget {budget['metadata']['name']} selects {len(hits)} workloads")
    expected = {pod.name: 1 for pod in manifests.pods if pod.component != "console"}
    if budgets != expected:
        found.append(f"budgets cover {budgets}")
    return found + [
        f"policy {policy['metadata']['name']}: {selector} selects no pod"
        for policy in manifests.of_kind("NetworkPolicy")
        for selector in _policy_selectors(policy["spec"])
        if not manifests.selected(selector)
    ]


# Any: JSON of Kubernetes.
def _policy_selectors(spec: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    yield spec["podSelector"]
    for rule in (*spec.get("ingress", []), *spec.get("egress", [])):
        for peer in (*rule.get("from", []), *rule.get("to", [])):
            if "namespaceSelector" not in peer and not _may_be_absent(peer["podSelector"]):
                yield peer["podSelector"]


def _may_be_absent(selector: Mapping[str, Any]) -> bool:
    """Whether a selector is of pods that an overlay may lack: workers of the mesh, or the model
    servers in their place."""
    labels = dict(selector.get("matchLabels", {}))
    if labels == {connections.MODEL_SERVERS.key: connections.MODEL_SERVERS.value}:
        return True
    named = {labels.get(COMPONENT_LABEL)}
    for expression in selector.get("matchExpressions", []):
        named = set(expression["values"])
    return named <= set(connections.WORKERS)


def references(manifests: Manifests) -> list[str]:
    """Accounts, config maps, secrets, claims and keys that pods name exist; secrets are used."""
    found, used = [], set()
    claims = manifests.names("PersistentVolumeClaim")
    for pod in manifests.pods:
        if pod.spec["serviceAccountName"] not in manifests.names("ServiceAccount"):
            found.append(f"{pod.name}: no account {pod.spec['serviceAccountName']}")
        templates = pod.workload["spec"].get("volumeClaimTemplates", [])
        names = {volume["name"] for volume in pod.spec["volumes"]}
        names |= {template["metadata"]["name"] for template in templates}
        for container in pod.containers:
            sources = {s["configMapRef"]["name"] for s in container.get("envFrom", [])}
            found += [f"{pod.name}: no map {name}" for name in sources - pod.config_maps.keys()]
            mounts = {mount["name"] for mount in container.get("volumeMounts", [])}
            found += [f"{pod.name}: no volume {name}" for name in mounts - names]
        for volume in pod.spec["volumes"]:
            secret = volume.get("secret", {}).get("secretName")
            used.add(secret)
            if secret and secret not in pod.secrets:
                found.append(f"{pod.name}: no secret {secret}")
            config_map = volume.get("configMap", {}).get("name")
            if config_map and config_map not in pod.config_maps:
                found.append(f"{pod.name}: no map {config_map}")
            claim = volume.get("persistentVolumeClaim", {}).get("claimName")
            if claim and claim not in claims:
                found.append(f"{pod.name}: no claim {claim}")
    for unused in manifests.names("Secret") - used - {"kvmesh-api-keys"}:
        found.append(f"no pod uses the secret {unused}")
    return found


def addresses(manifests: Manifests) -> list[str]:
    """URLs in settings name a service and its port."""
    found = []
    services = {
        service["metadata"]["name"]: {port["port"] for port in service["spec"]["ports"]}
        for service in manifests.of_kind("Service")
    }
    for pod, config in _configs(manifests):
        urls = [config.consul_url, *(endpoint.url for endpoint in config.otlp_endpoints)]
        for url in urls:
            parts = urlsplit(url)
            name, _, namespace = str(parts.hostname).partition(".")
            if not namespace and parts.port not in services.get(name, ()):
                found.append(f"{pod.name}: {url} is no service")
            permitted = {connections.CONSUL.number, 8501}
            if namespace and parts.port not in permitted:
                found.append(f"{pod.name}: no policy permits {url}")
    return found


def images(manifests: Manifests) -> list[str]:
    """Images are those of the Dockerfile with the version of the project, or pinned as in the
    compose file; containers of a pod have one image."""
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    compose = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
    others = {service.get("image") for service in compose.values() if "build" not in service}
    found = []
    for pod in manifests.pods:
        for container in pod.containers:
            image = container["image"]
            expected = f"kvmesh/{pod.target}:{version}"
            is_ours = pod.target in CONFIGS and image == expected
            if not is_ours and (pod.target or image not in others):
                found.append(f"{pod.name}/{container['name']} has the image {image}")
    return found


def restricted(manifests: Manifests) -> list[str]:
    """Pods meet the restricted level of Kubernetes, with a root that they cannot write, requests,
    limits of memory, and no token of the cluster."""
    found = []
    for pod in manifests.pods:
        spec, context = pod.spec, pod.spec["securityContext"]
        is_unprivileged = context["runAsNonRoot"] and context["runAsUser"] == 10001
        has_profile = context["seccompProfile"] == {"type": "RuntimeDefault"}
        if not (is_unprivileged and has_profile and context["fsGroup"] == 10001):
            found.append(f"{pod.name}: {context}")
        if spec["automountServiceAccountToken"] or spec["enableServiceLinks"]:
            found.append(f"{pod.name} gets a token or variables of the cluster")
        found += [f"{pod.name} sets {name}" for name in _HOST_FIELDS if name in spec]
        kinds = {key for volume in spec["volumes"] for key in volume if key != "name"}
        found += [f"{pod.name} has a volume of {kind}" for kind in kinds - _VOLUMES]
        for container in pod.containers:
            name = f"{pod.name}/{container['name']}"
            expected = {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }
            if container["securityContext"] != expected:
                found.append(f"{name}: {container['securityContext']}")
            limits, requests = (container["resources"][kind] for kind in ("limits", "requests"))
            if "memory" not in limits or not {"cpu", "memory"} <= requests.keys():
                found.append(f"{name} has no requests and limits")
    return found


def secrets(manifests: Manifests) -> list[str]:
    """No variable and no config map has a secret: settings name files."""
    found = []
    for pod in manifests.services:
        for variable, value in pod.variables(FIELDS).items():
            is_secret = re.search("TOKEN|PASSWORD|SECRET|_KEY(_|$)|HEADERS", variable)
            if is_secret and not variable.endswith(("_FILE", "_PATH")):
                found.append(f"{pod.name}: {variable}={value}")
    values = {
        value.strip()
        for pod in manifests.pods[:1]
        for secret in pod.secrets.values()
        for value in secret.values()
        if len(value) > 8
    }
    text = "\n".join(str(dict(found)) for found in manifests.objects if found["kind"] != "Secret")
    return found + ["an object has a secret" for value in values if value.decode() in text]


def writable(manifests: Manifests) -> list[str]:
    """What services write is in a volume that they may write."""
    found = []
    for pod, config in _configs(manifests):
        folders = pod.writable_folders()
        if "/tmp" not in folders:
            found.append(f"{pod.name} has no /tmp")
        for name in ("login_path", "usage_file", "audit_log", "request_trace", "database_file"):
            path = str(getattr(config, name, "") or "")
            if path and not any(Path(path).is_relative_to(folder) for folder in folders):
                found.append(f"{pod.name} cannot write {name} {path}")
    return found


def registry(manifests: Manifests) -> list[str]:
    """The servers of Consul are as many as found its cluster, and find each other."""
    found = []
    for pod in manifests.pods:
        if pod.component != "consul":
            continue
        spec = pod.workload["spec"]
        variables = pod.variables(FIELDS)
        service = spec["serviceName"]
        names = {f"{pod.name}-{number}.{service}" for number in range(pod.replicas)}
        if set(variables["CONSUL_PEERS"].split()) != names:
            found.append(f"the peers are {variables['CONSUL_PEERS']}")
        if int(variables["CONSUL_SERVERS"]) != pod.replicas:
            found.append(f"{variables['CONSUL_SERVERS']} servers found the cluster")
        (headless,) = [s for s in manifests.of_kind("Service") if s["metadata"]["name"] == service]
        if headless["spec"]["clusterIP"] != "None" or not headless["spec"].get(
            "publishNotReadyAddresses"
        ):
            found.append(f"{service} must have the names of servers that are not ready")
        files = pod.files()
        folder = variables["CONSUL_FOLDERS"]
        names = {"consul/management_token", "consul/gossip_key", "service/consul_token"}
        wanted = {f"{folder}/{name}" for name in names} | {pod.container["command"][-1]}
        found += [f"consul lacks {path}" for path in wanted - files.keys()]
    return found


def scaling(manifests: Manifests) -> list[str]:
    """Autoscalers follow the recommended number, within the limits of the routers, and are the only
    ones that set it."""
    found = []
    configs = {pod.name: (pod, config) for pod, config in _configs(manifests)}
    router = next(config for _, config in configs.values() if isinstance(config, RouterConfig))
    for scaler in manifests.of_kind("ScaledObject", "HorizontalPodAutoscaler"):
        spec = scaler["spec"]
        name = spec["scaleTargetRef"]["name"]
        pod, config = configs[name]
        if "replicas" in pod.workload["spec"]:
            found.append(f"{name}: its Deployment resets the number of the autoscaler")
        if not isinstance(config, WorkerConfig):
            continue
        is_keda = scaler["kind"] == "ScaledObject"
        limits = (
            (spec["minReplicaCount"], spec["maxReplicaCount"])
            if is_keda
            else (spec["minReplicas"], spec["maxReplicas"])
        )
        if limits != (router.scaling_min, router.scaling_max):
            found.append(f"{name}: limits {limits} are not those of the routers")
        labels = _query_labels(spec) if is_keda else _metric_labels(spec)
        wanted = {"model": config.model_name, "role": config.role}
        wanted |= {"namespace": NAMESPACE} if is_keda else {}
        if labels != wanted:
            found.append(f"{name}: follows {labels}, not {wanted}")
    return found


# Any: JSON of Kubernetes.
def _query_labels(spec: Mapping[str, Any]) -> dict[str, str]:
    (trigger,) = spec["triggers"]
    assert (trigger["type"], trigger["metadata"]["threshold"]) == ("prometheus", "1")
    expression = promql_parser.parse(trigger["metadata"]["query"])
    assert isinstance(expression, promql_parser.AggregateExpr)
    selector = expression.expr
    assert isinstance(selector, promql_parser.VectorSelector)
    assert selector.name == _SCALED, selector.name
    return {matcher.name: matcher.value for matcher in selector.matchers.matchers}


def _metric_labels(spec: Mapping[str, Any]) -> dict[str, str]:
    (metric,) = (entry["external"] for entry in spec["metrics"])
    assert metric["metric"]["name"] == _SCALED
    assert metric["target"] == {"type": "AverageValue", "averageValue": "1"}
    labels: dict[str, str] = metric["metric"]["selector"]["matchLabels"]
    return labels


def monitoring(manifests: Manifests) -> list[str]:
    """Prometheus scrapes every service with its key; alerts are those of deploy/observability."""
    found = []
    for monitor in manifests.of_kind("PodMonitor"):
        spec = monitor["spec"]
        hits = manifests.selected(spec["selector"])
        if hits != [pod for pod in manifests.services if "metrics" in pod.ports]:
            found.append(f"the monitor selects {[hit.name for hit in hits]}")
        (endpoint,) = spec["podMetricsEndpoints"]
        found += [f"{hit.name} has no metrics" for hit in hits if "metrics" not in hit.ports]
        found += _key_problems(manifests, endpoint["authorization"])
        labels = {r["targetLabel"]: r for r in endpoint["relabelings"]}
        job, instance = labels["job"]["replacement"], labels["instance"]["sourceLabels"]
        if (job, instance) != ("kvmesh", ["__meta_kubernetes_pod_name"]):
            found.append(f"alerts expect other labels than {labels}")
        found += _adapter_problems(manifests)
    alerts = yaml.safe_load((ROOT / "deploy/observability/alerts.yml").read_text())
    for rule in manifests.of_kind("PrometheusRule"):
        if rule["spec"] != alerts:
            found.append("the rules are not those of deploy/observability/alerts.yml")
    if _SCALED not in {metric.name for metric in catalog()}:
        found.append(f"no service has the metric {_SCALED}")
    return found


def _adapter_problems(manifests: Manifests) -> list[str]:
    """A frontend lists the workers of adapters to Prometheus, which reads no other member there."""
    found = []
    services = {item["metadata"]["name"]: item["spec"] for item in manifests.of_kind("Service")}
    (scrape,) = (item["spec"] for item in manifests.of_kind("ScrapeConfig"))
    (source,) = scrape["httpSDConfigs"]
    url = urlsplit(source["url"])
    name, _, namespace = str(url.hostname).partition(".")
    service = services.get(name, {"selector": {}, "ports": []})
    hits = {hit.component for hit in manifests.selected({"matchLabels": service["selector"]})}
    port = {entry["port"]: entry["targetPort"] for entry in service["ports"]}.get(url.port)
    if (namespace, hits, port) != (NAMESPACE, {"frontend"}, "metrics"):
        found.append(f"{source['url']} is not the port of the metrics of frontends")
    if url.path not in {route.path for route in ROUTES}:
        found.append(f"frontends have no {url.path}")
    found += _key_problems(manifests, source["authorization"])
    found += _key_problems(manifests, scrape["authorization"])
    keep, job = scrape["relabelings"]
    kept = {
        pod.component
        for pod in manifests.services
        # As `ServersApp` names the worker of a server.
        if re.fullmatch(keep["regex"], f"{pod.name}-6d4c-x7k2p-10.1.2.3-30000")
    }
    adapters = {pod.component for pod in manifests.services} & {"adapter"}
    if (keep["sourceLabels"], kept) != (["instance"], adapters):
        found.append(f"{keep} keeps the workers of {kept}")
    if (job["targetLabel"], job["replacement"]) != ("job", "kvmesh"):
        found.append(f"alerts expect other labels than {job}")
    return found


# Any: JSON of Kubernetes.
def _key_problems(manifests: Manifests, authorization: Mapping[str, Any]) -> list[str]:
    credentials = authorization["credentials"]
    key = manifests.pods[0].secrets.get(credentials["name"], {}).get(credentials["key"])
    keys = {config.metrics_key for _, config in _configs(manifests)}
    is_same = key is not None and {key.decode()} == keys
    return [] if is_same else ["Prometheus has another key than the services"]


def topology(manifests: Manifests) -> list[str]:
    """Workers state a transfer domain that the routers and the console read, or none."""
    found = []
    configs = {pod.component: config for pod, config in _configs(manifests)}
    router, console = configs["router"], configs["console"]
    name = router.kv_transfer_domain if isinstance(router, RouterConfig) else ""
    shown = getattr(console, "domain_taint", "")
    if shown != name:
        found.append(f"the console shows the domain {shown!r}, routers have {name!r}")
    groups = set()
    for worker in configs.values():
        if isinstance(worker, WorkerConfig):
            groups.add(worker.transfer_group)
            domains = {taint.partition("=")[0] for taint in worker.taints}
            if name and name not in domains:
                found.append(f"{worker.role} workers state no {name}")
    if len(groups) != 1:
        found.append(f"workers have the transfer groups {groups}")
    return found


def namespaces(manifests: Manifests) -> list[str]:
    """All objects are in the namespace, which enforces the restricted level, and have the label of
    the application; names are unique."""
    found, seen = [], set()
    for item in manifests.objects:
        metadata = item["metadata"]
        key = (item["kind"], metadata["name"])
        if key in seen:
            found.append(f"{key} is there twice")
        seen.add(key)
        if item["kind"] == "Namespace":
            level = metadata["labels"].get("pod-security.kubernetes.io/enforce")
            if level != "restricted":
                found.append(f"the namespace enforces {level}")
        elif metadata.get("namespace") != NAMESPACE:
            found.append(f"{key} is not in {NAMESPACE}")
        if metadata.get("labels", {}).get("app.kubernetes.io/part-of") != "kvmesh":
            found.append(f"{key} has no label of its application")
    return found


def gateway(manifests: Manifests) -> list[str]:
    """Gateways reach the pickers, and the pods of their pool are the servers of the adapters."""
    found = []
    services = {item["metadata"]["name"]: item["spec"] for item in manifests.of_kind("Service")}
    pools = {item["metadata"]["name"]: item["spec"] for item in manifests.of_kind("InferencePool")}
    for name, pool in pools.items():
        reference = pool["endpointPickerRef"]
        picker = services.get(reference["name"], {})
        ports = {port["port"]: port for port in picker.get("ports", [])}
        port = ports.get(reference["port"]["number"], {})
        if (port.get("targetPort"), port.get("appProtocol")) != ("ext-proc", "http2"):
            found.append(f"pool {name}: its picker serves {port}")
        numbers = [target["number"] for target in pool["targetPorts"]]
        for pod, config in _configs(manifests):
            if not isinstance(config, WorkerConfig):
                continue
            url = urlsplit(config.server_dns or "")
            servers = services.get(str(url.hostname), {})
            if servers.get("selector") != pool["selector"]["matchLabels"]:
                found.append(f"{pod.name}: {config.server_dns} has other pods than pool {name}")
            if servers.get("clusterIP") != "None" or [url.port] != numbers:
                found.append(f"{pod.name}: {config.server_dns} has no address or port of each pod")
    backends = {
        reference["name"]
        for route in manifests.of_kind("HTTPRoute")
        for rule in route["spec"]["rules"]
        for reference in rule["backendRefs"]
    }
    found += [f"there is no pool {name}" for name in backends - pools.keys()]
    pickers = {pool["endpointPickerRef"]["name"] for pool in pools.values()}
    hosts = {rule["spec"]["host"] for rule in manifests.of_kind("DestinationRule")}
    found += [f"a rule is for {host}, which is no picker" for host in hosts - pickers]
    return found + [
        f"{pod.name} serves gateways without TLS"
        for pod, config in _configs(manifests)
        if isinstance(config, EppConfig) and config.ext_proc_tls_cert_path is None
    ]


CHECKS: Final[Mapping[str, Check]] = {
    "settings": settings,
    "ports": ports,
    "probes": probes,
    "grace": grace,
    "rollouts": rollouts,
    "selectors": selectors,
    "references": references,
    "addresses": addresses,
    "images": images,
    "restricted": restricted,
    "secrets": secrets,
    "writable": writable,
    "registry": registry,
    "scaling": scaling,
    "monitoring": monitoring,
    "topology": topology,
    "namespaces": namespaces,
    "gateway": gateway,
    "network": network.find_problems,
}
