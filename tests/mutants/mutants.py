"""Defects of one line each, and the rows whose tests must find them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Mutant:
    """A defect: in the file `path`, `old`, which occurs there exactly once, becomes `new`.

    rows: of each, at least one test must fail.
    """

    path: str
    old: str
    new: str
    rows: tuple[str, ...]

    @property
    def name(self) -> str:
        return f"{self.path}: {' '.join(self.new.split()) or 'removed'}"


def _mutant(rows: str, path: str, old: str, new: str) -> Mutant:
    return Mutant(path, old, new, tuple(rows.split()))


_INSTANCES = "common/registry/instances.py"
_MODEL_WATCH = "frontend_svc/models/model_watch.py"
_CATALOG = "frontend_svc/models/catalog.py"
_FAMILIES = "frontend_svc/metrics/families.py"
_ROUTES = "frontend_svc/routes/table.py"
_HANDLERS = "frontend_svc/routes/handlers.py"
_PREPROCESSING = "frontend_svc/openai/body/preprocessing.py"
_APPROX = "router_svc/core/approx_index.py"
_TRACKER = "router_svc/core/load_tracker.py"
_CONTRACT = "worker_svc/engines/contract.py"
_RUNNER = "worker_svc/serving/runner.py"

MUTANTS = (
    # Discovery.
    _mutant("S0-12", _INSTANCES, "{self.name}-{unsigned_id:x}", "{self.name}-{unsigned_id:016x}"),
    _mutant("S0-12", _INSTANCES, '.sub("_", text.lower())', '.sub("_", text)'),
    _mutant(
        "S0-05 S0-36",
        _MODEL_WATCH,
        "return self.model_type is EntryType.BACKEND",
        "return True",
    ),
    _mutant(
        "S0-30",
        _MODEL_WATCH,
        "if served is not None and served.entry not in self._entries.values():",
        "if served is not None:",
    ),
    _mutant(
        "S0-32",
        _MODEL_WATCH,
        "            del self.served[name]\n",
        "            rest = dict([*served.engines.items()][1:])\n"
        "            self.served[name] = Built(served.entry, rest)\n",
    ),
    _mutant(
        "S0-07",
        _MODEL_WATCH,
        'return f"cards/{entry.checksum}"',
        'return f"cards/{entry.name}"',
    ),
    _mutant(
        "S0-46",
        _MODEL_WATCH,
        "return [action for name in tuple(self.not_ready) for action in self._build_if_new(name)]",
        "return []",
    ),
    _mutant(
        "S0-08",
        _CATALOG,
        "card_missing(entry) if missing else card_unreadable(entry, error)",
        "card_missing(entry)",
    ),
    _mutant(
        "S0-31",
        _MODEL_WATCH,
        'return f"models/{instance.key}"',
        'return "models/" + instance.key.replace("models.", "")',
    ),
    _mutant(
        "S0-45",
        _MODEL_WATCH,
        "self.served[name] = Built(build.entry, engines)",
        "self.served[name] = Built(build.entry, dict([*engines.items()][:1]))",
    ),
    # HTTP metrics.
    _mutant("S3-06", _FAMILIES, "Total number of LLM requests processed", "Requests"),
    _mutant("S3-23", _FAMILIES, "self.status = Status.ERROR", "self.status = Status.SUCCESS"),
    _mutant("S3-22 S3-25", _FAMILIES, "self.metrics.dec_inflight_gauge(self.model)", "pass"),
    _mutant("S3-09", _FAMILIES, "(0, 1, 2, 4, 8, 16, 32, 64, 128, 256)", "(0, 1, 2, 4, 8)"),
    _mutant(
        "S3-45",
        _FAMILIES,
        "return model if model in served else OTHER_MODEL",
        "return model",
    ),
    _mutant(
        "S3-26",
        _FAMILIES,
        "self.metrics.observe_duration(self.model, self._clock() - self.timer)",
        "self.metrics.observe_duration(self.model, 1000 * (self._clock() - self.timer))",
    ),
    _mutant("S3-41", _FAMILIES, "            self._model.queued.dec()\n", "            pass\n"),
    _mutant(
        "S3-42",
        _FAMILIES,
        "        self._model.disconnected.inc()\n",
        "        pass\n",
    ),
    _mutant("S3-38", _ROUTES, "serves_head=False", "serves_head=True"),
    _mutant(
        "S3-36 S3-37",
        _HANDLERS,
        'b"Failed to encode metrics", 500',
        'b"Failed to encode metrics", 200',
    ),
    # Hints of HTTP requests.
    _mutant(
        "S2-05",
        _PREPROCESSING,
        "backend_instance_id=nvext.backend_instance_id",
        "backend_instance_id=None",
    ),
    _mutant(
        "S2-12",
        _PREPROCESSING,
        "priority_jump=None if priority is None else float(max(0, priority))",
        "priority_jump=None",
    ),
    # The router.
    _mutant(
        "S1-73",
        "router_svc/core/eligibility.py",
        "if (allowed := routing.allowed_worker_ids) is not None:",
        "if allowed := routing.allowed_worker_ids:",
    ),
    _mutant(
        "S1-90",
        "router_svc/core/eligibility.py",
        "        if routing.lora_name:\n",
        "        if False:\n",
    ),
    _mutant("S1-92", _TRACKER, "        return entry is not None\n", "        return True\n"),
    _mutant(
        "S1-81",
        "router_svc/service.py",
        "for message in frame.prefills_done:",
        "for message in ():",
    ),
    _mutant(
        "S1-83",
        _TRACKER,
        "decode_blocks=booking.decode_blocks + blocks",
        "decode_blocks=booking.decode_blocks",
    ),
    _mutant(
        "S1-83",
        _TRACKER,
        "decay=booking.decay if decay_fraction is None else decay_fraction",
        "decay=booking.decay",
    ),
    _mutant("S1-91", "router_svc/service.py", 'self._metrics.unclaimed("prefill_done")', "pass"),
    _mutant(
        "S1-70",
        "router_svc/core/query.py",
        "if not cost_settings.track_active_blocks:",
        "if False:",
    ),
    _mutant(
        "S1-42 S1-46",
        "router_svc/core/overlap.py",
        "if overlap_score_credit == 0 and not uses_overlap_elsewhere:",
        "if False:",
    ),
    _mutant(
        "S1-98",
        "router_svc/config.py",
        "ttl_s=self.router_ttl_secs",
        "ttl_s=2 * self.router_ttl_secs",
    ),
    _mutant(
        "S1-99",
        _APPROX,
        "while self.blocks > self.limits.blocks_max:",
        "while self.blocks > 2 * self.limits.blocks_max:",
    ),
    _mutant(
        "S1-100",
        _APPROX,
        "self.limits.prune_target_ratio * self.limits.blocks_max",
        "self.limits.blocks_max",
    ),
    # The index.
    _mutant(
        "S1-09", "worker_svc/kv_events/event_log.py", "RING_BATCHES = 1024", "RING_BATCHES = 8"
    ),
    _mutant(
        "S1-26",
        "common/kv/index_feed.py",
        "batch.sequence > entry.sequence + 1:",
        "batch.sequence > entry.sequence + 2:",
    ),
    _mutant(
        "S1-54 S1-62",
        "router_svc/index_replica.py",
        "SubscribeRequest(resume=resume, loads_only=self._loads_only)",
        "SubscribeRequest(resume=resume)",
    ),
    _mutant("S1-08", "indexer_svc/service.py", 'return self._match(request, "")', "raise KeyError"),
    _mutant(
        "S1-49",
        "indexer_svc/service.py",
        'raise NotFound(f"worker {worker_id} is not in the index", field="worker_id")',
        "return []",
    ),
    # The worker.
    _mutant("S4-07", _RUNNER, "active_request.ctx.notify_first_token()", "pass"),
    _mutant(
        "S4-06",
        _RUNNER,
        "asyncio.Event() if is_decode else None",
        "asyncio.Event()",
    ),
    _mutant("S4-33", _RUNNER, "if terminal.finish_reason is FinishReason.ERROR:", "if False:"),
    _mutant(
        "S2-42",
        _RUNNER,
        "if checksum and checksum != self.card_checksum:",
        "if False:",
    ),
    _mutant(
        "S4-19",
        _CONTRACT,
        "if self.bootstrap_host is None or self.bootstrap_port is None:",
        "if self.bootstrap_host is None:",
    ),
    _mutant("S4-10", _CONTRACT, "self.served_model_name or self.model", "self.model"),
    _mutant(
        "S4-35",
        _CONTRACT,
        'raise InternalError(f"request {request_id}: chunk after the terminal chunk")',
        "return",
    ),
    _mutant(
        "S4-57",
        "common/request/preprocessed/response.py",
        "min(prompt + completion, top)",
        "prompt + completion",
    ),
    _mutant("S4-40 S4-21", "worker_svc/app.py", "await self.engine.drain()", "pass"),
    _mutant("S4-47 S4-43", "worker_svc/app.py", "await self.engine.cleanup()", "pass"),
)
