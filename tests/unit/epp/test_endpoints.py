"""The servers that a request may go to, and what its headers state."""

from __future__ import annotations

from typing import Any

import pytest

from common.errors import InvalidRequest, Unavailable
from common.registry.instances import SERVER_META_KEY, SERVER_MODEL_META_KEY, Instance
from epp_svc.core.endpoints import (
    Endpoints,
    endpoint_of,
    find_endpoints,
    retry_order,
    server_model,
)
from epp_svc.core.hints import FAIRNESS_CHARS_MAX, Hints, parse_objectives, read_hints
from tests.kit import instances


def worker(number: int, endpoint: str = "", **fields: Any) -> Instance:
    meta = {SERVER_META_KEY: endpoint, SERVER_MODEL_META_KEY: "m"} if endpoint else {}
    return instances.worker(number, meta=meta, **fields)


def test_only_aggregated_workers_with_a_server_are_endpoints() -> None:
    assert endpoint_of(worker(1, "a:1")) == "a:1"
    assert endpoint_of(worker(1)) == ""
    assert endpoint_of(worker(1, "a:1", role="decode")) == ""
    assert server_model(worker(1, "a:1")) == "m"
    assert server_model(worker(1)) == ""


def test_a_subset_restricts_the_endpoints_and_the_router() -> None:
    workers = [worker(1, "a:1"), worker(2, "b:1"), worker(3)]
    found = find_endpoints("m", workers[:2], None)
    assert found == Endpoints({1: "a:1", 2: "b:1"}, is_restricted=False)
    assert find_endpoints("m", workers, None).is_restricted, "one worker serves no HTTP"
    assert find_endpoints("m", workers, ("b:1", "c:1")).by_id == {2: "b:1"}
    for subset in ((), ("c:1",)):
        with pytest.raises(Unavailable, match=f"none of the {len(subset)} endpoints"):
            find_endpoints("m", workers, subset)
    with pytest.raises(Unavailable, match="its 1 workers serve no HTTP"):
        find_endpoints("m", workers[2:], None)
    with pytest.raises(Unavailable, match=r"no server serves 'm' at the moment$"):
        find_endpoints("m", [], None)


def test_the_gateway_tries_the_least_busy_endpoints_next() -> None:
    endpoints = Endpoints({1: "a:1", 2: "b:1", 3: "c:1", 4: "d:1"}, is_restricted=False)
    assert retry_order(endpoints, 2, (), {1: 3, 3: 1}, 2) == ("b:1", "d:1", "c:1")
    assert retry_order(endpoints, 2, {4}, {1: 3, 3: 1}, 2) == ("b:1", "c:1", "a:1")
    assert retry_order(endpoints, 2, (), {}, 0) == ("b:1",)


def test_objectives_become_levels_and_the_negative_ones_are_shed() -> None:
    objectives = parse_objectives(["critical=10", "batch=-1"])
    headers = {"x-gateway-inference-objective": "critical", "x-gateway-inference-fairness-id": "t"}
    assert read_hints(headers, objectives) == Hints("", "t", 10)
    batch = read_hints({"x-llm-d-inference-objective": "batch"}, objectives)
    assert (batch.level, batch.is_sheddable) == (0, True)
    assert read_hints({"x-gateway-inference-objective": "other"}, objectives) == Hints()
    assert read_hints({"x-gateway-model-name-rewrite": "m2"}, {}).model == "m2"


@pytest.mark.parametrize("text", ["a", "=1", "a=", "a=x", "a=1.5", "a=2000000"])
def test_an_invalid_objective_is_refused_with_its_text(text: str) -> None:
    with pytest.raises(ValueError, match=text):
        parse_objectives([text])


def test_an_objective_with_two_priorities_is_refused() -> None:
    with pytest.raises(ValueError, match="two priorities"):
        parse_objectives(["a=1", "a=2"])


def test_a_long_fairness_id_is_refused_with_the_limit() -> None:
    name = "x-gateway-inference-fairness-id"
    with pytest.raises(InvalidRequest, match=str(FAIRNESS_CHARS_MAX)) as caught:
        read_hints({name: "x" * (FAIRNESS_CHARS_MAX + 1)}, {})
    assert caught.value.field == name
