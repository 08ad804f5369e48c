"""The preprocessed request as JSON: fields, presence rules, methods, builder, rejected input."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest

from common.errors import InvalidRequest
from common.request.preprocessed import (
    BlockExtraInfo,
    BootstrapInfo,
    GuidedDecoding,
    MediaUrl,
    MmObject,
    MmRoutingInfo,
    OutputOptions,
    PrefillResult,
    PreprocessedEmbeddingRequest,
    PreprocessedRequest,
    RequestTracker,
    RouterConfigOverride,
    RouterParams,
    RoutingHints,
    SamplingOptions,
    StopConditions,
    TokenIds,
    TraceLink,
    from_json,
    from_json_value,
    to_json,
    to_json_value,
    unsupported_fields,
)
from common.request.preprocessed.codecs import codec_of

ALWAYS_WRITTEN: dict[str, Any] = {
    "model": "",
    "token_ids": [1],
    "stop_conditions": {},
    "sampling_options": {},
    "output_options": {},
    "eos_token_ids": [],
    "mdc_sum": None,
    "annotations": [],
    "router_config_override": None,
}


def request(*ids: int, **fields: Any) -> PreprocessedRequest:
    return PreprocessedRequest(token_ids=TokenIds.of(ids or (1,)), **fields)


def read(**fields: Any) -> PreprocessedRequest:
    return from_json_value(PreprocessedRequest, {"token_ids": [1], **fields})


def check_skipped(key: str, value: Any, found: object) -> None:
    """Check the rule *skip* for one key: absent by default, else written and read back."""
    assert key not in to_json_value(read())
    decoded = read(**{key: value})
    assert getattr(decoded, key) == found
    assert to_json_value(decoded)[key] == value
    assert getattr(read(**{key: None}), key) == getattr(read(), key)


@pytest.mark.row("S2-33", "S2-34")
def test_token_ids_is_the_only_key_a_reader_needs() -> None:
    decoded = read()
    assert decoded.model == ""
    assert list(decoded.token_ids) == [1]
    with pytest.raises(InvalidRequest) as error:
        from_json_value(PreprocessedRequest, {"model": "m"})
    assert error.value.field == "token_ids"


@pytest.mark.row("S2-34", "S2-91")
def test_token_ids_are_exactly_u32() -> None:
    decoded = read(token_ids=[0, 2**32 - 1])
    assert decoded.token_ids.tolist() == [0, 2**32 - 1]
    for bad in (-1, 2**32, 1.5, "7", True, None):
        with pytest.raises(InvalidRequest) as error:
            read(token_ids=[5, bad])
        assert error.value.field == "token_ids[1]"


@pytest.mark.row("S2-35", "S2-53", "S2-11")
def test_plain_values_are_skipped_when_absent() -> None:
    check_skipped("prompt_embeds", "AAECAw==", "AAECAw==")
    check_skipped("request_timestamp_ms", 1700000000000.25, 1700000000000.25)
    check_skipped("routing", {"lora_name": "fr"}, RoutingHints(lora_name="fr"))


@pytest.mark.row("S2-36", "S2-37", "S2-32")
def test_media_and_their_routing_identity_are_skipped_when_absent() -> None:
    url = "https://example.org/cat.png"
    check_skipped(
        "multi_modal_data", {"image_url": [{"Url": url}]}, {"image_url": (MediaUrl(url),)}
    )
    check_skipped(
        "mm_routing_info",
        {
            "routing_token_ids": [7, 7],
            "block_mm_infos": [None, {"mm_objects": [{"mm_hash": 9, "offsets": [[0, 2]]}]}],
        },
        MmRoutingInfo(
            routing_token_ids=TokenIds.of([7, 7]),
            block_mm_infos=(None, BlockExtraInfo((MmObject(9, ((0, 2),)),))),
        ),
    )


@pytest.mark.row("S2-38", "S2-39", "S2-40", "S2-41", "S2-43")
def test_options_and_lists_are_always_written_and_may_be_missing() -> None:
    decoded = read()
    assert decoded.stop_conditions == StopConditions()
    assert decoded.sampling_options == SamplingOptions()
    assert decoded.output_options == OutputOptions()
    assert decoded.eos_token_ids == ()
    assert decoded.annotations == ()
    assert to_json_value(decoded) == ALWAYS_WRITTEN
    full = {
        "stop_conditions": {"max_tokens": 5},
        "sampling_options": {"temperature": 0.5},
        "output_options": {"logprobs": 0},
        "eos_token_ids": [2],
        "annotations": ["a"],
    }
    assert to_json_value(read(**full)) == ALWAYS_WRITTEN | full


def test_null_is_rejected_where_it_is_not_a_value() -> None:
    for key in ("token_ids", "model", "stop_conditions", "annotations", "_HEALTH_CHECK"):
        with pytest.raises(InvalidRequest) as error:
            read(**{key: None})
        assert error.value.field == key


@pytest.mark.row("S2-42", "S2-45")
def test_checksum_and_router_override_are_written_as_null_when_absent() -> None:
    text = to_json(request())
    assert '"mdc_sum":null' in text
    assert '"router_config_override":null' in text
    assert read(mdc_sum=None, router_config_override=None) == read()
    decoded = read(mdc_sum="abc", router_config_override={"assume_kv_reuse": False})
    assert decoded.card_checksum == "abc"
    assert decoded.router_config_override == RouterConfigOverride(assume_kv_reuse=False)
    assert to_json_value(decoded)["router_config_override"] == {"assume_kv_reuse": False}


@pytest.mark.row("S2-44", "S2-46", "S2-47", "S2-48", "S2-50")
def test_optional_parts_are_skipped_when_absent() -> None:
    check_skipped("routing", {"dp_rank": 0}, RoutingHints(dp_rank=0))
    check_skipped("prefill_result", {"disaggregated_params": [1]}, PrefillResult([1]))
    link = {"trace_id": "a" * 32, "span_id": "b" * 16}
    check_skipped("migration_link", link, TraceLink("a" * 32, "b" * 16))
    room = {"bootstrap_host": "h", "bootstrap_port": 1, "bootstrap_room": 2}
    check_skipped("bootstrap_info", room, BootstrapInfo("h", 1, 2))
    check_skipped("router", {"ttft_target": 9.5}, RouterParams(ttft_target=9.5))


@pytest.mark.row("S2-49", "S2-51", "S2-52")
def test_free_json_and_agent_context_are_skipped_when_absent() -> None:
    free = {"handle": 2**63 + 1, "nested": [None, {"x": 1.5}]}
    check_skipped("extra_args", free, free)
    check_skipped("mm_processor_kwargs", {"use_audio_in_video": True}, {"use_audio_in_video": True})
    decoded = read(agent_context={"session_id": "s", "trajectory_id": "t"})
    assert to_json_value(decoded)["agent_context"] == {"session_id": "s", "trajectory_id": "t"}
    assert "agent_context" not in to_json_value(read())


@pytest.mark.row("S2-54", "S2-80")
def test_the_tracker_stays_in_the_process() -> None:
    tracker = RequestTracker(received_ms=1e12, received_s=10.0)
    tracked = request(tracker=tracker)
    assert tracked.tracker is tracker
    assert tracked == request()
    assert to_json(tracked) == to_json(request())
    assert read(tracker={"received_ms": 1}).tracker is None


@pytest.mark.row("S2-55", "S2-73", "S2-74")
def test_a_default_request_omits_the_health_check() -> None:
    text = to_json(request())
    assert "_HEALTH_CHECK" not in text
    assert "is_probe" not in text
    assert from_json(PreprocessedRequest, text).is_probe is False


@pytest.mark.row("S2-75", "S2-76")
def test_a_probe_is_marked_by_its_wire_key_and_comes_back() -> None:
    text = to_json(request(is_probe=True))
    assert '"_HEALTH_CHECK":true' in text
    assert from_json(PreprocessedRequest, text) == request(is_probe=True)
    canary = from_json(PreprocessedRequest, '{"token_ids":[1],"_HEALTH_CHECK":true}')
    assert (canary.model, list(canary.token_ids), canary.is_probe) == ("", [1], True)


@pytest.mark.row("S2-55")
def test_the_python_name_of_the_probe_flag_is_not_a_wire_key() -> None:
    assert read(is_probe=True).is_probe is False


@pytest.mark.row("S2-57")
def test_unknown_keys_are_ignored_at_every_level() -> None:
    newer = read(
        from_the_future=1,
        sampling_options={"temperature": 1.0, "entropy_floor": 3},
        bootstrap_info={
            "bootstrap_host": "h",
            "bootstrap_port": 1,
            "bootstrap_room": 2,
            "transport": "x",
        },
    )
    assert newer.sampling_options == SamplingOptions(temperature=1.0)
    assert newer.bootstrap_info == BootstrapInfo("h", 1, 2)
    assert "from_the_future" not in to_json_value(newer)


@pytest.mark.row("S2-58", "S2-60")
def test_an_annotation_is_found_by_its_exact_text() -> None:
    marked = request(annotations=("trace", "user:7"))
    assert marked.has_annotation("trace")
    assert marked.has_annotation("user:7")
    assert not marked.has_annotation("user")
    assert not marked.has_annotation("trac")
    assert marked.get_annotation_value("trace") is None


@pytest.mark.row("S2-59")
@pytest.mark.parametrize(
    ("annotations", "value"),
    [
        (("a:1",), "1"),
        (("a:1", "a:2"), "1"),
        (("b:0", "a:2"), "2"),
        (("a:",), ""),
        (("a:http://h:1",), "http://h:1"),
        (("a", "a:late"), "late"),
        ((), None),
    ],
)
def test_an_annotation_value_is_all_behind_the_first_colon(
    annotations: tuple[str, ...], value: str | None
) -> None:
    assert request(annotations=annotations).get_annotation_value("a") == value


@pytest.mark.row("S2-61")
def test_a_key_does_not_match_a_longer_key() -> None:
    assert request(annotations=("ab:1",)).get_annotation_value("a") is None
    assert request(annotations=("ab:1", "a:2")).get_annotation_value("a") == "2"


@pytest.mark.row("S2-64", "S2-87")
def test_routing_uses_the_multimodal_tokens_only_where_there_are_any() -> None:
    block = BlockExtraInfo((MmObject(1),))
    own = TokenIds.of([1, 2])
    expanded = MmRoutingInfo(routing_token_ids=TokenIds.of([9]), block_mm_infos=(block,))
    no_tokens = MmRoutingInfo(block_mm_infos=(block,))
    assert request(1, 2).routing_tokens() == (own, None)
    assert request(1, 2, mm_routing_info=no_tokens).routing_tokens() == (own, None)
    assert request(1, 2, mm_routing_info=expanded).routing_tokens() == (
        TokenIds.of([9]),
        (block,),
    )


@pytest.mark.row("S2-65", "S2-66", "S2-67", "S2-68", "S2-69")
def test_an_embedding_request_writes_null_for_what_is_absent() -> None:
    plain = {"token_ids": [[1, 2], []], "model": "e", "annotations": []}
    decoded = from_json_value(PreprocessedEmbeddingRequest, plain)
    assert [list(ids) for ids in decoded.token_ids] == [[1, 2], []]
    nulls = {"encoding_format": None, "dimensions": None, "mdc_sum": None}
    assert to_json_value(decoded) == plain | nulls
    full = plain | {"encoding_format": "base64", "dimensions": 2**32 - 1, "mdc_sum": "c"}
    assert to_json_value(from_json_value(PreprocessedEmbeddingRequest, full)) == full
    with pytest.raises(InvalidRequest) as error:
        from_json_value(PreprocessedEmbeddingRequest, plain | {"dimensions": 2**32})
    assert error.value.field == "dimensions"


@pytest.mark.row("S2-66", "S2-70", "S2-71")
@pytest.mark.parametrize("key", ["token_ids", "model", "annotations"])
def test_an_embedding_request_needs_tokens_model_and_annotations(key: str) -> None:
    whole = {"token_ids": [[1]], "model": "e", "annotations": ["x:1"]}
    assert from_json_value(PreprocessedEmbeddingRequest, whole).has_annotation("x:1")
    assert not from_json_value(PreprocessedEmbeddingRequest, whole).has_annotation("x")
    del whole[key]
    with pytest.raises(InvalidRequest) as error:
        from_json_value(PreprocessedEmbeddingRequest, whole)
    assert error.value.field == key


@pytest.mark.parametrize(
    "text",
    ["{", "[]", '{"token_ids":[1],"extra_args":NaN}', '{"token_ids":[1],"extra_args":1e999}'],
)
def test_text_that_is_not_a_json_object_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequest) as error:
        from_json(PreprocessedRequest, text)
    assert error.value.field is None


def test_deeply_nested_json_is_rejected_without_a_crash() -> None:
    with pytest.raises(InvalidRequest, match="JSON"):
        from_json(PreprocessedRequest, '{"token_ids":[1],"extra_args":' + "[" * 200_000)


def test_errors_name_the_path_into_the_request() -> None:
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"sampling_options": {"temperature": "hot"}}, "sampling_options.temperature"),
        ({"stop_conditions": {"stop": ["a", 3]}}, "stop_conditions.stop[1]"),
        ({"routing": {"routing_constraints": {"preferred_taints": {"t": None}}}},
         "routing.routing_constraints.preferred_taints.t"),
        ({"mm_routing_info": {"block_mm_infos": [None, {"mm_objects": [{}]}]}},
         "mm_routing_info.block_mm_infos[1].mm_objects[0].mm_hash"),
        ({"model": "\ud800"}, "model"),
        ({"extra_args": {"x": float("nan")}}, "extra_args"),
    ]  # fmt: skip
    for fields, path in wrong:
        with pytest.raises(InvalidRequest) as error:
            read(**fields)
        assert error.value.field == path


def test_json_text_is_compact_and_plain_json() -> None:
    text = to_json(request(1, 2, model="m"))
    assert ": " not in text
    assert json.loads(text) == ALWAYS_WRITTEN | {"model": "m", "token_ids": [1, 2]}


def test_unsupported_features_are_listed_by_name() -> None:
    requested = request(
        prompt_embeds="AA==",
        sampling_options=SamplingOptions(
            temperature=0.5, seed=1, guided_decoding=GuidedDecoding(regex="a+")
        ),
        stop_conditions=StopConditions(max_tokens=1, stop=("x",)),
        routing=RoutingHints(lora_name="fr", dp_rank=1),
        extra_args={"k": 1},
        request_timestamp_ms=1.0,
    )
    honoured = frozenset({"sampling_options.temperature", "stop_conditions.max_tokens"})
    assert unsupported_fields(requested, honoured) == [
        "prompt_embeds",
        "stop_conditions.stop",
        "sampling_options.seed",
        "sampling_options.guided_decoding",
        "routing.lora_name",
        "extra_args",
        "request_timestamp_ms",
    ]


def test_a_name_covers_what_is_below_it_and_a_part_covers_only_itself() -> None:
    guided = GuidedDecoding(regex="a+", backend="x")
    requested = request(sampling_options=SamplingOptions(seed=1, guided_decoding=guided))
    assert unsupported_fields(requested, frozenset({"sampling_options"})) == []
    some = frozenset({"sampling_options.seed", "sampling_options.guided_decoding.regex"})
    assert unsupported_fields(requested, some) == ["sampling_options.guided_decoding.backend"]


def test_values_without_effect_request_no_feature() -> None:
    neutral = request(
        sampling_options=SamplingOptions(
            n=1,
            best_of=1,
            presence_penalty=0.0,
            frequency_penalty=0.0,
            repetition_penalty=1.0,
            top_p=1.0,
            top_k=-1,
            min_p=0.0,
            use_beam_search=False,
            logit_bias={},
        ),
        stop_conditions=StopConditions(min_tokens=0, ignore_eos=False),
        output_options=OutputOptions(skip_special_tokens=True, formatted_prompt=False),
        routing=RoutingHints(lora_name=""),
    )
    assert unsupported_fields(neutral, frozenset()) == []
    loud = request(sampling_options=SamplingOptions(n=2, temperature=0.0))
    assert unsupported_fields(loud, frozenset()) == [
        "sampling_options.n",
        "sampling_options.temperature",
    ]
    assert unsupported_fields(
        request(output_options=OutputOptions(logprobs=0)), frozenset()
    ) == ["output_options.logprobs"]  # fmt: skip


def test_an_annotation_without_a_codec_is_a_type_error() -> None:
    for hint in (int, bytes, Mapping[bool, str], tuple[str, str]):
        with pytest.raises(TypeError, match="has no codec"):
            codec_of(hint)
