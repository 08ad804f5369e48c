"""Converts SGLang's load snapshots to loads. Pure; no SGLang import."""

from __future__ import annotations

from typing import Protocol

from common.kv.load import Load


class HandoffQueues(Protocol):
    """Handoff queues of a rank; see SGLang's `DisaggregationMetrics`."""

    prefill_bootstrap_queue_reqs: int
    prefill_inflight_queue_reqs: int
    decode_prealloc_queue_reqs: int
    decode_transfer_queue_reqs: int


class QueueMetrics(Protocol):
    """See SGLang's `QueueMetrics`. prealloc_ready: decode legs that wait only for KV pages."""

    prealloc_ready: int


class LoadSnapshot(Protocol):
    """The used fields of SGLang's `LoadSnapshot`. timestamp: of the snapshot, in Unix seconds."""

    timestamp: float
    dp_rank: int
    num_running_reqs: int
    num_waiting_reqs: int
    num_waiting_uncached_tokens: int
    num_used_tokens: int
    max_total_num_tokens: int
    total_prefill_uncached_tokens: int
    disaggregation: HandoffQueues | None
    queues: QueueMetrics | None


def to_load(snapshot: LoadSnapshot, block_size: int, chunks: int) -> Load:
    """Returns the load of one rank.

    chunks: number of chunks this rank has sent. engine_step is chunks + computed prompt tokens:
    SGLang does not publish its step count, but each step increases one of the two.
    """
    queues = snapshot.disaggregation
    return Load(
        engine_step=chunks + snapshot.total_prefill_uncached_tokens,
        running=snapshot.num_running_reqs,
        waiting=snapshot.num_waiting_reqs,
        waiting_tokens=snapshot.num_waiting_uncached_tokens,
        kv_used_blocks=-(-snapshot.num_used_tokens // block_size),
        kv_total_blocks=snapshot.max_total_num_tokens // block_size or None,
        dp_rank=snapshot.dp_rank,
        prefill_tokens=snapshot.total_prefill_uncached_tokens,
        rooms_open=0
        if queues is None
        else queues.prefill_bootstrap_queue_reqs
        + queues.prefill_inflight_queue_reqs
        + queues.decode_prealloc_queue_reqs
        + queues.decode_transfer_queue_reqs,
    )


def count_waiting_for_pages(snapshot: LoadSnapshot) -> int:
    """Returns the number of decode legs of one rank that wait for KV pages."""
    return 0 if snapshot.queues is None else snapshot.queues.prealloc_ready
