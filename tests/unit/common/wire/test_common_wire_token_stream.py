"""Attach frames on the wire: both directions round-trip, invalid messages are rejected."""

from __future__ import annotations

import dataclasses
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.errors import (
    INVALID_OUTPUT,
    MESH_ERROR_CLASSES,
    InternalError,
    InvalidRequest,
    MeshError,
    Overloaded,
    UnknownModel,
    Unsupported,
    WorkerLost,
)
from common.kv.load import Load
from common.request.preprocessed import (
    BootstrapInfo,
    CompletionTokensDetails,
    CompletionUsage,
    FinishReason,
    OutputOptions,
    PrefillResult,
    PreprocessedRequest,
    PromptTokensDetails,
    RoutingHints,
    SamplingOptions,
    StopConditions,
    TokenIds,
    TokenLogprob,
    TopLogprob,
    TraceLink,
)
from common.request.token_stream import (
    ENGINE_FAILURE_CHARS_MAX,
    PROMPT_PART_BYTES,
    AbortSlot,
    FrontendLink,
    Hello,
    HelloAck,
    JsonChunk,
    LegRequest,
    PromptPart,
    Rejected,
    RequestFrame,
    ResponseFrame,
    StartSlot,
    Terminal,
    WorkerLink,
)
from common.wire.errors import error_from_proto, error_to_proto
from common.wire.load import load_from_proto, load_to_proto
from common.wire.token_stream import (
    request_frame_from_proto,
    request_frame_to_proto,
    response_frame_from_proto,
    response_frame_to_proto,
)
from kvmesh.engine.v1 import engine_pb2
from kvmesh.types.v1 import error_pb2

U32 = st.integers(0, 2**32 - 1)
U64 = st.integers(0, 2**64 - 1)
MILLISECONDS = U32.map(lambda ms: ms / 1000)
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
NUMBER = st.floats(allow_nan=False, allow_infinity=False)
COUNT = st.none() | U32
JSON = st.none() | st.integers() | TEXT | st.dictionaries(TEXT, st.booleans(), max_size=2)


def few(items: st.SearchStrategy[object]) -> st.SearchStrategy[list[object]]:
    return st.lists(items, max_size=3)


@st.composite
def mesh_errors(draw: st.DrawFn) -> MeshError:
    cls = draw(st.sampled_from(MESH_ERROR_CLASSES))
    return cls.restore(
        draw(TEXT),
        field=draw(st.none() | TEXT.filter(bool)),
        retry_after_s=draw(st.none() | MILLISECONDS),
        reason=draw(st.none() | st.just("SOME_REASON")),
        metadata=draw(st.none() | st.dictionaries(TEXT, TEXT, max_size=2)),
        retryable=draw(st.booleans()),
    )


LOADS = st.builds(
    Load, U64, U32, U32, U64, U64, kv_total_blocks=st.none() | U64, dp_rank=U32, rooms_open=U32
)
REQUESTS = st.builds(
    PreprocessedRequest,
    model=TEXT,
    token_ids=st.lists(U32, max_size=6).map(TokenIds.of),
    stop_conditions=st.builds(
        StopConditions, max_tokens=COUNT, stop=few(TEXT).map(tuple), min_tokens=COUNT
    ),
    sampling_options=st.builds(
        SamplingOptions, temperature=st.none() | NUMBER, seed=st.none() | st.just(-1)
    ),
    output_options=st.builds(OutputOptions, logprobs=COUNT),
    eos_token_ids=few(U32).map(tuple),
    card_checksum=st.none() | TEXT,
    routing=st.none() | st.builds(RoutingHints, dp_rank=COUNT, lora_name=st.none() | TEXT),
    bootstrap_info=st.none() | st.builds(BootstrapInfo, TEXT, st.just(80), U64),
    extra_args=JSON,
)


@st.composite
def orders(draw: st.DrawFn) -> LegRequest:
    one = LegRequest(
        request_id=draw(TEXT.filter(bool)),
        attempt=draw(U32),
        timeout_s=draw(st.none() | MILLISECONDS.filter(bool)),
        traceparent=draw(TEXT),
        span_id=draw(TEXT),
        tenant=draw(TEXT),
        priority=draw(st.none() | st.integers(-(2**31), 2**31 - 1)),
        phase=draw(st.sampled_from(["", "prefill", "decode"])),
    )
    match draw(st.integers(0, 2)):
        case 0:
            return replace(one, request=draw(REQUESTS))
        case 1:
            return replace(one, chat_json=draw(st.binary(max_size=5)))
        case _:
            return replace(one, completion_json=draw(st.binary(max_size=5)))


