"""`meshctl trace REQUEST_ID`: where the time of a request went."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Mapping, Sequence
from itertools import pairwise

import click

from common.errors import MeshError, NotFound
from common.registry.instances import Snapshot
from meshctl.options import LOG_FLAGS, LogConfig, MeshCommand, json_flag
from meshctl.request_files import (
    FoundRequest,
    FoundWorker,
    find_request,
    log_files,
    record_files,
    request_ids,
)
from meshctl.view.jaeger import find_trace
from meshctl.view.members import read_members
from meshctl.view.recent_requests import find_recent
from meshctl.view.spans import Span, tree_lines


class TraceConfig(LogConfig):
    """Settings of `meshctl trace`."""

    jaeger_url: str = ""
    """Query API of Jaeger, such as http://127.0.0.1:16686. Unset: stages of the request instead of
    spans."""


@click.command("trace", cls=MeshCommand, config=TraceConfig, flags=(*LOG_FLAGS, "jaeger_url"))
@click.argument("request_id")
@json_flag
@click.pass_obj
def command(environ: Mapping[str, str], config: TraceConfig, request_id: str, as_json: bool) -> int:
    """Shows where the time of a request went, as a tree: start and duration in milliseconds.

    REQUEST_ID is the id in the log line of the request, that of its response (chatcmpl-...), its
    trace id, or the x-request-id of the client. With `--jaeger-url` these are the spans of its
    trace, in which the span of decode is linked to that of prefill. Without it, or if the request
    was not sampled, they are its stages: of the last requests of frontends, or else of the logs of
    `meshctl up` or the records of frontends.
    """
    files = [*log_files(config.log_dir), *record_files(environ)]
    snapshot, found = asyncio.run(_read_mesh(config, request_id))
    if found is None:
        found = find_request(request_id, files)
    source, spans = "Jaeger", _read_spans(config, request_id, found)
    if not spans:
        if found is None:
            raise NotFound(
                f"no frontend has the request {request_id!r} among its last ones, and no line of it"
                f" is in {len(files)} file(s) of logs and records ({config.log_dir})"
                + (", and no trace" if config.jaeger_url else ""),
                field="request_id",
            )
        source, spans = found.source, stages(found, {**_workers_of(snapshot), **found.workers})
    if as_json:
        origin_ms = min(span.start_ms for span in spans)
        result = {"source": source, "spans": [span.json_object(origin_ms) for span in spans]}
        sys.stdout.write(json.dumps(result) + "\n")
    else:
        header = f"{'START':>9} {'DURATION':>12}  SPAN   ({source})"
        sys.stdout.writelines(f"{line}\n" for line in (header, *tree_lines(spans)))
    return 0


def _read_spans(config: TraceConfig, request_id: str, found: FoundRequest | None) -> Sequence[Span]:
    if not config.jaeger_url:
        return ()
    ids = request_ids(request_id) | (frozenset() if found is None else {found.request_id})
    trace_id = str(found.fields.get("trace_id", "")) if found is not None else ""
    return find_trace(config.jaeger_url, ids, trace_id)


async def _read_mesh(config: TraceConfig, request_id: str) -> tuple[Snapshot, FoundRequest | None]:
    """Returns the members, none without a registry, and what a frontend has of the request."""
    try:
        snapshot = await read_members(config)
    except MeshError:
        return Snapshot(), None
    return snapshot, await find_recent(config, snapshot, request_id)


def _workers_of(snapshot: Snapshot) -> dict[str, FoundWorker]:
    return {
        str(worker.id): FoundWorker(worker.stable_name, worker.role)
        for worker in snapshot.of("worker")
    }


def stages(found: FoundRequest, known: Mapping[str, FoundWorker]) -> list[Span]:
    """Returns a request and its stages as spans. known: workers by id."""
    fields = found.fields
    total_ms = float(fields.get("total_ms") or 0.0)
    wait_ms, prefill_ms = fields.get("prefill_wait_time_ms"), fields.get("prefill_time_ms")
    ttft_ms = fields.get("ttft_ms")
    ids = [str(id_) for id_ in fields.get("workers", ())]
    workers = [known.get(id_, FoundWorker("", "")) for id_ in ids]
    names = [worker.name or id_ for id_, worker in zip(ids, workers, strict=True)]
    is_pair = [worker.role for worker in workers[-2:]] == ["prefill", "decode"]
    ends: list[tuple[str, float]] = [("received", 0.0)]
    if (tokenized_ms := fields.get("tokenized_ms")) is not None:
        ends.append(("tokenize", tokenized_ms))
    if wait_ms is not None:
        ends.append(("wait for a worker", wait_ms))
        if prefill_ms is not None:
            ends.append(("prefill", wait_ms + prefill_ms))
    if ttft_ms is not None:
        ends.append(("handoff" if is_pair else "first token", max(ttft_ms, ends[-1][1])))
        ends.append(("output", max(total_ms, ttft_ms)))
    tokens = fields.get("completion_tokens", fields.get("output_length"))
    root = Span(
        found.request_id,
        str(fields.get("name") or "frontend"),
        f"{fields.get('endpoint', 'request')} {fields.get('model', '')}".strip(),
        0.0,
        total_ms,
        attributes={
            key: str(fields[key]) for key in ("finish_reason", "failure") if fields.get(key)
        },
    )
    spans = [root]
    for (_, start_ms), (name, end_ms) in pairwise(ends):
        attributes: dict[str, str] = {}
        links: tuple[str, ...] = ()
        if name == "prefill":
            attributes["kvmesh.stable_name"] = names[-2] if is_pair else "".join(names[-1:])
            attributes["disagg_role"] = "prefill" if is_pair else ""
        elif name == "output":
            attributes["kvmesh.stable_name"] = "".join(names[-1:])
            attributes["tokens"] = "" if tokens is None else f"{tokens} tokens"
            if is_pair:
                attributes["disagg_role"] = "decode"
                links = tuple(span.span_id for span in spans if span.name == "prefill")
        id_ = f"{found.request_id}/{name}"
        spans.append(
            Span(id_, "", name, start_ms, end_ms - start_ms, root.span_id, links, attributes)
        )
    return spans
