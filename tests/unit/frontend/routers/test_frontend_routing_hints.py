"""Routing hints of clients, and which of them allow a placement without a router."""

from __future__ import annotations

from random import Random
from typing import Any

import orjson
import pytest

from common.errors import InvalidRequest, Unavailable
from common.registry.instances import Instance, Snapshot
from common.request.placement import Decision, Query
from common.request.preprocessed import (
    RoutingConstraints,
    RoutingHints,
    SessionAction,
    SessionControl,
)
from frontend_svc.openai.body.parsing import parse_completion
from frontend_svc.openai.body.preprocessing import to_preprocessed
from frontend_svc.request.local_placement import place_locally


def body(**nvext: object) -> bytes:
    return orjson.dumps({"model": "m", "prompt": "hi", "nvext": nvext})


def routing(**nvext: object) -> RoutingHints | None:
    request = to_preprocessed(
        parse_completion(body(**nvext)),
        [1],
        eos_token_ids=(),
        card_checksum="",
        context_length=100,
        default_max_tokens=None,
        vocab_size=None,
    )
    return request.routing


def test_a_session_reaches_the_router() -> None:
    assert routing(session_control={"session_id": "s"}) == RoutingHints(
        session_control=SessionControl("s")
    )
    for action in SessionAction:
        hints = routing(session_control={"session_id": "s", "action": action.value})
        assert hints == RoutingHints(session_control=SessionControl("s", action))


def test_taints_reach_the_router() -> None:
    hints = routing(
        routing_constraints={"required_taints": ["a", "a"], "preferred_taints": {"b": 0.5, "c": -1}}
    )
    assert hints == RoutingHints(
        routing_constraints=RoutingConstraints(
            required_taints=frozenset({"a"}), preferred_taints={"b": 0.5, "c": -1.0}
        )
    )
    assert routing(routing_constraints={}) == RoutingHints(routing_constraints=RoutingConstraints())


@pytest.mark.parametrize(
    ("nvext", "field"),
    [
        ({"session_control": {}}, "nvext.session_control.session_id"),
        ({"session_control": {"session_id": ""}}, "nvext.session_control.session_id"),
        ({"session_control": {"session_id": "x" * 257}}, "nvext.session_control.session_id"),
        (
            {"session_control": {"session_id": "s", "action": "pause"}},
            "nvext.session_control.action",
        ),
        ({"session_control": {"session_id": "s", "ttl": 5}}, "nvext.session_control.ttl"),
        (
            {"routing_constraints": {"required_taints": [""]}},
            "nvext.routing_constraints.required_taints[0]",
        ),
        (
            {"routing_constraints": {"required_taints": ["t"] * 65}},
            "nvext.routing_constraints.required_taints",
        ),
        (
            {"routing_constraints": {"preferred_taints": {"t": "much"}}},
            "nvext.routing_constraints.preferred_taints.t",
        ),
        (
            {"routing_constraints": {"preferred_taints": {"t": 1e9}}},
            "nvext.routing_constraints.preferred_taints.t",
        ),
        ({"routing_constraints": {"taints": []}}, "nvext.routing_constraints.taints"),
    ],
)
def test_an_invalid_session_or_taint_is_refused_with_its_field(
    nvext: dict[str, Any], field: str
) -> None:
    with pytest.raises(InvalidRequest) as refused:
        parse_completion(body(**nvext))
    assert refused.value.field == field


SESSION = SessionControl("s")
PREFERRED = RoutingConstraints(preferred_taints={"t": 1.0})
REQUIRED = RoutingConstraints(required_taints=frozenset({"t"}))


@pytest.mark.parametrize(
    ("hints", "is_placed"),
    [
        (RoutingHints(session_control=SESSION, priority=1, priority_jump=1.0), True),
        (RoutingHints(routing_constraints=PREFERRED, expected_output_tokens=5), True),
        (RoutingHints(routing_constraints=REQUIRED), False),
        (RoutingHints(decode_worker_id=1), False),
        (RoutingHints(dp_rank=0), False),
        (RoutingHints(allowed_worker_ids=frozenset({1})), False),
    ],
)
def test_without_a_router_only_requests_for_any_worker_are_placed(
    hints: RoutingHints, is_placed: bool
) -> None:
    worker = Instance(1, "mesh", "worker", "", "127.0.0.1:1", model="m")
    query = Query("m", 1, routing=hints)
    result = place_locally(Snapshot(1, {1: worker}), {}, query, Random(0))
    if is_placed:
        assert isinstance(result, Decision)
        assert result.worker.worker_id == 1
    else:
        assert isinstance(result, Unavailable)
        assert result.reason == "NO_ROUTER"
