"""Defects in what a field of a request does (S2), and the rows whose tests must find them."""

from __future__ import annotations

from tests.mutants.mutant import mutant

_BODY = "frontend_svc/openai/body/preprocessing.py"
_NVEXT = "frontend_svc/openai/body/nvext.py"
_MACHINE = "frontend_svc/request/machine.py"
_MEDIA = "frontend_svc/media/prompt.py"
_CODECS = "common/request/preprocessed/codecs.py"
_REQUEST = "common/request/preprocessed/request.py"
_ELIGIBILITY = "router_svc/core/eligibility.py"
_JOBS = "worker_svc/engines/sim/jobs.py"
_SERVICE = "worker_svc/serving/service.py"
_CONTRACT = "worker_svc/engines/contract.py"
_WORKER_SPAN = "worker_svc/tracing.py"

REQUEST_MUTANTS = (
    # Placement.
    mutant(
        "S2-05 S1-20",
        _BODY,
        "backend_instance_id=nvext.backend_instance_id",
        "backend_instance_id=None",
    ),
    mutant("S2-06", _ELIGIBILITY, "return routing.prefill_worker_id", "return None"),
    mutant(
        "S2-07", _ELIGIBILITY, "return decode if backend is None else backend", "return backend"
    ),
    mutant(
        "S2-08",
        _ELIGIBILITY,
        'rank_field = "prefill_dp_rank" if leg == "prefill" else "dp_rank"',
        'rank_field = "prefill_dp_rank"',
    ),
    mutant("S2-08", _BODY, " dp_rank=nvext.dp_rank", " dp_rank=None"),
    mutant("S2-09", _BODY, "prefill_dp_rank=nvext.prefill_dp_rank", "prefill_dp_rank=None"),
    mutant("S2-10", _BODY, "expected_output_tokens=agent.osl", "expected_output_tokens=None"),
    mutant(
        "S2-11 S1-68",
        "worker_svc/engines/sim/block_manager.py",
        "lora=lora_name, salt=salt",
        'lora="", salt=salt',
    ),
    mutant(
        "S2-12",
        _BODY,
        "priority_jump=None if priority is None else float(max(0, priority))",
        "priority_jump=None",
    ),
    mutant("S2-12 S2-13", _BODY, "else -request.priority", "else request.priority"),
    mutant(
        "S2-14",
        _BODY,
        "allowed_worker_ids=None if allowed is None else frozenset(allowed)",
        "allowed_worker_ids=None",
    ),
    mutant(
        "S2-15 S2-88",
        _ELIGIBILITY,
        "lambda c: taints <= c.instance.taints",
        "lambda c: not taints.isdisjoint(c.instance.taints)",
    ),
    mutant("S2-15 S2-88", _BODY, "preferred_taints=preferred or {}", "preferred_taints={}"),
    mutant(
        "S2-16 S2-89",
        "router_svc/core/sessions.py",
        "            control.action is SessionAction.OPEN\n            or any(",
        "            any(",
    ),
    mutant(
        "S2-17",
        "frontend_svc/openai/body/fields.py",
        "Field(ge=0, le=2**64 - 1)",
        "Field(ge=0, le=2**53)",
    ),
    mutant(
        "S2-44",
        _BODY,
        "return None if hints == _NO_ROUTING_HINTS else hints",
        "return None",
    ),
    mutant("S2-45 S2-86", _BODY, "=_router_override(nvext)", "=None"),
    mutant(
        "S2-86 S1-42",
        "router_svc/core/cost.py",
        "credit = 0.0 if legacy_scale == 0 else credit",
        "pass",
    ),
    mutant(
        "S2-63",
        _BODY,
        'cache_salt=top_level_or_nvext(request, "cache_salt")',
        "cache_salt=nvext.cache_salt",
    ),
    # Handoff, retries and their trace.
    mutant("S2-18 S2-48", _JOBS, "return (info.bootstrap_host, info", 'return ("x y", info'),
    mutant("S2-19 S2-48", _JOBS, "info.bootstrap_port), info", "1), info"),
    mutant(
        "S2-19",
        _CODECS,
        "U16: TypeAlias = Annotated[int, IntegerCodec(0, 2**16 - 1)]",
        "U16: TypeAlias = Annotated[int, IntegerCodec(0, 2**32 - 1)]",
    ),
    mutant("S2-20 S2-48", _JOBS, "_port), info.bootstrap_room", "_port), 0"),
    mutant("S2-21 S2-47", _WORKER_SPAN, "links.append(link)", "pass"),
    mutant(
        "S2-22 S2-23",
        "common/runtime/telemetry.py",
        'f"00-{trace_id}-{span_id}-01"',
        'f"00-{span_id}{span_id}-{trace_id[:16]}-01"',
    ),
    mutant(
        "S2-24",
        "common/runtime/telemetry.py",
        "return None if context is None else trace.Link(_span_context(context))",
        "return trace.Link(_span_context(context))",
    ),
    mutant("S2-25 S2-47", _MACHINE, "self._linked_span_id = last.span_id\n", "pass\n"),
    mutant("S2-25 S2-47", _MACHINE, "self._linked_span_id = leg.span_id  #", "pass  #"),
    mutant(
        "S2-26 S2-46",
        _CONTRACT,
        "return PrefillResult(self.disaggregated_params, details)",
        "return PrefillResult({}, details)",
    ),
    mutant(
        "S2-27 S2-90",
        _CONTRACT,
        "return PrefillResult(self.disaggregated_params, details)",
        "return PrefillResult(self.disaggregated_params)",
    ),
    mutant(
        "S2-27 S2-90",
        "worker_svc/serving/runner.py",
        "return terminal.with_usage(replace(counts, prompt_tokens_details=details))",
        "return terminal",
    ),
    # Media.
    mutant(
        "S2-28 S2-37 S1-30",
        _MEDIA,
        "routing_token_ids=with_media(request.token_ids, hashes)",
        "routing_token_ids=request.token_ids",
    ),
    mutant(
        "S2-29 S2-87",
        _MEDIA,
        "block_mm_infos=block_media(request.token_ids, hashes, block_size)",
        "block_mm_infos=()",
    ),
    mutant("S2-64", _REQUEST, "if info is not None and info.routing_token_ids:", "if False:"),
    mutant(
        "S2-30",
        "common/request/preprocessed/media.py",
        "if not is_absolute or any(",
        "if any(",
    ),
    mutant("S2-32 S2-36", _JOBS, "for index, item in enumerate(items):", "for index, item in ():"),
    # The request.
    mutant(
        "S2-42",
        "worker_svc/serving/runner.py",
        "if checksum and checksum != self.card_checksum:",
        "if False:",
    ),
    mutant(
        "S2-33",
        "worker_svc/serving/runner.py",
        'if model and self.model not in ("", model)',
        'if self.model not in ("", model)',
    ),
    mutant(
        "S2-34 S2-91",
        "common/wire/preprocessed.py",
        "return TokenIds.of(message.token_ids)",
        "return TokenIds()",
    ),
    mutant(
        "S2-04 S2-34",
        _CODECS,
        "        elif field.required:\n",
        "        else:\n",
    ),
    mutant(
        "S2-57",
        _CODECS,
        "    fields: dict[str, object] = {}\n",
        "    fields: dict[str, object] = {}\n"
        "    if value.keys() - {field.key for field in wire_fields(cls)}:\n"
        '        raise invalid_value(path, "an object", value)\n',
    ),
    mutant(
        "S2-91",
        "common/request/preprocessed/token_ids.py",
        "TOKEN_ID_MAX = 2**32 - 1",
        "TOKEN_ID_MAX = 2**40",
    ),
    mutant("S2-38 S2-81", _BODY, "min_tokens=request.min_tokens", "min_tokens=None"),
    mutant("S2-39 S2-82", _BODY, "logit_bias=bias", "logit_bias={}"),
    mutant("S2-40 S2-83", _BODY, "logprobs=request.alternatives,", "logprobs=None,"),
    mutant(
        "S2-41",
        "worker_svc/engines/stop_tokens.py",
        "*request.eos_token_ids",
        "*()",
    ),
    mutant("S2-43", _BODY, "annotations=tuple(nvext.annotations or ())", "annotations=()"),
    mutant("S2-49", _BODY, "extra_args=nvext.extra_args", "extra_args=None"),
    mutant("S2-51 S2-84", _BODY, "=_agent_context(nvext)", "=None"),
    mutant("S2-53", _BODY, "=nvext.request_timestamp_ms", "=None"),
    mutant(
        "S2-54",
        _REQUEST,
        "compare=False, repr=False, metadata=LOCAL)",
        "compare=False, repr=False)",
    ),
    mutant("S2-80", _REQUEST, "self.marks.setdefault(point, now)", "pass"),
    # Annotations.
    mutant(
        "S2-58",
        _REQUEST,
        "        return annotation in self.annotations\n\n    def get_annotation_value",
        "        return any(annotation in one for one in self.annotations)\n\n"
        "    def get_annotation_value",
    ),
    mutant("S2-59", _REQUEST, 'annotation.split(":", 1)[1]', 'annotation.split(":")[1]'),
    mutant(
        "S2-60 S2-61",
        _REQUEST,
        'if annotation.startswith(f"{key}:"):',
        "if annotation.startswith(key):",
    ),
    # Embeddings.
    mutant(
        "S2-65",
        _SERVICE,
        "token_ids=embedding.token_ids[index]",
        "token_ids=embedding.token_ids[0]",
    ),
    mutant("S2-66", _SERVICE, "model=embedding.model", 'model=""'),
    mutant("S2-67", _SERVICE, 'if embedding.encoding_format == "base64":', "if False:"),
    mutant(
        "S2-68",
        _SERVICE,
        "shorten(run.result(), embedding.dimensions)",
        "shorten(run.result(), None)",
    ),
    mutant("S2-69", _SERVICE, "card_checksum=embedding.card_checksum", "card_checksum=None"),
    mutant(
        "S2-70 S2-72",
        _REQUEST,
        "    annotations: tuple[str, ...]\n",
        "    annotations: tuple[str, ...] = ()\n",
    ),
    mutant(
        "S2-71", _SERVICE, "is_named = embedding.has_annotation(_REQUEST_ID)", "is_named = False"
    ),
    # Probes.
    mutant(
        "S2-73",
        _REQUEST,
        '{"rule": "skip", "key": "_HEALTH_CHECK"}',
        '{"rule": "always", "key": "_HEALTH_CHECK"}',
    ),
    mutant(
        "S2-74",
        _REQUEST,
        "is_probe: bool = field(default=False",
        "is_probe: bool = field(default=True",
    ),
    mutant("S2-75 S2-76", _REQUEST, '"key": "_HEALTH_CHECK"', '"key": "is_probe"'),
    mutant("S2-77", "worker_svc/serving/probe.py", "        is_probe=True,\n", ""),
    mutant(
        "S2-78",
        _JOBS,
        'if request.is_probe or self.config.handoff.role == "decode":',
        'if self.config.handoff.role == "decode":',
    ),
    mutant(
        "S2-55 S2-79",
        _JOBS,
        "if request.is_probe:\n            return Job(",
        "if False:\n            return Job(",
    ),
)
