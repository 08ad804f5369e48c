"""What a request means to SGLang, and what SGLang's answers mean to the mesh. Pure; no SGLang here.

Written against SGLang 0.5.23, driven by token ids (`skip_tokenizer_init`): SGLang sees no text. So

- stop strings hold at the frontend; `min_tokens`, for which SGLang wants a tokenizer, is kept by
  `MinTokens`, a logit processor that rules the stop tokens out for so long;
- guided decoding is refused, for SGLang compiles grammars with its tokenizer;
- `seed` is refused, unless sampling is greedy or SGLang runs with deterministic inference: its
  sampling seed alone does not make answers repeat;
- `n`, `best_of`, beams, prompt log probabilities, embeddings, media, `extra_args` and
  `max_thinking_tokens` are refused too; always by name.

A hidden stop token and EOS end the answer and are left out of it and of the counts.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Final, Protocol

from common.errors import (
    InternalError,
    InvalidRequest,
    MeshError,
    Overloaded,
    PromptTooLong,
    Unsupported,
    WorkerLost,
)
from common.kv.load import Load
from common.registry.instances import Role
from common.request.preprocessed import (
    BootstrapInfo,
    CompletionUsage,
    FinishReason,
    PreprocessedRequest,
    PromptTokensDetails,
    StopConditions,
    TokenLogprob,
    TopLogprob,
    unsupported_fields,
    usage,
)
from worker_svc.engines.contract import KV_EVENTS_OFF, LLMEngineOutput
from worker_svc.engines.sim.transfer import PEER_LOST

# A leg with this partner waits for nobody and hands nothing over: SGLang's own word for it.
NO_PARTNER_HOST: Final = "2.2.2.2"
# What OpenAI reports where the logarithm of zero would stand.
LOGPROB_MIN: Final = -9999.0

# Field -> SGLang's sampling parameter; a field that is not set leaves SGLang's neutral default.
SAMPLING_PARAMETERS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "temperature": "temperature",
        "top_p": "top_p",
        "top_k": "top_k",
        "min_p": "min_p",
        "presence_penalty": "presence_penalty",
        "frequency_penalty": "frequency_penalty",
        "repetition_penalty": "repetition_penalty",
    }
)
_REQUEST_FIELDS: Final[Mapping[str, str]] = MappingProxyType(
    {name: f"sampling_options.{one}" for one, name in SAMPLING_PARAMETERS.items()}
    | {
        "logit_bias": "sampling_options.logit_bias",
        "sampling_seed": "sampling_options.seed",
        "max_new_tokens": "stop_conditions.max_tokens",
    }
)
SUPPORTED_FIELDS: Final = frozenset(
    {
        *(f"sampling_options.{name}" for name in SAMPLING_PARAMETERS),
        "sampling_options.logit_bias",
        "sampling_options.seed",  # see `_check_seed`
        "stop_conditions.max_tokens",
        "stop_conditions.min_tokens",
        "stop_conditions.ignore_eos",
        "stop_conditions.stop",
        "stop_conditions.stop_token_ids_hidden",
        "stop_conditions.stop_token_ids_visible",
        "output_options.logprobs",
        # What the frontend makes of the tokens.
        "output_options.skip_special_tokens",
        "output_options.formatted_prompt",
        "output_options.include_stop_str_in_output",
        "output_options.return_tokens_as_token_ids",
        "routing.lora_name",  # see `_check_routing`
    }
)
_HANDOFF_FIELDS: Final = frozenset({"bootstrap_info", "prefill_result"})

# Any, here and below: SGLang's arguments and answers are plain JSON-like values of many types.
Arguments = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class EngineProperties:
    """What a started SGLang is, as far as requests must fit it.

    max_input_tokens: a prompt must be shorter. eos_ids: of the model. loras: adapters that are
    loaded. is_deterministic: whether seeds are honoured.
    """

    role: Role = "aggregated"
    vocab_size: int = 2**32
    context_length: int = 2**31
    max_input_tokens: int = 2**31
    eos_ids: frozenset[int] = frozenset()
    loras: frozenset[str] = frozenset()
    dp_size: int = 1
    is_deterministic: bool = False


@dataclass(frozen=True, slots=True)
class StopToken:
    """How a token ends an answer. is_visible: the token is the answer's last one."""

    reason: FinishReason
    is_visible: bool = False


