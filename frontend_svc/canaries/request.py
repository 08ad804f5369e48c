"""The request of a canary: the smallest one that takes the whole path of a client's."""

from __future__ import annotations

import os
from collections.abc import Mapping

import orjson

from common.request.placement import CANARY_ID_PREFIX, Query
from common.request.preprocessed import PreprocessedRequest, TokenIds
from frontend_svc.config import FrontendConfig
from frontend_svc.models.catalog import Engine
from frontend_svc.models.model_watch import Table
from frontend_svc.models.served_model import ServedModel
from frontend_svc.openai.body.preprocessing import to_preprocessed
from frontend_svc.openai.body.schema import CompletionRequest
from frontend_svc.request.placement_request import PlacementRequest
from frontend_svc.request.types import PassThroughPayload, Pooling, RequestPlan

PROMPT = "Hello"
_POOLING: Mapping[Table, Pooling] = {"embeddings": "embedding", "scores": "score"}


async def make_canary(
    table: Table, engine: Engine, config: FrontendConfig, now: float, *, is_split: bool
) -> tuple[RequestPlan, PlacementRequest]:
    """Returns the plan and the placement request of one canary. The query has no tenant and no
    prefix hashes, so that no index changes.

    - table: the first one of the model.
    - now: loop time, seconds.
    - is_split: whether the model is served by pairs. The query then has no length, because a
      router may place a short prompt on one worker.

    Raises MeshError if the prompt cannot be prepared.
    """
    model = engine.model
    body: PassThroughPayload | None = None
    if model is None:
        request = PreprocessedRequest(model=engine.name, token_ids=TokenIds())
        body = PassThroughPayload(_body(engine.name, table), is_chat=table == "chat")
    else:
        request = await _prepare(table, model)
    query = Query(engine.name, 0 if is_split else len(request.token_ids))
    plan = RequestPlan(
        request_id=f"{CANARY_ID_PREFIX}{os.urandom(12).hex()}",
        request=request,
        deadline=now + config.canary_timeout_s,
        attempts_max=config.attempts_max,
        accept_timeout_s=config.accept_timeout_s,
        body=body,
        pooling=_POOLING.get(table, ""),
    )
    return plan, PlacementRequest(query, now)


async def _prepare(table: Table, model: ServedModel) -> PreprocessedRequest:
    """Returns the prompt as the endpoints of completions, embeddings and scores prepare it."""
    card = model.card
    if table == "scores":
        (token_ids,) = await model.encode_pairs([(PROMPT, PROMPT)])
    else:
        token_ids = await model.encode(PROMPT, special_tokens=True)
    if table in _POOLING:
        return PreprocessedRequest(
            model=model.name, token_ids=TokenIds.of(token_ids), card_checksum=model.checksum
        )
    return to_preprocessed(
        CompletionRequest.model_validate({"model": model.name, "prompt": PROMPT, "max_tokens": 1}),
        token_ids,
        eos_token_ids=card.eos_token_ids,
        card_checksum=model.checksum,
        context_length=card.context_length or 0,
        vocab_size=model.vocab_size,
    )


def _body(model: str, table: Table) -> bytes:
    """Returns the body for a pass-through worker."""
    messages = [{"role": "user", "content": PROMPT}]
    prompt = {"messages": messages} if table == "chat" else {"prompt": PROMPT}
    return orjson.dumps({"model": model, "max_tokens": 1, **prompt})
