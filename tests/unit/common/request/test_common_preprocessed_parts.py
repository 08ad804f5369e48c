"""The nested values of a preprocessed request as JSON."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from common.errors import InvalidRequest
from common.request.preprocessed import (
    AgentContext,
    BlockExtraInfo,
    BootstrapInfo,
    FinishReason,
    GuidedDecoding,
    MediaRawUrl,
    MediaUrl,
    MmObject,
    MmRoutingInfo,
    NixlDescriptor,
    OutputOptions,
    PrefillResult,
    PreprocessedRequest,
    PromptTokensDetails,
    RdmaMediaDataDescriptor,
    RequestTracker,
    RouterConfigOverride,
    RouterParams,
    RoutingConstraints,
    RoutingHints,
    SamplingOptions,
    SessionAction,
    SessionControl,
    StopConditions,
    TokenIds,
    TokenLogprob,
    TopLogprob,
    TraceLink,
    check_absolute_url,
    from_json,
    from_json_value,
    to_json,
    to_json_value,
    usage,
)
from common.runtime import telemetry

U64_MAX = 0xFFFF_FFFF_FFFF_FFFF


def round_trip(part: Any, form: Any) -> None:
    """Assert that `part` is written as `form` and read back equal."""
    assert json.loads(to_json(part)) == form
    assert from_json(type(part), json.dumps(form)) == part


def refused_field(cls: type[Any], form: Any) -> str | None:
    with pytest.raises(InvalidRequest) as error:
        from_json_value(cls, form)
    return error.value.field


def media_of(form: Any) -> Any:
    request = {"token_ids": [], "multi_modal_data": {"image_url": [form]}}
    return from_json_value(PreprocessedRequest, request).multi_modal_data["image_url"][0]


def media_form(medium: Any) -> Any:
    request = PreprocessedRequest(token_ids=TokenIds(), multi_modal_data={"image_url": (medium,)})
    return to_json_value(request)["multi_modal_data"]["image_url"][0]


@pytest.mark.row("S2-01", "S2-02", "S2-03")
def test_router_params_are_optional_targets_compared_by_value() -> None:
    round_trip(RouterParams(), {})
    round_trip(RouterParams(ttft_target=250.5), {"ttft_target": 250.5})
    round_trip(RouterParams(itl_target=20.0), {"itl_target": 20.0})
    assert RouterParams(ttft_target=1.0) == RouterParams(ttft_target=1.0)
    assert RouterParams(ttft_target=1.0) != RouterParams(itl_target=1.0)


@pytest.mark.row("S2-04")
def test_empty_routing_hints_are_an_empty_object() -> None:
    round_trip(RoutingHints(), {})


@pytest.mark.row("S2-05", "S2-06", "S2-07", "S2-08", "S2-09")
def test_routing_hints_pin_workers_and_ranks() -> None:
    form = {
        "backend_instance_id": 1,
        "prefill_worker_id": 2,
        "decode_worker_id": 3,
        "dp_rank": 0,
        "prefill_dp_rank": 2**32 - 1,
    }
    round_trip(
        RoutingHints(
            backend_instance_id=1,
            prefill_worker_id=2,
            decode_worker_id=3,
            dp_rank=0,
            prefill_dp_rank=2**32 - 1,
        ),
        form,
    )
    for key in form:
        beyond = 2**64 if key.endswith("_id") else 2**32
        assert refused_field(RoutingHints, {key: beyond}) == key
        assert refused_field(RoutingHints, {key: -1}) == key


@pytest.mark.row("S2-10", "S2-11", "S2-12", "S2-13")
def test_routing_hints_carry_length_adapter_and_priority() -> None:
    round_trip(
        RoutingHints(expected_output_tokens=9, lora_name="fr", priority_jump=-0.5, priority=-7),
        {"expected_output_tokens": 9, "lora_name": "fr", "priority_jump": -0.5, "priority": -7},
    )
    assert refused_field(RoutingHints, {"priority": 2**31}) == "priority"
    assert refused_field(RoutingHints, {"priority_jump": float("inf")}) == "priority_jump"


@pytest.mark.row("S2-14")
def test_allowed_workers_are_a_set_and_an_empty_set_is_not_absence() -> None:
    round_trip(
        RoutingHints(allowed_worker_ids=frozenset({U64_MAX, 1})),
        {"allowed_worker_ids": [1, U64_MAX]},
    )
    twice = from_json_value(RoutingHints, {"allowed_worker_ids": [2, 2]})
    assert twice.allowed_worker_ids == frozenset({2})
    round_trip(RoutingHints(allowed_worker_ids=frozenset()), {"allowed_worker_ids": []})


@pytest.mark.row("S2-15", "S2-88")
def test_routing_constraints_are_hard_and_weighted_taints() -> None:
    constraints = RoutingConstraints(
        required_taints=frozenset({"b", "a"}), preferred_taints={"gpu": 1.5}
    )
    round_trip(
        RoutingHints(routing_constraints=constraints),
        {
            "routing_constraints": {
                "required_taints": ["a", "b"],
                "preferred_taints": {"gpu": 1.5},
            }
        },
    )
    assert from_json_value(RoutingConstraints, {}) == RoutingConstraints()


@pytest.mark.row("S2-16", "S2-89")
def test_session_control_has_an_id_and_an_optional_action() -> None:
    round_trip(SessionControl("s"), {"session_id": "s"})
    for action in SessionAction:
        round_trip(SessionControl("s", action), {"session_id": "s", "action": action.value})
    assert {action.value for action in SessionAction} == {"open", "close"}
    assert refused_field(SessionControl, {}) == "session_id"
    assert refused_field(SessionControl, {"session_id": "s", "action": "pause"}) == "action"


@pytest.mark.row("S2-17")
@pytest.mark.parametrize("worker_id", [U64_MAX, 2**53 + 1, 2**63])
def test_ids_above_2_to_53_survive_json_text(worker_id: int) -> None:
    text = to_json(RoutingHints(backend_instance_id=worker_id, decode_worker_id=worker_id))
    assert f'"backend_instance_id":{worker_id}' in text
    assert from_json(RoutingHints, text).backend_instance_id == worker_id


@pytest.mark.row("S2-18", "S2-19", "S2-20")
def test_bootstrap_info_needs_host_port_and_room() -> None:
    form = {"bootstrap_host": "10.0.0.1", "bootstrap_port": 65535, "bootstrap_room": 2**63 - 1}
    round_trip(BootstrapInfo("10.0.0.1", 65535, 2**63 - 1), form)
    for key in form:
        assert refused_field(BootstrapInfo, {k: v for k, v in form.items() if k != key}) == key
    assert refused_field(BootstrapInfo, form | {"bootstrap_port": 65536}) == "bootstrap_port"


@pytest.mark.row("S2-21", "S2-22", "S2-23")
def test_a_trace_link_names_its_predecessor_span() -> None:
    trace_id, span_id = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
    link = TraceLink(trace_id, span_id)
    round_trip(link, {"trace_id": trace_id, "span_id": span_id})
    assert link == TraceLink(trace_id, span_id)
    assert link != TraceLink(trace_id, "0" * 15 + "1")
    assert telemetry.link(link.trace_id, link.span_id) is not None


@pytest.mark.row("S2-24")
@pytest.mark.parametrize(
    ("trace_id", "span_id"),
    [
        ("", ""),
        ("a" * 31, "b" * 16),
        ("a" * 32, "b" * 17),
        ("g" * 32, "b" * 16),
        ("a" * 32, "0x" + "b" * 14),
        ("_".join("a" * 16) + "a", "b" * 16),
        ("\u0660" * 32, "b" * 16),
        ("a" * 32 + "\n", "b" * 16),
        ("0" * 32, "b" * 16),
        ("a" * 32, "0" * 16),
    ],
)
def test_malformed_trace_ids_are_ignored(trace_id: str, span_id: str) -> None:
    form = {"token_ids": [1], "migration_link": {"trace_id": trace_id, "span_id": span_id}}
    request = from_json_value(PreprocessedRequest, form)
    assert request.migration_link is not None
    link = request.migration_link
    assert telemetry.link(link.trace_id, link.span_id) is None


@pytest.mark.row("S2-26")
@pytest.mark.parametrize("params", [None, 3, "x", [], {"room": U64_MAX, "deep": [{"a": None}]}])
def test_disaggregated_params_pass_through_as_they_are(params: Any) -> None:
    round_trip(PrefillResult(params), {"disaggregated_params": params})


@pytest.mark.row("S2-26", "S2-27", "S2-90")
def test_a_prefill_result_may_carry_usage_details() -> None:
    details = PromptTokensDetails(cached_tokens=64)
    round_trip(
        PrefillResult({}, details),
        {"disaggregated_params": {}, "prompt_tokens_details": {"cached_tokens": 64}},
    )
    assert refused_field(PrefillResult, {}) == "disaggregated_params"


@pytest.mark.row("S2-28", "S2-29", "S2-87")
def test_multimodal_routing_info_defaults_to_empty_lists() -> None:
    assert from_json_value(MmRoutingInfo, {}) == MmRoutingInfo()
    round_trip(MmRoutingInfo(), {"routing_token_ids": [], "block_mm_infos": []})
    block = BlockExtraInfo((MmObject(U64_MAX, ((0, 3), (5, 5))), MmObject(1)))
    round_trip(
        MmRoutingInfo(routing_token_ids=TokenIds.of([1]), block_mm_infos=(None, block)),
        {
            "routing_token_ids": [1],
            "block_mm_infos": [
                None,
                {
                    "mm_objects": [
                        {"mm_hash": U64_MAX, "offsets": [[0, 3], [5, 5]]},
                        {"mm_hash": 1, "offsets": []},
                    ]
                },
            ],
        },
    )


@pytest.mark.parametrize("span", [[3, 2], [1], [1, 2, 3], [-1, 2], ["0", 1], [False, True], 7])
def test_an_invalid_token_span_is_rejected(span: Any) -> None:
    assert refused_field(MmObject, {"mm_hash": 1, "offsets": [span]}) == "offsets[0]"


RDMA_FORM = {
    "nixl_metadata": "bWV0YQ==",
    "nixl_descriptor": {"addr": U64_MAX, "size": 12, "mem_type": "Dram", "device_id": 0},
    "shape": [2, 2, 3],
    "dtype": "UINT8",
}
RDMA = RdmaMediaDataDescriptor(
    nixl_metadata="bWV0YQ==",
    nixl_descriptor=NixlDescriptor(U64_MAX, 12, "Dram", 0),
    shape=(2, 2, 3),
    dtype="UINT8",
)


@pytest.mark.row("S2-30", "S2-85")
def test_a_medium_is_an_object_with_one_key() -> None:
    url = "https://example.org/a.png"
    assert media_of({"Url": url}) == MediaUrl(url)
    assert media_form(MediaUrl(url)) == {"Url": url}
    assert media_of({"Decoded": RDMA_FORM}) == RDMA
    assert media_form(RDMA) == {"Decoded": RDMA_FORM}
    for bad in ({}, {"Path": "x"}, {"Url": url, "RawUrl": url}, url, None):
        with pytest.raises(InvalidRequest) as error:
            media_of(bad)
        assert error.value.field == "multi_modal_data.image_url[0]"


@pytest.mark.row("S2-31")
def test_a_raw_url_is_written_as_url_and_read_as_raw_url() -> None:
    valid, odd = "https://example.org/a.png", "not a url"
    assert media_of({"RawUrl": odd}) == MediaRawUrl(odd)
    assert media_form(MediaRawUrl(odd)) == {"Url": odd}
    assert media_of(media_form(MediaRawUrl(valid))) == MediaUrl(valid)
    with pytest.raises(InvalidRequest) as error:
        media_of(media_form(MediaRawUrl(odd)))
    assert error.value.field == "multi_modal_data.image_url[0].Url"


@pytest.mark.row("S2-30")
def test_only_an_absolute_url_is_valid() -> None:
    for good in ("http://h/x", "https://[::1]:80", "data:image/png;base64,AAAA", "file:///a/b"):
        assert check_absolute_url(good, "u") == good
    bad = ("", "x", "/a/b", "//h/x", "http://", "http://h:99999/", "http://h/a b", "http://[::1")
    for url in bad:
        with pytest.raises(InvalidRequest) as error:
            check_absolute_url(url, "u")
        assert error.value.field == "u"


@pytest.mark.row("S2-32")
def test_media_are_grouped_by_part_type_in_order() -> None:
    form = {
        "token_ids": [1],
        "multi_modal_data": {
            "image_url": [{"Url": "http://h/1"}, {"RawUrl": "2"}],
            "audio_url": [],
        },
    }
    assert from_json_value(PreprocessedRequest, form).multi_modal_data == {
        "image_url": (MediaUrl("http://h/1"), MediaRawUrl("2")),
        "audio_url": (),
    }


@pytest.mark.row("S2-80")
def test_a_tracker_reports_its_marked_times() -> None:
    tracker = RequestTracker(
        received_ms=1000.0, received_s=5.0, prompt_blocks=4, cached_blocks=1
    )  # fmt: skip
    assert tracker.timing() == {"request_received_ms": 1000.0, "kv_hit_rate": 0.25}
    tracker.mark("prefill_started", 5.5)
    tracker.mark("first_token", 6.5)
    tracker.mark("first_token", 9.0)
    tracker.mark("finished", 8.0)
    assert tracker.timing() == {
        "request_received_ms": 1000.0,
        "prefill_wait_time_ms": 500.0,
        "prefill_time_ms": 1000.0,
        "ttft_ms": 1500.0,
        "total_time_ms": 3000.0,
        "kv_hit_rate": 0.25,
    }


@pytest.mark.row("S2-81")
def test_stop_conditions_have_all_their_fields() -> None:
    round_trip(StopConditions(), {})
    round_trip(
        StopConditions(
            max_tokens=0,
            stop=("\n\n", "é"),
            stop_token_ids_hidden=(2,),
            stop_token_ids_visible=(3, 4),
            min_tokens=0,
            ignore_eos=False,
            max_thinking_tokens=7,
        ),
        {
            "max_tokens": 0,
            "stop": ["\n\n", "é"],
            "stop_token_ids_hidden": [2],
            "stop_token_ids_visible": [3, 4],
            "min_tokens": 0,
            "ignore_eos": False,
            "max_thinking_tokens": 7,
        },
    )
    assert from_json_value(StopConditions, {"stop": None, "max_tokens": None}) == StopConditions()


@pytest.mark.row("S2-82")
def test_sampling_options_have_all_their_fields() -> None:
    round_trip(SamplingOptions(), {})
    form: dict[str, Any] = {
        "n": 2,
        "best_of": 3,
        "presence_penalty": 0.0,
        "frequency_penalty": -2.0,
        "repetition_penalty": 1.1,
        "temperature": 0.0,
        "top_p": 0.9,
        "top_k": -1,
        "min_p": 0.05,
        "use_beam_search": False,
        "length_penalty": 1.0,
        "seed": -(2**63),
        "logit_bias": {"0": -100.0, "4294967295": 0.5},
        "guided_decoding": {"choice": ["yes", "no"], "backend": "xgrammar"},
    }
    guided = GuidedDecoding(choice=("yes", "no"), backend="xgrammar")
    plain = {k: v for k, v in form.items() if k not in ("logit_bias", "guided_decoding")}
    round_trip(
        SamplingOptions(
            **plain, logit_bias={0: -100.0, 2**32 - 1: 0.5}, guided_decoding=guided
        ),
        form,
    )  # fmt: skip


@pytest.mark.parametrize("key", ["-1", "4294967296", "01", "1.0", "\u0663", "", "1" * 5000])
def test_logit_bias_is_keyed_by_token_ids_only(key: str) -> None:
    field = refused_field(SamplingOptions, {"logit_bias": {key: 1.0}})
    assert field == f"logit_bias.{key}"


@pytest.mark.row("S2-82")
@pytest.mark.parametrize(
    "form",
    [
        {"json": {"type": "object", "maximum": 2**60 + 1}},
        {"json": True},
        {"regex": "a|b", "whitespace_pattern": "[ ]?"},
        {"choice": ["only"]},
        {"grammar": "root ::= 'x'"},
        {"structural_tag": {"structures": []}},
    ],
)
def test_guided_decoding_takes_each_kind_of_constraint(form: dict[str, Any]) -> None:
    guided = from_json_value(GuidedDecoding, form)
    assert to_json_value(guided) == form


@pytest.mark.parametrize(
    "form",
    [{}, {"backend": "x"}, {"json": None}, {"json": {}, "regex": "a"}, {"choice": []}],
)
def test_guided_decoding_needs_exactly_one_constraint(form: dict[str, Any]) -> None:
    field = refused_field(
        PreprocessedRequest, {"token_ids": [1], "sampling_options": {"guided_decoding": form}}
    )
    assert field is not None
    assert field.startswith("sampling_options.guided_decoding")


@pytest.mark.row("S2-83")
def test_output_options_have_all_their_fields() -> None:
    round_trip(OutputOptions(), {})
    form: dict[str, Any] = {
        "logprobs": 0,
        "prompt_logprobs": 5,
        "skip_special_tokens": True,
        "formatted_prompt": False,
        "include_stop_str_in_output": True,
        "return_tokens_as_token_ids": False,
    }
    round_trip(OutputOptions(**form), form)


@pytest.mark.row("S2-84", "S2-86", "S2-90")
def test_context_override_and_details_have_all_their_fields() -> None:
    agent = {
        "session_type_id": "coder",
        "session_id": "s",
        "trajectory_id": "t",
        "parent_trajectory_id": "p",
    }
    round_trip(AgentContext(**agent), agent)
    override: dict[str, Any] = {
        "overlap_score_credit": 0.0,
        "prefill_load_scale": 2.0,
        "overlap_score_weight": 1.0,
        "router_temperature": 0.5,
        "assume_kv_reuse": False,
        "track_prefill_tokens": True,
        "shared_cache_multiplier": 0.25,
    }
    round_trip(RouterConfigOverride(**override), override)
    details = {"cached_tokens": 1, "audio_tokens": 2, "cache_write_tokens": 3}
    round_trip(PromptTokensDetails(**details), details)
    assert from_json_value(RouterConfigOverride, {}) == RouterConfigOverride()


@pytest.mark.row("S4-53", "S4-56", "S4-57")
def test_usage_adds_up_and_saturates() -> None:
    assert usage(7, 11).total_tokens == 18
    assert usage(2**32 - 1, 10).total_tokens == 2**32 - 1
    assert usage(2**40, 1).prompt_tokens == 2**32 - 1
    round_trip(usage(7, 11), {"prompt_tokens": 7, "completion_tokens": 11, "total_tokens": 18})


def test_finish_reasons_map_to_openai_values() -> None:
    assert {reason: reason.openai for reason in FinishReason} == {
        FinishReason.EOS: "stop",
        FinishReason.STOP: "stop",
        FinishReason.LENGTH: "length",
        FinishReason.CONTENT_FILTER: "content_filter",
        FinishReason.ERROR: None,
        FinishReason.CANCELLED: None,
    }
    assert FinishReason("abort") is FinishReason.CANCELLED
    with pytest.raises(ValueError, match="bored"):
        FinishReason("bored")


def test_a_token_logprob_carries_its_alternatives() -> None:
    round_trip(
        TokenLogprob(5, -0.5, (TopLogprob(5, -0.5), TopLogprob(6, -1.0))),
        {
            "token_id": 5,
            "logprob": -0.5,
            "top": [{"token_id": 5, "logprob": -0.5}, {"token_id": 6, "logprob": -1.0}],
        },
    )


@pytest.mark.row("S2-91")
def test_token_ids_are_a_sequence_equal_by_value_and_viewed_without_copy() -> None:
    ids = TokenIds.of([1, 2, 2**32 - 1])
    assert ids == TokenIds.of(np.array([1, 2, 2**32 - 1], dtype=np.int64))
    assert hash(ids) == hash(TokenIds(b"\x01\0\0\0\x02\0\0\0\xff\xff\xff\xff"))
    assert (len(ids), ids[-1], ids[:2], 2 in ids) == (3, 2**32 - 1, TokenIds.of([1, 2]), True)
    assert ids.extended([7]).tolist() == [1, 2, 2**32 - 1, 7]
    assert not TokenIds()
    assert ids.array.dtype == np.uint32
    assert not ids.array.flags.writeable
    assert TokenIds.of(ids) is ids


@pytest.mark.row("S2-91")
def test_a_number_outside_u32_is_not_a_token_id() -> None:
    for bad in ([-1], [2**32], np.array([-1]), np.array([2**32]), np.array([1.5])):
        with pytest.raises(OverflowError):
            TokenIds.of(bad)
    with pytest.raises(TypeError):
        TokenIds.of([1.5])  # type: ignore[list-item]