@dataclass(frozen=True, slots=True)
class SglangRequest:
    """One request to SGLang.

    arguments: keyword arguments of `async_generate`, all but `rid`, `stream` and the processor.
    needs_min_tokens: whether `MinTokens` must be the request's logit processor.
    """

    arguments: Arguments
    stop_tokens: Mapping[int, StopToken] = field(default_factory=dict)
    logprobs: int | None = None
    needs_min_tokens: bool = False
    bootstrap: BootstrapInfo | None = None


def build_sglang_request(
    request: PreprocessedRequest, properties: EngineProperties, priority: int | None = None
) -> SglangRequest:
    """The call that honours the request. priority: used where the request itself has none.

    Raises Unsupported, InvalidRequest and PromptTooLong, naming the field.
    """
    _check_supported(request, properties)
    rank, priority, lora = _check_routing(request, properties, priority)
    _check_prompt(request, properties)
    stop_tokens = _stop_tokens(request, properties)
    arguments: dict[str, Any] = {
        "input_ids": request.token_ids.tolist(),
        "sampling_params": _sampling(request, properties, stop_tokens),
        # SGLang puts those without a priority behind all others; here 0 is in the middle.
        "priority": priority or 0,
        "routed_dp_rank": rank,
        "lora_path": lora,
    }
    logprobs = request.output_options.logprobs
    if logprobs is not None:
        arguments |= {"return_logprob": True, "top_logprobs_num": logprobs}
    bootstrap = _bootstrap(request, properties)
    if bootstrap is not None:
        arguments |= {
            "bootstrap_host": bootstrap.bootstrap_host,
            "bootstrap_port": bootstrap.bootstrap_port,
            "bootstrap_room": bootstrap.bootstrap_room,
        }
    needs_min_tokens = "custom_params" in arguments["sampling_params"]
    return SglangRequest(arguments, stop_tokens, logprobs, needs_min_tokens, bootstrap)


def _check_supported(request: PreprocessedRequest, properties: EngineProperties) -> None:
    supported = (
        SUPPORTED_FIELDS | _HANDOFF_FIELDS
        if properties.role != "aggregated" or request.is_probe
        else SUPPORTED_FIELDS
    )
    unsupported = unsupported_fields(request, supported)
    if unsupported:
        others_text = f" (nor are {', '.join(unsupported[1:])})" if unsupported[1:] else ""
        raise Unsupported(unsupported[0], f"the SGLang engine has no such thing{others_text}")
    options = request.sampling_options
    if options.seed is not None and not properties.is_deterministic and options.temperature != 0:
        raise Unsupported(
            "sampling_options.seed",
            "answers repeat at temperature 0 only, or with SGLang's deterministic inference",
        )


def _check_routing(
    request: PreprocessedRequest, properties: EngineProperties, priority: int | None
) -> tuple[int | None, int | None, str | None]:
    """Rank, priority and adapter."""
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
            f"the prompt has {tokens} tokens; fewer than {properties.max_input_tokens} "
            "fit this worker",
            field="token_ids",
        )
    # SGLang looks them up unchecked, and an index out of range ends its process.
    largest = int(request.token_ids.array.max())
    if largest >= properties.vocab_size:
        raise InvalidRequest(
            f"token_ids has the id {largest}; the model has {properties.vocab_size}", "token_ids"
        )


def _stop_tokens(
    request: PreprocessedRequest, properties: EngineProperties
) -> dict[int, StopToken]:
    """EOS wins over hidden, since frontends merge EOS into the hidden ids; visible over both."""
    stop = request.stop_conditions
    if stop.ignore_eos:
        return {}
    stop_tokens = dict.fromkeys(stop.stop_token_ids_hidden, StopToken(FinishReason.STOP))
    stop_tokens |= dict.fromkeys(
        (*properties.eos_ids, *request.eos_token_ids), StopToken(FinishReason.EOS)
    )
    return stop_tokens | dict.fromkeys(
        stop.stop_token_ids_visible, StopToken(FinishReason.STOP, is_visible=True)
    )


