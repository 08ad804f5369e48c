"""Alerts on batches: not run, without progress."""

from __future__ import annotations

from tools.dashboards.alerts.model import Alert, Example, counter, gauge

_FAULT_MIN, _AFTER_MIN = 90, 60

ALERTS = (
    Alert(
        "BatchesNotRun",
        "max(kvmesh_batch_has_lease) == 0",
        "2m",
        "ticket",
        "No batch service runs the lines of batches",
        "None of the services can take the lease in their database, so no line is sent. Clients may"
        " still upload files and create batches, if the database responds to them.",
        (
            "The log of the services: `batch_database_lost`, `batch_lease_not_renewed`.",
            "`meshctl batches`: the runner, and the batches that have not ended.",
        ),
        (
            "Repair the database, or its disk. The batches go on by themselves then.",
            "If it responds: its clock, and that of the service, must run.",
        ),
        Example((gauge('kvmesh_batch_has_lease{instance="batch-0"}', 1, 0),), {}),
    ),
    Alert(
        "BatchesStall",
        "sum(kvmesh_batch_running) > 0"
        ' and sum(rate(kvmesh_batch_lines_total{outcome=~"completed|failed"}[15m])) == 0',
        "30m",
        "ticket",
        "No line of a batch has ended for 45 minutes",
        "Lines wait for workers without requests of users. After 24 hours the rest of a batch ends"
        " with `batch_expired`.",
        (
            '`kvmesh_batch_lines_total{outcome="retried"}`: are lines refused, or only late?',
            "The dashboard *workers*: is any worker idle at all?",
            "`meshctl status`: is a router there, and a worker of the model of the lines?",
        ),
        (
            "Start workers, or the router or model that is missing.",
            "If users leave no capacity: raise `--background-load-share` and"
            " `--background-prefill-share` of the routers.",
        ),
        Example(
            (
                gauge('kvmesh_batch_running{instance="batch-0"}', 1, 1),
                counter('kvmesh_batch_lines_total{instance="batch-0", outcome="completed"}', 60, 0),
            ),
            {},
            fault_min=_FAULT_MIN,
            after_min=_AFTER_MIN,
        ),
    ),
    Alert(
        "BatchResultsUnwritten",
        "max by (instance) (kvmesh_batch_results_unwritten) > 1000",
        "5m",
        "ticket",
        "{{ $labels.instance }} cannot write the results of lines",
        "The database is slower than the lines. At 4,096 results no more lines are sent; results"
        " that are not written when the process ends are computed again.",
        (
            "The log of the service: `batch_database_lost`.",
            "Processor, disk and locks of the database.",
        ),
        ("Give the database a faster disk, or lower `--lines-in-flight`.",),
        Example(
            (gauge('kvmesh_batch_results_unwritten{instance="batch-0"}', 10, 3000),),
            {"instance": "batch-0"},
        ),
    ),
)
