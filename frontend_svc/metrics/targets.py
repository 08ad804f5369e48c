"""Where Prometheus finds the metrics of the members, in the form of `http_sd_configs` (pure)."""

from __future__ import annotations

from typing import TypedDict
from urllib.parse import urlsplit

from common.registry.instances import METRICS_META_KEY, Snapshot


class TargetGroup(TypedDict):
    """One target with its labels."""

    targets: list[str]
    labels: dict[str, str]


def metrics_targets(snapshot: Snapshot) -> list[TargetGroup]:
    """Returns a group for each member that advertises its metrics, oldest first. The processes of
    one frontend share a URL, and are one target.

    `instance` is the stable name, which survives restarts, or the address of a member without one.
    """
    names: dict[str, str] = {}
    for member in snapshot.instances.values():
        if url := member.meta.get(METRICS_META_KEY):
            names.setdefault(url, member.stable_name or urlsplit(url).netloc)
    return [_group(url, name) for url, name in names.items()]


def _group(url: str, name: str) -> TargetGroup:
    parts = urlsplit(url)
    labels = {"instance": name, "__scheme__": parts.scheme, "__metrics_path__": parts.path}
    return {"targets": [parts.netloc], "labels": labels}
