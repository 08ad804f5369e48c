"""Defects of router and index (S1), and the rows whose tests must find them."""

from __future__ import annotations

from tests.mutants.mutant import mutant

_APPROX = "router_svc/core/approx_index.py"
_TRACKER = "router_svc/core/load_tracker.py"
_ROUTER = "router_svc/core/router.py"
_OVERLAP = "router_svc/core/overlap.py"
_ROUTER_APP = "router_svc/app.py"
_ROUTER_SERVICE = "router_svc/service.py"
_REPLICA = "router_svc/index_replica.py"
_INDEXER_SERVICE = "indexer_svc/service.py"

ROUTER_MUTANTS = (
    mutant(
        "S1-73",
        "router_svc/core/eligibility.py",
        "if (allowed := routing.allowed_worker_ids) is not None:",
        "if allowed := routing.allowed_worker_ids:",
    ),
    mutant(
        "S1-90",
        "router_svc/core/eligibility.py",
        "        if routing.lora_name:\n",
        "        if False:\n",
    ),
    mutant("S1-92", _TRACKER, "        return entry is not None\n", "        return True\n"),
    mutant(
        "S1-81",
        _ROUTER_SERVICE,
        "for message in frame.prefills_done:",
        "for message in ():",
    ),
    mutant(
        "S1-83",
        _TRACKER,
        "decode_blocks=booking.decode_blocks + blocks",
        "decode_blocks=booking.decode_blocks",
    ),
    mutant(
        "S1-83",
        _TRACKER,
        "decay=booking.decay if decay_fraction is None else decay_fraction",
        "decay=booking.decay",
    ),
    mutant("S1-91", _ROUTER_SERVICE, 'self._metrics.unclaimed("prefill_done")', "pass"),
    mutant(
        "S1-70",
        "router_svc/core/query.py",
        "if not cost_settings.track_active_blocks:",
        "if False:",
    ),
    mutant(
        "S1-42 S1-46 S1-48",
        _OVERLAP,
        "if overlap_score_credit == 0 and not uses_overlap_elsewhere:",
        "if False:",
    ),
    mutant(
        "S1-98",
        "router_svc/config.py",
        "ttl_s=self.router_ttl_secs",
        "ttl_s=2 * self.router_ttl_secs",
    ),
    mutant(
        "S1-99",
        _APPROX,
        "if self.blocks > self.limits.blocks_max:",
        "if self.blocks > 2 * self.limits.blocks_max:",
    ),
    mutant(
        "S1-100",
        _APPROX,
        "self.limits.prune_target_ratio * self.limits.blocks_max",
        "self.limits.blocks_max",
    ),
    mutant(
        "S1-50",
        _OVERLAP,
        "index.touch(query, placement, now)",
        "pass",
    ),
    mutant(
        "S1-04",
        _TRACKER,
        "replace(booking, prefill_tokens=0, revision=booking.revision + 1)",
        "replace(booking, revision=booking.revision + 1)",
    ),
    mutant(
        "S1-81",
        "frontend_svc/request/machine.py",
        "self._ports.prefill_done(attempt)",
        "pass",
    ),
    # The index.
    mutant(
        "S1-09 S1-19",
        "worker_svc/kv_events/event_log.py",
        "RING_BATCHES = 1024",
        "RING_BATCHES = 8",
    ),
    mutant(
        "S1-26",
        "common/kv/index_feed.py",
        "batch.sequence > entry.sequence + 1:",
        "batch.sequence > entry.sequence + 2:",
    ),
    mutant(
        "S1-54 S1-62 S1-96 S1-97 S1-103",
        _REPLICA,
        "SubscribeRequest(resume=resume, loads_only=self._loads_only)",
        "SubscribeRequest(resume=resume)",
    ),
    mutant("S1-08", _INDEXER_SERVICE, 'return self._match(request, "")', "raise KeyError"),
    mutant(
        "S1-49",
        _INDEXER_SERVICE,
        'raise NotFound(f"worker {worker_id} is not in the index", field="worker_id")',
        "return []",
    ),
    # Decisions.
    mutant(
        "S1-14 S1-65 S1-71 S1-104",
        "router_svc/core/cost.py",
        "        if override is None:\n            return self\n        credit,",
        "        if True:\n            return self\n        credit,",
    ),
    mutant("S1-18", "router_svc/core/decision.py", "make_bootstrap_info(at, attempt.rng)", "None"),
    mutant(
        "S1-21",
        _ROUTER,
        "        if not plan.is_blocked and not (may_wait and self.queue):\n",
        "        if True:\n",
    ),
    mutant(
        "S1-23 S1-86",
        _ROUTER,
        "return LoadTotals(tokens, blocks, requests + 1)",
        "return LoadTotals(tokens, blocks, requests)",
    ),
    mutant("S1-27 S1-43", _OVERLAP, "index = self.approximate\n", "index = None\n"),
    mutant("S1-52", _ROUTER, "self.overlaps.forget(instance.id)", "pass"),
    mutant(
        "S1-56 S1-57 S1-61 S1-63",
        _ROUTER_APP,
        "            index_settings=index_settings,\n            cost_settings",
        "            cost_settings",
    ),
    mutant(
        "S1-59",
        "router_svc/core/placement.py",
        "if not roles and self.fleet.has_snapshot and not",
        "if not roles and not",
    ),
    mutant(
        "S1-60 S1-107",
        "router_svc/fleet_watch.py",
        "        self._router.update(snapshot, self._clock(), changes)\n",
        "        if not self.first_snapshot.is_set() or len(changes.joined) > 1:\n"
        "            self._router.update(snapshot, self._clock(), changes)\n",
    ),
    mutant(
        "S1-39",
        "router_svc/core/fleet.py",
        "        self._snapshot = snapshot\n        self.has_snapshot = True\n",
        "        self._snapshot = snapshot\n        self.has_snapshot = True\n"
        "        if changes.changed:\n            return changes\n",
    ),
    mutant(
        "S1-95",
        _ROUTER,
        "        for instance in changes.joined:\n",
        "        for instance in changes.joined:\n"
        '            __import__("socket").create_connection(instance.address.split(":"))\n',
    ),
    # Sessions, calls and bookings.
    mutant(
        "S1-24 S1-34 S1-80 S1-82 S1-88",
        _TRACKER,
        "            self._drop(entry)\n        self.events.booking_changed(key)  #",
        "            pass\n        self.events.booking_changed(key)  #",
    ),
    mutant("S1-05", "router_svc/core/replication.py", "upserts.append(booking)", "pass"),
    mutant(
        "S1-66 S1-74",
        _ROUTER_SERVICE,
        "key = _key_of(request) if request.book else None",
        "key = None",
    ),
    mutant(
        "S1-67 S1-72",
        "router_svc/decisions.py",
        "            if message.token_ids:\n",
        "            if False:\n",
    ),
    mutant("S1-79", _ROUTER_SERVICE, "in frame.announced:", "in ():"),
    mutant(
        "S1-89 S1-105 S1-106",
        _ROUTER,
        "self.load_tracker.book(booking_of(key, query, decision, generation), session, now)",
        "pass",
    ),
    mutant(
        "S1-93",
        _ROUTER_SERVICE,
        "return router_pb2.NewResult(id=number, decision=decision)",
        "return router_pb2.NewResult(id=0, decision=decision)",
    ),
    mutant(
        "S1-94 S1-108",
        _ROUTER_SERVICE,
        "                return self._result(number, None, error)\n",
        "                raise\n",
    ),
    mutant(
        "S1-102",
        "router_svc/config.py",
        "router_ttl_secs: PositiveFloat",
        "router_ttl_secs: float",
    ),
    mutant(
        "S1-17",
        "router_svc/metrics.py",
        "for stage, spent in zip(self._overhead, seconds, strict=True):",
        "for stage, spent in ():",
    ),
    # Discovery.
    mutant(
        "S1-11 S1-12 S1-13",
        "common/registry/instances.py",
        "return EndpointId(self.namespace, self.service, ENDPOINT_NAME)",
        'return EndpointId(self.namespace, "worker", ENDPOINT_NAME)',
    ),
    # The index of a router.
    mutant("S1-69 S1-84 S1-85", _OVERLAP, "rows = self._index.match(query)", "rows = ()"),
    mutant(
        "S1-25",
        _REPLICA,
        "self.feed.mark_disconnected(source, now, reason)",
        "self.feed.forget(source, reason)",
    ),
    mutant("S1-51", "common/kv/index_feed.py", '"UNKNOWN_SOURCE"', '""'),
    mutant("S1-53", _REPLICA, 'else "no indexer was reached yet"', 'else ""'),
    mutant(
        "S1-47 S1-64",
        _ROUTER_APP,
        'lifecycle.spawn(self.index.run(), name="index replica")',
        "self._task = asyncio.create_task(self.index.run())",
    ),
    # Indexers and publishers.
    mutant(
        "S1-01",
        "worker_svc/serving/service.py",
        "loads=[load_to_proto(load) for load in self.runner.loads()]",
        "loads=[]",
    ),
    mutant(
        "S1-02 S1-32 S1-33 S1-37",
        _INDEXER_SERVICE,
        "            await ingest.run(ingest.feed.apply(batch, now))\n",
        "",
    ),
    mutant(
        "S1-03",
        "worker_svc/kv_events/publish_link.py",
        "self._loads = self._reported_loads = loads",
        "self._reported_loads = loads",
    ),
    mutant(
        "S1-10",
        "worker_svc/kv_events/publisher.py",
        "source = self.sources.get(event.rank)",
        "source = self.sources.get(0)",
    ),
    mutant("S1-15", "indexer_svc/app.py", '"indexer", config,', '"router", config,'),
    mutant(
        "S1-16",
        _INDEXER_SERVICE,
        'resume = [source_state_from_proto(state, "resume") for state in request.resume]',
        "resume = []",
    ),
    mutant(
        "S1-22",
        "indexer_svc/tools/record.py",
        "        self._add(indexer_pb2.RecordedMessage(received=received))\n",
        "",
    ),
    mutant("S1-28", "indexer_svc/metrics.py", "{state: counts[state] for", "{state: 0 for"),
    mutant(
        "S1-29",
        _INDEXER_SERVICE,
        "status=source_status_to_proto(feed.status(source)),",
        "status=None,",
    ),
    mutant(
        "S1-55",
        "common/kv/index_feed.py",
        "while (batch := entry.pop_batch(entry.sequence + 1)) is not None:",
        "while (batch := None) is not None:",
    ),
    mutant(
        "S1-87",
        _INDEXER_SERVICE,
        "snapshot_chunks(at, index.chunks(advertised))",
        "snapshot_chunks(at, iter(()))",
    ),
    # Hashes of other routers.
    mutant(
        "S1-31 S1-36 S1-38",
        "frontend_svc/tokenizing/preprocess.py",
        '"sequence_hashes": list(tokens.seq_hashes)',
        '"sequence_hashes": list(tokens.block_hashes)',
    ),
)