@st.composite
def submits(draw: st.DrawFn) -> tuple[int, LegRequest]:
    return draw(U64), replace(draw(orders()), prompt_bytes=draw(U64))


TO_WORKER = st.builds(
    RequestFrame,
    hello=st.none() | st.builds(Hello, U64, U64, U64),
    submits=few(submits()),
    prompt_parts=few(st.builds(PromptPart, U64, U64, st.binary(max_size=8))),
    aborts=few(st.builds(AbortSlot, U64, TEXT)),
    acked_bytes=U64,
    heartbeat=st.booleans(),
)
LOGPROBS = st.builds(TokenLogprob, U32, NUMBER, few(st.builds(TopLogprob, U32, NUMBER)).map(tuple))
PROMPT_DETAILS = st.builds(
    PromptTokensDetails, cached_tokens=COUNT, audio_tokens=COUNT, cache_write_tokens=COUNT
)
USAGES = st.builds(
    CompletionUsage,
    U32,
    U32,
    U32,
    st.none() | PROMPT_DETAILS,
    st.none() | st.builds(CompletionTokensDetails, reasoning_tokens=COUNT),
)


@st.composite
def terminals(draw: st.DrawFn) -> Terminal:
    error = draw(st.none() | mesh_errors())
    reasons = st.sampled_from(FinishReason)
    return Terminal(
        slot=draw(U64),
        finish_reason=draw(reasons if error is None else st.none() | reasons),
        error=error,
        usage=draw(st.none() | USAGES),
        prefill_result=draw(st.none() | st.builds(PrefillResult, JSON, st.none() | PROMPT_DETAILS)),
        worker_trace_link=draw(st.none() | st.builds(TraceLink, TEXT, TEXT)),
        stop_reason_json=draw(TEXT),
        total_tokens=draw(U32),
    )


TO_FRONTEND = st.builds(
    ResponseFrame,
    hello_ack=st.none() | st.builds(HelloAck, U64, MILLISECONDS, U32),
    accepted=few(U64),
    rejected=few(st.builds(Rejected, U64, mesh_errors())),
    slot=few(U64),
    start=few(U32),
    count=few(U32),
    token_id=st.lists(U32, min_size=1, max_size=5),
    logprobs=few(st.tuples(U64, few(LOGPROBS))),
    chunks=few(st.builds(JsonChunk, U64, U32, st.binary(max_size=5))),
    terminals=few(terminals()),
    sent_bytes=U64,
    heartbeat=few(LOADS),
)


def plain(value: object) -> object:
    """Return a comparable form: errors have no equality, tuples equal lists."""
    if isinstance(value, MeshError):
        return (
            type(value),
            value.message,
            value.field,
            value.retry_after_s,
            value.reason,
            value.retryable,
            dict(value.metadata),
        )
    if isinstance(value, PreprocessedRequest):
        return value
    if dataclasses.is_dataclass(value):
        names = [one.name for one in dataclasses.fields(value)]
        return type(value), {name: plain(getattr(value, name)) for name in names}
    if isinstance(value, list | tuple):
        return [plain(one) for one in value]
    return value


def to_worker_over_the_wire(frame: RequestFrame) -> RequestFrame:
    data = request_frame_to_proto(frame).SerializeToString()
    return request_frame_from_proto(engine_pb2.AttachRequest.FromString(data))


def to_frontend_over_the_wire(frame: ResponseFrame) -> ResponseFrame:
    data = response_frame_to_proto(frame).SerializeToString()
    return response_frame_from_proto(engine_pb2.AttachResponse.FromString(data))


@settings(max_examples=60, deadline=None)
@given(TO_WORKER)
def test_a_frame_to_the_worker_survives_the_wire(frame: RequestFrame) -> None:
    assert plain(to_worker_over_the_wire(frame)) == plain(frame)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(TO_FRONTEND)
