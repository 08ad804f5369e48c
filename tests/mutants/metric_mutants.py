"""Defects of the metrics of HTTP requests (S3), and the rows whose tests must find them."""

from __future__ import annotations

from tests.mutants.mutant import mutant

_FAMILIES = "frontend_svc/metrics/families.py"
_ROUTES = "frontend_svc/routes/table.py"
_HANDLERS = "frontend_svc/routes/handlers.py"
_APP = "frontend_svc/app.py"

METRIC_MUTANTS = (
    mutant("S3-06", _FAMILIES, "Total number of LLM requests processed", "Requests"),
    mutant("S3-23 S3-24", _FAMILIES, "self.status = Status.ERROR", "self.status = Status.SUCCESS"),
    mutant("S3-22 S3-25", _FAMILIES, "self.metrics.dec_inflight_gauge(self.model)", "pass"),
    mutant("S3-09", _FAMILIES, "(0, 1, 2, 4, 8, 16, 32, 64, 128, 256)", "(0, 1, 2, 4, 8)"),
    mutant(
        "S3-45",
        _FAMILIES,
        "return model if model in served else OTHER_MODEL",
        "return model",
    ),
    mutant(
        "S3-26",
        _FAMILIES,
        "self.metrics.observe_duration(self.model, self._clock() - self.timer)",
        "self.metrics.observe_duration(self.model, 1000 * (self._clock() - self.timer))",
    ),
    mutant("S3-41", _FAMILIES, "            self._model.queued.dec()\n", "            pass\n"),
    mutant(
        "S3-42",
        _FAMILIES,
        "        self._model.disconnected.inc()\n",
        "        pass\n",
    ),
    mutant("S3-42", "frontend_svc/pooling/endpoint.py", "meter.mark_disconnected()", "pass"),
    mutant(
        "S3-40",
        _FAMILIES,
        "self._model.itl.observe(gap_s / count, count)",
        "self._model.itl.observe(gap_s, count)",
    ),
    mutant(
        "S3-22 S3-23",
        "frontend_svc/generation/worker_requests.py",
        "    if outcome.error is None:\n",
        "    if True:\n",
    ),
    mutant(
        "S3-46",
        "frontend_svc/processes/metric_sums.py",
        "return [family for family in families if family[1] in MONOTONIC]",
        "return list(families)",
    ),
    mutant(
        "S3-38",
        _ROUTES,
        "permission=Permission.ADMIN,\n    serves_head=False",
        "permission=Permission.ADMIN,\n    serves_head=True",
    ),
    mutant(
        "S3-36 S3-37",
        _HANDLERS,
        'b"Failed to encode metrics", 500',
        'b"Failed to encode metrics", 200',
    ),
    # Names and labels.
    mutant("S3-01 S3-31", _FAMILIES, 'SUCCESS = "success"', 'SUCCESS = "ok"'),
    mutant("S3-02 S3-31", _FAMILIES, 'ERROR = "error"', 'ERROR = "failure"'),
    mutant("S3-03 S3-30", _FAMILIES, 'STREAM = "stream"', 'STREAM = "streamed"'),
    mutant("S3-04 S3-30", _FAMILIES, 'UNARY = "unary"', 'UNARY = "whole"'),
    mutant("S3-05 S3-10", _FAMILIES, 'LEGACY_PREFIX = "nv_llm"', 'LEGACY_PREFIX = "llm"'),
    mutant("S3-07", _FAMILIES, '"Number of inflight requests"', '"Requests"'),
    mutant("S3-08", _FAMILIES, '"Duration of LLM requests"', '"Duration"'),
    mutant(
        "S3-19",
        _FAMILIES,
        "RequestType.STREAM if streaming else RequestType.UNARY",
        "RequestType.UNARY if streaming else RequestType.STREAM",
    ),
    mutant("S3-27", _ROUTES, 'label="completions"', 'label="completion"'),
    mutant("S3-28", _ROUTES, 'label="chat_completions"', 'label="chat"'),
    mutant(
        "S3-29",
        "frontend_svc/endpoints/request_log.py",
        '"endpoint": context.route.label',
        '"endpoint": context.route.path',
    ),
    mutant("S3-44", _FAMILIES, "failures(*labels, self._error_type)", 'failures(*labels, "")'),
    # Counts.
    mutant(
        "S3-12",
        _FAMILIES,
        "self._requests_child(model, endpoint, request_type, status).inc()",
        "self._requests_child(model, endpoint, request_type, status).inc(2)",
    ),
    mutant("S3-14 S3-20", _FAMILIES, "self._inflight_child(model).inc()", "pass"),
    mutant("S3-17 S3-21", _FAMILIES, "self._guard.mark_ok()", "pass"),
    mutant(
        "S3-43",
        "frontend_svc/metrics/collectors.py",
        "(self.SUMS, sum, ",
        "(self.SUMS, max, ",
    ),
    # The registry and the scrape.
    mutant(
        "S3-15",
        _FAMILIES,
        'raise Conflict(f"metrics are registered already: {error}") from error',
        "pass",
    ),
    mutant(
        "S3-16 S3-35",
        _APP,
        "        metrics = CollectorRegistry()\n",
        "        from prometheus_client import REGISTRY as metrics\n",
    ),
    mutant(
        "S3-32",
        "frontend_svc/config.py",
        '[A-Za-z0-9._/-]+$")] = "/metrics"',
        '[A-Za-z0-9._/-]+$")] = "/scrape"',
    ),
    mutant(
        "S3-33 S3-34", _ROUTES, "metrics = replace(METRICS, path=metrics_path)", "metrics = METRICS"
    ),
    mutant("S3-39", _APP, 'legacy=families != "current"', "legacy=True"),
)
