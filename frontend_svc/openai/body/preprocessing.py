"""Converts a validated request into the request that routers and engines receive (pure)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

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
from frontend_svc.openai.body.sampling import ExtensionSampling, OpenAiSampling
from frontend_svc.openai.body.schema import ChatRequest, GenerationRequest, TextPart
from frontend_svc.openai.body.validation_errors import INVALID_VALUE

_NO_EXTENSIONS, _NO_AGENT_HINTS, _NO_ROUTING_HINTS = Nvext(), AgentHints(), RoutingHints()
# 7 MB, and 0.1 s to write.
ECHO_ENTRIES_MAX = 1 << 16
# Keys of the metadata of PromptTooLong.
PROMPT_TOKENS, OUTPUT_TOKENS, CONTEXT_TOKENS = "prompt_tokens", "output_tokens", "context_tokens"
# Workers do not receive `n`: each choice is a request of its own (`choice_request`).
_SAMPLING_FIELDS = tuple(
    name for name in (*OpenAiSampling.model_fields, *ExtensionSampling.model_fields) if name != "n"
)


def to_preprocessed(
    request: GenerationRequest,
    token_ids: Iterable[int],
    *,
    eos_token_ids: Sequence[int],
    card_checksum: str | None,
    context_length: int,
    default_max_tokens: int | None = None,
    vocab_size: int | None = None,
    adapter: str = "",
    guided: GuidedDecoding | None = None,
) -> PreprocessedRequest:
    """Returns the request for the engine.

    token_ids: the whole prompt.
    eos_token_ids: of the model; unused if the request ignores EOS.
    card_checksum: of the model's card.
    context_length: limit of prompt and output tokens together; 0: unknown, not checked.
    default_max_tokens: output limit of requests that set none; None: the rest of the context.
    vocab_size: ids at or above it are refused; None: not checked.
    adapter: "" is the base model.
    guided: the constraint on the text.

    Raises PromptTooLong if the prompt leaves no token for output, and if prompt and max_tokens
    together exceed the context. As in OpenAI's API they are refused and not clamped: a truncated
    response would look like a requested one. Raises InvalidRequest for an empty prompt, ids out of
    range and a min_tokens above the limit.
    """
    prompt = _checked_prompt(request, token_ids, vocab_size)
    max_tokens = _max_tokens(request, len(prompt), context_length, default_max_tokens)
    eos = () if top_level_or_nvext(request, "ignore_eos") else tuple(eos_token_ids)
    nvext = request.nvext or _NO_EXTENSIONS
    return PreprocessedRequest(
        model=request.model,
        token_ids=prompt,
        stop_conditions=_stop_conditions(request, eos, max_tokens),
        sampling_options=_sampling_options(request, vocab_size, guided),
        output_options=OutputOptions(
            logprobs=request.alternatives,
            prompt_logprobs=request.alternatives if request.echoes_logprobs else None,
        ),
        eos_token_ids=eos,
        card_checksum=card_checksum,
        annotations=tuple(nvext.annotations or ()),
        routing=routing_hints(
            request.nvext,
            adapter=adapter,
            cache_salt=top_level_or_nvext(request, "cache_salt"),
            default_priority=None if request.priority is None else -request.priority,
        ),
        router_config_override=_router_override(nvext),
        extra_args=nvext.extra_args,
        agent_context=_agent_context(nvext),
        request_timestamp_ms=nvext.request_timestamp_ms,
    )


def _stop_conditions(
    request: GenerationRequest, eos: tuple[int, ...], max_tokens: int | None
) -> StopConditions:
    stop_ids = tuple(request.stop_token_ids or ())
    is_visible = request.include_stop_str_in_output is True
    return StopConditions(
        max_tokens=max_tokens,
        # A requested stop token ends the response and is not part of it, like EOS.
        stop_token_ids_hidden=tuple(dict.fromkeys(eos if is_visible else (*eos, *stop_ids))),
        stop_token_ids_visible=stop_ids if is_visible else (),
        min_tokens=request.min_tokens,
        ignore_eos=top_level_or_nvext(request, "ignore_eos"),
    )


def _sampling_options(
    request: GenerationRequest, vocab_size: int | None, guided: GuidedDecoding | None
) -> SamplingOptions:
    # Any: the types of the fields.
    fields: dict[str, Any] = {name: top_level_or_nvext(request, name) for name in _SAMPLING_FIELDS}
    if request.temperature == 0:
        fields["seed"] = None  # a greedy choice does not depend on it
    bias = _logit_bias(request, vocab_size)
    return SamplingOptions(**fields, logit_bias=bias, guided_decoding=guided)


def _router_override(nvext: Nvext) -> RouterConfigOverride | None:
    override = nvext.router_config_override
    return None if override is None else RouterConfigOverride(**override.model_dump())


def _agent_context(nvext: Nvext) -> AgentContext | None:
    agent = nvext.agent_context
    return None if agent is None else AgentContext(**agent.model_dump())


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
    """Yields the texts of all messages but those of the assistant, of which a chat template may
    leave out some. Without the white space around them, which others strip."""
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
        raise _prompt_too_long(request, tokens_min, context_length, "at least ")


def _prompt_too_long(
    request: GenerationRequest, tokens: int, context: int, at_least: str = ""
) -> PromptTooLong:
    prompt_field = _prompt_field(request)
    return PromptTooLong(
        f"This model's maximum context length is {context} tokens. However, your {prompt_field}"
        f" resulted in {at_least}{tokens} tokens. Please reduce the length of the {prompt_field}.",
        prompt_field,
        metadata=_lengths(tokens, 0, context),
    )


def _lengths(prompt: int, output: int, context: int) -> dict[str, str]:
    """Returns the numbers of an error, from which other APIs write their own text. output: 0: the
    prompt alone is too long."""
    return {PROMPT_TOKENS: str(prompt), OUTPUT_TOKENS: str(output), CONTEXT_TOKENS: str(context)}


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
        raise _prompt_too_long(request, prompt, context)
    prompt_field = _prompt_field(request)
    if requested is not None and requested > tokens_available:
        raise PromptTooLong(
            f"This model's maximum context length is {context} tokens. However, you requested"
            f" {prompt + requested} tokens ({prompt} in the {prompt_field}, {requested} "
            "in the completion)."
            f" Please reduce the length of the {prompt_field} or completion.",
            field,
            metadata=_lengths(prompt, requested, context),
        )
    limit = requested or (tokens_available if default is None else min(default, tokens_available))
    check_min_tokens(request, limit, f"the output limit of {limit} tokens")
    return limit


def choice_request(request: PreprocessedRequest, choice: int) -> PreprocessedRequest:
    """Returns the request of a prompt's choice, counted from 0, which adds its number to the
    seed."""
    sampling = request.sampling_options
    if not choice or sampling.seed is None:
        return request
    seed = (sampling.seed + choice + 2**63) % 2**64 - 2**63
    return replace(request, sampling_options=replace(sampling, seed=seed))


def check_total_tokens(prompts: Sequence[PreprocessedRequest]) -> int:
    """Returns the tokens of all prompts. Raises InvalidRequest if they are too many."""
    tokens = sum(len(prompt.token_ids) for prompt in prompts)
    if len(prompts) > 1 and tokens > PROMPT_TOKENS_MAX:
        text = f"{len(prompts)} prompts have {tokens} tokens together, and {PROMPT_TOKENS_MAX} are"
        raise InvalidRequest(f"Invalid 'prompt': {text} allowed.", "prompt", reason=INVALID_VALUE)
    return tokens


def check_echo(request: GenerationRequest, prompts: Sequence[PreprocessedRequest]) -> None:
    """Raises InvalidRequest if the echoed prompts of all choices have too many log probabilities,
    which are kept until they are complete, and written at once."""
    if not request.echoes_logprobs:
        return
    tokens = sum(len(prompt.token_ids) for prompt in prompts) * request.choices_per_prompt
    entries = tokens * (1 + (request.alternatives or 0))
    if entries > ECHO_ENTRIES_MAX:
        text = f"the prompts have {entries} log probabilities, alternatives included, and"
        text = f"Invalid 'echo': {text} {ECHO_ENTRIES_MAX} are allowed."
        raise InvalidRequest(text, "echo", reason=INVALID_VALUE)


def strict_priority(nvext: Nvext | None) -> int:
    """Returns level in the router's queue; 0, the lowest, by default."""
    if nvext is None or nvext.agent_hints is None:
        return 0
    return nvext.agent_hints.strict_priority or 0


