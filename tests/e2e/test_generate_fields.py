"""Each field of `Generate` at a running worker: it has its effect, or the call names it.

The fields come from the descriptors, so that a new field fails here until one of the two holds.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message

from common.errors import MeshError
from kvmesh.engine.v1 import engine_pb2 as pb
from kvmesh.engine.v1 import engine_pb2_grpc
from kvmesh.types.v1 import request_pb2
from tests.kit.oracle import Oracle
from tests.kit.processes import Service, mesh_error
from tests.kit.waiting import WAIT_S

PROMPT = [5, 6, 7]
OUTPUT = Oracle().tokens(PROMPT, 4)
STOP = OUTPUT[1]
STOP_FIELD = "request.stop_conditions.stop_token_ids_hidden"

Result = Sequence[pb.GenerateResponse]


def leaf_paths(message: Descriptor, prefix: str = "") -> Iterator[tuple[FieldDescriptor, ...]]:
    """The fields below a message that hold a value; a map or a list of values is one field."""
    for field in message.fields:
        inner = field.message_type
        if inner is None or inner.GetOptions().map_entry:
            yield (field,)
        else:
            yield from ((field, *rest) for rest in leaf_paths(inner))


def dotted(path: Sequence[FieldDescriptor]) -> str:
    return ".".join(field.name for field in path)


FIELDS = {dotted(path): path for path in leaf_paths(pb.GenerateRequest.DESCRIPTOR)}
# Values by path where the value for the type has no effect or is no valid one.
VALUES: dict[str, Any] = {
    "request.token_ids": PROMPT,
    "request.token_ids_le": b"".join(one.to_bytes(4, "little") for one in PROMPT),
    "request.prefill_result.disaggregated_params_json": '{"host": "h"}',
    "request.output_options.skip_special_tokens": False,
    "request.output_options.logprobs": 1,
    "request.output_options.prompt_logprobs": 1,
    "request.eos_token_ids": [STOP],
    "request.stop_conditions.max_tokens": 3,
    "request.stop_conditions.min_tokens": 2,
    "request.stop_conditions.stop_token_ids_hidden": [STOP],
    "request.stop_conditions.stop_token_ids_visible": [STOP],
    "request.sampling_options.top_k": 5,
    "request.sampling_options.presence_penalty": -50.0,
    "request.sampling_options.frequency_penalty": -50.0,
    "request.sampling_options.repetition_penalty": 0.05,
    "request.sampling_options.logit_bias": {OUTPUT[0]: -100.0},
    "request.sampling_options.use_beam_search": True,
    "request.multi_modal_data": {"image_url": request_pb2.MultimodalDataList()},
}
# Fields that a check needs beside the one under test.
COMPANIONS: dict[str, Sequence[str]] = {
    "request.stop_conditions.min_tokens": [STOP_FIELD],
    "request.stop_conditions.ignore_eos": ["request.eos_token_ids"],
}


def tokens(result: Result) -> list[int]:
    return [token for message in result for token in message.token_ids]


def ends(count: int, reason: int) -> Callable[[Result], bool]:
    """Whether the output is the first `count` tokens of the model and ends for `reason`."""
    return lambda result: tokens(result) == OUTPUT[:count] and result[-1].finish_reason == reason


WHOLE = ends(4, request_pb2.FINISH_REASON_LENGTH)
EFFECTS: dict[str, Callable[[Result], bool]] = {
    "request_json": WHOLE,
    "request.token_ids": WHOLE,
    "request.token_ids_le": WHOLE,
    "request.eos_token_ids": ends(1, request_pb2.FINISH_REASON_EOS),
    "request.is_probe": ends(1, request_pb2.FINISH_REASON_LENGTH),
    "request.stop_conditions.max_tokens": ends(3, request_pb2.FINISH_REASON_LENGTH),
    "request.stop_conditions.stop_token_ids_hidden": ends(1, request_pb2.FINISH_REASON_STOP),
    "request.stop_conditions.stop_token_ids_visible": ends(2, request_pb2.FINISH_REASON_STOP),
    "request.stop_conditions.min_tokens": WHOLE,
    "request.stop_conditions.ignore_eos": WHOLE,
    "request.output_options.logprobs": lambda result: (
        WHOLE(result) and [one.token_id for m in result for one in m.logprobs] == OUTPUT
    ),
    "request.output_options.prompt_logprobs": lambda result: (
        WHOLE(result) and [one.token_id for m in result for one in m.prompt_logprobs] == PROMPT[1:]
    ),
    # The free output does not match: no token of it is allowed.
    **{
        f"request.sampling_options.guided_decoding.{name}": lambda result: (
            len(tokens(result)) > 0 and tokens(result)[0] != OUTPUT[0]
        )
        for name in ("choice.choices", "json_schema_json", "regex")
    },
    # The model chooses the token of the highest logit.
    **{
        f"request.sampling_options.{name}": WHOLE
        for name in ("temperature", "top_p", "top_k", "min_p")
    },
    **{
        f"request.sampling_options.{name}_penalty": lambda result: tokens(result) == OUTPUT[:1] * 4
        for name in ("presence", "frequency", "repetition")
    },
    "request.sampling_options.seed": lambda result: tokens(result) != OUTPUT,
    "request.sampling_options.logit_bias": lambda result: (
        tokens(result)[:1] not in ([], OUTPUT[:1])
    ),
}
# The effect is not in the output of one request; the test that shows it.
SHOWN_ELSEWHERE = {
    "request_id": "test_abort_ends_a_request_by_its_id",
    "request.annotations": "test_annotations_are_in_the_log_line_and_in_the_spans_of_frontend_and_worker",  # noqa: E501
    "request.routing.priority": "test_the_larger_priority_goes_first_and_the_hint_outweighs_the_context",  # noqa: E501
    "request.routing.cache_salt": "test_two_cache_salts_never_share_blocks",
    "request.migration_link.trace_id": "test_the_demo_shows_a_kv_hit_and_decode_linked_to_prefill",
    "request.migration_link.span_id": "test_the_demo_shows_a_kv_hit_and_decode_linked_to_prefill",
}


# The rows of S2 whose effect a case shows, by the name of its field or a beginning of it.
ROWS = {
    "request_json": "34",
    "request.token_ids": "34 91",
    "request.eos_token_ids": "41",
    "request.is_probe": "55 78",
    "request.stop_conditions.": "38 81",
    "request.output_options.logprobs": "40 83",
    "request.sampling_options.": "39 82",
    "request.mm_processor_kwargs_json": "52",
    "request.prompt_embeds": "35",
}


def with_rows(names: Iterable[str]) -> list[Any]:
    """The cases with the marks of their rows."""
    return [
        pytest.param(
            name,
            marks=[
                pytest.mark.row(*(f"S2-{row}" for row in rows.split()))
                for beginning, rows in ROWS.items()
                if name.startswith(beginning)
            ],
        )
        for name in sorted(names)
    ]


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    folder = tmp_path_factory.mktemp("worker")
    flags = [f"--registry-path={folder / 'registry'}", "--speedup=0"]
    service = Service("worker", flags, folder, "worker")
    try:
        yield service.wait_ready()
    finally:
        service.close()


def type_value(field: FieldDescriptor) -> Any:
    """A value that is not the default of the field's type."""
    if field.message_type is not None:  # a map
        key, value = field.message_type.fields
        return {type_value(key): type_value(value)}
    scalar: Any = {
        FieldDescriptor.CPPTYPE_STRING: '{"a": 1}' if field.name.endswith("_json") else "x",
        FieldDescriptor.CPPTYPE_DOUBLE: 0.5,
        FieldDescriptor.CPPTYPE_BOOL: True,
        FieldDescriptor.CPPTYPE_ENUM: 1,
    }.get(field.cpp_type, 7)
    scalar = scalar.encode() if field.type == FieldDescriptor.TYPE_BYTES else scalar
    return [scalar] if field.is_repeated else scalar


