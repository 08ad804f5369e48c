"""What successful requests prove about a model, until a canary takes it."""

from __future__ import annotations

from typing import Any, cast

from common.registry.instances import Snapshot
from frontend_svc.members import Members
from frontend_svc.request.gateway import Gateway
from frontend_svc.request.types import Success


async def test_a_success_is_not_replaced_by_a_lesser_one() -> None:
    # Any: no request is placed or sent.
    gateway = Gateway(cast(Any, None), cast(Any, None), Members(Snapshot()))
    pair, single, no_tokens = Success(True, True), Success(True, False), Success(False, False)
    for success in (no_tokens, single, no_tokens, pair, single, no_tokens):
        gateway.succeeded("m", success)
    gateway.succeeded("other", no_tokens)
    assert gateway.successes == {"m": pair, "other": no_tokens}
