"""`meshctl explain REQUEST_ID`: why a router chose the worker of a request."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

# Any: JSON.
from typing import Any

import click
from google.protobuf.json_format import MessageToDict

from common.errors import NotFound, Unavailable
from common.inspection.decisions import read_decision
from common.registry.instances import Instance
from common.rpc import channel as rpc
from kvmesh.router.v1 import router_pb2
from meshctl.options import LOG_FLAGS, LogConfig, MeshCommand, json_flag
from meshctl.request_files import find_request, log_files, record_files
from meshctl.view.members import names_by_id, read_members
from meshctl.view.recent_requests import find_recent
from meshctl.view.screen import align

_HEADER: tuple[str, ...] = (
    *("", "LEG", "WORKER", "ID", "COST", "HIT", "REQUESTS", "PREFILL", "BLOCKS", "INDEX"),
)


@click.command("explain", cls=MeshCommand, config=LogConfig, flags=LOG_FLAGS)
@click.argument("request_id")
@json_flag
@click.pass_obj
def command(environ: Mapping[str, str], config: LogConfig, request_id: str, as_json: bool) -> int:
    """Shows why a router chose the worker of a request: every candidate with its cost.

    REQUEST_ID is the id in the log line of the request, that of its response (chatcmpl-...), its
    trace id, or the x-request-id of the client. The last two are looked up in the last requests of
    frontends, the logs of `meshctl up` and the records of frontends. A router keeps its last 4096
    decisions.
    """
    explanation = asyncio.run(_explain(config, request_id, environ))
    if as_json:
        sys.stdout.write(json.dumps(explanation.json_object()) + "\n")
    else:
        sys.stdout.writelines(f"{line}\n" for line in explanation.lines())
    return 0


@dataclass(frozen=True, slots=True)
class _Explanation:
    """names: stable names of the members, by id."""

    request_id: str
    router: Instance
    response: router_pb2.ExplainResponse
    names: Mapping[str, str]

    def json_object(self) -> dict[str, Any]:
        """Returns the response of the router, with its own name and id."""
        fields = MessageToDict(
            self.response,
            preserving_proto_field_name=True,
            always_print_fields_with_no_presence=True,
        )
        router = {"name": self.router.stable_name or None, "id": str(self.router.id)}
        return {"request_id": self.request_id, "router": router, **fields}

    def lines(self) -> list[str]:
        response, decision = self.response, self.response.decision
        chosen = self._name(decision.worker)
        if decision.HasField("prefill"):
            chosen = f"{self._name(decision.prefill)} -> {chosen}"
        router = self.router.stable_name or self.router.id
        age_s = response.age_ms / 1000
        header, *rows = align([_HEADER, *map(self._row, response.candidates)])
        notes = ["" if c.HasField("cost") else c.excluded_reason for c in response.candidates]
        rows = [f"{row}  {note}".rstrip() for row, note in zip(rows, notes, strict=True)]
        decided = f"{age_s:.1f} s ago ({response.selector})"
        return [
            f"request {self.request_id}: {chosen}, by {router} {decided}",
            *(f"  {reason}" for reason in decision.reasons),
            f"  predicted {decision.predicted_cached_tokens} cached tokens, "
            f"{decision.queued_ms} ms in the queue",
            "",
            header,
            *rows,
        ]

    def _row(self, candidate: router_pb2.Candidate) -> tuple[str, ...]:
        decision, at = self.response.decision, candidate.worker
        is_chosen = at == (decision.prefill if candidate.leg == "prefill" else decision.worker)
        load = candidate.load
        rank = f"/{at.dp_rank}" if at.dp_rank else ""
        return (
            "*" if is_chosen else "",
            candidate.leg,
            (candidate.name or self.names.get(str(at.worker_id), "-")) + rank,
            str(at.worker_id),
            f"{candidate.cost:.3f}" if candidate.HasField("cost") else "-",
            str(candidate.overlap_blocks),
            str(load.active_requests),
            str(load.potential_prefill_tokens),
            str(load.potential_decode_blocks),
            candidate.source_state or "-",
        )

    def _name(self, at: router_pb2.Placement) -> str:
        names = {c.worker.worker_id: c.name for c in self.response.candidates if c.name}
        known = names.get(at.worker_id) or self.names.get(str(at.worker_id))
        return known or str(at.worker_id)


async def _explain(config: LogConfig, request_id: str, environ: Mapping[str, str]) -> _Explanation:
    """Raises NotFound if no router has the decision, and Unavailable without a router."""
    snapshot = await read_members(config)
    routers = snapshot.of("router")
    if not routers:
        raise Unavailable("no router is registered; `meshctl status` lists the members")
    names = names_by_id(snapshot)

    async def ask(id_: str) -> _Explanation | None:
        for router in routers:
            response = await _explain_at(config, router, id_)
            if response is not None:
                return _Explanation(id_, router, response, names)
        return None

    if explanation := await ask(request_id):
        return explanation
    # Routers only have the ids of the mesh.
    files: list[Path] = [*log_files(config.log_dir), *record_files(environ)]
    found = await find_recent(config, snapshot, request_id)
    if found is None:
        found = await asyncio.to_thread(find_request, request_id, files)
    if found is not None and (explanation := await ask(found.request_id)):
        return explanation
    raise NotFound(
        f"no decision for the request {request_id!r} among the last 4096 of {len(routers)} "
        "router(s), nor the request among the last ones of frontends or in "
        f"{len(files)} file(s) of logs and records ({config.log_dir}); "
        "use the id of its response, or request_id of its log line",
        field="request_id",
    )


async def _explain_at(
    config: LogConfig, router: Instance, request_id: str
) -> router_pb2.ExplainResponse | None:
    """Returns the explanation of a router; None if it has no such decision, or does not respond."""
    security = rpc.security_from_config(config)
    async with rpc.channel(router.address, role="router", security=security) as channel:
        try:
            return await read_decision(channel, request_id)
        except Unavailable as error:
            name = router.stable_name or router.address
            sys.stderr.write(f"meshctl explain: {name} does not respond: {error.message}\n")
            return None
