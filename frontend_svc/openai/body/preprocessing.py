"""Converts a validated request into the request that routers and engines receive (pure)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from common.errors import InvalidRequest, PromptTooLong
from common.request.preprocessed import (
    AgentContext,
    GuidedDecoding,
    OutputOptions,
    PreprocessedRequest,
    RouterConfigOverride,
    RoutingConstraints,
    RoutingHints,
    SamplingOptions,
    SessionAction,
    SessionControl,
    StopConditions,
    TokenIds,
)
from frontend_svc.openai.body.fields import PROMPT_TOKENS_MAX
from frontend_svc.openai.body.nvext import AgentHints, Nvext
from frontend_svc.openai.body.parsing import check_min_tokens, top_level_or_nvext
from frontend_svc.openai.body.schema import ChatRequest, GenerationRequest, TextPart
from frontend_svc.openai.body.validation_errors import INVALID_VALUE

# Without any field; never changed.
_NO_EXTENSIONS, _NO_AGENT_HINTS, _NO_ROUTING_HINTS = Nvext(), AgentHints(), RoutingHints()


def to_preprocessed(
    request: GenerationRequest,
    token_ids: Iterable[int],
    *,
    eos_token_ids: Sequence[int],
    mdc_sum: str | None,
    context_length: int,
    default_max_tokens: int | None = None,
    vocab_size: int | None = None,
    adapter: str = "",
    guided: GuidedDecoding | None = None,
) -> PreprocessedRequest:
    """The request for the engine; `token_ids` is the whole prompt.

    context_length: limit of prompt and output tokens together; 0: unknown, not checked.
    default_max_tokens: output limit of requests that set none; None: the rest of the context.
    vocab_size: ids at or above it are refused; None: not checked. adapter: "" is the base model.
    guided: the constraint on the text.

    Raises PromptTooLong if the prompt leaves no token for output, and if prompt and max_tokens
    together exceed the context. As in OpenAI's API they are refused and not clamped: a truncated
    response would look like a requested one. Raises InvalidRequest for an empty prompt, ids out of
    range and a min_tokens above the limit.
    """
    prompt = _checked_prompt(request, token_ids, vocab_size)
    max_tokens = _max_tokens(request, len(prompt), context_length, default_max_tokens)
    ignore_eos = top_level_or_nvext(request, "ignore_eos") is True
    eos = () if ignore_eos else tuple(eos_token_ids)
    stop_ids = tuple(request.stop_token_ids or ())
    is_stop_visible = request.include_stop_str_in_output is True
    nvext = request.nvext or _NO_EXTENSIONS
    override, agent = nvext.router_config_override, nvext.agent_context
    preprocessed = PreprocessedRequest(
        model=request.model,
        token_ids=prompt,
        stop_conditions=StopConditions(
            max_tokens=max_tokens,
            # A requested stop token ends the response and is not part of it, like EOS.
            stop_token_ids_hidden=tuple(
                dict.fromkeys(eos if is_stop_visible else (*eos, *stop_ids))
            ),
            stop_token_ids_visible=stop_ids if is_stop_visible else (),
            min_tokens=request.min_tokens,
            ignore_eos=top_level_or_nvext(request, "ignore_eos"),
        ),
        sampling_options=SamplingOptions(
            presence_penalty=request.presence_penalty,
            frequency_penalty=request.frequency_penalty,
            repetition_penalty=top_level_or_nvext(request, "repetition_penalty"),
            temperature=request.temperature,
            top_p=request.top_p,
            top_k=top_level_or_nvext(request, "top_k"),
            min_p=top_level_or_nvext(request, "min_p"),
            # A greedy choice does not depend on it.
            seed=None if request.temperature == 0 else request.seed,
            logit_bias=_logit_bias(request, vocab_size),
            guided_decoding=guided,
        ),
        output_options=OutputOptions(logprobs=request.alternatives),
        eos_token_ids=eos,
        mdc_sum=mdc_sum,
        annotations=tuple(nvext.annotations or ()),
        routing=routing_hints(request.nvext),
        router_config_override=None
        if override is None
        else RouterConfigOverride(**override.model_dump()),
        extra_args=nvext.extra_args,
        agent_context=None if agent is None else AgentContext(**agent.model_dump()),
        request_timestamp_ms=nvext.request_timestamp_ms,
    )
    if adapter:
        preprocessed.routing_mut().lora_name = adapter
    if (salt := top_level_or_nvext(request, "cache_salt")) is not None:
        preprocessed.routing_mut().cache_salt = salt
    if request.priority is not None and preprocessed.routing_mut().priority is None:
        _set_priority(preprocessed.routing_mut(), -request.priority)
    return preprocessed


def _set_priority(hints: RoutingHints, priority: int) -> None:
    """Sets both effects of a priority; a positive one counts as that many seconds of waiting."""
    hints.priority, hints.priority_jump = priority, float(max(0, priority))


def _checked_prompt(
    request: GenerationRequest, token_ids: Iterable[int], vocab_size: int | None
) -> TokenIds:
    field = _prompt_field(request)
    prompt = TokenIds.of(token_ids)
    if not len(prompt):
        raise InvalidRequest(f"Invalid '{field}': the prompt has no tokens.", field)
    if vocab_size is not None and prompt.largest >= vocab_size:
        index = int(np.argmax(prompt.array >= vocab_size))
        text = f"token {prompt[index]} at position {index} is not in the vocabulary of {vocab_size}"
        raise InvalidRequest(f"Invalid '{field}': {text}.", field)
    return prompt


def _logit_bias(request: GenerationRequest, vocab_size: int | None) -> dict[int, float]:
    bias = {int(token): value for token, value in (request.logit_bias or {}).items()}
    largest = max(bias, default=-1)
    if vocab_size is not None and largest >= vocab_size:
        text = f"token {largest} is not in the vocabulary of {vocab_size}"
        raise InvalidRequest(f"Invalid 'logit_bias': {text}.", "logit_bias")
    return bias


def input_texts(request: ChatRequest) -> Iterator[str]:
    """The texts of all messages but those of the assistant, of which a chat template may leave out
    some. Without the white space around them, which others strip."""
    for message in request.messages:
        if message.role == "assistant":
            continue
        if isinstance(message.content, str):
            yield message.content.strip()
        else:
            parts = message.content or ()
            yield from (part.text.strip() for part in parts if isinstance(part, TextPart))


def check_prompt_length(request: GenerationRequest, tokens_min: int, context_length: int) -> None:
    """Raises PromptTooLong if a prompt of at least `tokens_min` tokens leaves none for output.
    context_length: as in `to_preprocessed`, which checks the tokenized prompt."""
    if context_length and tokens_min >= context_length:
        raise _prompt_too_long(request, f"at least {tokens_min}", context_length)


def _prompt_too_long(request: GenerationRequest, tokens: str, context: int) -> PromptTooLong:
    prompt_field = _prompt_field(request)
    return PromptTooLong(
        f"This model's maximum context length is {context} tokens. However, your {prompt_field}"
        f" resulted in {tokens} tokens. Please reduce the length of the {prompt_field}.",
        prompt_field,
    )


def _prompt_field(request: GenerationRequest) -> str:
    return "messages" if isinstance(request, ChatRequest) else "prompt"


def _max_tokens(
    request: GenerationRequest, prompt: int, context: int, default: int | None
) -> int | None:
    requested, field = request.max_output_tokens
    if not context:
        return default if requested is None else requested
    tokens_available = context - prompt
    if tokens_available < 1:
        raise _prompt_too_long(request, str(prompt), context)
    prompt_field = _prompt_field(request)
    if requested is not None and requested > tokens_available:
        raise PromptTooLong(
            f"This model's maximum context length is {context} tokens. However, you requested"
            f" {prompt + requested} tokens ({prompt} in the {prompt_field}, {requested} "
            "in the completion)."
            f" Please reduce the length of the {prompt_field} or completion.",
            field,
        )
    limit = requested or (tokens_available if default is None else min(default, tokens_available))
    check_min_tokens(request, limit, f"the output limit of {limit} tokens")
    return limit


def choice_request(request: PreprocessedRequest, choice: int) -> PreprocessedRequest:
    """The request of a prompt's choice, counted from 0, which adds its number to the seed."""
    sampling = request.sampling_options
    if not choice or sampling.seed is None:
        return request
    seed = (sampling.seed + choice + 2**63) % 2**64 - 2**63
    return replace(request, sampling_options=replace(sampling, seed=seed))