def _sampling(
    request: PreprocessedRequest, properties: EngineProperties, stop_tokens: Mapping[int, StopToken]
) -> dict[str, Any]:
    options = request.sampling_options
    room = properties.context_length - len(request.token_ids)
    sampling: dict[str, Any] = {
        name: value
        for one, name in SAMPLING_PARAMETERS.items()
        if (value := getattr(options, one)) is not None
    }
    if sampling.get("top_k") == 0:
        sampling["top_k"] = -1
    if options.seed is not None and properties.is_deterministic:
        sampling["sampling_seed"] = options.seed
    if options.logit_bias:
        sampling["logit_bias"] = {str(one): bias for one, bias in options.logit_bias.items()}
    stop = request.stop_conditions
    if request.is_probe:
        return sampling | {"max_new_tokens": 1, "ignore_eos": True}
    sampling["max_new_tokens"] = _max_tokens(stop, room)
    if stop.ignore_eos:
        sampling["ignore_eos"] = True
    elif stop_tokens:
        sampling["stop_token_ids"] = sorted(stop_tokens)
    if stop.min_tokens and stop_tokens:
        sampling["custom_params"] = {"min_tokens": stop.min_tokens, "stop_ids": sorted(stop_tokens)}
    return sampling


def _max_tokens(stop: StopConditions, room: int) -> int:
    if stop.max_tokens == 0:
        raise InvalidRequest("max_tokens must be at least 1", "stop_conditions.max_tokens")
    return room if stop.max_tokens is None else min(stop.max_tokens, room)


def _bootstrap(request: PreprocessedRequest, properties: EngineProperties) -> BootstrapInfo | None:
    if properties.role == "aggregated":
        return None
    if request.is_probe:
        return BootstrapInfo(NO_PARTNER_HOST, 0, 0)
    if request.bootstrap_info is None:
        raise InvalidRequest(
            f"a {properties.role} worker takes requests with a bootstrap rendezvous only",
            "bootstrap_info",
            reason="NO_LOCAL_PREFILL" if properties.role == "decode" else None,
        )
    return request.bootstrap_info


def to_invalid_request(error: ValueError) -> InvalidRequest:
    """What SGLang refused a request with; its messages begin with the parameter's name."""
    message = str(error)
    return InvalidRequest(message, _REQUEST_FIELDS.get(message.split(" ", 1)[0]))


class MinTokens:
    """A logit processor, run by SGLang: no stop token before `min_tokens`.

    With overlapped scheduling SGLang knows of a token one step late, so the first stop token that
    is possible may be one later than asked for; never earlier.
    """

    def __call__(self, logits: Any, params: Sequence[Mapping[str, Any]]) -> Any:
        """logits: a tensor of shape [requests, vocabulary], changed in place."""
        for row, one in enumerate(params):
            if len(one["__req__"].output_ids) < one["min_tokens"]:
                logits[row, one["stop_ids"]] = -math.inf
        return logits


