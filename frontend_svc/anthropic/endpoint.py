"""The Messages API: how its bodies are read and its responses written, and its token counts."""

from __future__ import annotations

import orjson

from common.access.caller import Caller
from frontend_svc.anthropic.message_format import MessageFormat
from frontend_svc.anthropic.translation import MessagesChat, parse_count, parse_messages
from frontend_svc.endpoints.endpoint import PostEndpoint
from frontend_svc.endpoints.request_context import HttpRequest
from frontend_svc.generation.api import ParsedBody, ResponseInfo, off_loop
from frontend_svc.generation.streaming import send_json
from frontend_svc.generation.tokenization import encode_chat
from frontend_svc.metrics.families import RequestMeter
from frontend_svc.text.api_format import ApiFormat


class MessagesApi:
    """The GenerationApi of `/v1/messages`."""

    async def parse(self, raw: bytes, caller: Caller) -> ParsedBody:
        request = await off_loop(len(raw), parse_messages, raw)

        def make_format(info: ResponseInfo) -> ApiFormat:
            return MessageFormat(
                f"msg_{info.request_id}",
                info.model,
                info.prompt_tokens,
                info.header_id,
                omits_thinking=request.omits_thinking,
            )

        return ParsedBody(request, make_format, omitted_tools=request.omitted_tools)


class CountTokensEndpoint(PostEndpoint[MessagesChat]):
    """Returns the number of tokens of a prompt, without a worker."""

    async def parse(self, context: HttpRequest, raw: bytes) -> MessagesChat:
        context.progress.body = request = await off_loop(len(raw), parse_count, raw)
        context.progress.omitted_tools = request.omitted_tools
        return request

    async def serve(self, context: HttpRequest, body: MessagesChat, meter: RequestMeter) -> None:
        model = self._models.get_for(self.served_model(context, body.model), "chat")
        context.progress.base_model = model.base
        token_ids, _ = await encode_chat(body, model)
        await send_json(context, orjson.dumps({"input_tokens": len(token_ids)}))
        meter.mark_ok()