def check_total_tokens(prompts: Sequence[PreprocessedRequest]) -> int:
    """The tokens of all prompts. Raises InvalidRequest if they are too many."""
    tokens = sum(len(one.token_ids) for one in prompts)
    if len(prompts) > 1 and tokens > PROMPT_TOKENS_MAX:
        text = f"{len(prompts)} prompts have {tokens} tokens together, and {PROMPT_TOKENS_MAX} are"
        raise InvalidRequest(f"Invalid 'prompt': {text} allowed.", "prompt", reason=INVALID_VALUE)
    return tokens


def strict_priority(nvext: Nvext | None) -> int:
    """Level in the router's queue; 0, the lowest, by default."""
    if nvext is None or nvext.agent_hints is None:
        return 0
    return nvext.agent_hints.strict_priority or 0


def routing_hints(nvext: Nvext | None) -> RoutingHints | None:
    """The routing hints of a request; None if it has none."""
    if nvext is None:
        return None
    agent = nvext.agent_hints or _NO_AGENT_HINTS
    constraints, session = nvext.routing_constraints, nvext.session_control
    hints = RoutingHints(
        backend_instance_id=nvext.backend_instance_id,
        prefill_worker_id=nvext.prefill_worker_id,
        decode_worker_id=nvext.decode_worker_id,
        dp_rank=nvext.dp_rank,
        prefill_dp_rank=nvext.prefill_dp_rank,
        expected_output_tokens=agent.osl,
        allowed_worker_ids=None
        if nvext.allowed_worker_ids is None
        else frozenset(nvext.allowed_worker_ids),
        routing_constraints=None
        if constraints is None
        else RoutingConstraints(
            required_taints=frozenset(constraints.required_taints or ()),
            preferred_taints=constraints.preferred_taints or {},
        ),
        session_control=None
        if session is None
        else SessionControl(
            session.session_id, None if session.action is None else SessionAction(session.action)
        ),
    )
    if agent.priority is not None:
        _set_priority(hints, agent.priority)
    return None if hints == _NO_ROUTING_HINTS else hints