def test_a_frame_to_the_frontend_survives_the_wire(frame: ResponseFrame) -> None:
    assert plain(to_frontend_over_the_wire(frame)) == plain(frame)


@settings(max_examples=60, deadline=None)
@given(mesh_errors())
def test_an_error_of_any_class_survives_the_wire(error: MeshError) -> None:
    message = error_pb2.Error.FromString(error_to_proto(error).SerializeToString())
    assert message.code != 0
    assert plain(error_from_proto(message)) == plain(error)


@settings(max_examples=30, deadline=None)
@given(LOADS)
def test_a_load_survives_the_wire(load: Load) -> None:
    assert load_from_proto(load_to_proto(load)) == load


@pytest.mark.parametrize("cls", MESH_ERROR_CLASSES)
def test_every_class_of_error_is_restored_as_itself(cls: type[MeshError]) -> None:
    error = cls.restore("why", field="f", retry_after_s=1.5, metadata={"a": "b"}, retryable=True)
    assert plain(error_from_proto(error_to_proto(error))) == plain(error)


@pytest.mark.parametrize(
    "error",
    [
        UnknownModel("m"),
        Unsupported("n", "one answer a request"),
        Overloaded(0.25, "full"),
        WorkerLost(retryable=False),
    ],
)
def test_errors_as_they_are_raised_are_restored(error: MeshError) -> None:
    assert plain(error_from_proto(error_to_proto(error))) == plain(error)


def test_an_error_of_an_unknown_kind_becomes_an_internal_error() -> None:
    error = error_from_proto(error_pb2.Error(code=2, kind="TEAPOT", message="short and stout"))
    assert isinstance(error, InternalError)
    assert "short and stout" in error.message
    assert "'TEAPOT'" in error.message


@pytest.mark.parametrize(
    ("retry_after_s", "arrives"),
    [(float("inf"), None), (float("nan"), None), (-1.0, 0.0), (1e12, (2**32 - 1) / 1000)],
)
def test_an_infinite_retry_hint_does_not_break_the_stream(
    retry_after_s: float, arrives: float | None
) -> None:
    error = error_from_proto(error_to_proto(Overloaded(retry_after_s)))
    assert error.retry_after_s == arrives


def test_an_error_with_client_text_does_not_break_the_stream() -> None:
    sent = "x" * 100_000
    error = InvalidRequest(
        f"half a pair: \ud800 {sent}", f"logit_bias.{sent}", metadata={"a": sent}
    )
    back = error_from_proto(error_to_proto(error))
    assert back.message.startswith("half a pair: ? xxx")
    assert back.field is not None
    assert {len(back.message), len(back.field), len(back.metadata["a"])} == {4096}


@pytest.mark.parametrize(
    ("timeout_s", "arrives"), [(0.0, 0.001), (0.0001, 0.001), (1e9, 4294967.295)]
)
def test_a_timeout_is_limited_to_the_range_of_the_wire_field(
    timeout_s: float, arrives: float
) -> None:
    one = LegRequest("r", timeout_s=timeout_s, chat_json=b"{}")
    frame = to_worker_over_the_wire(RequestFrame(submits=[(1, one)]))
    assert frame.submits[0][1].timeout_s == arrives
    endless = LegRequest("r", timeout_s=float("inf"), chat_json=b"{}")
    frame = to_worker_over_the_wire(RequestFrame(submits=[(1, endless)]))
    assert frame.submits[0][1].timeout_s == 4294967.295


def readable(slot: int = 1) -> engine_pb2.Submit:
    request = PreprocessedRequest(
        model="m",
        token_ids=TokenIds.of([1, 2]),
        stop_conditions=StopConditions(),
        sampling_options=SamplingOptions(),
        output_options=OutputOptions(),
    )
    frame = RequestFrame(submits=[(slot, LegRequest("r", request=request))])
    return request_frame_to_proto(frame).submits[0]


def unreadable() -> dict[str, engine_pb2.Submit]:
    messages = {name: readable() for name in ("payload", "request_id", "phase", "token_ids_le")}
    messages["payload"].ClearField("preprocessed")
    messages["request_id"].request_id = ""
    messages["phase"].phase = 9  # type: ignore[assignment]
    messages["token_ids_le"].preprocessed.token_ids_le = b"abc"
    return messages


