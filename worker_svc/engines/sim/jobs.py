"""Translates requests to jobs of the simulated scheduler. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from common.errors import InvalidRequest, PromptTooLong, Unavailable, Unsupported
from common.kv.hashing import PrefixHasher
from common.request.media import (
    PART_NAMES,
    MediaHashes,
    MediaInput,
    content_hash,
    read_data_url,
    with_media,
)
from common.request.preprocessed import (
    MediaUrl,
    PreprocessedRequest,
    SamplingOptions,
    TokenIds,
    unsupported_fields,
)
from worker_svc.engines.sim.config import SimConfig, SimModel
from worker_svc.engines.sim.constraint import Constraint, ConstraintCompiler
from worker_svc.engines.sim.logits import LogitChanges
from worker_svc.engines.sim.scheduler import Job
from worker_svc.engines.stop_tokens import TOKEN_STOP_CONDITIONS, stop_tokens_of

_PROBE_PRIORITY: Final = 2**31

SUPPORTED_FIELDS: Final = frozenset(
    {
        *(f"stop_conditions.{name}" for name in TOKEN_STOP_CONDITIONS),
        *("routing.lora_name", "routing.cache_salt"),
        *("output_options.logprobs", "output_options.prompt_logprobs"),
        *(f"sampling_options.{name}_penalty" for name in ("presence", "frequency", "repetition")),
        *(f"sampling_options.{name}" for name in ("temperature", "top_p", "top_k", "min_p")),
        *(f"sampling_options.{name}" for name in ("seed", "logit_bias", "prefix_tokens")),
        *(f"sampling_options.guided_decoding.{name}" for name in ("json", "regex", "choice")),
        *(f"sampling_options.guided_decoding.{name}" for name in ("grammar", "structural_tag")),
        "sampling_options.guided_decoding.whitespace_pattern",
        *(f"sampling_options.guided_decoding.{name}" for name in ("prefix_tokens", "best_effort")),
    }
)
# Fields that a probe may carry without effect; a decode leg has one of them.
_HANDOFF_FIELDS: Final = frozenset({"bootstrap_info", "prefill_result"})


@dataclass(frozen=True, slots=True)
class JobBuilder:
    """Builds the jobs of one engine. hashers: by loaded adapter, "" for the base model. media: that
    the model takes, by kind."""

    config: SimConfig
    eos_ids: tuple[int, ...]
    context_length: int
    hashers: dict[str, PrefixHasher]
    constraints: ConstraintCompiler
    vocab_size: int
    media: Mapping[str, MediaInput]

    @staticmethod
    def create(config: SimConfig, model: SimModel, cpu_time: Callable[[], float]) -> JobBuilder:
        """cpu_time: of the calling thread, in seconds."""
        context_length = config.context_length or model.context_length
        constraints = ConstraintCompiler(
            model.tokenizer_json, model.word_ids, model.eos_ids[0], cpu_time
        )
        builder = JobBuilder(
            config, model.eos_ids, context_length, {}, constraints, model.vocab_size, model.media
        )
        for lora in ("", *config.loras):
            builder.add_lora(lora)
        return builder

    def add_lora(self, name: str) -> frozenset[str]:
        """Adds an adapter. Returns all adapters."""
        self.hashers[name] = PrefixHasher(
            mesh_key=self.config.mesh_key,
            model=self.config.model,
            block_size=self.config.block_size,
            lora_name=name,
        )
        return frozenset(self.hashers) - {""}

    def remove_lora(self, name: str) -> frozenset[str]:
        """Removes an adapter. Returns all others."""
        del self.hashers[name]
        return frozenset(self.hashers) - {""}

    def build(
        self,
        request: PreprocessedRequest,
        priority: int | None,
        constraint: Constraint | None = None,
    ) -> Job:
        """Returns the job of a request. priority: its default. constraint: from `constraint`.

        Raises MeshError if rejected."""
        lora = self._check_fields(request, self.supported_fields)
        limit = self._max_output_tokens(request)
        stop = request.stop_conditions
        if stop.max_tokens == 0:
            raise InvalidRequest("max_tokens must be at least 1", "stop_conditions.max_tokens")
        salt = ""
        if (routing := request.routing) is not None:
            salt = routing.cache_salt or ""
            priority = priority if routing.priority is None else routing.priority
        if request.is_probe:
            return Job(request.token_ids.little_endian, 1, priority=_PROBE_PRIORITY)
        job = Job(
            self._prompt(request).little_endian,
            limit if stop.max_tokens is None else min(stop.max_tokens, limit),
            stops=stop_tokens_of(request, self.eos_ids),
            min_tokens=stop.min_tokens or 0,
            hasher=self._hasher(lora, salt),
            lora_name=lora,
            cache_salt=salt,
            priority=priority or 0,
            constraint=constraint,
            seed=seed_of(request.sampling_options),
            changes=self._logit_changes(request),
            logprobs=request.output_options.logprobs,
        )
        return self._job_for_role(request, job)

    def constraint(self, request: PreprocessedRequest) -> Constraint | None:
        """Returns the constraint of guided decoding, which takes up to seconds. Raises MeshError if
        the request is rejected."""
        guided, stop = request.sampling_options.guided_decoding, request.stop_conditions
        if guided is None:
            return None
        self._check_fields(request, self.supported_fields)
        for name in ("ignore_eos", "min_tokens"):
            if getattr(stop, name):
                message = f"{name} cannot be combined with guided decoding, which decides the end"
                raise InvalidRequest(message, f"stop_conditions.{name}")
        return self.constraints.compile(guided, request.token_ids.tolist())

    def build_embedding(self, request: PreprocessedRequest, priority: int | None) -> Job:
        """Returns the job that computes the prompt for its vector: apart from the prefix cache and,
        for every role, on this engine. Raises MeshError if rejected."""
        lora = self._check_fields(request, SUPPORTED_FIELDS)
        self._max_output_tokens(request)
        if request.routing is not None and request.routing.priority is not None:
            priority = request.routing.priority
        prompt = request.token_ids.little_endian
        return Job(prompt, 1, lora_name=lora, priority=priority or 0)

    def _hasher(self, lora: str, salt: str) -> PrefixHasher | None:
        """Returns the hasher of a request's blocks; None without a cache."""
        if not self.config.prefix_caching:
            return None
        return self.hashers[lora].salted(salt) if salt else self.hashers[lora]

    def _logit_changes(self, request: PreprocessedRequest) -> LogitChanges | None:
        """Returns the changes of the logits. Raises InvalidRequest."""
        options = request.sampling_options
        if options.logit_bias and (largest := max(options.logit_bias)) >= self.vocab_size:
            message = f"token {largest} is not in the vocabulary of {self.vocab_size}"
            raise InvalidRequest(message, "sampling_options.logit_bias")
        if (options.prefix_tokens or 0) > len(request.token_ids):
            message = f"prefix_tokens is above the {len(request.token_ids)} tokens of the prompt"
            raise InvalidRequest(message, "sampling_options.prefix_tokens")
        return LogitChanges.of(options, request.token_ids.array)

    @property
    def supported_fields(self) -> frozenset[str]:
        return SUPPORTED_FIELDS | {"multi_modal_data"} if self.media else SUPPORTED_FIELDS

    def _prompt(self, request: PreprocessedRequest) -> TokenIds:
        """Returns the prompt with the content of its media. Raises Unsupported or InvalidRequest.

        The content comes from the bytes, not from `mm_routing_info`, so the output shows which
        media arrived.
        """
        inputs = {PART_NAMES[kind]: media_input for kind, media_input in self.media.items()}
        media = []
        for part, items in request.multi_modal_data.items():
            name = f"multi_modal_data.{part}"
            if part not in inputs:
                raise Unsupported(name, "the model does not take it")
            hashes = []
            for index, item in enumerate(items):
                field = f"{name}[{index}]"
                if not isinstance(item, MediaUrl):
                    raise Unsupported(field, "the simulated engine takes data: URLs only")
                hashes.append(content_hash(read_data_url(item.url, field)[1]))
            if hashes:
                media.append(MediaHashes(inputs[part], hashes))
        return with_media(request.token_ids, media) if media else request.token_ids

    def _check_fields(self, request: PreprocessedRequest, supported: frozenset[str]) -> str:
        """Returns the adapter's name. Raises Unsupported or InvalidRequest."""
        if request.is_probe or self.config.handoff.role == "decode":
            supported |= _HANDOFF_FIELDS
        elif self.config.handoff.role == "prefill" and self.config.handoff.mode == "bootstrap":
            supported |= {"bootstrap_info"}
        if unsupported := unsupported_fields(request, supported):
            others = f" (nor are {', '.join(unsupported[1:])})" if unsupported[1:] else ""
            raise Unsupported(unsupported[0], f"not supported by the simulated engine{others}")
        routing = request.routing
        if routing is None:
            return ""
        if routing.dp_rank:
            raise InvalidRequest(
                f"unknown dp_rank {routing.dp_rank}; this worker has rank 0 only", "routing.dp_rank"
            )
        lora = routing.lora_name or ""
        if lora not in self.hashers:
            raise Unsupported("routing.lora_name", f"the adapter {lora!r} is not loaded here")
        return lora

    def _max_output_tokens(self, request: PreprocessedRequest) -> int:
        """Returns the limit of output tokens. Raises InvalidRequest or PromptTooLong."""
        prompt = len(request.token_ids)
        if prompt == 0:
            raise InvalidRequest("token_ids must not be empty", "token_ids")
        max_length = min(self.context_length, self.config.total_kv_blocks * self.config.block_size)
        if prompt >= max_length:
            raise PromptTooLong(
                f"prompt too long: {prompt}/{max_length - 1} tokens, with one left for the output",
                field="token_ids",
            )
        return max_length - prompt

    def _job_for_role(self, request: PreprocessedRequest, job: Job) -> Job:
        """Returns the job as this role runs it. Raises Unavailable if the role does not run it."""
        config = self.config.handoff
        match config.role:
            case "aggregated":
                return job
            case "prefill":
                is_completed = config.mode == "completed"
                if request.bootstrap_info is None and not (is_completed and job.max_tokens == 1):
                    raise Unavailable(
                        "a prefill worker accepts requests with bootstrap_info only",
                        reason="PREFILL_ONLY",
                    )
                return replace(job, max_tokens=1, is_handed_over=True)
            case _ if request.bootstrap_info or request.prefill_result:
                return replace(job, is_remote=True)
        if not config.local_prefill:
            raise Unavailable(
                "this decode worker computes no prompts; it needs a prefill result",
                reason="NO_LOCAL_PREFILL",
            )
        return job


