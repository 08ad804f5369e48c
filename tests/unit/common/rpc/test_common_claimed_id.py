"""Which ids a caller may claim in its messages."""

from __future__ import annotations

import pytest

from common.errors import PermissionDenied
from common.instance_ids import MEMBER_IDS
from common.rpc.claimed_id import bind_caller_id, check_claimed_id

MEMBER_ID, EARLIER_ID = MEMBER_IDS[5], 7


async def test_an_operator_may_claim_no_id() -> None:
    for caller_id in (0, None):  # Whether the server requires a proof.
        bind_caller_id(caller_id, is_operator=True)
        for claimed_id in (EARLIER_ID, MEMBER_ID):
            with pytest.raises(PermissionDenied, match="the operator token has no id"):
                check_claimed_id(claimed_id, "frontend_id")


async def test_a_caller_without_a_proof_may_claim_the_ids_of_earlier_versions_only() -> None:
    bind_caller_id(0)
    check_claimed_id(EARLIER_ID, "frontend_id")
    with pytest.raises(PermissionDenied, match="has not proved"):
        check_claimed_id(MEMBER_ID, "frontend_id")
