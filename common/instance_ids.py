"""Ids of instances (pure)."""

from __future__ import annotations

from typing import Final

# 2^63: ids are positive and signed.
INSTANCE_ID_LIMIT: Final = 2**63
# Ids of instances with a key (`common/runtime/member_key.py`). As other ids of processes, they are
# from 2^53 on, so that logs write them as text.
MEMBER_IDS: Final = range(2**53, 2**53 + 2**50)