def set_field(message: Any, path: Sequence[FieldDescriptor], value: Any) -> None:
    *parents, field = path
    for parent in parents:
        inner = getattr(message, parent.name)
        message = inner.add() if parent.is_repeated else inner
    if field.message_type is not None and isinstance(next(iter(value.values())), Message):
        for key, one in value.items():
            getattr(message, field.name)[key].CopyFrom(one)
    elif field.message_type is not None:
        getattr(message, field.name).update(value)
    elif field.is_repeated:
        getattr(message, field.name)[:] = value
    else:
        setattr(message, field.name, value)


def build(*names: str) -> pb.GenerateRequest:
    if "request_json" in names:
        stop = {"max_tokens": 4}
        request_json = json.dumps({"token_ids": PROMPT, "stop_conditions": stop})
        return pb.GenerateRequest(request_json=request_json)
    message = pb.GenerateRequest()
    if "request.token_ids" not in names:
        message.request.token_ids_le = VALUES["request.token_ids_le"]
    message.request.stop_conditions.max_tokens = 4
    for name in names:
        path = FIELDS[name]
        set_field(message, path, VALUES[name] if name in VALUES else type_value(path[-1]))
    return message


def generate(worker: Service, message: pb.GenerateRequest) -> Result:
    """The responses of a call. Raises its MeshError."""
    stub = engine_pb2_grpc.EngineServiceStub(worker.channel)
    try:
        return list(stub.Generate(message, timeout=WAIT_S))
    except grpc.RpcError as error:
        raise mesh_error(error) from error


