from __future__ import annotations

from dataclasses import replace

import pytest

from common.errors import Unsupported
from common.registry.card import ModelCard
from common.registry.instances import (
    CONTINUES_PENALTIES_META_KEY,
    ENGINE_META_KEY,
    UNSUPPORTED_OPTIONS_META_KEY,
    Instance,
)
from common.request.preprocessed import (
    CONSTRAINT_PREFIX,
    GuidedDecoding,
    PreprocessedRequest,
    RoutingHints,
    SamplingOptions,
    TokenIds,
    option_names,
    unsupported_options,
)
from frontend_svc.models.aliases import find_aliases
from frontend_svc.models.engine_options import (
    EngineTraits,
    ModelEngines,
    check_options,
    refused_options,
)

SEED, REGEX = "sampling_options.seed", "sampling_options.guided_decoding.regex"


def worker(*unsupported: str, reports: bool = True) -> Instance:
    meta = {UNSUPPORTED_OPTIONS_META_KEY: ",".join(unsupported)} if reports else {}
    return Instance(
        id=1,
        namespace="n",
        service="worker",
        address="h:1",
        stable_name="",
        model="m",
        meta=meta,
    )


def test_options_are_refused_that_every_worker_refuses() -> None:
    assert refused_options([worker(SEED, REGEX), worker(SEED)]) == {SEED}
    assert refused_options([worker(SEED), worker(reports=False)]) == frozenset()
    assert refused_options([]) == frozenset()


def test_a_refused_option_is_named() -> None:
    def check(*refused: str, **parts: object) -> str:
        request = PreprocessedRequest(token_ids=TokenIds.of([1]), **parts)  # type: ignore[arg-type]
        with pytest.raises(Unsupported) as raised:
            check_options(request, frozenset(refused))
        return raised.value.field or ""

    seeded = SamplingOptions(seed=1)
    assert check(SEED, sampling_options=seeded) == SEED
    guided = SamplingOptions(guided_decoding=GuidedDecoding(regex="a"))
    assert check(REGEX, sampling_options=guided) == REGEX
    salted = RoutingHints(cache_salt="a", backend_instance_id=3)
    assert check("routing.cache_salt", routing=salted) == "routing.cache_salt"
    for parts in ({"sampling_options": seeded}, {"routing": salted}):
        check_options(PreprocessedRequest(token_ids=TokenIds.of([1]), **parts), frozenset())


def test_a_supported_field_includes_the_fields_below_it() -> None:
    names = unsupported_options(frozenset({"sampling_options.guided_decoding", "stop_conditions"}))
    assert not any(name.startswith(("sampling_options.guided", "stop_cond")) for name in names)
    assert {SEED, "routing.cache_salt"} <= names < option_names()


def test_an_alias_belongs_to_the_model_that_sorts_first_unless_the_name_is_taken() -> None:
    cards = [ModelCard(name, aliases=("x", name + "1", "taken")) for name in ("b", "a")]
    assert find_aliases(cards, {"a", "b", "taken"}) == {"x": "a", "a1": "a", "b1": "b"}


def test_an_unknown_worker_has_the_engine_of_all_others_and_counts_no_output() -> None:
    stated = {CONTINUES_PENALTIES_META_KEY: "1", ENGINE_META_KEY: "vllm"}
    first = replace(worker(SEED), meta={**stated, **worker(SEED).meta})
    other = replace(first, id=2, meta={ENGINE_META_KEY: "sglang"})
    engines = ModelEngines.of([first])
    assert engines.refused_options == {SEED}
    assert engines.traits_of(1) == EngineTraits("vllm", counts_output=True)
    assert engines.traits_of(3) == EngineTraits("vllm")
    engines = ModelEngines.of([first, other])
    assert [engines.traits_of(id) for id in (2, 3)] == [EngineTraits("sglang"), EngineTraits(None)]
    silent = ModelEngines.of([worker(SEED)])
    assert [silent.traits_of(id) for id in (1, 3)] == [EngineTraits(), EngineTraits()]
    assert ModelEngines.of([]).traits_of(3) == EngineTraits()


def test_a_worker_that_refuses_continued_constraints_states_it() -> None:
    traits = ModelEngines.of([worker(CONSTRAINT_PREFIX)]).traits_of(1)
    assert traits == EngineTraits(continues_constraints=False)
