"""Load of a worker rank. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from common.streams.silence import SUBSCRIBE

# A worker sends an unchanged load this often; a changed one at the next sample, 0.1 s.
LOAD_HEARTBEAT_S = SUBSCRIBE.heartbeat_s
# An older load does not count: two heartbeats were missed.
LOAD_MAX_AGE_S = SUBSCRIBE.limit_s


@dataclass(frozen=True, slots=True)
class Load:
    """Load of one rank in counts; fields: `kvmesh/types/v1/load.proto`."""

    engine_step: int = 0
    running: int = 0
    waiting: int = 0
    waiting_tokens: int = 0
    kv_used_blocks: int = 0
    kv_total_blocks: int | None = None
    dp_rank: int = 0
    rooms_open: int = 0
    prefill_tokens: int = 0
    step_limit_ms: int = 0