@pytest.mark.parametrize("field", list(unreadable()))
def test_one_unreadable_submit_does_not_affect_the_others(field: str) -> None:
    message = engine_pb2.AttachRequest(submits=[unreadable()[field], readable(2)])
    message.hello.expected_worker_id = 7
    frame = request_frame_from_proto(message)
    (_, bad), (_, good) = frame.submits
    assert bad.error is not None
    assert bad.error.field == field
    assert good.error is None
    worker = WorkerLink(7, 0.0)
    assert [command.slot for command in worker.receive(frame, 0.0)] == [2]
    answer = worker.next_frame(0.0)
    assert answer is not None
    assert [rejected.slot for rejected in answer.rejected] == [1]
    assert not answer.rejected[0].error.retryable


def test_tokens_without_slots_are_not_lost_on_the_way() -> None:
    frame = response_frame_from_proto(engine_pb2.AttachResponse(token_id=[1, 2]))
    assert frame.token_id == [1, 2]


@pytest.mark.parametrize(
    "parts",
    [
        {"usage": CompletionUsage(-1, 2, 1)},
        {"usage": CompletionUsage("many", 2, 1)},  # type: ignore[arg-type]
        {"prefill_result": PrefillResult(object())},
        {"finish_reason": "stop"},
    ],
)
def test_an_end_that_cannot_be_encoded_does_not_affect_the_others(parts: dict[str, Any]) -> None:
    """The values are an engine's."""
    broken = Terminal(**{"slot": 1, "finish_reason": FinishReason.STOP, "total_tokens": 3, **parts})
    whole = Terminal(2, FinishReason.STOP)
    frame = ResponseFrame(terminals=[broken, whole])
    read = response_frame_from_proto(response_frame_to_proto(frame)).terminals
    assert read[1] == whole
    assert (read[0].slot, read[0].total_tokens, read[0].finish_reason) == (1, 3, None)
    assert isinstance(read[0].error, InternalError)
    assert read[0].error.reason == INVALID_OUTPUT


def test_an_end_without_a_reason_or_an_error_is_refused() -> None:
    message = engine_pb2.AttachResponse(terminals=[engine_pb2.Terminal(slot=1)])
    with pytest.raises(InvalidRequest) as raised:
        response_frame_from_proto(message)
    assert raised.value.field == "finish_reason"


def test_a_long_prompt_is_reassembled_at_the_worker() -> None:
    ids = TokenIds.of(range(PROMPT_PART_BYTES))  # four parts
    request = PreprocessedRequest(
        model="m",
        token_ids=ids,
        stop_conditions=StopConditions(max_tokens=5),
        sampling_options=SamplingOptions(),
        output_options=OutputOptions(),
    )
    frontend, worker = FrontendLink(Hello(1, 7, 1), 0.0), WorkerLink(7, 0.0)

    class UnusedSink:
        def __getattr__(self, name: str) -> object:
            raise AssertionError(f"unexpected call of {name}")

    frontend.submit(LegRequest("r", request=request), UnusedSink())  # type: ignore[arg-type]
    commands = []
    while (frame := frontend.next_frame(0.0)) is not None:
        commands += worker.receive(to_worker_over_the_wire(frame), 0.0)
    (start,) = commands
    assert isinstance(start, StartSlot)
    assert start.prompt == ids.little_endian
    assert start.leg_request.request is not None
    assert replace(start.leg_request.request, token_ids=ids) == request


def test_the_failure_of_an_engine_travels_with_a_heartbeat_and_has_a_bound() -> None:
    frame = ResponseFrame(heartbeat=(Load(),), engine_failure="CUDA error")
    assert response_frame_from_proto(response_frame_to_proto(frame)).engine_failure == "CUDA error"
    without = ResponseFrame(accepted=[1], engine_failure="CUDA error")
    assert response_frame_from_proto(response_frame_to_proto(without)).engine_failure == ""
    long = ResponseFrame(heartbeat=(Load(),), engine_failure="x" * 1000)
    received = response_frame_from_proto(response_frame_to_proto(long)).engine_failure
    assert received == "x" * ENGINE_FAILURE_CHARS_MAX


def test_a_worker_of_the_version_before_sends_no_failure() -> None:
    message = engine_pb2.AttachResponse()
    message.heartbeat.add()
    assert response_frame_from_proto(message).engine_failure == ""