class OutputConverter:
    """One request's answer, from SGLang's cumulative chunks to ours, which say what is new."""

    def __init__(
        self, sglang_request: SglangRequest, properties: EngineProperties, prompt_tokens: int
    ) -> None:
        self.delivered = 0
        self._sglang_request = sglang_request
        self._properties = properties
        self._prompt_tokens = prompt_tokens
        self._cached_tokens = 0

    def convert(self, raw_output: Arguments) -> LLMEngineOutput | None:
        """What a chunk of SGLang's adds; None for nothing. Raises what the request failed with.

        SGLang gives the same, growing list each time, so what is passed on is copied out of it.
        """
        meta = raw_output["meta_info"]
        self._cached_tokens = meta.get("cached_tokens") or self._cached_tokens
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

    def usage(self) -> CompletionUsage:
        """The counts so far."""
        details = PromptTokensDetails(cached_tokens=self._cached_tokens)
        counts = usage(self._prompt_tokens, self.delivered)
        return replace(counts, prompt_tokens_details=details)

    def _match_stop(self, finish_info: Arguments) -> StopToken | None:
        if finish_info["type"] != "stop":
            return None
        match finish_info.get("matched"):
            case int(stop_token_id) | [*_, int(stop_token_id)]:
                return self._sglang_request.stop_tokens.get(
                    stop_token_id, StopToken(FinishReason.EOS)
                )
            case other:  # SGLang was given no strings to match, and names this one itself
                raise InternalError(f"the engine computed nonsense: {other}")

    def _final_output(
        self, chunk: LLMEngineOutput, finish_info: Arguments, stop: StopToken | None
    ) -> LLMEngineOutput:
        stop_token_id = finish_info.get("matched")
        room = self._sglang_request.bootstrap
        return replace(
            chunk,
            finish_reason=FinishReason.LENGTH if stop is None else stop.reason,
            stop_reason=stop_token_id if stop is not None and stop.is_visible else None,
            completion_usage=self.usage(),
            disaggregated_params=(
                {
                    "bootstrap_host": room.bootstrap_host,
                    "bootstrap_port": room.bootstrap_port,
                    "bootstrap_room": room.bootstrap_room,
                }
                if room is not None and self._properties.role == "prefill"
                else None
            ),
        )

    def _logprobs(self, meta: Arguments, start: int, end: int) -> Sequence[TokenLogprob]:
        if self._sglang_request.logprobs is None:
            return ()
        tokens = meta["output_token_logprobs"][start:end]
        top_logprobs: Iterable[Any] = ()
        if self._sglang_request.logprobs:
            top_logprobs = meta["output_top_logprobs"][start:end]
        return [
            TokenLogprob(token, _clamp_logprob(value), _alternatives(top))
            for (value, token, _), top in zip(
                tokens, [*top_logprobs] or [()] * len(tokens), strict=True
            )
        ]


def _alternatives(top: Iterable[Any]) -> tuple[TopLogprob, ...]:
    return tuple(TopLogprob(token, _clamp_logprob(value)) for value, token, _ in top or ())


def _clamp_logprob(value: float | None) -> float:
    return LOGPROB_MIN if value is None else max(LOGPROB_MIN, value)


def abort_error(finish_info: Arguments, properties: EngineProperties) -> MeshError:
    """What it means that SGLang aborted a request which nobody here gave up."""
    message = finish_info.get("message") or "the engine gave the request up"
    match finish_info.get("status_code"):
        case 400:
            return InvalidRequest(message)
        case 503:
            return Overloaded(None, message)
        case None:
            return WorkerLost(message, retryable=True)
        case _ if properties.role != "aggregated":
            # Bootstrap or transfer failed: most often the other side is gone.
            return WorkerLost(message, retryable=True, reason=PEER_LOST)
        case status:
            return InternalError(f"the engine failed with status {status}: {message}")


class HandoffQueues(Protocol):
    """Queues of a rank that hands KV over; see SGLang's `DisaggregationMetrics`."""

    prefill_bootstrap_queue_reqs: int
    prefill_inflight_queue_reqs: int
    decode_prealloc_queue_reqs: int
    decode_transfer_queue_reqs: int


class QueueMetrics(Protocol):
    """See SGLang's `QueueMetrics`. prealloc_ready: decode legs that wait for KV pages only."""

    prealloc_ready: int


