"""The images of deploy/Dockerfile: their stages, variables and configurations."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from batch_svc.config import BatchConfig
from common.runtime.config import ServiceConfig, read_config
from console_svc.config import ConsoleConfig
from epp_svc.config import EppConfig
from frontend_svc.config import FrontendConfig
from indexer_svc.config import IndexerConfig
from router_svc.config import RouterConfig
from worker_svc.config import WorkerConfig

ROOT = Path(__file__).resolve().parents[2]
# By the target of the Dockerfile: the settings of its service, and their name in variables.
CONFIGS: dict[str, tuple[type[ServiceConfig], str]] = {
    "frontend": (FrontendConfig, "FRONTEND"),
    "router": (RouterConfig, "ROUTER"),
    "indexer": (IndexerConfig, "INDEXER"),
    "worker": (WorkerConfig, "WORKER"),
    "worker-sglang": (WorkerConfig, "WORKER"),
    "console": (ConsoleConfig, "CONSOLE"),
    "batch": (BatchConfig, "BATCH"),
    "epp": (EppConfig, "EPP"),
}


def dockerfile() -> str:
    return (ROOT / "deploy/Dockerfile").read_text()


def stages() -> dict[str, str]:
    """Returns the text of each stage of the Dockerfile."""
    _, *parts = re.split(r"^FROM ", dockerfile(), flags=re.MULTILINE)
    return {part.split("\n")[0].partition(" AS ")[2]: part for part in parts}


def image_variables(target: str) -> dict[str, str]:
    """Returns the settings that an image has as variables."""
    found = stages()
    return dict(re.findall(r"\b(KVMESH_\w+)=(\S+)", found["base"] + found[target]))


def read_container_config(
    target: str, variables: Mapping[str, str], argv: Sequence[str] = ()
) -> tuple[ServiceConfig, list[str]]:
    """Returns what the service of an image reads at its start, and its warnings. Raises
    ConfigError."""
    return read_config(*CONFIGS[target], image_variables(target) | dict(variables), argv)
