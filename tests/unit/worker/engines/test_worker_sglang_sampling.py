"""Translation of requests and outputs, without SGLang."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.errors import (
    InternalError,
    InvalidRequest,
    MeshError,
    Overloaded,
    PromptTooLong,
    Unsupported,
    WorkerLost,
)
from common.request.preprocessed import (
    BootstrapInfo,
    FinishReason,
    GuidedDecoding,
    OutputOptions,
    PrefillResult,
    PreprocessedRequest,
    RoutingHints,
    SamplingOptions,
    StopConditions,
    TokenIds,
    TopLogprob,
)
from worker_svc.config import WorkerConfig
from worker_svc.engines.handoff import PEER_LOST
from worker_svc.engines.sglang.continuation import GRAMMAR_PREFIX, PENALTY_PREFIX
from worker_svc.engines.sglang.load import count_waiting_for_pages, to_load
from worker_svc.engines.sglang.sampling import (
    LOGPROB_MIN,
    NO_PARTNER_HOST,
    EngineProperties,
    MinTokens,
    OutputConverter,
    SglangRequest,
    abort_error,
    build_sglang_request,
    supported_fields,
    to_invalid_request,
)
from worker_svc.engines.sglang.server_args import (
    RESERVED_ARGUMENTS,
    check_nodes,
    find_kv_events_off_reason,
    model_kv_index,
    resolve_page_size,
    server_arguments,
    serves_in_order,
)
from worker_svc.engines.stop_tokens import StopToken

FACTS = EngineProperties(
    vocab_size=100, context_length=64, max_input_tokens=59, eos_ids=frozenset({2}), dp_size=1
)
ROOM = BootstrapInfo("10.0.0.1", 9000, 2**61)


def asked(**parts: Any) -> PreprocessedRequest:
    return PreprocessedRequest(**{"token_ids": TokenIds.of([5, 6, 7]), **parts})


def sampling_of(
    request: PreprocessedRequest, properties: EngineProperties = FACTS
) -> dict[str, Any]:
    sampling: dict[str, Any] = build_sglang_request(request, properties).arguments[
        "sampling_params"
    ]
    return sampling


def refusal(request: PreprocessedRequest, properties: EngineProperties = FACTS) -> MeshError:
    with pytest.raises(MeshError) as caught:
        build_sglang_request(request, properties)
    return caught.value


# Requests.


def test_a_plain_request_gets_the_rest_of_the_context_and_the_models_eos() -> None:
    sglang_request = build_sglang_request(asked(), FACTS)
    assert sglang_request.arguments == {
        "input_ids": [5, 6, 7],
        "sampling_params": {"max_new_tokens": 61, "stop_token_ids": [2]},
        "priority": 0,
        "routed_dp_rank": None,
        "lora_path": None,
    }
    assert sglang_request.stop_tokens == {2: StopToken(FinishReason.EOS)}


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"temperature": 0.0}, {"temperature": 0.0}),
        ({"top_p": 0.5, "top_k": 7, "min_p": 0.1}, {"top_p": 0.5, "top_k": 7, "min_p": 0.1}),
        ({"top_k": 0}, {"top_k": -1}),
        ({"top_k": -1}, {"top_k": -1}),
        ({"presence_penalty": 1.0}, {"presence_penalty": 1.0}),
        ({"frequency_penalty": -1.0}, {"frequency_penalty": -1.0}),
        ({"repetition_penalty": 1.2}, {"repetition_penalty": 1.2}),
        ({"logit_bias": {7: 2.5}}, {"logit_bias": {"7": 2.5}}),
        # Neutral values have no effect.
        ({"n": 1, "best_of": 1, "use_beam_search": False, "length_penalty": 1.0}, {}),
    ],
)
def test_every_sampling_option_is_mapped(
    options: Mapping[str, Any], expected: Mapping[str, Any]
) -> None:
    sampling = sampling_of(asked(sampling_options=SamplingOptions(**options)))
    del sampling["max_new_tokens"], sampling["stop_token_ids"]
    assert sampling == expected


@pytest.mark.parametrize(
    ("stop", "expected"),
    [
        (StopConditions(max_tokens=4), {"max_new_tokens": 4, "stop_token_ids": [2]}),
        (StopConditions(max_tokens=9999), {"max_new_tokens": 61, "stop_token_ids": [2]}),
        (StopConditions(max_tokens=4, ignore_eos=True), {"max_new_tokens": 4, "ignore_eos": True}),
        (
            StopConditions(max_tokens=4, stop_token_ids_hidden=(9,), stop_token_ids_visible=(8,)),
            {"max_new_tokens": 4, "stop_token_ids": [2, 8, 9]},
        ),
        (
            StopConditions(max_tokens=4, min_tokens=3),
            {
                "max_new_tokens": 4,
                "stop_token_ids": [2],
                "custom_params": {"min_tokens": 3, "stop_ids": [2]},
            },
        ),
        (
            StopConditions(max_tokens=4, min_tokens=3, ignore_eos=True),
            {"max_new_tokens": 4, "ignore_eos": True},
        ),
    ],
)
def test_every_stop_condition_is_mapped(stop: StopConditions, expected: Mapping[str, Any]) -> None:
    sglang_request = build_sglang_request(asked(stop_conditions=stop), FACTS)
    assert sglang_request.arguments["sampling_params"] == expected
    assert sglang_request.needs_min_tokens is ("custom_params" in expected)


def test_visible_overrides_eos_and_eos_overrides_hidden() -> None:
    stop = StopConditions(stop_token_ids_hidden=(2, 3, 4), stop_token_ids_visible=(3,))
    stop_tokens = build_sglang_request(
        asked(stop_conditions=stop, eos_token_ids=(3,)), FACTS
    ).stop_tokens
    assert stop_tokens == {
        2: StopToken(FinishReason.EOS),
        3: StopToken(FinishReason.STOP, is_visible=True),
        4: StopToken(FinishReason.STOP),
    }


def test_logprobs_request_that_many_alternatives() -> None:
    arguments = build_sglang_request(
        asked(output_options=OutputOptions(logprobs=0)), FACTS
    ).arguments
    assert (arguments["return_logprob"], arguments["top_logprobs_num"]) == (True, 0)
    assert "return_logprob" not in build_sglang_request(asked(), FACTS).arguments


@pytest.mark.parametrize(
    ("parts", "field"),
    [
        ({"prompt_embeds": "x"}, "prompt_embeds"),
        ({"extra_args": {"a": 1}}, "extra_args"),
        ({"mm_processor_kwargs": {"a": 1}}, "mm_processor_kwargs"),
        ({"bootstrap_info": ROOM}, "bootstrap_info"),
        ({"prefill_result": PrefillResult({})}, "prefill_result"),
        ({"sampling_options": SamplingOptions(n=2)}, "sampling_options.n"),
        ({"sampling_options": SamplingOptions(best_of=2)}, "sampling_options.best_of"),
        (
            {"sampling_options": SamplingOptions(use_beam_search=True)},
            "sampling_options.use_beam_search",
        ),
        (
            {"sampling_options": SamplingOptions(length_penalty=0.5)},
            "sampling_options.length_penalty",
        ),
        ({"sampling_options": SamplingOptions(seed=1)}, "sampling_options.seed"),
        (
            {
                "sampling_options": SamplingOptions(
                    guided_decoding=GuidedDecoding(json={}, prefix_tokens=3)
                )
            },
            "sampling_options.guided_decoding.prefix_tokens",
        ),
        (
            {
                "sampling_options": SamplingOptions(
                    guided_decoding=GuidedDecoding(json={}, whitespace_pattern=" ")
                )
            },
            "sampling_options.guided_decoding.whitespace_pattern",
        ),
        ({"output_options": OutputOptions(prompt_logprobs=0)}, "output_options.prompt_logprobs"),
        (
            {"stop_conditions": StopConditions(max_thinking_tokens=5)},
            "stop_conditions.max_thinking_tokens",
        ),
        ({"routing": RoutingHints(lora_name="a")}, "routing.lora_name"),
    ],
)
def test_fields_that_sglang_does_not_support_are_rejected_by_name(
    parts: Mapping[str, Any], field: str
) -> None:
    error = refusal(asked(**parts))
    assert isinstance(error, Unsupported)
    assert error.field == field


@pytest.mark.parametrize(
    ("guided", "arguments"),
    [
        (GuidedDecoding(json={"type": "object"}), {"json_schema": '{"type": "object"}'}),
        (GuidedDecoding(regex="a+"), {"regex": "a+"}),
        (GuidedDecoding(choice=("a.b", "c")), {"regex": r"a\.b|c"}),
        (GuidedDecoding(grammar='root ::= "a"'), {"ebnf": 'root ::= "a"'}),
        (GuidedDecoding(structural_tag={"a": 1}), {"structural_tag": '{"a": 1}'}),
        (GuidedDecoding(structural_tag={"a": 1}, best_effort=True), {}),
    ],
)
def test_a_constraint_goes_to_the_grammar_backend_unless_it_is_a_hint(
    guided: GuidedDecoding, arguments: dict[str, str]
) -> None:
    sampling = sampling_of(asked(sampling_options=SamplingOptions(guided_decoding=guided)))
    names = ("json_schema", "regex", "ebnf", "structural_tag")
    assert {name: sampling[name] for name in names if name in sampling} == arguments


def test_a_cache_salt_reaches_the_prefix_cache() -> None:
    salted = asked(routing=RoutingHints(cache_salt="s"))
    assert build_sglang_request(salted, FACTS).arguments["cache_salt"] == "s"
    assert "cache_salt" not in build_sglang_request(asked(), FACTS).arguments


def test_seeds_are_advertised_where_output_is_repeatable() -> None:
    assert "sampling_options.seed" not in supported_fields(FACTS)
    assert "sampling_options.seed" in supported_fields(replace(FACTS, is_deterministic=True))


def test_a_seed_is_accepted_where_output_is_repeatable() -> None:
    seeded = SamplingOptions(seed=7)
    greedy = sampling_of(asked(sampling_options=replace(seeded, temperature=0.0)))
    assert "sampling_seed" not in greedy
    deterministic = replace(FACTS, is_deterministic=True)
    assert sampling_of(asked(sampling_options=seeded), deterministic)["sampling_seed"] == 7


@pytest.mark.parametrize(
    ("parts", "error", "field"),
    [
        ({"token_ids": TokenIds.of([])}, InvalidRequest, "token_ids"),
        ({"token_ids": TokenIds.of([1] * 59)}, PromptTooLong, "token_ids"),
        ({"token_ids": TokenIds.of([1, 100])}, InvalidRequest, "token_ids"),
        (
            {"stop_conditions": StopConditions(max_tokens=0)},
            InvalidRequest,
            "stop_conditions.max_tokens",
        ),
        ({"routing": RoutingHints(dp_rank=1)}, InvalidRequest, "routing.dp_rank"),
    ],
)
def test_invalid_values_are_rejected_with_their_field(
    parts: Mapping[str, Any], error: type[MeshError], field: str
) -> None:
    found = refusal(asked(**parts))
    assert type(found) is error
    assert found.field == field


def test_priority_rank_and_adapter_are_passed_on() -> None:
    properties = replace(FACTS, dp_size=2, loras=frozenset({"a"}))
    routing = RoutingHints(priority=3, dp_rank=1, lora_name="a")
    arguments = build_sglang_request(asked(routing=routing), properties, priority=9).arguments
    assert (arguments["priority"], arguments["routed_dp_rank"]) == (3, 1)
    assert arguments["lora_path"] == "a"
    assert build_sglang_request(asked(), properties, priority=9).arguments["priority"] == 9


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_leg_carries_its_rendezvous_and_is_rejected_without_one(role: Any) -> None:
    properties = replace(FACTS, role=role)
    sglang_request = build_sglang_request(asked(bootstrap_info=ROOM), properties)
    assert sglang_request.bootstrap == ROOM
    names = ("bootstrap_host", "bootstrap_port", "bootstrap_room")
    assert [sglang_request.arguments[one] for one in names] == ["10.0.0.1", 9000, 2**61]
    error = refusal(asked(), properties)
    assert error.field == "bootstrap_info"
    probe = build_sglang_request(asked(is_probe=True), properties).arguments
    assert probe["bootstrap_host"] == NO_PARTNER_HOST


def test_a_probe_requests_one_token_whatever_its_other_fields() -> None:
    probe = asked(is_probe=True, stop_conditions=StopConditions(max_tokens=30))
    assert sampling_of(probe) == {"max_new_tokens": 1, "ignore_eos": True}


def test_a_rejection_by_sglang_names_the_request_field() -> None:
    assert (
        to_invalid_request(ValueError("top_p must be in (0, 1], got 2")).field
        == "sampling_options.top_p"
    )
    assert to_invalid_request(ValueError("something else")).field is None


def test_output_of_another_worker_travels_as_parameters_of_the_scheduler() -> None:
    able = replace(FACTS, continues_constraints=True, continues_penalties=True)
    guided = GuidedDecoding(regex="a+", prefix_tokens=2)
    options = SamplingOptions(guided_decoding=guided, presence_penalty=0.5, prefix_tokens=3)
    built = build_sglang_request(asked(sampling_options=options), able)
    assert built.arguments["sampling_params"]["custom_params"] == {
        GRAMMAR_PREFIX: 2,
        PENALTY_PREFIX: 3,
    }
    assert not built.needs_min_tokens
    names = {f"sampling_options.{one}prefix_tokens" for one in ("", "guided_decoding.")}
    assert names <= supported_fields(able)
    assert not names & supported_fields(FACTS)
    with pytest.raises(InvalidRequest, match="above the 3 tokens"):
        build_sglang_request(asked(sampling_options=replace(options, prefix_tokens=4)), able)
    with pytest.raises(Unsupported, match="SGLang"):
        build_sglang_request(asked(sampling_options=options), FACTS)


def test_stop_tokens_are_excluded_until_min_tokens() -> None:
    logits = np.zeros((2, 5))
    short, enough = SimpleNamespace(output_ids=[1]), SimpleNamespace(output_ids=[1, 1])
    params = [{"__req__": one, "min_tokens": 2, "stop_ids": [0, 4]} for one in (short, enough)]
    assert MinTokens()(logits, params) is logits
    assert logits[0].tolist() == [-math.inf, 0, 0, 0, -math.inf]
    assert logits[1].tolist() == [0] * 5


# Output.


def raw_output(
    ids: Sequence[int], finish: Mapping[str, Any] | None = None, **meta: Any
) -> dict[str, Any]:
    return {"output_ids": ids, "meta_info": {"finish_reason": finish, **meta}}


def output(
    stop_tokens: Mapping[int, StopToken] | None = None,
    properties: EngineProperties = FACTS,
    **parts: Any,
) -> OutputConverter:
    return OutputConverter(SglangRequest({}, stop_tokens or {}, **parts), properties, 3)


def test_cumulative_chunks_become_incremental_ones() -> None:
    one, growing = output(), [4]
    first = one.convert(raw_output(growing))
    growing += [5, 6]
    second = one.convert(raw_output(growing))
    assert first is not None
    assert second is not None
    growing.append(7)  # tokens already sent do not change with it
    assert (first.token_ids, second.token_ids) == ((4,), (5, 6))
    assert one.convert(raw_output([4, 5, 6])) is None


@given(st.lists(st.integers(3, 9), min_size=1, max_size=12), st.data())
@settings(max_examples=60)
def test_chunk_boundaries_do_not_change_the_tokens(ids: list[int], data: st.DataObject) -> None:
    cuts = data.draw(st.lists(st.integers(0, len(ids)), max_size=6).map(sorted))
    one, got = output(), list[int]()
    for cut in cuts:
        chunk = one.convert(raw_output(ids[:cut]))
        got += chunk.token_ids if chunk else ()
    last = one.convert(raw_output(ids, {"type": "length", "length": len(ids)}, cached_tokens=1))
    assert last is not None
    assert [*got, *last.token_ids] == ids
    assert last.completion_usage is not None
    assert last.completion_usage.completion_tokens == len(ids)


STOPS = {
    2: StopToken(FinishReason.EOS),
    8: StopToken(FinishReason.STOP, is_visible=True),
    9: StopToken(FinishReason.STOP),
}


@pytest.mark.parametrize(
    ("finish", "tokens", "reason", "stop_reason"),
    [
        ({"type": "length", "length": 3}, (4, 5, 2), FinishReason.LENGTH, None),
        ({"type": "stop", "matched": 2}, (4, 5), FinishReason.EOS, None),
        ({"type": "stop", "matched": 9}, (4, 5), FinishReason.STOP, None),
        ({"type": "stop", "matched": 8}, (4, 5, 2), FinishReason.STOP, 8),
        ({"type": "stop", "matched": [4, 9]}, (4, 5), FinishReason.STOP, None),
        # A stop of the model that SGLang applies itself.
        ({"type": "stop", "matched": 77}, (4, 5), FinishReason.EOS, None),
    ],
)
def test_every_end_is_mapped(
    finish: Mapping[str, Any],
    tokens: tuple[int, ...],
    reason: FinishReason,
    stop_reason: int | None,
) -> None:
    last = output(STOPS).convert(raw_output([4, 5, 2], finish, cached_tokens=2))
    assert last is not None
    assert (last.token_ids, last.finish_reason, last.stop_reason) == (tokens, reason, stop_reason)
    usage = last.completion_usage
    assert usage is not None
    assert usage.prompt_tokens_details is not None
    assert (usage.prompt_tokens, usage.completion_tokens) == (3, len(tokens))
    assert usage.prompt_tokens_details.cached_tokens == 2


def test_a_stop_by_text_is_an_internal_error() -> None:
    with pytest.raises(InternalError, match="NaN happened"):
        output().convert(raw_output([4], {"type": "stop", "matched": "NaN happened"}))


def test_logprobs_accompany_the_tokens_that_are_passed_on() -> None:
    one = output(STOPS, logprobs=2)
    meta = {
        "output_token_logprobs": [(-0.5, 4, None), (-math.inf, 9, None)],
        "output_top_logprobs": [[(-0.5, 4, None), (-math.inf, 7, None)], [(0.0, 9, None)]],
    }
    last = one.convert(raw_output([4, 9], {"type": "stop", "matched": 9}, **meta))
    assert last is not None
    (only,) = last.logprobs
    assert (only.token_id, only.logprob) == (4, -0.5)
    assert only.top == (TopLogprob(4, -0.5), TopLogprob(7, LOGPROB_MIN))


def test_without_alternatives_there_are_none() -> None:
    chunk = output(logprobs=0).convert(
        raw_output([4], None, output_token_logprobs=[(-1.0, 4, None)])
    )
    assert chunk is not None
    assert [one.top for one in chunk.logprobs] == [()]


def test_prefill_ends_with_what_decode_needs_and_decode_without() -> None:
    ended = {"type": "length", "length": 0}
    prefill = output(properties=replace(FACTS, role="prefill"), bootstrap=ROOM).convert(
        raw_output([4], ended)
    )
    decode = output(properties=replace(FACTS, role="decode"), bootstrap=ROOM).convert(
        raw_output([4], ended)
    )
    assert prefill is not None
    assert decode is not None
    assert prefill.disaggregated_params == {
        "bootstrap_host": "10.0.0.1",
        "bootstrap_port": 9000,
        "bootstrap_room": 2**61,
    }
    assert decode.disaggregated_params is None


@pytest.mark.parametrize(
    ("status", "role", "error", "retryable"),
    [
        (400, "aggregated", InvalidRequest, False),
        (503, "aggregated", Overloaded, True),
        (None, "aggregated", WorkerLost, True),
        (500, "prefill", WorkerLost, True),
        (500, "aggregated", InternalError, False),
    ],
)
def test_every_abort_by_sglang_is_a_typed_error(
    status: int | None, role: Any, error: type[MeshError], retryable: bool
) -> None:
    found = abort_error({"message": "why", "status_code": status}, replace(FACTS, role=role))
    assert type(found) is error
    assert found.retryable is retryable
    assert "why" in found.message
    if role == "prefill":
        assert found.reason == PEER_LOST


def test_an_abort_in_a_chunk_is_raised() -> None:
    with pytest.raises(WorkerLost):
        output().convert(raw_output([4], {"type": "abort", "message": "gone"}))


# The server.


@dataclass
class QueueMetrics:
    prefill_bootstrap_queue_reqs: int = 1
    prefill_inflight_queue_reqs: int = 2
    decode_prealloc_queue_reqs: int = 4
    decode_transfer_queue_reqs: int = 8


@dataclass
class Snapshot:
    timestamp: float = 0.0
    dp_rank: int = 1
    num_running_reqs: int = 2
    num_waiting_reqs: int = 3
    num_waiting_uncached_tokens: int = 40
    num_used_tokens: int = 17
    max_total_num_tokens: int = 160
    total_prefill_uncached_tokens: int = 1000
    disaggregation: Any = None
    queues: Any = None


def test_load_is_in_blocks_and_its_step_moves_with_chunks_and_prefill() -> None:
    load = to_load(Snapshot(), 16, 5)
    assert (load.kv_used_blocks, load.kv_total_blocks) == (2, 10)
    assert (load.running, load.waiting, load.waiting_tokens, load.dp_rank) == (2, 3, 40, 1)
    assert (load.engine_step, load.rooms_open) == (1005, 0)
    assert to_load(Snapshot(disaggregation=QueueMetrics()), 16, 5).rooms_open == 15
    assert to_load(Snapshot(max_total_num_tokens=0), 16, 5).kv_total_blocks is None


def test_a_rank_that_does_not_report_its_queues_has_no_leg_waiting_for_pages() -> None:
    assert count_waiting_for_pages(Snapshot()) == 0
    assert count_waiting_for_pages(Snapshot(queues=SimpleNamespace(prealloc_ready=3))) == 3


@pytest.mark.parametrize(
    ("role", "arguments", "is_ordered"),
    [
        ("aggregated", {"schedule_policy": "fcfs"}, True),
        ("aggregated", {"schedule_policy": "lof"}, False),
        ("aggregated", {"schedule_policy": "fcfs", "enable_lora": True}, False),
        ("aggregated", {"schedule_policy": "fcfs", "enable_hierarchical_cache": True}, False),
        ("aggregated", {}, False),
        ("decode", {"schedule_policy": "fcfs"}, False),
        ("prefill", {"schedule_policy": "fcfs"}, False),
    ],
)
def test_requests_are_served_in_order_with_the_default_policy_only(
    role: Any, arguments: dict[str, Any], *, is_ordered: bool
) -> None:
    assert serves_in_order(role, arguments) == is_ordered


def arguments_of(role: Any = "aggregated", *, is_cpu: bool = True, **extra: Any) -> dict[str, Any]:
    return server_arguments(
        role,
        extra,
        is_cpu=is_cpu,
        block_size=16,
        adapter_arguments={"model_path": "m", "host": "h"},
    )


def test_a_cpu_uses_torchs_kernels_and_an_accelerator_sglangs_default() -> None:
    assert arguments_of()["attention_backend"] == "torch_native"
    assert arguments_of("decode")["disaggregation_decode_retraction_backup"] == "cpu_tensor"
    on_cuda = arguments_of("prefill", is_cpu=False)
    assert not {"device", "attention_backend", "disaggregation_transfer_backend"} & on_cuda.keys()


def test_operator_arguments_override_defaults() -> None:
    arguments = arguments_of(dtype="bfloat16", page_size=8, tp_size=2)
    assert (arguments["dtype"], arguments["page_size"], arguments["tp_size"]) == ("bfloat16", 8, 2)


@pytest.mark.parametrize("name", sorted(RESERVED_ARGUMENTS))
def test_reserved_arguments_are_rejected_by_name(name: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        resolve_page_size({name: 1}, 16)
    assert caught.value.field == f"engine_args.{name}"


@pytest.mark.parametrize("page", [0, 3, 32, "16", True])
def test_pages_that_do_not_divide_blocks_are_rejected(page: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        resolve_page_size({"page_size": page}, 16)
    assert caught.value.field == "engine_args.page_size"


def test_models_without_shareable_prefixes_are_kept_out_of_the_index() -> None:
    assert model_kv_index(is_hybrid=False, is_speculative=False) == ("events", "")
    assert model_kv_index(is_hybrid=True, is_speculative=False)[0] == "none"
    assert model_kv_index(is_hybrid=False, is_speculative=True)[0] == "none"


@pytest.mark.parametrize(
    ("role", "resolved", "kv_events", "word"),
    [
        ("aggregated", {}, True, ""),
        ("prefill", {}, True, ""),
        ("prefill", {}, False, "kv_events"),
        ("decode", {"disable_radix_cache": True}, True, "decode"),
        ("decode", {"disaggregation_decode_enable_radix_cache": True}, True, ""),
        ("aggregated", {"disable_radix_cache": True}, True, "caching"),
        # No approximate index for a worker without a cache.
        ("aggregated", {"disable_radix_cache": True}, False, "caching"),
        ("decode", {}, False, "decode"),
    ],
)
def test_a_worker_that_reports_no_events_gives_the_reason(
    role: Any, resolved: Mapping[str, Any], kv_events: bool, word: str
) -> None:
    reason = find_kv_events_off_reason(role, resolved, kv_events=kv_events)
    assert bool(reason) is bool(word)
    assert word in reason


def test_invalid_engine_arguments_are_rejected_before_the_start() -> None:
    def problems(**settings: Any) -> list[str]:
        return [
            one
            for one in WorkerConfig(engine="sglang", **settings).problems()
            if "engine:" not in one
        ]

    assert problems(engine_args='{"tp_size": 2}') == []
    assert "is not JSON" in problems(engine_args="{")[0]
    assert "must be a JSON object" in problems(engine_args="[]")[0]
    assert problems(engine_args='{"page_size": 3}')[0].startswith("engine_args.page_size: ")
    assert problems(engine_args='{"host": "x"}')[0].startswith("engine_args.host: ")
    assert "bootstrap" in problems(role="prefill", handoff="completed")[0]
    assert "takes none" in WorkerConfig(engine="sim", engine_args="{}").problems()[0]


def test_cached_tokens_are_counted_by_tier_where_sglang_has_tiers() -> None:
    # Recorded fields of SGLang 0.5.23 (`get_cached_tokens_details`).
    meta = {
        "finish_reason": {"type": "length"},
        "cached_tokens": 96,
        "cached_tokens_details": {"device": 32, "host": 48, "storage": 16},
    }
    for has_tiers, expected in ((True, (96, 48, 16)), (False, (96, None, None))):
        properties = EngineProperties(has_lower_tiers=has_tiers)
        converter = OutputConverter(SglangRequest({}), properties, 100)
        output = converter.convert({"output_ids": [7], "meta_info": meta})
        assert output is not None
        assert output.completion_usage is not None
        details = output.completion_usage.prompt_tokens_details
        assert details is not None
        counts = (details.cached_tokens, details.host_cached_tokens, details.disk_cached_tokens)
        assert counts == expected


def test_drafted_tokens_are_counted_by_result() -> None:
    # Recorded fields of SGLang 0.5.23 (`_calculate_spec_decoding_metrics`).
    meta = {
        "finish_reason": {"type": "length"},
        "spec_accept_rate": 0.25,
        "spec_accept_length": 1.75,
        "spec_num_correct_drafts": 6,
        "spec_num_proposed_drafts": 24,
        "spec_verify_ct": 8,
    }
    converter = OutputConverter(SglangRequest({}), EngineProperties(), 3)
    output = converter.convert({"output_ids": [7], "meta_info": meta})
    assert output is not None
    assert output.completion_usage is not None
    details = output.completion_usage.completion_tokens_details
    assert details is not None
    assert (details.accepted_prediction_tokens, details.rejected_prediction_tokens) == (6, 18)


@pytest.mark.parametrize(
    ("arguments", "field", "text"),
    [
        ({"nnodes": 0}, "nnodes", "must be a number of nodes, at least 1, not 0"),
        ({"nnodes": 2, "node_rank": 2}, "node_rank", "must be in 0..1, because nnodes is 2, not 2"),
        ({"node_rank": 1}, "node_rank", "must be in 0..0, because nnodes is 1, not 1"),
        ({"nnodes": 2, "tp_size": 3}, "nnodes", "2 nodes do not divide the 3 ranks"),
        ({"nnodes": 2, "tp_size": 2}, "dist_init_addr", "several nodes need HOST:PORT of node 0"),
    ],
)
def test_arguments_of_several_nodes_must_fit(
    arguments: dict[str, Any], field: str, text: str
) -> None:
    with pytest.raises(InvalidRequest, match=text) as refused:
        check_nodes(arguments)
    assert refused.value.field == f"engine_args.{field}"
    check_nodes({"nnodes": 2, "node_rank": 1, "tp_size": 2, "dist_init_addr": "127.0.0.1:5000"})
