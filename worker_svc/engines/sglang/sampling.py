"""Translates requests to SGLang arguments and SGLang chunks to engine outputs. Pure; no SGLang
import.

Written for SGLang 0.5.23 driven by token ids; its tokenizer serves guided decoding only. Therefore

- stop strings and other options of the text are rejected; `min_tokens`, for which SGLang needs a
  tokenizer, is enforced by `MinTokens`, a logit processor that excludes the stop tokens until then;
- guided decoding goes to SGLang's grammar backend; a constraint that is only a hint (`best_effort`)
  is not used;
- constraints and penalties continue after output of another worker (`continuation.py`) where SGLang
  runs the scheduler that takes them so;
- `seed` is rejected unless sampling is greedy or SGLang runs with deterministic inference: SGLang's
  sampling seed alone does not make output repeatable;
- images go to Gemma 3 only (`media.py`);
- `n`, `best_of`, beams, prompt log probabilities, embeddings, other media, `extra_args` and
  `max_thinking_tokens` are rejected too; always by name.

A hidden stop token or EOS ends the output and is excluded from it and from the counts.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from types import MappingProxyType
from typing import Any, Final, Literal

from common.errors import (
    InternalError,
    InvalidRequest,
    MeshError,
    Overloaded,
    PromptTooLong,
    Unsupported,
    WorkerLost,
)
from common.registry.instances import Role
from common.request.preprocessed import (
    BootstrapInfo,
    CompletionTokensDetails,
    CompletionUsage,
    FinishReason,
    GuidedDecoding,
    PreprocessedRequest,
    PromptTokensDetails,
    TokenLogprob,
    TopLogprob,
    unsupported_fields,
    usage,
)
from worker_svc.engines.contract import LLMEngineOutput
from worker_svc.engines.handoff import PEER_LOST
from worker_svc.engines.sglang.continuation import GRAMMAR_PREFIX, PENALTY_PREFIX
from worker_svc.engines.sglang.media import ImageModel, Images, read_images
from worker_svc.engines.stop_tokens import TOKEN_STOP_CONDITIONS, StopToken, stop_tokens_of

# SGLang's own placeholder for a leg without a partner: it waits for none and hands nothing over.
NO_PARTNER_HOST: Final = "2.2.2.2"
# Tokens of the model's context that SGLang keeps free: a prompt must be shorter than the rest, and
# output ends at most four tokens after the rest, however many were requested.
RESERVED_TOKENS: Final = 6
# OpenAI's value for the logarithm of zero.
LOGPROB_MIN: Final = -9999.0

# Fields that SGLang's sampling parameters share; an unset one leaves SGLang's neutral default.
SAMPLING_PARAMETERS: Final = (
    *("temperature", "top_p", "top_k", "min_p"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty"),
)
_REQUEST_FIELDS: Final[Mapping[str, str]] = MappingProxyType(
    {name: f"sampling_options.{name}" for name in SAMPLING_PARAMETERS}
    | {
        "logit_bias": "sampling_options.logit_bias",
        "sampling_seed": "sampling_options.seed",
        "max_new_tokens": "stop_conditions.max_tokens",
    }
)
SUPPORTED_FIELDS: Final = frozenset(
    {
        *(f"sampling_options.{name}" for name in SAMPLING_PARAMETERS),
        *("sampling_options.logit_bias", "sampling_options.seed"),
        *(f"stop_conditions.{name}" for name in TOKEN_STOP_CONDITIONS),
        *("output_options.logprobs", "routing.lora_name", "routing.cache_salt"),
        *(f"sampling_options.guided_decoding.{name}" for name in ("json", "regex", "choice")),
        *(f"sampling_options.guided_decoding.{name}" for name in ("grammar", "structural_tag")),
    }
)
_PREFIX: Final = "prefix_tokens"
_HANDOFF_FIELDS: Final = frozenset({"bootstrap_info", "prefill_result"})
_NO_POOLING: Final = {
    "embedding": 'the model computes embeddings only with engine_args {"is_embedding": true}',
    "score": 'only a classifier of one class, with engine_args {"is_embedding": true}, scores',
}

# Any, here and below: SGLang's arguments and chunks are JSON-like values of many types.
Arguments = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class EngineProperties:
    """Properties of a started SGLang that requests must fit."""

    role: Role = "aggregated"
    vocab_size: int = 2**32
    context_length: int = 2**31
    max_input_tokens: int = 2**31
    """A prompt must be shorter."""

    eos_ids: frozenset[int] = frozenset()
    """End-of-sequence tokens of the model."""

    loras: frozenset[str] = frozenset()
    """Loaded adapters."""

    dp_size: int = 1
    is_deterministic: bool = False
    """Whether seeds are supported."""

    pooling: Literal["", "embedding", "score"] = ""
    """What the model computes of prompts, if it generates nothing."""

    images: ImageModel | None = None
    """How the model takes images; None: it takes none."""

    continues_constraints: bool = False
    """Whether a constraint may begin after output in the prompt."""

    continues_penalties: bool = False
    """Whether penalties may count output in the prompt."""

    has_lower_tiers: bool = False
    """Whether cached tokens may be on the host or in storage."""


@dataclass(frozen=True, slots=True)
class SglangRequest:
    """One request to SGLang.

    arguments: keyword arguments of `async_generate`, except `rid`, `stream` and the processor.
    needs_min_tokens: whether the request needs the logit processor `MinTokens`.
    """

    arguments: Arguments
    stop_tokens: Mapping[int, StopToken] = field(default_factory=dict)
    logprobs: int | None = None
    needs_min_tokens: bool = False
    bootstrap: BootstrapInfo | None = None
    images: Images | None = None


def usable_context(model_context: int) -> int:
    """Returns the limit of prompt and output together within which SGLang keeps every request; a
    prompt must be shorter. model_context: that of the model."""
    return model_context - RESERVED_TOKENS


def build_sglang_request(
    request: PreprocessedRequest, properties: EngineProperties, priority: int | None = None
) -> SglangRequest:
    """Returns the SGLang call for a request. priority: used if the request has none.

    Raises Unsupported, InvalidRequest and PromptTooLong, naming the field.
    """
    _check_supported(request, properties)
    rank, priority, lora = _check_routing(request, properties, priority)
    _check_prompt(request, properties)
    stop_tokens = stop_tokens_of(request, properties.eos_ids)
    arguments: dict[str, Any] = {
        "input_ids": request.token_ids.tolist(),
        "sampling_params": _sampling(request, properties, stop_tokens),
        # SGLang orders requests without a priority last; here no priority means 0.
        "priority": priority or 0,
        "routed_dp_rank": rank,
        "lora_path": lora,
    }
    if request.routing is not None and request.routing.cache_salt:
        arguments["cache_salt"] = request.routing.cache_salt
    logprobs = request.output_options.logprobs
    if logprobs is not None:
        arguments |= {"return_logprob": True, "top_logprobs_num": logprobs}
    bootstrap = _bootstrap(request, properties)
    if bootstrap is not None:
        arguments |= asdict(bootstrap)
    needs_min_tokens = "min_tokens" in arguments["sampling_params"].get("custom_params", {})
    images = read_images(request, properties.images)
    return SglangRequest(arguments, stop_tokens, logprobs, needs_min_tokens, bootstrap, images)


def build_pooling_arguments(
    request: PreprocessedRequest,
    properties: EngineProperties,
    pooling: Literal["embedding", "score"],
    priority: int | None = None,
) -> Arguments:
    """Returns the fields of SGLang's embedding request, except `rid`. pooling: what is requested.
    priority: used if the request has none. Raises as `build_sglang_request`."""
    if properties.pooling != pooling:
        raise Unsupported("model", _NO_POOLING[pooling])
    # SGLang chooses the rank of such a request itself.
    _, priority, lora = _check_routing(request, properties, priority)
    _check_prompt(request, properties)
    return {
        "input_ids": request.token_ids.tolist(),
        "priority": priority or 0,
        "lora_path": lora,
    }


def supported_fields(properties: EngineProperties) -> frozenset[str]:
    """Returns the fields that every request may have."""
    refused = set() if properties.is_deterministic else {"sampling_options.seed"}
    return _fields_with_value(properties) - refused


def _fields_with_value(properties: EngineProperties) -> frozenset[str]:
    """Returns the fields that requests may have, some of them with certain values only."""
    further = {
        # `read_images` names the parts that the model does not take.
        "multi_modal_data": properties.images is not None,
        f"sampling_options.guided_decoding.{_PREFIX}": properties.continues_constraints,
        f"sampling_options.{_PREFIX}": properties.continues_penalties,
    }
    return SUPPORTED_FIELDS | {name for name, is_supported in further.items() if is_supported}


def _check_supported(request: PreprocessedRequest, properties: EngineProperties) -> None:
    supported = _fields_with_value(properties)
    if properties.role != "aggregated" or request.is_probe:
        supported |= _HANDOFF_FIELDS
    unsupported = unsupported_fields(request, supported)
    if unsupported:
        others_text = f" (nor are {', '.join(unsupported[1:])})" if unsupported[1:] else ""
        raise Unsupported(unsupported[0], f"not supported by the SGLang engine{others_text}")
    options = request.sampling_options
    if options.seed is not None and not properties.is_deterministic and options.temperature != 0:
        raise Unsupported(
            "sampling_options.seed",
            "a seed needs temperature 0 or SGLang's deterministic inference",
        )


def _check_routing(
    request: PreprocessedRequest, properties: EngineProperties, priority: int | None
) -> tuple[int | None, int | None, str | None]:
    routing = request.routing
    if routing is None:
        return None, priority, None
    if routing.dp_rank is not None and routing.dp_rank >= properties.dp_size:
        raise InvalidRequest(
            f"this worker has ranks 0 to {properties.dp_size - 1}, not {routing.dp_rank}",
            "routing.dp_rank",
        )
    lora = routing.lora_name or None
    if lora is not None and lora not in properties.loras:
        raise Unsupported("routing.lora_name", f"the adapter {lora!r} is not loaded here")
    rank = routing.dp_rank if properties.dp_size > 1 else None
    return rank, priority if routing.priority is None else routing.priority, lora


def _check_prompt(request: PreprocessedRequest, properties: EngineProperties) -> None:
    tokens = len(request.token_ids)
    if tokens == 0:
        raise InvalidRequest("token_ids must not be empty", "token_ids")
    if tokens >= properties.max_input_tokens:
        raise PromptTooLong(
            f"prompt too long: {tokens}/{properties.max_input_tokens - 1} tokens", field="token_ids"
        )
    # SGLang does not check ids; an id out of range crashes its process.
    largest = request.token_ids.largest
    if largest >= properties.vocab_size:
        raise InvalidRequest(
            f"token_ids: {largest} is above the largest token id {properties.vocab_size - 1}",
            "token_ids",
        )


def _sampling(
    request: PreprocessedRequest, properties: EngineProperties, stop_tokens: Mapping[int, StopToken]
) -> dict[str, Any]:
    options = request.sampling_options
    max_output = properties.context_length - len(request.token_ids)
    sampling: dict[str, Any] = {
        name: value for name in SAMPLING_PARAMETERS if (value := getattr(options, name)) is not None
    }
    if sampling.get("top_k") == 0:
        sampling["top_k"] = -1
    if options.seed is not None and properties.is_deterministic:
        sampling["sampling_seed"] = options.seed
    if options.logit_bias:
        sampling["logit_bias"] = {
            str(token_id): bias for token_id, bias in options.logit_bias.items()
        }
    if options.guided_decoding is not None and not options.guided_decoding.best_effort:
        sampling |= _grammar(options.guided_decoding)
    stop = request.stop_conditions
    if request.is_probe:
        return sampling | {"max_new_tokens": 1, "ignore_eos": True}
    if stop.max_tokens == 0:
        raise InvalidRequest("max_tokens must be at least 1", "stop_conditions.max_tokens")
    sampling["max_new_tokens"] = (
        max_output if stop.max_tokens is None else min(stop.max_tokens, max_output)
    )
    if stop.ignore_eos:
        sampling["ignore_eos"] = True
    elif stop_tokens:
        sampling["stop_token_ids"] = sorted(stop_tokens)
    parameters = _prefixes(request)
    if stop.min_tokens and stop_tokens:
        parameters |= {"min_tokens": stop.min_tokens, "stop_ids": sorted(stop_tokens)}
    if parameters:
        sampling["custom_params"] = parameters
    return sampling


def _prefixes(request: PreprocessedRequest) -> dict[str, Any]:
    """Returns how many tokens of the prompt are output, for `continuation.py`. Raises
    InvalidRequest if these are more than it has."""
    options, tokens = request.sampling_options, len(request.token_ids)
    guided = options.guided_decoding
    counts = {
        PENALTY_PREFIX: options.prefix_tokens,
        GRAMMAR_PREFIX: None if guided is None or guided.best_effort else guided.prefix_tokens,
    }
    if max((count or 0 for count in counts.values()), default=0) > tokens:
        text = f"{_PREFIX} is above the {tokens} tokens of the prompt"
        raise InvalidRequest(text, f"sampling_options.{_PREFIX}")
    return {name: count for name, count in counts.items() if count}


def _grammar(guided: GuidedDecoding) -> dict[str, str]:
    if guided.regex is not None:
        return {"regex": guided.regex}
    if guided.choice is not None:
        return {"regex": "|".join(map(re.escape, guided.choice))}
    if guided.grammar is not None:
        return {"ebnf": guided.grammar}
    if guided.structural_tag is not None:
        return {"structural_tag": json.dumps(guided.structural_tag)}
    return {"json_schema": json.dumps(guided.json)}


def _bootstrap(request: PreprocessedRequest, properties: EngineProperties) -> BootstrapInfo | None:
    if properties.role == "aggregated":
        return None
    if request.is_probe:
        return BootstrapInfo(NO_PARTNER_HOST, 0, 0)
    if request.bootstrap_info is None:
        raise InvalidRequest(
            f"a {properties.role} worker requires bootstrap_info",
            "bootstrap_info",
            reason="NO_LOCAL_PREFILL" if properties.role == "decode" else None,
        )
    return request.bootstrap_info


def to_invalid_request(error: ValueError) -> InvalidRequest:
    """Returns the error of a rejected request; SGLang's message begins with the parameter."""
    message = str(error)
    return InvalidRequest(message, _REQUEST_FIELDS.get(message.split(" ", 1)[0]))