def routing_hints(
    nvext: Nvext | None,
    *,
    adapter: str = "",
    cache_salt: str | None = None,
    default_priority: int | None = None,
) -> RoutingHints | None:
    """Returns the routing hints of a request; None if it has none.

    adapter: "" is the base model.
    cache_salt: from the body or `nvext`.
    default_priority: of a request without one in `nvext`; a larger number goes first.
    """
    if nvext is None:
        if not adapter and cache_salt is None and default_priority is None:
            return None  # the usual case
        nvext = _NO_EXTENSIONS
    agent = nvext.agent_hints or _NO_AGENT_HINTS
    allowed = nvext.allowed_worker_ids
    priority = default_priority if agent.priority is None else agent.priority
    hints = RoutingHints(
        backend_instance_id=nvext.backend_instance_id,
        prefill_worker_id=nvext.prefill_worker_id,
        decode_worker_id=nvext.decode_worker_id,
        dp_rank=nvext.dp_rank,
        prefill_dp_rank=nvext.prefill_dp_rank,
        expected_output_tokens=agent.osl,
        lora_name=adapter or None,
        # A positive priority counts as that many seconds of waiting.
        priority_jump=None if priority is None else float(max(0, priority)),
        priority=priority,
        allowed_worker_ids=None if allowed is None else frozenset(allowed),
        routing_constraints=_routing_constraints(nvext),
        session_control=_session_control(nvext),
        cache_salt=cache_salt,
    )
    return None if hints == _NO_ROUTING_HINTS else hints


def _routing_constraints(nvext: Nvext) -> RoutingConstraints | None:
    constraints = nvext.routing_constraints
    if constraints is None:
        return None
    required, preferred = constraints.required_taints, constraints.preferred_taints
    return RoutingConstraints(
        required_taints=frozenset(required or ()), preferred_taints=preferred or {}
    )


def _session_control(nvext: Nvext) -> SessionControl | None:
    session = nvext.session_control
    if session is None:
        return None
    action = None if session.action is None else SessionAction(session.action)
    return SessionControl(session.session_id, action)
