"""Translates between the router's messages and the types of its core."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import TypeVar

from common.errors import InvalidRequest
from common.request.placement import Decision, Placement, Query
from common.wire.preprocessed import dataclass_from_proto, dataclass_to_proto
from kvmesh.router.v1 import router_pb2
from router_svc.core.booking import Booking, BookingKey, SessionHello, SessionName
from router_svc.core.candidate import LoadTotals
from router_svc.core.explain import CandidateRow
from router_svc.core.fleet import Fleet
from router_svc.core.load_tracker import COUNTER_MAX
from router_svc.core.pools import PoolKey
from router_svc.core.query import HASH_BYTES, validate_query
from router_svc.core.replicas import PoolReplicas
from router_svc.core.replication import Frame, PlacedPrompt
from router_svc.core.sessions import (
    SESSION_ID_CHARS_MAX,
    SessionPlacement,
    SessionRecord,
    SessionUpdate,
)

REQUEST_ID_CHARS_MAX = 256

M = TypeVar("M")
T = TypeVar("T")


def query_from_proto(message: router_pb2.Query) -> Query:
    """Returns the query; token ids are counted, not hashed. Raises InvalidRequest with the
    field."""
    query = dataclass_from_proto(Query, message, "query")
    if token_count := len(message.token_ids):
        if (total := query.total_tokens) not in (0, token_count):
            raise InvalidRequest(
                f"query.total_tokens is {total}, but query.token_ids has {token_count}",
                "query.total_tokens",
            )
        query = replace(query, total_tokens=token_count)
    return query


def key_from_proto(message: router_pb2.BookingKey, frontend_id: int, field: str) -> BookingKey:
    """Returns the key of a booking of `frontend_id`. Raises InvalidRequest without a request id."""
    request_id = message.request_id
    _check_length(request_id, REQUEST_ID_CHARS_MAX, f"{field}.request_id")
    return BookingKey(frontend_id, request_id, message.attempt)


def booking_from_proto(message: router_pb2.Booking, frontend_id: int, field: str) -> Booking:
    """Returns a booking of `frontend_id`. Raises InvalidRequest, which names the field."""
    if message.frontend_id != frontend_id:
        raise InvalidRequest(
            f"{field}.frontend_id is {message.frontend_id}, not {frontend_id} of the session",
            f"{field}.frontend_id",
        )
    if not message.HasField("worker"):
        raise InvalidRequest(f"{field}.worker is required", f"{field}.worker")
    if not message.model:
        raise InvalidRequest(f"{field}.model is required", f"{field}.model")
    _check_number(message.revision, 1, f"{field}.revision")
    _check_number(message.prefill_tokens, 0, f"{field}.prefill_tokens")
    _check_number(message.decode_blocks, 0, f"{field}.decode_blocks")
    if message.session_id:
        _check_length(message.session_id, SESSION_ID_CHARS_MAX, f"{field}.session_id")
        _check_number(message.session_revision, 1, f"{field}.session_revision")
    return Booking(
        key_from_proto(message.key, frontend_id, f"{field}.key"),
        message.model,
        _placement(message.worker),
        _placement(message.prefill) if message.HasField("prefill") else None,
        message.prefill_tokens,
        message.decode_blocks,
        message.revision,
        message.decay_fraction if message.HasField("decay_fraction") else 1.0,
        message.generation,
        message.session_id,
        message.session_revision,
        message.lora_name,
        message.affinity_key,
    )


def peer_booking_from_proto(message: router_pb2.Booking, field: str) -> Booking:
    """Returns a booking from a peer, of any frontend. Raises InvalidRequest, which names the
    field."""
    if not message.frontend_id:
        raise InvalidRequest(f"{field}.frontend_id is required", f"{field}.frontend_id")
    return booking_from_proto(message, message.frontend_id, field)


def frame_from_proto(message: router_pb2.SyncRequest) -> Frame:
    """Returns a frame of a peer, with its malformed entries in `refused`. Raises InvalidRequest."""
    if not message.sequence:
        raise InvalidRequest("sequence must be at least 1", "sequence")
    refused: list[InvalidRequest] = []
    refused_uncounted: list[InvalidRequest] = []
    return Frame(
        message.sequence,
        tuple(_parse_valid(peer_booking_from_proto, message.upserts, "upserts", refused)),
        tuple(_parse_valid(_key_of, message.removals, "removals", refused)),
        message.digest,
        message.begins_all,
        message.ends_all,
        tuple(SessionHello(hello.frontend_id, hello.generation) for hello in message.sessions),
        tuple(
            _parse_valid(session_record_from_proto, message.bindings, "bindings", refused_uncounted)
        ),
        tuple(_parse_valid(_key_of, message.released, "released", refused)),
        tuple(_parse_valid(_prompt_from_proto, message.prompts, "prompts", refused_uncounted)),
        tuple(refused),
        tuple(refused_uncounted),
    )


def snapshot_from_proto(
    message: router_pb2.SyncResponse,
) -> tuple[list[Booking], list[SessionUpdate], list[InvalidRequest]]:
    """Returns a part of a peer's snapshot, and the errors of malformed entries, which are left
    out."""
    refused: list[InvalidRequest] = []
    bookings = _parse_valid(peer_booking_from_proto, message.snapshot, "snapshot", refused)
    session_records = _parse_valid(
        session_record_from_proto, message.snapshot_bindings, "snapshot_bindings", refused
    )
    return list(bookings), list(session_records), refused


def session_record_from_proto(message: router_pb2.SessionBinding, field: str) -> SessionUpdate:
    """Returns the record of a client session. Raises InvalidRequest, which names the field."""
    if not message.model:
        raise InvalidRequest(f"{field}.model is required", f"{field}.model")
    _check_length(message.session_id, SESSION_ID_CHARS_MAX, f"{field}.session_id")
    _check_number(message.revision, 1, f"{field}.revision")
    session_placement = None
    if message.HasField("worker"):
        prefill = _placement(message.prefill) if message.HasField("prefill") else None
        session_placement = SessionPlacement(_placement(message.worker), prefill)
    session = SessionName(message.model, message.session_id, message.lora_name)
    key = key_from_proto(message.bound_by, message.frontend_id, f"{field}.bound_by")
    return SessionUpdate(
        SessionRecord(session, session_placement, message.revision, key), message.idle_ms / 1000
    )


def session_record_to_proto(update: SessionUpdate) -> router_pb2.SessionBinding:
    record, idle_s = update
    message = router_pb2.SessionBinding(
        **record.session._asdict(),
        revision=record.revision,
        bound_by=_key_to_proto(record.key),
        frontend_id=record.key.frontend_id,
        idle_ms=max(0, int(idle_s * 1000)),
    )
    if record.placement is not None:
        message.worker.CopyFrom(placement_to_proto(record.placement.worker))
        if record.placement.prefill is not None:
            message.prefill.CopyFrom(placement_to_proto(record.placement.prefill))
    return message


def frame_to_proto(frame: Frame, router_id: int) -> router_pb2.SyncRequest:
    return router_pb2.SyncRequest(
        router_id=router_id,
        sequence=frame.sequence,
        upserts=map(booking_to_proto, frame.upserts),
        removals=map(_ended_to_proto, frame.removals),
        released=map(_ended_to_proto, frame.released),
        digest=frame.digest,
        begins_all=frame.begins_all,
        ends_all=frame.ends_all,
        sessions=(router_pb2.SessionHello(**hello._asdict()) for hello in frame.sessions),
        bindings=map(session_record_to_proto, frame.session_records),
        prompts=map(_prompt_to_proto, frame.prompts),
    )


def booking_to_proto(booking: Booking) -> router_pb2.Booking:
    return router_pb2.Booking(
        key=_key_to_proto(booking.key),
        frontend_id=booking.key.frontend_id,
        model=booking.model,
        worker=placement_to_proto(booking.worker),
        prefill=None if booking.prefill is None else placement_to_proto(booking.prefill),
        prefill_tokens=booking.prefill_tokens,
        decode_blocks=booking.decode_blocks,
        revision=booking.revision,
        decay_fraction=None if booking.decay == 1.0 else booking.decay,
        generation=booking.generation,
        session_id=booking.session_id,
        session_revision=booking.session_revision,
        lora_name=booking.lora_name,
        affinity_key=booking.affinity_key,
    )


def decision_to_proto(decision: Decision, fleet: Fleet) -> router_pb2.Decision:
    """Returns the decision, with the addresses of its workers from discovery."""
    message = dataclass_to_proto(decision, router_pb2.Decision())
    message.worker_address = fleet.address(decision.worker.worker_id)
    if decision.prefill is not None:
        message.prefill_address = fleet.address(decision.prefill.worker_id)
    return message


def load_to_proto(placement: Placement, load: LoadTotals) -> router_pb2.PotentialLoad:
    return router_pb2.PotentialLoad(
        worker=placement_to_proto(placement),
        potential_prefill_tokens=load.prefill_tokens,
        potential_decode_blocks=load.decode_blocks,
        active_requests=load.requests,
    )


def pool_to_proto(key: PoolKey, pool: PoolReplicas) -> router_pb2.PoolReplicas:
    return router_pb2.PoolReplicas(
        model=key.model,
        role=key.role,
        present=pool.sample.present,
        recommended=pool.advice.replicas,
        reason=pool.advice.reason,
        state=pool.state,
        awaiting=pool.sample.awaiting,
    )


def placement_to_proto(placement: Placement) -> router_pb2.Placement:
    return router_pb2.Placement(worker_id=placement.worker_id, dp_rank=placement.dp_rank)


def _prompt_from_proto(message: router_pb2.PlacedPrompt, field: str) -> PlacedPrompt:
    hashes = message.prefix_hashes
    tokens = len(hashes) // HASH_BYTES * message.block_size
    query = Query(message.model, tokens, hashes, message.hash_scheme, message.block_size)
    try:
        validate_query(query)
    except InvalidRequest as error:
        raise InvalidRequest(f"{field}: {error.message}", field) from None
    return PlacedPrompt(query, _placement(message.worker))


def _prompt_to_proto(prompt: PlacedPrompt) -> router_pb2.PlacedPrompt:
    query, placement = prompt
    return router_pb2.PlacedPrompt(
        model=query.model,
        prefix_hashes=query.prefix_hashes,
        hash_scheme=query.hash_scheme,
        block_size=query.block_size,
        worker=placement_to_proto(placement),
    )


def _parse_valid(
    parse: Callable[[M, str], T], entries: Iterable[M], field: str, refused: list[InvalidRequest]
) -> Iterator[T]:
    for entry in entries:
        try:
            yield parse(entry, field)
        except InvalidRequest as error:
            refused.append(error)


def _check_length(text: str, chars_max: int, field: str) -> None:
    if not 0 < len(text) <= chars_max:
        error = f"{field} must have 1 to {chars_max} characters, not {len(text)}"
        raise InvalidRequest(error, field)


def _check_number(number: int, least: int, field: str) -> None:
    if not least <= number <= COUNTER_MAX:
        raise InvalidRequest(f"{field} must be {least} to {COUNTER_MAX}, not {number}", field)


def _key_of(message: router_pb2.Booking, field: str) -> BookingKey:
    return key_from_proto(message.key, message.frontend_id, f"{field}.key")


def _key_to_proto(key: BookingKey) -> router_pb2.BookingKey:
    return router_pb2.BookingKey(request_id=key.request_id, attempt=key.attempt)


def _ended_to_proto(key: BookingKey) -> router_pb2.Booking:
    return router_pb2.Booking(key=_key_to_proto(key), frontend_id=key.frontend_id)


def _placement(message: router_pb2.Placement) -> Placement:
    return Placement(message.worker_id, message.dp_rank)


def candidate_to_proto(row: CandidateRow) -> router_pb2.Candidate:
    age_s, index_status = row.report_age_s, row.index_status
    return router_pb2.Candidate(
        worker=placement_to_proto(row.placement),
        cost=row.cost,
        overlap_blocks=row.overlap_blocks,
        load=load_to_proto(row.placement, row.load),
        report_age_ms=None if age_s is None else round(age_s * 1000),
        excluded_reason=row.excluded_reason,
        leg=row.leg,
        terms=None if row.terms is None else row.terms._asdict(),
        name=row.name,
        source_state=index_status.state,
        source_reason=index_status.reason,
        # The state is that of the question, and may be younger than the decision.
        source_age_ms=(
            None if index_status.age_s is None else round(max(0.0, index_status.age_s) * 1000)
        ),
    )
