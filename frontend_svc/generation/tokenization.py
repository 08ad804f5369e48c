"""The prompts of a body: checks their length, renders the chat template and tokenizes."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

from common.errors import InvalidRequest, Unsupported
from frontend_svc.media.prompt import check_media, expand_media, media_parts
from frontend_svc.models.served_model import ServedModel
from frontend_svc.openai.body.preprocessing import check_prompt_length, input_texts
from frontend_svc.openai.body.schema import ChatRequest, CompletionRequest
from frontend_svc.prompts.prompt import Prompt, TemplateError


async def tokenize(
    body: ChatRequest | CompletionRequest, model: ServedModel
) -> tuple[list[Sequence[int]], str | None]:
    """Returns the prompts of a body, at least one, and the text of the first one; None: token
    ids."""
    context_length = model.card.context_length or 0
    if isinstance(body, CompletionRequest):
        token_lists: list[Sequence[int]] = [
            await _encode(body, prompt, model, context_length)
            if isinstance(prompt, str)
            else prompt
            for prompt in body.prompts
        ]
        first = body.prompts[0]
        return token_lists, first if isinstance(first, str) else None
    token_ids, text = await encode_chat(body, model, context_length=context_length)
    return [token_ids], text


async def encode_chat(
    body: ChatRequest,
    model: ServedModel,
    *,
    add_generation_prompt: bool = True,
    context_length: int = 0,
) -> tuple[Sequence[int], str | None]:
    """Returns the prompt of a chat request, with all placeholders of its media, and its text; None:
    token ids. context_length: 0: a prompt of any length is encoded."""
    parts = media_parts(body)
    check_media(parts, model.card.media, model.name)
    token_ids: Sequence[int] | None = body.token_data
    text = None
    if token_ids is None:
        # Templates print these in full: their length can refuse a body before it is rendered.
        check_prompt_length(body, model.token_count_min(*input_texts(body)), context_length)
        prompt = await _render_prompt(body, model, add_generation_prompt=add_generation_prompt)
        check_prompt_length(body, model.token_count_min(prompt.text), context_length)
        token_ids, text = await model.encode_prompt(prompt), prompt.text
    return expand_media(token_ids, parts, model.card.media), text


async def _render_prompt(
    body: ChatRequest, model: ServedModel, *, add_generation_prompt: bool = True
) -> Prompt:
    """Returns the prompt of a chat request. Raises InvalidRequest or Unsupported, which name the
    field."""
    if model.template is None:
        text = f"The model {model.name!r} has no chat template; use /v1/completions."
        raise InvalidRequest(text, "model")
    tools = body.template_tools()
    if tools is not None and not model.template.prints_tools:
        raise Unsupported("tools", "the model's chat template does not print them")
    try:
        return await model.template.prompt(
            body.template_messages(),
            tools=tools,
            template_kwargs=body.template_kwargs(
                model.template.variables, is_reasoning=model.is_reasoning
            ),
            add_generation_prompt=add_generation_prompt,
            now=datetime.now(UTC),
        )
    except TemplateError as error:
        raise InvalidRequest(str(error), "messages") from error


async def _encode(
    body: CompletionRequest, text: str, model: ServedModel, context_length: int
) -> list[int]:
    check_prompt_length(body, model.token_count_min(text), context_length)
    return await model.encode(text, special_tokens=True)
