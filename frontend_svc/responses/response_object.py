"""The response object of the Responses API (pure)."""

from __future__ import annotations

from typing import Any

from common.request.preprocessed import CompletionUsage
from frontend_svc.openai.body.fields import HostedTool
from frontend_svc.responses.schema import NamedTool, ResponsesRequest

# Any: JSON.
Json = dict[str, Any]


def new_response(
    request: ResponsesRequest, response_id: str, created: int, *, is_stored: bool
) -> Json:
    """Returns a response without output. created: Unix seconds."""
    conversation = request.named_conversation
    text, reasoning, choice = request.text, request.reasoning, request.tool_choice
    text_format: Json = {"type": "text"}
    if text is not None and text.format is not None:
        text_format = text.format.model_dump(exclude_none=True, by_alias=True)
    return {
        "id": response_id,
        "object": "response",
        "created_at": created,
        "status": "in_progress",
        "background": request.background is True,
        "conversation": None if conversation is None else {"id": conversation},
        "error": None,
        "incomplete_details": None,
        "instructions": request.instructions,
        "max_output_tokens": request.max_output_tokens,
        "max_tool_calls": request.max_tool_calls,
        "metadata": request.metadata or {},
        "model": request.model,
        "output": [],
        "parallel_tool_calls": request.parallel_tool_calls is not False,
        "previous_response_id": request.previous_response_id,
        "prompt_cache_key": request.prompt_cache_key,
        "reasoning": {"effort": None if reasoning is None else reasoning.effort, "summary": None},
        "safety_identifier": request.safety_identifier,
        "service_tier": "default",
        "store": is_stored,
        "temperature": request.temperature,
        "text": {"format": text_format, "verbosity": "medium"},
        "tool_choice": choice.model_dump() if isinstance(choice, NamedTool) else choice or "auto",
        "tools": [
            tool.model_dump(exclude={"defer_loading"})
            for tool in request.tools or ()
            if not isinstance(tool, HostedTool)
        ],
        "top_logprobs": 0,
        "top_p": request.top_p,
        "truncation": "disabled",
        "usage": None,
        "user": request.user,
    }


def usage_object(usage: CompletionUsage) -> Json:
    """Returns the counts; 0 for a detail that was not reported, because clients require numbers."""
    prompt, completion = usage.prompt_tokens_details, usage.completion_tokens_details
    cached = None if prompt is None else prompt.cached_tokens
    reasoning = None if completion is None else completion.reasoning_tokens
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": cached or 0, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": reasoning or 0},
        "total_tokens": usage.total_tokens,
    }
