"""Preprocessed requests, as workers and engines receive them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from common.request.preprocessed import PreprocessedRequest, StopConditions, TokenIds
from common.request.token_stream import LegRequest
from worker_svc.engines.contract import GenerateContext


def preprocessed_request(
    token_ids: Iterable[int] = (1, 2, 3), max_tokens: int | None = None, **fields: Any
) -> PreprocessedRequest:
    """Returns a request for this prompt. fields: other fields of `PreprocessedRequest`."""
    if max_tokens is not None:
        fields["stop_conditions"] = StopConditions(max_tokens=max_tokens)
    return PreprocessedRequest(token_ids=TokenIds.of(tuple(token_ids)), **fields)


def leg_request(request_id: str, **fields: Any) -> LegRequest:
    """Returns a leg of a request, by default of `preprocessed_request()`."""
    return LegRequest(request_id, **{"request": preprocessed_request(), **fields})


def context(request_id: str = "r", **fields: Any) -> GenerateContext:
    """Returns the context of a call of `generate`. fields: fields of `GenerateContext`."""
    return GenerateContext(request_id, **fields)
