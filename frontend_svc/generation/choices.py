"""The choices of a response: how the tokens of each become text, calls and reasoning."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Final

from common.request.preprocessed import PreprocessedRequest
from frontend_svc.generation.api import PreparedBody
from frontend_svc.generation.streaming import OpenChoice
from frontend_svc.models.served_model import ServedModel
from frontend_svc.openai.body.schema import ChatRequest, CompletionRequest
from frontend_svc.openai.body.tool_calls import ToolPlan
from frontend_svc.openai.output.logprobs import token_id_text
from frontend_svc.text.choice import Choice, PromptTokens
from frontend_svc.text.output_text import DetokenizerLike, RecordedText, TextStream
from frontend_svc.tools.choice_parser import ChoiceParser
from frontend_svc.tools.formats import HERMES
from frontend_svc.tools.harmony import HarmonyParser
from frontend_svc.tools.parser import ToolCallParser

# In UTF-8, all other bytes begin a character.
_INNER_BYTES: Final = bytes(range(0x80, 0xC0))


def make_choices(
    prepared: PreparedBody,
    request_ids: Sequence[str],
    counts: list[int] | None = None,
    *,
    is_recorded: bool = False,
) -> list[Choice]:
    """Returns the choices of all prompts, in order.

    - request_ids: of the requests that generate them.
    - counts: of `ResponseInfo`.
    - is_recorded: whether their texts are kept.
    """
    body, model = prepared.body, prepared.model
    choices: list[Choice] = []
    for prompt, request in enumerate(prepared.requests):
        echo = _echoed_text(body, model, prompt)
        for _ in range(body.choices_per_prompt):
            number, parser = len(choices), None
            if isinstance(body, ChatRequest):
                parser = _response_parser(request_ids[number], model, prepared.plan, request)
            detokenizer: DetokenizerLike = model.detokenizer(
                for_parser=parser is not None, skips_special=body.skip_special_tokens is not False
            )
            recorded = RecordedText(detokenizer) if is_recorded else None
            choices.append(
                Choice(
                    number,
                    _text_stream(body, recorded or detokenizer),
                    parser,
                    echo=echo,
                    token_bytes=_token_bytes(body, model),
                    counts=counts,
                    recorded=recorded,
                )
            )
    return choices


def echo_with_logprobs(prepared: PreparedBody, open_choices: Sequence[OpenChoice]) -> None:
    """Gives each choice the log probabilities of its prompt, if the client requested them."""
    for number, open_choice in enumerate(open_choices):
        if (logprobs := open_choice.buffer.prompt_logprobs) is None:
            continue
        request = prepared.requests[number // prepared.body.choices_per_prompt]
        token_ids = request.token_ids.tolist()
        offsets = _text_offsets(prepared.model, token_ids)
        open_choice.choice.echo_with(PromptTokens(token_ids, offsets, logprobs))


def _text_offsets(model: ServedModel, token_ids: Sequence[int]) -> list[int]:
    """Returns how many characters begin before each token."""
    token_bytes = model.token_bytes
    sizes = [len(token_bytes(token).translate(None, _INNER_BYTES)) for token in token_ids]
    return [0, *accumulate(sizes)][:-1]


def _echoed_text(body: ChatRequest | CompletionRequest, model: ServedModel, prompt: int) -> str:
    if not isinstance(body, CompletionRequest) or not body.echo:
        return ""
    value = body.prompts[prompt]
    return value if isinstance(value, str) else model.tokenizer.decode(value)


def _response_parser(
    response_id: str, model: ServedModel, plan: ToolPlan | None, request: PreprocessedRequest
) -> ChoiceParser | None:
    if model.is_harmony and (plan is None or plan.call_format is not HERMES):
        messages = HarmonyParser(is_single=plan is not None and plan.is_single)
        return ChoiceParser(messages, None, response_id)
    guided = request.sampling_options.guided_decoding
    is_guided = guided is not None and not guided.best_effort
    reasoning = model.reasoning_parser(request.token_ids, is_guided=is_guided)
    if plan is None:
        return None if reasoning is None else ChoiceParser(None, reasoning, response_id)
    tools = ToolCallParser(plan.call_format, plan.types, is_single=plan.is_single)
    id_chars = plan.call_format.id_chars
    return ChoiceParser(tools, reasoning, response_id, id_chars=id_chars)


def _token_bytes(
    body: ChatRequest | CompletionRequest, model: ServedModel
) -> Callable[[int], bytes] | None:
    """Returns how log probabilities write a token; None if the client requested none."""
    if body.alternatives is None:
        return None
    return token_id_text if body.return_tokens_as_token_ids else model.token_bytes


def _text_stream(body: ChatRequest | CompletionRequest, detokenizer: DetokenizerLike) -> TextStream:
    return TextStream(
        detokenizer,
        body.stop_strings,
        min_tokens=body.min_tokens or 0,
        includes_stop=body.include_stop_str_in_output is True,
    )
