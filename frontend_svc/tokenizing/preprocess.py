"""`/v1/internal/preprocess`: the requests that workers would receive for a body."""

from __future__ import annotations

from dataclasses import replace

import orjson

from common.access.caller import Caller
from common.kv.hashing import TokensWithHashes
from common.request.preprocessed import JsonValue, PreprocessedRequest, to_json_value
from frontend_svc.endpoints.request_context import HttpRequest
from frontend_svc.generation.api import (
    CHAT_COMPLETIONS,
    COMPLETIONS,
    ParsedBody,
    off_loop,
)
from frontend_svc.generation.endpoint import GenerationEndpoint
from frontend_svc.generation.streaming import send_json
from frontend_svc.metrics.families import RequestMeter
from frontend_svc.models.served_model import ServedModel
from frontend_svc.openai.body.parsing import parse_json_object
from frontend_svc.request.leg_request import leg_changes
from frontend_svc.responses.endpoint import ResponsesApi


class PreprocessApi:
    """Reads a body of chat completions (`messages`), of the Responses API (`input`) or of
    completions."""

    def __init__(self, responses: ResponsesApi) -> None:
        self._responses = responses

    async def parse(self, raw: bytes, caller: Caller) -> ParsedBody:
        names = (await off_loop(len(raw), parse_json_object, raw)).keys()
        if "messages" in names:
            return await CHAT_COMPLETIONS.parse(raw, caller)
        if "input" in names:
            return await self._responses.parse(raw, caller)
        return await COMPLETIONS.parse(raw, caller)


class PreprocessEndpoint(GenerationEndpoint):
    """Checks and tokenizes a body as generation does, and returns the requests with the hashes
    of their blocks."""

    async def serve(self, context: HttpRequest, body: ParsedBody, meter: RequestMeter) -> None:
        prepared = await self.prepare(context, body.request, meter)
        requests = prepared.requests
        value = {
            "requests": [
                to_json_value(replace(request, **leg_changes(request))) for request in requests
            ],
            "hashes": [_hashes(request, prepared.model) for request in requests],
        }
        await send_json(context, orjson.dumps(value))
        meter.mark_ok()


def _hashes(request: PreprocessedRequest, model: ServedModel) -> JsonValue:
    """Returns the hashes that identify the blocks of a prompt in Dynamo's router and its
    recordings."""
    media = request.mm_routing_info
    tokens = TokensWithHashes(
        request.token_ids.array,
        model.hasher.block_size,
        None if media is None else media.block_mm_infos,
        model.adapter,
    )
    return {
        "block_size": tokens.block_size,
        "block_hashes": list(tokens.block_hashes),
        "sequence_hashes": list(tokens.seq_hashes),
    }
