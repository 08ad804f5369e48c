"""Which roles a model needs to be served."""

from __future__ import annotations

from typing import Any

import pytest

from common.registry.instances import Instance
from frontend_svc.models.routable import has_pair, missing_pair_role, missing_role


def worker(number: int, role: str, **facts: Any) -> Instance:
    return Instance(
        id=number,
        namespace="n",
        service="worker",
        stable_name=f"w{number}",
        address="127.0.0.1:1",
        model="m",
        role=role,  # type: ignore[arg-type]  # the table names roles as text
        **{"local_prefill": False, "transfer_group": "g", **facts},
    )


@pytest.mark.parametrize(
    ("workers", "missing"),
    [
        ([worker(1, "aggregated")], ""),
        ([worker(1, "prefill"), worker(2, "decode")], ""),
        ([worker(1, "decode", local_prefill=True)], ""),
        ([worker(1, "decode")], "no prefill worker"),
        ([worker(1, "prefill")], "no decode worker"),
        ([], "no prefill worker"),
        (
            [worker(1, "prefill"), worker(2, "decode", transfer_group="h")],
            "no prefill and decode workers of one transfer group",
        ),
    ],
)
def test_a_model_is_routable_if_its_workers_have_the_required_roles(
    workers: list[Instance], missing: str
) -> None:
    assert missing_role(workers) == missing


def test_a_pair_is_a_prefill_and_a_decode_worker_of_one_transfer_group() -> None:
    assert has_pair([worker(1, "prefill"), worker(2, "decode"), worker(3, "aggregated")])
    assert not has_pair([worker(1, "prefill"), worker(3, "aggregated")])
    assert not has_pair([worker(1, "prefill"), worker(2, "decode", transfer_group="h")])


LOCAL = worker(9, "decode", local_prefill=True)


@pytest.mark.parametrize(
    ("workers", "reason"),
    [
        ([], ""),
        ([worker(1, "aggregated")], ""),
        ([worker(1, "prefill"), worker(2, "decode")], ""),
        ([worker(1, "prefill"), LOCAL, worker(3, "aggregated")], ""),
        ([worker(2, "decode")], ""),  # Not served at all: see `missing_role`.
        ([LOCAL], "no prefill worker"),
        ([worker(1, "aggregated"), worker(2, "decode")], "no prefill worker"),
        ([worker(1, "aggregated"), worker(2, "prefill")], "no decode worker"),
        (
            [worker(1, "prefill", transfer_group="h"), LOCAL],
            "no prefill and decode workers of one transfer group",
        ),
    ],
)
def test_a_model_with_unpaired_roles_has_a_reason_for_aggregated_serving(
    workers: list[Instance], reason: str
) -> None:
    assert missing_pair_role(workers) == reason
