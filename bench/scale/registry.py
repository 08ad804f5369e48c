"""What a change of the members costs each of them: bytes and CPU of one answer of Consul."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, replace

# Any: Consul's JSON.
from typing import Any

from common.registry.consul.entries import InstanceReader, parse_listing, registration
from common.registry.instances import Instance, Snapshot, diff_snapshots
from common.registry.signature import UNSIGNED
from replay.policies import POLICIES
from router_svc.core.router import Router

NAMESPACE = "default"
TTL_S = 10.0


@dataclass(frozen=True, slots=True)
class RegistryCosts:
    """Of one answer with all members, one of them new."""

    listing_mb: float
    parse_ms: float
    """From the text to the changes of the snapshot."""

    router_ms: float
    """Of the router's own part: candidates, kinds of index, queue."""


def measure(members: int) -> RegistryCosts:
    instances = [_instance(number) for number in range(1, members + 2)]
    texts = [_item(instance) for instance in instances]
    reader, router = InstanceReader(UNSIGNED), Router(POLICIES["kv"].make_selector({}))
    old = _snapshot(Snapshot(), _listing(texts[:-1]), reader)
    router.update(old, 0.0)
    text = _listing(texts)
    began = time.thread_time()
    new = _snapshot(old, text, reader)
    changes = diff_snapshots(old, new)
    parsed = time.thread_time()
    router.update(new, 1.0, changes)
    ended = time.thread_time()
    return RegistryCosts(len(text) / 1e6, (parsed - began) * 1e3, (ended - parsed) * 1e3)


def _snapshot(old: Snapshot, text: bytes, reader: InstanceReader) -> Snapshot:
    listing = parse_listing(NAMESPACE, "7", json.loads(text), reader)
    return old.next_snapshot(entry.instance for entry in listing.entries)


def _listing(items: list[bytes]) -> bytes:
    return b"[" + b",".join(items) + b"]"


def _item(instance: Instance) -> bytes:
    """Returns the part of an answer of `/v1/health/service` for an instance."""
    entry = registration(instance, instance.to_json(), TTL_S)
    checks = [_check("serfHealth", "Serf Health Status", ""), _check("", "", entry["service_id"])]
    checks[1] |= {"CheckID": entry["check"]["CheckID"], "Name": entry["check"]["Name"]}
    service: dict[str, Any] = {
        "ID": entry["service_id"],
        "Service": entry["name"],
        "Tags": entry["tags"],
        "Address": entry["address"],
        "TaggedAddresses": {"lan_ipv4": {"Address": entry["address"], "Port": entry["port"]}},
        "Meta": entry["meta"],
        "Port": entry["port"],
        "Weights": {"Passing": 1, "Warning": 1},
        "EnableTagOverride": False,
        "CreateIndex": instance.id,
        "ModifyIndex": instance.id,
    }
    node = {
        "ID": "0f1e2d3c-0000-4000-8000-000000000001",
        "Node": "host-1",
        "Address": "10.0.0.1",
        "Datacenter": "dc1",
        "TaggedAddresses": {"lan": "10.0.0.1", "wan": "10.0.0.1"},
        "Meta": {"consul-network-segment": "", "consul-version": "1.20.0"},
        "CreateIndex": 5,
        "ModifyIndex": 6,
    }
    return json.dumps({"Node": node, "Service": service, "Checks": checks}).encode()


def _check(check_id: str, name: str, service_id: str) -> dict[str, Any]:
    return {
        "Node": "host-1",
        "CheckID": check_id,
        "Name": name,
        "Status": "passing",
        "Notes": "",
        "Output": "gRPC check 127.0.0.1:20000: success" if service_id else "Agent alive",
        "ServiceID": service_id,
        "ServiceName": f"kvmesh-{NAMESPACE}" if service_id else "",
        "ServiceTags": ["worker"] if service_id else [],
        "Type": "grpc" if service_id else "",
        "Interval": "1s",
        "Timeout": "500ms",
        "Definition": {},
        "CreateIndex": 5,
        "ModifyIndex": 6,
    }


def _instance(number: int) -> Instance:
    address = f"10.{number >> 16}.{number >> 8 & 255}.{number & 255}"
    worker = Instance(
        *(number, NAMESPACE, "worker", f"worker-{number}", f"{address}:20000"),
        model="llama-3.1-70b",
        card_checksum="0" * 64,
        block_size=16,
        total_kv_blocks=60_000,
        max_num_seqs=256,
        max_num_batched_tokens=8192,
        context_length=131_072,
        kv_index="events",
        pid=4_000,
    )
    meta = {
        "health": f"{address}:20000",
        "streams": f"{address}:20001",
        "metrics": f"http://{address}:20002/metrics",
        "build": "0123456789abcdef",
    }
    return replace(worker, meta=meta)
