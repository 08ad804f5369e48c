"""The last requests of all frontends, joined."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

# Any: JSON.
from typing import Any

from google.protobuf.json_format import MessageToDict

from common.errors import MeshError
from common.inspection.recent_requests import read_recent_requests
from common.registry.instances import Instance, Snapshot
from common.rpc import channel as rpc
from common.runtime.config import ServiceConfig
from kvmesh.frontend.v1 import frontend_pb2
from meshctl.request_files import FoundRequest, FoundWorker

# The JSON of protobuf has them as text; only ids need that.
_NUMBERS = (
    *("sequence", "prompt_tokens", "output_tokens", "cached_tokens", "predicted_cached_tokens"),
)

Record = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class RecentRequests:
    """records: fields of `RecentRequest`, with `frontend` (name and id), newest first. problems: of
    frontends that did not respond."""

    records: Sequence[Record]
    problems: Sequence[str]


async def list_recent(
    config: ServiceConfig, snapshot: Snapshot, request: frontend_pb2.ListRecentRequestsRequest
) -> RecentRequests:
    """Returns what the frontends of a snapshot respond to a request, within some seconds."""
    frontends = snapshot.of("frontend")
    answers = await asyncio.gather(*(_list_of(config, member, request) for member in frontends))
    found = [record for answer in answers if not isinstance(answer, str) for record in answer]
    found.sort(key=_received_ms, reverse=True)
    problems = [answer for answer in answers if isinstance(answer, str)]
    return RecentRequests(found[: request.limit or None], problems)


async def _list_of(
    config: ServiceConfig, member: Instance, request: frontend_pb2.ListRecentRequestsRequest
) -> list[dict[str, Any]] | str:
    """Returns the records of a frontend, or why it has none."""
    name = member.stable_name or str(member.id)
    security = rpc.security_from_config(config)
    try:
        async with rpc.channel(member.address, role="frontend", security=security) as channel:
            response = await read_recent_requests(channel, request)
    except MeshError as error:
        return f"{name}: {error.message}"
    frontend = {"name": member.stable_name or None, "id": str(member.id)}
    return [{"frontend": frontend, **_fields(record)} for record in response.requests]


def _fields(record: frontend_pb2.RecentRequest) -> dict[str, Any]:
    fields = MessageToDict(
        record, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
    return fields | {name: int(fields[name]) for name in _NUMBERS if name in fields}


def _received_ms(record: Record) -> float:
    return float(record["received_ms"])


async def find_recent(
    config: ServiceConfig, snapshot: Snapshot, request_id: str
) -> FoundRequest | None:
    """Returns the newest request with this id; None if no frontend has it."""
    request = frontend_pb2.ListRecentRequestsRequest(id=request_id, limit=1)
    found = await list_recent(config, snapshot, request)
    return as_found(found.records[0]) if found.records else None


def as_found(record: Record) -> FoundRequest:
    """Returns a record with the fields of a log line."""
    name = record["frontend"]["name"] or record["frontend"]["id"]
    workers = record["workers"]
    fields = {
        "name": name,
        **record,
        "workers": [worker["worker_id"] for worker in workers],
        "completion_tokens": record["output_tokens"],
        "routing": record["reasons"],
    }
    routed_ms, first_ms = record.get("routed_ms"), record.get("first_token_ms")
    if first_ms is not None:
        fields["ttft_ms"] = first_ms
    if routed_ms is not None:
        fields["prefill_wait_time_ms"] = routed_ms
        if (end_ms := record.get("prefilled_ms", first_ms)) is not None:
            fields["prefill_time_ms"] = end_ms - routed_ms
    found = FoundRequest(fields, f"recent requests of {name}")
    return replace(
        found,
        workers={w["worker_id"]: FoundWorker(w["name"], w["role"]) for w in workers if w["role"]},
    )
