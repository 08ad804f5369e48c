"""What clients of the HTTP API observe, and what frontends do to save requests."""

from __future__ import annotations

from tools.dashboards.model import Board, Panel, Query
from tools.dashboards.queries import of_instance, of_model, quantile, rate, total

_F = "kvmesh_frontend"
_SHARES = ((0.5, "p50"), (0.9, "p90"), (0.99, "p99"))


def _times(title: str, metric: str, text: str, *, exemplars: bool = False) -> Panel:
    """Returns the panel of a histogram of seconds."""
    selector = of_model(f"{_F}_{metric}_bucket")
    queries = (Query(quantile(share, selector), name, exemplars) for share, name in _SHARES)
    return Panel(title, "s", tuple(queries), text)


def _count(title: str, metric: str, label: str, text: str, empty: str = "") -> Panel:
    """Returns the panel of a counter by one label."""
    expr = total(rate(of_model(f"{_F}_{metric}_total")), label)
    return Panel(title, "ops", (Query(expr, f"{{{{{label}}}}}"),), text, empty=empty)


def _value(title: str, metric: str, text: str) -> Panel:
    """Returns the panel of a gauge of each frontend."""
    expr = f"max by (instance) ({of_instance(f'{_F}_{metric}')})"
    return Panel(title, "short", (Query(expr, "{{instance}}"),), text)


def _increase(title: str, metric: str, text: str) -> Panel:
    """Returns the panel of a counter of each frontend."""
    expr = total(rate(of_instance(f"{_F}_{metric}_total")), "instance")
    return Panel(title, "ops", (Query(expr, "{{instance}}"),), text)


LATENCY = (
    _times(
        "Time to first token",
        "time_to_first_token_seconds",
        "A point is a sampled request: it opens the trace.",
        exemplars=True,
    ),
    _times(
        "Duration of requests",
        "request_duration_seconds",
        "From the start to the end. A point is a sampled request: it opens the trace.",
        exemplars=True,
    ),
    _times("Time between tokens", "inter_token_latency_seconds", "Of all requests."),
    Panel(
        "Time to first token, distribution",
        "s",
        (
            Query(
                total(rate(of_model(f"{_F}_time_to_first_token_seconds_bucket")), "le"),
                "{{le}}",
            ),
        ),
        "Two bands are two kinds of requests: hits and misses of the cache, for example.",
        kind="heatmap",
    ),
)
REQUESTS = (
    _count("Requests ended", "requests", "endpoint", "By endpoint, all outcomes."),
    _count("Failures", "failures", "error_type", "Requests that failed, by type of error."),
    _count("Bodies refused", "refused_bodies", "code", "Requests that are wrong, by error code."),
    _count(
        "Clients that disconnect",
        "disconnected_clients",
        "model",
        "Before the end of their response.",
    ),
    Panel(
        "Length of prompts",
        "short",
        (
            Query(quantile(0.5, of_model(f"{_F}_input_sequence_tokens_bucket")), "p50"),
            Query(quantile(0.99, of_model(f"{_F}_input_sequence_tokens_bucket")), "p99"),
        ),
        "In tokens.",
    ),
    Panel(
        "Length of responses",
        "short",
        (
            Query(quantile(0.5, of_model(f"{_F}_output_sequence_tokens_bucket")), "p50"),
            Query(quantile(0.99, of_model(f"{_F}_output_sequence_tokens_bucket")), "p99"),
        ),
        "In tokens.",
    ),
)
RESILIENCE = (
    _increase("Attempts after the first", "retries", "Requests that another worker continues."),
    _increase("Retries refused", "retries_refused", "Beyond the retry budget after overload."),
    _increase("Placements without a router", "unrouted", "By the frontend's own load figures."),
    _value("Requests tried again", "rerouted_requests", "Without a token of the new attempt."),
    _value("Workers without requests", "excluded_workers", "Excluded by this frontend now."),
    Panel(
        "Open circuits",
        "short",
        (Query(f"max by (cause) ({of_instance(f'{_F}_open_circuits')})", "{{cause}}"),),
        "Of workers: lost, hung, or failing at requests.",
    ),
    Panel(
        "Requests that wait for a worker",
        "short",
        (Query(total(of_model(f"{_F}_model_awaiting_worker_requests"), "model"), "{{model}}"),),
        "No worker of their model can serve them: start one.",
        empty="a series appears when a request of a model waits, or for configured models",
    ),
    Panel(
        "Canaries that fail",
        "ops",
        (Query(total(rate(of_model(f"{_F}_canary_failures_total")), "stage"), "{{stage}}"),),
        "By what they did not get.",
        empty="no canary fails in a healthy mesh",
    ),
)
PROCESS = (
    Panel(
        "Delay of the event loop",
        "percentunit",
        (
            Query(
                rate(of_instance("kvmesh_event_loop_stalled_seconds_total")),
                "{{instance}}",
            ),
        ),
        "Share of the time in which the process did not run when it should. Above 0.1: too few"
        " processors, or a blocking call.",
    ),
    Panel(
        "Records lost",
        "ops",
        (
            Query(
                total(rate(of_instance(f"{_F}_records_dropped_total")), "instance", "file"),
                "{{instance}} {{file}}",
            ),
        ),
        "Of the audit log and the request trace.",
        empty="only with --audit-log or --request-trace",
    ),
    Panel(
        "Spans exported and lost",
        "ops",
        (
            Query(total(rate(of_instance("kvmesh_spans_exported_total"))), "exported"),
            Query(
                total(rate(of_instance("kvmesh_spans_dropped_total")), "endpoint"), "{{endpoint}}"
            ),
        ),
        "Of all services. Lost: the collector does not accept them.",
        empty="only with --otlp-endpoint",
    ),
    Panel(
        "Child processes that end",
        "ops",
        (
            Query(
                total(rate(of_instance("kvmesh_child_process_ends_total")), "instance", "kind"),
                "{{instance}} {{kind}}",
            ),
        ),
        "Of chat templates and trials: an input exceeded its limits.",
    ),
    Panel(
        "Memory",
        "bytes",
        (Query(of_instance("process_resident_memory_bytes"), "{{instance}}"),),
        "Of all processes, workers included.",
    ),
)

BOARD = Board(
    "frontend",
    "KVMesh: frontend",
    "Latency with exemplars, requests by outcome, retries and migrations.",
    {"Latency": LATENCY, "Requests": REQUESTS, "Resilience": RESILIENCE, "Processes": PROCESS},
)
