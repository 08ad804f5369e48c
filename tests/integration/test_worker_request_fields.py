"""Each field of a request on the wire reaches the engine of a running worker, and so does absence.

This proves no mission row: what a field does there, the tests of its effect show. Fields that the
worker refuses by name are not here.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from operator import attrgetter
from typing import Any

import grpc.aio
import pytest

from common.errors import InvalidRequest
from common.registry.registry import MemoryRegistry, MemoryStore
from common.request.preprocessed import (
    BlockExtraInfo,
    BootstrapInfo,
    GuidedDecoding,
    MediaRawUrl,
    MediaUrl,
    MmObject,
    MmRoutingInfo,
    OutputOptions,
    PrefillResult,
    PreprocessedRequest,
    PromptTokensDetails,
    RdmaMediaDataDescriptor,
    RouterConfigOverride,
    RoutingConstraints,
    RoutingHints,
    SamplingOptions,
    SessionAction,
    SessionControl,
    StopConditions,
    TokenIds,
    TraceLink,
    to_json,
)
from common.request.preprocessed.media import NixlDescriptor
from common.rpc import channel as rpc
from common.rpc.status import mesh_error_from_rpc
from kvmesh.engine.v1 import engine_pb2 as pb
from kvmesh.types.v1 import request_pb2 as wire
from tests.kit.apps import living
from tests.kit.engines import RecordingEngine
from tests.kit.waiting import WAIT_S
from worker_svc.app import WorkerApp
from worker_svc.config import WorkerConfig

GENERATE = "/kvmesh.engine.v1.EngineService/Generate"
U64_MAX, U32_MAX = 2**64 - 1, 2**32 - 1
TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
# Any: a value of a field.
Value = Any


class Worker:
    """A running worker whose engine records its requests."""

    def __init__(self, engine: RecordingEngine, channel: grpc.aio.Channel, checksum: str) -> None:
        self.engine = engine
        self.checksum = checksum
        self._channel = channel

    async def received(self, **fields: Value) -> PreprocessedRequest:
        """What the engine receives of a request with these fields and a prompt."""
        request = wire.PreprocessedRequest(**{"token_ids": [1, 2], **fields})
        return await self.received_raw(pb.GenerateRequest(request=request).SerializeToString())

    async def received_raw(self, message: bytes) -> PreprocessedRequest:
        """The same for an encoded GenerateRequest. Raises its MeshError."""
        try:
            call: Any = self._channel.unary_stream(GENERATE)
            responses = call(message, timeout=WAIT_S)
            assert [response async for response in responses]
        except grpc.aio.AioRpcError as error:
            raise mesh_error_from_rpc(error) from error
        return self.engine.requests.pop()


@asynccontextmanager
async def working() -> AsyncIterator[Worker]:
    config = WorkerConfig(registry="memory", canary_idle_s=0.0)
    engine = RecordingEngine()
    app = WorkerApp(config, registry=MemoryRegistry(MemoryStore()), engine=engine)
    async with living(app, registered=False), rpc.channel(app.address) as channel:
        yield Worker(engine, channel, app.runner.card_checksum)


STOPS: dict[str, Value] = {
    "max_tokens": 5,
    "stop": ("a", "b"),
    "stop_token_ids_hidden": (6,),
    "stop_token_ids_visible": (7,),
    "min_tokens": 2,
    "ignore_eos": True,
    "max_thinking_tokens": 9,
}
SAMPLING: dict[str, Value] = {
    "n": 2,
    "best_of": 3,
    "presence_penalty": 0.25,
    "frequency_penalty": -0.5,
    "repetition_penalty": 1.5,
    "temperature": 0.0,
    "top_p": 0.5,
    "top_k": -1,
    "min_p": 0.125,
    "use_beam_search": False,
    "length_penalty": 0.75,
    "seed": -(2**63),
    "logit_bias": {7: -1.5},
}
HINTS: dict[str, Value] = {
    "backend_instance_id": U64_MAX,
    "prefill_worker_id": 2,
    "decode_worker_id": 3,
    "dp_rank": 4,
    "prefill_dp_rank": U32_MAX,
    "expected_output_tokens": 6,
    "priority_jump": 0.5,
    "priority": -(2**31),
}
OVERRIDE: dict[str, Value] = {
    "overlap_score_credit": 0.0,
    "prefill_load_scale": 2.0,
    "overlap_score_weight": 0.5,
    "router_temperature": 1.0,
    "assume_kv_reuse": False,
    "track_prefill_tokens": False,
    "shared_cache_multiplier": 0.25,
}


def media(**kind: Value) -> dict[str, wire.MultimodalDataList]:
    return {"image_url": wire.MultimodalDataList(items=[wire.MultimodalData(**kind)])}


def case(rows: str, name: str, sent: Value, received: Value, absent: Value = None) -> Any:
    """rows: of S2 that describe the field. absent: what the engine receives if it is not sent."""
    return pytest.param(name, sent, received, absent, id=f"{name}-{rows}")


NO_STOPS, NO_SAMPLING, NO_OPTIONS = StopConditions(), SamplingOptions(), OutputOptions()


@pytest.mark.parametrize(
    ("name", "sent", "received", "absent"),
    [
        case("33", "model", "m", "m", ""),
        case("34", "token_ids", [7, 4095], TokenIds.of([7, 4095]), TokenIds.of([1, 2])),
        case(
            "30 32 36",
            "multi_modal_data",
            media(url="https://example.org/a.png"),
            {"image_url": (MediaUrl("https://example.org/a.png"),)},
            {},
        ),
        case("30", "multi_modal_data", media(raw_url="x"), {"image_url": (MediaRawUrl("x"),)}, {}),
        case(
            "30 85",
            "multi_modal_data",
            media(
                decoded=wire.RdmaMediaDataDescriptor(
                    nixl_metadata="bWV0YQ==",
                    nixl_descriptor=wire.NixlDescriptor(
                        addr=U64_MAX, size=2, mem_type="Dram", device_id=3
                    ),
                    shape=[4, 5],
                    dtype="UINT8",
                )
            ),
            {
                "image_url": (
                    RdmaMediaDataDescriptor(
                        nixl_metadata="bWV0YQ==",
                        nixl_descriptor=NixlDescriptor(U64_MAX, 2, "Dram", 3),
                        shape=(4, 5),
                        dtype="UINT8",
                    ),
                )
            },
            {},
        ),
        case(
            "28 29 37 87",
            "mm_routing_info",
            wire.MmRoutingInfo(
                routing_token_ids=wire.TokenSequence(token_ids=[1, U32_MAX]),
                block_mm_infos=[
                    wire.BlockMmInfo(),
                    wire.BlockMmInfo(
                        info=wire.BlockExtraInfo(
                            mm_objects=[
                                wire.MmObject(
                                    mm_hash=U64_MAX, offsets=[wire.TokenRange(start=1, end=3)]
                                )
                            ]
                        )
                    ),
                ],
            ),
            MmRoutingInfo(
                routing_token_ids=TokenIds.of([1, U32_MAX]),
                block_mm_infos=(None, BlockExtraInfo((MmObject(U64_MAX, ((1, 3),)),))),
            ),
        ),
        case(
            "38 81",
            "stop_conditions",
            wire.StopConditions(**STOPS),
            StopConditions(**STOPS),
            NO_STOPS,
        ),
        case(
            "39 82",
            "sampling_options",
            wire.SamplingOptions(**SAMPLING, guided_decoding=wire.GuidedDecoding(regex="a+")),
            SamplingOptions(**SAMPLING, guided_decoding=GuidedDecoding(regex="a+")),
            NO_SAMPLING,
        ),
        case(
            "40",
            "output_options",
            wire.OutputOptions(logprobs=0, prompt_logprobs=3),
            OutputOptions(logprobs=0, prompt_logprobs=3),
            NO_OPTIONS,
        ),
        case("41", "eos_token_ids", [2, 0], (2, 0), ()),
        case("05 06 07 08 09", "routing", wire.RoutingHints(**HINTS), RoutingHints(**HINTS)),
        case("10 12 13 44", "routing", wire.RoutingHints(**HINTS), RoutingHints(**HINTS)),
        case("04", "routing", wire.RoutingHints(), RoutingHints()),
        case(
            "14",
            "routing",
            wire.RoutingHints(allowed_worker_ids=wire.WorkerIdSet()),
            RoutingHints(allowed_worker_ids=frozenset()),
        ),
        case(
            "15 88",
            "routing",
            wire.RoutingHints(
                routing_constraints=wire.RoutingConstraints(
                    required_taints=["a"], preferred_taints={"b": -0.5}
                )
            ),
            RoutingHints(
                routing_constraints=RoutingConstraints(
                    required_taints=frozenset("a"), preferred_taints={"b": -0.5}
                )
            ),
        ),
        case(
            "16 89",
            "routing",
            wire.RoutingHints(
                session_control=wire.SessionControl(
                    session_id="s", action=wire.SESSION_ACTION_CLOSE
                )
            ),
            RoutingHints(session_control=SessionControl("s", SessionAction.CLOSE)),
        ),
        case(
            "45 86",
            "router_config_override",
            wire.RouterConfigOverride(**OVERRIDE),
            RouterConfigOverride(**OVERRIDE),
        ),
        case(
            "26 27 46 90",
            "prefill_result",
            wire.PrefillResult(
                disaggregated_params_json='{"a":[1,null]}',
                prompt_tokens_details=wire.PromptTokensDetails(
                    cached_tokens=1, audio_tokens=2, cache_write_tokens=3
                ),
            ),
            PrefillResult(
                {"a": [1, None]},
                PromptTokensDetails(cached_tokens=1, audio_tokens=2, cache_write_tokens=3),
            ),
        ),
        case(
            "21 22 23 47",
            "migration_link",
            wire.TraceLink(trace_id=TRACE, span_id=SPAN),
            TraceLink(TRACE, SPAN),
        ),
        case("24", "migration_link", wire.TraceLink(trace_id="z", span_id=""), TraceLink("z", "")),
        case(
            "18 19 20 48",
            "bootstrap_info",
            wire.BootstrapInfo(bootstrap_host="h", bootstrap_port=65535, bootstrap_room=2**63 - 1),
            BootstrapInfo("h", 65535, 2**63 - 1),
        ),
        case("49", "extra_args_json", '{"x": 9007199254740993}', {"x": 2**53 + 1}),
        case("52", "mm_processor_kwargs_json", '{"use_audio_in_video": true}', None),
        case("55", "is_probe", True, True, False),
    ],
)
async def test_a_field_reaches_the_engine_and_so_does_its_absence(
    name: str, sent: Value, received: Value, absent: Value
) -> None:
    attribute = name.removesuffix("_json")
    if attribute == "mm_processor_kwargs":
        received = {"use_audio_in_video": True}
    of = attrgetter(attribute)
    async with working() as worker:
        assert of(await worker.received(**{name: sent})) == received
        assert of(await worker.received()) == absent


@pytest.mark.row("S2-18", "S2-19", "S2-20")
@pytest.mark.parametrize("name", ["bootstrap_host", "bootstrap_port", "bootstrap_room"])
async def test_all_parts_of_a_rendezvous_are_required(name: str) -> None:
    info = wire.BootstrapInfo(bootstrap_host="h", bootstrap_port=1, bootstrap_room=2)
    info.ClearField(name)  # type: ignore[arg-type]
    async with working() as worker:
        with pytest.raises(InvalidRequest) as refused:
            await worker.received(bootstrap_info=info)
    assert refused.value.field == f"bootstrap_info.{name}"


@pytest.mark.row("S2-19")
async def test_a_port_above_16_bits_is_refused_by_name() -> None:
    info = wire.BootstrapInfo(bootstrap_host="h", bootstrap_port=65536, bootstrap_room=2)
    async with working() as worker:
        with pytest.raises(InvalidRequest) as refused:
            await worker.received(bootstrap_info=info)
    assert refused.value.field == "bootstrap_info.bootstrap_port"


@pytest.mark.row("S2-30")
async def test_a_url_that_is_not_absolute_is_refused_by_name() -> None:
    async with working() as worker:
        with pytest.raises(InvalidRequest) as refused:
            await worker.received(multi_modal_data=media(url="a.png"))
    assert str(refused.value.field).startswith("multi_modal_data")


@pytest.mark.row("S2-57")
async def test_unknown_fields_are_ignored() -> None:
    request = wire.PreprocessedRequest(token_ids=[1, 2]).SerializeToString()
    # Field 1000, a varint, and then the request as field 1 of a GenerateRequest.
    extended = request + b"\xc0\x3e\x05"
    known = pb.GenerateRequest(request_id="r").SerializeToString()
    message = known + b"\x0a" + bytes([len(extended)]) + extended
    assert pb.GenerateRequest.FromString(message).request.token_ids == [1, 2]
    async with working() as worker:
        assert (await worker.received_raw(message)).token_ids == TokenIds.of([1, 2])


async def test_no_tracker_of_another_process_reaches_the_engine() -> None:
    names = {field.name for field in wire.PreprocessedRequest.DESCRIPTOR.fields}
    assert "tracker" not in names
    async with working() as worker:
        assert (await worker.received()).tracker is None


@pytest.mark.row("S2-42")
async def test_the_checksum_of_another_card_is_refused_and_its_absence_is_not() -> None:
    async with working() as worker:
        assert (await worker.received()).card_checksum is None
        assert (await worker.received(mdc_sum=worker.checksum)).card_checksum == worker.checksum
        with pytest.raises(InvalidRequest) as refused:
            await worker.received(mdc_sum="0" * 64)
    assert (refused.value.field, refused.value.reason) == ("mdc_sum", "CARD_MISMATCH")


async def received_json(worker: Worker, text: str) -> PreprocessedRequest:
    message = pb.GenerateRequest(request_json=text)
    return await worker.received_raw(message.SerializeToString())


async def test_the_json_form_of_a_request_reaches_the_engine() -> None:
    plain = PreprocessedRequest(model="m", token_ids=TokenIds.of([1, 2]))
    async with working() as worker:
        assert "_HEALTH_CHECK" not in to_json(plain)
        assert await received_json(worker, to_json(plain)) == plain
        probe = replace(plain, is_probe=True, stop_conditions=StopConditions(**STOPS))
        assert '"_HEALTH_CHECK":true' in to_json(probe)
        assert await received_json(worker, to_json(probe)) == probe
        canary = await received_json(worker, '{"token_ids":[1],"_HEALTH_CHECK":true}')
        assert (canary.model, list(canary.token_ids), canary.is_probe) == ("", [1], True)


async def test_a_raw_url_is_read_from_its_own_tag_and_written_as_url() -> None:
    text = '{"token_ids":[1],"multi_modal_data":{"image_url":[{"RawUrl":"a b"}]}}'
    async with working() as worker:
        request = await received_json(worker, text)
        assert request.multi_modal_data == {"image_url": (MediaRawUrl("a b"),)}
        written = to_json(request)
        assert '"image_url":[{"Url":"a b"}]' in written
        with pytest.raises(InvalidRequest) as refused:
            await received_json(worker, written)
    assert refused.value.field == "multi_modal_data.image_url[0].Url"


@pytest.mark.parametrize(
    ("text", "field"),
    [('{"token_ids":[1]', ""), ('{"token_ids":["a"]}', "token_ids[0]")],
)
async def test_an_invalid_json_form_is_refused_by_its_field(text: str, field: str) -> None:
    async with working() as worker:
        with pytest.raises(InvalidRequest) as rejected:
            await received_json(worker, text)
        assert (rejected.value.field or "") == field


async def test_a_request_in_both_forms_is_refused() -> None:
    message = pb.GenerateRequest(
        request=wire.PreprocessedRequest(token_ids=[1]), request_json='{"token_ids":[1]}'
    )
    async with working() as worker:
        with pytest.raises(InvalidRequest) as rejected:
            await worker.received_raw(message.SerializeToString())
        assert rejected.value.field == "request_json"