def seed_of(options: SamplingOptions) -> int | None:
    """Returns the seed; None if the output does not depend on it."""
    return None if options.temperature == 0 else options.seed


def kv_location(request: PreprocessedRequest) -> tuple[tuple[str, int], int]:
    """Returns address and room of a decode leg's KV. Raises InvalidRequest."""
    info, result = request.bootstrap_info, request.prefill_result
    if info is not None:
        return (info.bootstrap_host, info.bootstrap_port), info.bootstrap_room
    field_path = "prefill_result.disaggregated_params"
    assert result is not None, "a decode leg has one of the two"
    params = result.disaggregated_params
    if not isinstance(params, dict):
        raise InvalidRequest("disaggregated_params must be an object", field_path)
    if "bootstrap_room" in params:
        room: Any = params["bootstrap_room"]
        host, port = params.get("bootstrap_host"), params.get("bootstrap_port")
    else:
        host, port, room = params.get("host"), params.get("port"), params.get("transfer_id")
        if isinstance(room, str) and re.fullmatch("[0-9a-f]{16}", room):
            room = int(room, 16)
    if not (isinstance(host, str) and host):
        raise InvalidRequest("disaggregated_params have no host", field_path)
    if type(port) is not int or not 0 < port < 65536:
        raise InvalidRequest(f"disaggregated_params have an invalid port: {port!r}", field_path)
    if type(room) is not int or not 0 <= room < 2**64:
        raise InvalidRequest(
            f"disaggregated_params have an invalid room or transfer_id: {room!r}", field_path
        )
    return (host, port), room
