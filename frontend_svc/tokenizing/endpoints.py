"""`/tokenize` and `/detokenize`: the tokenizer of a model, as generation uses it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from frontend_svc.endpoints.endpoint import PostEndpoint
from frontend_svc.endpoints.request_context import HttpRequest
from frontend_svc.generation.api import off_loop
from frontend_svc.generation.streaming import send_json
from frontend_svc.generation.tokenization import encode_chat
from frontend_svc.metrics.families import RequestMeter
from frontend_svc.models.served_model import ServedModel
from frontend_svc.tokenizing.bodies import (
    DetokenizeRequest,
    TokenizeRequest,
    check_tokens,
    detokenize_json,
    parse_detokenize,
    parse_tokenize,
    tokenize_json,
)


class TokenizeEndpoint(PostEndpoint[TokenizeRequest]):
    """The ASGI application of `/tokenize`."""

    async def parse(self, context: HttpRequest, raw: bytes) -> TokenizeRequest:
        context.progress.body = body = await off_loop(len(raw), parse_tokenize, raw)
        return body

    async def serve(self, context: HttpRequest, body: TokenizeRequest, meter: RequestMeter) -> None:
        model = self._models.get(self.served_model(context, body.model))
        token_ids = await _encode(body, model)
        meter.prompt(len(token_ids))
        token_text = model.tokenizer.id_to_token if body.with_strings else None
        payload = tokenize_json(token_ids, model.card.context_length, token_text)
        await send_json(context, payload)
        meter.mark_ok()


class DetokenizeEndpoint(PostEndpoint[DetokenizeRequest]):
    """The ASGI application of `/detokenize`."""

    async def parse(self, context: HttpRequest, raw: bytes) -> DetokenizeRequest:
        context.progress.body = body = await off_loop(len(raw), parse_detokenize, raw)
        return body

    async def serve(
        self, context: HttpRequest, body: DetokenizeRequest, meter: RequestMeter
    ) -> None:
        model = self._models.get(self.served_model(context, body.model))
        check_tokens(body, model.vocab_size)
        # All tokens have a text, so that tokenizing it gives the same ids.
        text = await asyncio.to_thread(
            model.tokenizer.decode, body.tokens, skip_special_tokens=False
        )
        await send_json(context, detokenize_json(text))
        meter.mark_ok()


async def _encode(body: TokenizeRequest, model: ServedModel) -> Sequence[int]:
    if body.chat is None:
        return await model.encode(body.text, special_tokens=body.special_tokens)
    add = body.add_generation_prompt
    return (await encode_chat(body.chat, model, add_generation_prompt=add))[0]