class MinTokens:
    """A logit processor, run by SGLang: excludes stop tokens before `min_tokens`.

    With overlapped scheduling SGLang sees a token one step late, so the first possible stop token
    may be one later than requested, never earlier.
    """

    def __call__(self, logits: Any, params: Sequence[Mapping[str, Any]]) -> Any:
        """Changes the logits in place. logits: a tensor of shape [requests, vocabulary]."""
        for row, parameters in enumerate(params):
            if len(parameters["__req__"].output_ids) < parameters["min_tokens"]:
                logits[row, parameters["stop_ids"]] = -math.inf
        return logits


class OutputConverter:
    """Converts SGLang's cumulative chunks of one request to incremental ones."""

    def __init__(
        self, sglang_request: SglangRequest, properties: EngineProperties, prompt_tokens: int
    ) -> None:
        self.delivered = 0
        self._sglang_request = sglang_request
        self._properties = properties
        self._prompt_tokens = prompt_tokens
        self._prompt_details = PromptTokensDetails(cached_tokens=0)
        self._completion_details: CompletionTokensDetails | None = None

    def convert(self, raw_output: Arguments) -> LLMEngineOutput | None:
        """Returns the new part of a chunk, None without one. Raises MeshError if it failed.

        SGLang passes the same growing list each time, so tokens are copied out of it.
        """
        meta = raw_output["meta_info"]
        self._read_details(meta)
        finish_info = meta["finish_reason"]
        if finish_info is not None and finish_info["type"] == "abort":
            raise abort_error(finish_info, self._properties)
        start, ids = self.delivered, raw_output["output_ids"]
        stop = None if finish_info is None else self._match_stop(finish_info)
        end = len(ids) - (stop is not None and not stop.is_visible)
        self.delivered = max(start, end)
        tokens = tuple(ids[start:end])
        if finish_info is None and not tokens:
            return None
        chunk = LLMEngineOutput(token_ids=tokens, logprobs=self._logprobs(meta, start, end))
        return chunk if finish_info is None else self._final_output(chunk, finish_info, stop)

    def _read_details(self, meta: Arguments) -> None:
        if cached := meta.get("cached_tokens"):
            self._prompt_details = PromptTokensDetails(cached_tokens=cached)
        if self._properties.has_lower_tiers:
            tiers = meta.get("cached_tokens_details") or {}
            self._prompt_details = replace(
                self._prompt_details,
                host_cached_tokens=tiers.get("host", 0),
                disk_cached_tokens=tiers.get("storage", 0),
            )
        # In the last chunk; the token that a verification adds itself is no draft.
        if (proposed := meta.get("spec_num_proposed_drafts")) is not None:
            accepted = meta["spec_num_correct_drafts"]
            self._completion_details = CompletionTokensDetails(
                accepted_prediction_tokens=accepted,
                rejected_prediction_tokens=max(0, proposed - accepted),
            )

    def usage(self) -> CompletionUsage:
        return replace(
            usage(self._prompt_tokens, self.delivered),
            prompt_tokens_details=self._prompt_details,
            completion_tokens_details=self._completion_details,
        )

    def _match_stop(self, finish_info: Arguments) -> StopToken | None:
        if finish_info["type"] != "stop":
            return None
        match finish_info.get("matched"):
            case int(stop_token_id) | [*_, int(stop_token_id)]:
                return self._sglang_request.stop_tokens.get(
                    stop_token_id, StopToken(FinishReason.EOS)
                )
            case other:  # SGLang gets no stop strings; it reports this one itself
                raise InternalError(f"the engine reported an unknown stop: {other}")

    def _final_output(
        self, chunk: LLMEngineOutput, finish_info: Arguments, stop: StopToken | None
    ) -> LLMEngineOutput:
        stop_token_id = finish_info.get("matched")
        bootstrap = self._sglang_request.bootstrap
        return replace(
            chunk,
            finish_reason=FinishReason.LENGTH if stop is None else stop.reason,
            stop_reason=stop_token_id if stop is not None and stop.is_visible else None,
            completion_usage=self.usage(),
            disaggregated_params=(
                asdict(bootstrap)
                if bootstrap is not None and self._properties.role == "prefill"
                else None
            ),
        )

    def _logprobs(self, meta: Arguments, start: int, end: int) -> Sequence[TokenLogprob]:
        if self._sglang_request.logprobs is None:
            return ()
        tokens = meta["output_token_logprobs"][start:end]
        tops: Sequence[Any] = [()] * len(tokens)
        if self._sglang_request.logprobs:
            tops = meta["output_top_logprobs"][start:end] or tops
        return [
            TokenLogprob(
                token,
                _clamp_logprob(value),
                tuple(TopLogprob(other, _clamp_logprob(its)) for its, other, _ in top or ()),
            )
            for (value, token, _), top in zip(tokens, tops, strict=True)
        ]


def _clamp_logprob(value: float | None) -> float:
    return LOGPROB_MIN if value is None else max(LOGPROB_MIN, value)


def abort_error(finish_info: Arguments, properties: EngineProperties) -> MeshError:
    """Returns the error for a request that SGLang aborted on its own."""
    message = finish_info.get("message") or "the engine aborted the request"
    match finish_info.get("status_code"):
        case 400:
            return InvalidRequest(message)
        case 503:
            return Overloaded(None, message)
        case None:
            return WorkerLost(message, retryable=True)
        case _ if properties.role != "aggregated":
            # The bootstrap or the transfer failed: usually the other worker is gone.
            return WorkerLost(message, retryable=True, reason=PEER_LOST)
        case status:
            return InternalError(f"the engine failed with status {status}: {message}")