def refusal(worker: Service, *names: str) -> MeshError | None:
    """The error of a call with these fields; fields that they require are added."""
    try:
        generate(worker, build(*names))
    except MeshError as error:
        required = f"request.{error.field}"
        if error.message.endswith("is required") and required not in names:
            return refusal(worker, *names, required)
        return error
    return None


@pytest.mark.parametrize("name", with_rows(FIELDS.keys() - EFFECTS.keys() - SHOWN_ELSEWHERE.keys()))
def test_a_field_without_effect_is_refused_by_its_name(worker: Service, name: str) -> None:
    error = refusal(worker, name)
    assert error is not None, f"{name} was accepted and has no effect"
    assert error.field, f"{error.message} names no field"
    field = re.sub(r"\[\d+\]", "", error.field).removesuffix("_json")
    assert f"{name}.".startswith(f"request.{field}"), error.field


@pytest.mark.parametrize("name", with_rows(EFFECTS))
def test_a_field_has_its_effect(worker: Service, name: str) -> None:
    result = generate(worker, build(name, *COMPANIONS.get(name, ())))
    assert EFFECTS[name](result), (tokens(result), result[-1].finish_reason)


@pytest.mark.row("S2-31", "S2-85")
@pytest.mark.parametrize("kind", ["raw_url", "decoded"])
def test_a_medium_that_no_engine_reads_is_refused_by_name(worker: Service, kind: str) -> None:
    message = build()
    item = message.request.multi_modal_data["image_url"].items.add()
    if kind == "raw_url":
        item.raw_url = "a b"
    else:
        item.decoded.nixl_metadata, item.decoded.dtype = "bWV0YQ==", "UINT8"
        item.decoded.nixl_descriptor.size = 4
    with pytest.raises(MeshError) as refused:
        generate(worker, message)
    assert str(refused.value.field).startswith("multi_modal_data")


@pytest.mark.parametrize("name", sorted(SHOWN_ELSEWHERE))
def test_a_field_whose_effect_another_test_shows_is_accepted(worker: Service, name: str) -> None:
    assert refusal(worker, name) is None
