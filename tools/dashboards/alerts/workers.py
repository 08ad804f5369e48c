"""Alerts on workers, handoffs and the index of their caches."""

from __future__ import annotations

from tools.dashboards.alerts.model import Alert, Example, counter, gauge

_INFO = "max by (job, instance, role, model) (kvmesh_instance_info)"

ALERTS = (
    Alert(
        "WorkerFails",
        'max by (instance) (kvmesh_frontend_open_circuits{cause=~"failing|hung"}) > 0',
        "10s",
        "ticket",
        "{{ $labels.instance }} sends no requests to workers that fail or hang",
        "Workers fail more requests than their peers, fail their own probe, or take no steps."
        " Their requests continue on others.",
        (
            "`degraded` of `/ready`, or `meshctl doctor` (`engine_failing`): which workers.",
            "The log of the worker: `worker_engine_fails`, `invalid_output`, `request_stalled`.",
        ),
        ("`meshctl restart --wait NAME`. If it fails again, check accelerator and engine log.",),
        Example(
            (gauge('kvmesh_frontend_open_circuits{instance="frontend-0", cause="failing"}', 0, 1),),
            {"instance": "frontend-0"},
        ),
    ),
    Alert(
        "EngineFails",
        "max by (instance) (kvmesh_worker_engine_failing) > 0",
        "30s",
        "ticket",
        "The engine of {{ $labels.instance }} fails its probes",
        "The worker is NOT_SERVING, and peers leave it.",
        ("As for WorkerFails.",),
        ("As for WorkerFails.",),
        Example(
            (gauge('kvmesh_worker_engine_failing{instance="worker-0"}', 0, 1),),
            {"instance": "worker-0"},
        ),
    ),
    Alert(
        "KvFull",
        "min by (role, model) ((kvmesh_worker_kv_used_blocks / (kvmesh_worker_kv_total_blocks > 0))"
        f" * on (job, instance) group_left (role, model) {_INFO}) > 0.95",
        "5m",
        "ticket",
        "All {{ $labels.role }} workers of {{ $labels.model }} use more than 95 % of their KV",
        "Running requests hold nearly all blocks: engines preempt, and new prompts wait.",
        ("The dashboard *workers*: KV blocks in use, requests that wait.",),
        ("Add workers of the role, or reduce `max_num_seqs` or the context length.",),
        Example(
            (
                gauge('kvmesh_worker_kv_used_blocks{job="kvmesh", instance="w"}', 10, 99),
                gauge('kvmesh_worker_kv_total_blocks{job="kvmesh", instance="w"}', 100, 100),
                gauge(
                    'kvmesh_instance_info{job="kvmesh", instance="w", role="decode", model="sim"}',
                    1,
                    1,
                ),
            ),
            {"role": "decode", "model": "sim"},
        ),
    ),
    Alert(
        "HandoffsFail",
        "sum by (reason) (increase(kvmesh_worker_handoff_failures_total[5m])) > 5",
        "0s",
        "ticket",
        "Handoffs of KV fail: {{ $labels.reason }}",
        "Requests start again with another pair, or end. `handoff_no_blocks`: decode has no free"
        " KV. `handoff_no_partner`, `handoff_peer_lost`: the other worker died or cannot be"
        " reached. `handoff_mismatch`: the workers of a group differ.",
        (
            "The dashboard *handoff*, row *Transfer*: which side reports it.",
            "The bootstrap address of prefill workers from the host of decode workers.",
        ),
        (
            "`handoff_no_blocks`: add decode workers. `handoff_mismatch`: give the groups different"
            " names (`--transfer-group`). Otherwise repair the network or the lost worker.",
        ),
        Example(
            (
                counter(
                    "kvmesh_worker_handoff_failures_total"
                    '{instance="decode-0", reason="handoff_peer_lost"}',
                    0,
                    4,
                ),
            ),
            {"reason": "handoff_peer_lost"},
        ),
    ),
    Alert(
        "IndexDegraded",
        "max by (instance, state)"
        ' (kvmesh_router_index_sources{state=~"degraded|gapped|stale"}) > 0',
        "1m",
        "ticket",
        "The index of {{ $labels.instance }} is {{ $labels.state }} for some workers",
        "Routers miss cache hits of these workers. `degraded`: only a part of their blocks;"
        " `gapped`: events are missing and their blocks do not count; `stale`: they are silent.",
        (
            "`meshctl doctor`: `index_degraded`, `index_source_inexact` name worker and cause.",
            "The dashboard *index*: gaps, overflows, memory.",
        ),
        (
            "Events lost: flush the cache (AdminService/FlushCache) or restart the worker. Stale:"
            " see ScrapeFails.",
        ),
        Example(
            (gauge('kvmesh_router_index_sources{instance="router-0", state="degraded"}', 0, 1),),
            {"instance": "router-0", "state": "degraded"},
        ),
    ),
    Alert(
        "IndexFull",
        "max by (instance) (kvmesh_indexer_used_bytes / (kvmesh_indexer_budget_bytes > 0)) > 0.85",
        "5m",
        "ticket",
        "The index of {{ $labels.instance }} has nearly used up its memory",
        "Above its budget the indexer makes workers withdraw their deepest blocks: routers miss"
        " cache hits of long prompts.",
        (
            "The dashboard *index*: memory and blocks. `meshctl doctor`: `index_full`.",
            "The log of the indexer: `over_budget`.",
        ),
        ("Raise `--budget-mb` of the indexers; a block takes about 110 bytes.",),
        Example(
            (
                gauge('kvmesh_indexer_used_bytes{instance="indexer-0"}', 5e8, 9.5e8),
                gauge('kvmesh_indexer_budget_bytes{instance="indexer-0"}', 1e9, 1e9),
            ),
            {"instance": "indexer-0"},
        ),
    ),
    Alert(
        "IndexNotFollowed",
        "min by (instance) (kvmesh_router_index_connected) == 0"
        ' and on () max(kvmesh_frontend_members{role="indexer"}) > 0',
        "30s",
        "ticket",
        "{{ $labels.instance }} follows no indexer, although one is registered",
        "The router places by the last state of the index, which ages; then without it.",
        (
            "`meshctl doctor`: `index_not_followed`, `member_stopped`.",
            "The log of the router: `indexer_lost`.",
        ),
        ("Restart the indexer if it hangs; check that the router reaches its stream port.",),
        Example(
            (
                gauge('kvmesh_router_index_connected{instance="router-0"}', 1, 0),
                gauge('kvmesh_frontend_members{role="indexer"}', 1, 1),
            ),
            {"instance": "router-0"},
        ),
    ),
    Alert(
        "HitsDrift",
        "max by (model, worker) (kvmesh_frontend_kv_degraded) > 0",
        "2m",
        "ticket",
        "Predicted and actual cached tokens of {{ $labels.worker }} ({{ $labels.model }}) differ",
        "No request fails, but requests are slow: events of the worker are lost, or the members"
        " compute different hashes.",
        (
            "The dashboard *routing*, row *Cache*: since when, all workers or one.",
            "`meshctl doctor`: `index_drift`, `hashes_differ`.",
        ),
        (
            "One worker: restart it. All: give all members the same `KVMESH_MESH_KEY`, block size"
            " and version.",
        ),
        Example(
            (gauge('kvmesh_frontend_kv_degraded{model="sim", worker="worker-0"}', 0, 1),),
            {"model": "sim", "worker": "worker-0"},
        ),
    ),
    Alert(
        "IndexGaps",
        "sum by (instance) (increase(kvmesh_indexer_gaps_total[10m])) > 10",
        "0s",
        "ticket",
        "Events of KV caches do not reach {{ $labels.instance }} in order",
        "Each gap is repaired, but meanwhile blocks of the worker do not count.",
        ("The dashboard *index*, row *Streams*.", "Load of the host of the indexer."),
        ("Give the indexer a core; check the network between workers and indexer.",),
        Example(
            (counter('kvmesh_indexer_gaps_total{instance="indexer-0"}', 0, 4),),
            {"instance": "indexer-0"},
        ),
    ),
)
