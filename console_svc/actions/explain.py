"""Why a worker was chosen, as pages show it (pure)."""

from __future__ import annotations

from collections.abc import Callable

from console_svc.state.requests import Candidate, Explanation, RequestRow
from kvmesh.router.v1 import router_pb2


def describe(
    request_id: str,
    router: str,
    response: router_pb2.ExplainResponse,
    row: RequestRow | None,
    name: Callable[[int], str],
) -> Explanation:
    """Returns the explanation of a router.

    - router: its name.
    - row: the request, if it has ended here.
    - name: of a member by its id; the id, if the member has left.
    """
    decision = response.decision
    names = {c.worker.worker_id: c.name for c in response.candidates if c.name}

    def name_of(at: router_pb2.Placement) -> str:
        return names.get(at.worker_id) or name(at.worker_id)

    return Explanation(
        request_id=request_id,
        router=router,
        selector=response.selector,
        age_s=response.age_ms / 1000,
        worker=name_of(decision.worker),
        prefill=name_of(decision.prefill) if decision.HasField("prefill") else "",
        reasons=tuple(decision.reasons),
        predicted_cached_tokens=decision.predicted_cached_tokens,
        actual_cached_tokens=None if row is None else row.cached_tokens,
        overlap_blocks=decision.overlap_blocks,
        queued_ms=decision.queued_ms,
        candidates=tuple(
            _candidate(found, decision, name_of(found.worker)) for found in response.candidates
        ),
    )


def _candidate(found: router_pb2.Candidate, decision: router_pb2.Decision, name: str) -> Candidate:
    chosen = decision.prefill if found.leg == "prefill" else decision.worker
    return Candidate(
        leg=found.leg,
        worker=name,
        worker_id=str(found.worker.worker_id),
        dp_rank=found.worker.dp_rank,
        is_chosen=found.worker == chosen,
        cost=found.cost if found.HasField("cost") else None,
        excluded_reason=found.excluded_reason,
        overlap_blocks=found.overlap_blocks,
        active_requests=found.load.active_requests,
        prefill_tokens=found.load.potential_prefill_tokens,
        decode_blocks=found.load.potential_decode_blocks,
        index_state=found.source_state,
        index_reason=found.source_reason,
        report_age_ms=found.report_age_ms if found.HasField("report_age_ms") else None,
        terms=dict(found.terms),
    )
