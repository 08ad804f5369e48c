"""Fields of request bodies that are accepted and have no effect (pure).

A body of an application often has fields that no engine could use: the caller's own ids, and
options of another server with the value that all responses here follow anyway. Refusing them would
exclude the application, so they are accepted, and `docs/http.md` states that they have no effect.
A field with which an engine could do something else is not one of these.
"""

from __future__ import annotations

from typing import Annotated, Any, TypeAlias

from frontend_svc.openai.body.fields import StrictModel, refuse

# Any: only the caller's programs read it.
_Anything: TypeAlias = Any

_NO_BEAMS = "there is no beam search"
_NO_TRUNCATION = "prompts are not cut; send a shorter one"
_WHOLE_REASONING = "reasoning is always separate from the content"


class CallerFields(StrictModel):
    """Names under which the programs of a caller keep their own records of a request."""

    client_metadata: _Anything = None
    request_id: _Anything = None
    rid: _Anything = None
    trace: _Anything = None
    trace_id: _Anything = None
    tags: _Anything = None
    user_id: _Anything = None
    session_id: _Anything = None
    conversation_id: _Anything = None
    litellm_metadata: _Anything = None
    litellm_call_id: _Anything = None
    litellm_session_id: _Anything = None
    litellm_trace_id: _Anything = None


class DefaultOptions(StrictModel):
    """Options of vLLM, SGLang and llama.cpp, accepted with the value that is in force here."""

    use_beam_search: Annotated[object, refuse(_NO_BEAMS, False)] = None
    length_penalty: Annotated[object, refuse(_NO_BEAMS, 1, 1.0)] = None
    early_stopping: Annotated[object, refuse(_NO_BEAMS, False)] = None
    truncate_prompt_tokens: Annotated[object, refuse(_NO_TRUNCATION)] = None
    detokenize: Annotated[object, refuse("responses are text", True)] = None
    spaces_between_special_tokens: Annotated[object, refuse("they are always there", True)] = None
    allowed_token_ids: Annotated[object, refuse("use logit_bias or a guided_ field", [])] = None
    bad_words: Annotated[object, refuse("use logit_bias", [])] = None
    logits_processors: Annotated[object, refuse("no engine runs code of a client", [])] = None
    return_token_ids: Annotated[object, refuse("use nvext.extra_fields", False)] = None
    return_hidden_states: Annotated[object, refuse("no engine returns them", False)] = None
    no_stop_trim: Annotated[object, refuse("use include_stop_str_in_output", False)] = None
    cache_prompt: Annotated[object, refuse("prefixes are always cached", True)] = None


class DefaultChatOptions(StrictModel):
    """As `DefaultOptions`, for chats."""

    add_special_tokens: Annotated[object, refuse("the chat template adds them", False)] = None
    add_generation_prompt: Annotated[object, refuse("the response is a new message", True)] = None
    continue_final_message: Annotated[object, refuse("the response is a new message", False)] = None
    documents: Annotated[object, refuse("put them into messages", [])] = None
    include_reasoning: Annotated[object, refuse(_WHOLE_REASONING, True)] = None
    separate_reasoning: Annotated[object, refuse(_WHOLE_REASONING, True)] = None
    stream_reasoning: Annotated[object, refuse(_WHOLE_REASONING, True)] = None