class LoadSnapshot(Protocol):
    """What is read of SGLang's `LoadSnapshot`. timestamp: when it was taken, in Unix seconds."""

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
    """One rank's load.

    chunks: what this rank has sent so far. The step is chunks + prompt tokens computed: SGLang does
    not count its steps where others can read it, but each of them moves one of these.
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
        rooms_open=0
        if queues is None
        else queues.prefill_bootstrap_queue_reqs
        + queues.prefill_inflight_queue_reqs
        + queues.decode_prealloc_queue_reqs
        + queues.decode_transfer_queue_reqs,
    )


def count_waiting_for_pages(snapshot: LoadSnapshot) -> int:
    """Decode legs of one rank that wait for KV pages."""
    return 0 if snapshot.queues is None else snapshot.queues.prealloc_ready


# Arguments that the adapter depends on; the operator's may not name them.
RESERVED_ARGUMENTS: Final = frozenset(
    {
        "model_path",
        "served_model_name",
        "tokenizer_path",
        "skip_tokenizer_init",
        "incremental_streaming_output",
        "tokenizer_worker_num",
        "host",
        "context_length",
        "allow_auto_truncate",
        "kv_events_config",
        "disaggregation_mode",
        "disaggregation_bootstrap_port",
        "enable_priority_scheduling",
        "schedule_low_priority_values_first",
        "enable_custom_logit_processor",
        "custom_sigquit_handler",
        "enable_pd_role_switch",
    }
)
# Torch's own operators, and a pool that any machine has room for.
_CPU_ARGUMENTS: Final[Arguments] = MappingProxyType(
    {
        "device": "cpu",
        "attention_backend": "torch_native",
        "sampling_backend": "pytorch",
        "disable_cuda_graph": True,
        "disable_overlap_schedule": True,
        "dtype": "float32",
        "max_total_tokens": 32_768,
        "mem_fraction_static": 0.3,
        "max_running_requests": 32,
        "sleep_on_idle": True,
    }
)


def resolve_page_size(operator_arguments: Arguments, block_size: int) -> int:
    """Tokens a page, once the operator's arguments are found good.

    Raises InvalidRequest naming an argument that is not the operator's to set, or pages that do
    not fill blocks.
    """
    for name in sorted(RESERVED_ARGUMENTS & operator_arguments.keys()):
        raise InvalidRequest(f"{name} is set by the worker itself", f"engine_args.{name}")
    page = operator_arguments.get("page_size", block_size)
    if type(page) is not int or page < 1 or block_size % page:
        raise InvalidRequest(
            f"pages of {page} tokens do not divide routing blocks of {block_size}",
            "engine_args.page_size",
        )
    return page


def server_arguments(
    role: Role,
    operator_arguments: Arguments,
    *,
    is_cpu: bool,
    block_size: int,
    adapter_arguments: Arguments,
) -> dict[str, Any]:
    """All arguments SGLang is started with: the defaults here, `operator_arguments` over them,
    then `adapter_arguments`.

    Raises InvalidRequest as `resolve_page_size`.
    """
    resolve_page_size(operator_arguments, block_size)
    arguments: dict[str, Any] = {
        "log_level": "error",
        "page_size": block_size,
        # Higher priorities overtake in the queue; they do not throw running requests out.
        "disable_priority_preemption": True,
        # In decode steps; the default lets load reports lag by 15 of them.
        "load_snapshot_publish_interval": 4,
    }
    if is_cpu:
        arguments |= _CPU_ARGUMENTS
        if role != "aggregated":
            arguments["disaggregation_transfer_backend"] = "mooncake_tcp"
        if role == "decode":
            arguments["disaggregation_decode_retraction_backup"] = "cpu_tensor"
    arguments |= operator_arguments
    return {**arguments, **adapter_arguments}


def model_kv_index(*, is_hybrid: bool, is_speculative: bool) -> tuple[str, str]:
    """`EngineConfig.kv_index` and its reason, as the model has it: on all workers the same."""
    if is_hybrid:
        return "none", "a sliding window or recurrent state: a cached prefix need not be usable"
    if is_speculative:
        return "none", "with speculative decoding events need not name single tokens"
    return "events", ""


def find_kv_events_off_reason(role: Role, resolved: Arguments, *, kv_events: bool) -> str:
    """Why a worker reports nothing although the model's prefixes could be shared; "": it does."""
    if role == "decode" and not resolved.get("disaggregation_decode_enable_radix_cache"):
        return "a decode worker keeps no prefixes"
    if resolved.get("disable_radix_cache"):
        return "prefix caching is off"
    return "" if kv_events else KV_EVENTS_OFF
