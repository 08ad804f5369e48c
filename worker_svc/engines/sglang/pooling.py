"""Vectors and scores of prompts by SGLang, for a model started with `is_embedding` (0.5.23)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import aclosing
from typing import Any, Literal, TypeAlias

import numpy as np

from common.errors import InternalError, InvalidRequest
from common.request.embedding import Vector
from worker_svc.engines.sglang.sampling import (
    Arguments,
    EngineProperties,
    abort_error,
    to_invalid_request,
)

Pooling: TypeAlias = Literal["", "embedding", "score"]

_CLASSIFIER = "ForSequenceClassification"


# Any, here and below: JSON-like values of SGLang, whose tokenizer manager has no types.
def pooling_of(model_config: Any) -> Pooling:
    """Returns what a model computes: "" if it generates. Raises as `classifier_pooling`."""
    if model_config.is_generation:
        return ""
    config: Any = model_config.hf_config
    return classifier_pooling(
        getattr(config, "architectures", None) or (),
        getattr(config, "num_labels", 1),
        getattr(config, "type_vocab_size", 0) or 0,
    )


def classifier_pooling(
    architectures: Sequence[str], classes: int, token_types: int
) -> Literal["embedding", "score"]:
    """Returns what a model that generates nothing computes: a classifier of one class scores.

    Raises InvalidRequest for a classifier whose prompts SGLang would compute otherwise than they
    are meant.
    """
    if classes != 1 or not any(name.endswith(_CLASSIFIER) for name in architectures):
        return "embedding"
    if token_types > 1:
        text = f"the model distinguishes the texts of a pair by {token_types} token types"
        raise InvalidRequest(f"{text}, which SGLang takes with texts only", "model_path")
    return "score"


async def pool(
    manager: Any, arguments: Arguments, rid: str, properties: EngineProperties
) -> Mapping[str, Any]:
    """Returns SGLang's output for a prompt. Cancelling the call ends it in SGLang, too.

    Raises InvalidRequest, or the error of a request that SGLang aborted.
    """
    from sglang.srt.managers.io_struct import EmbeddingReqInput  # type: ignore[import-not-found] # noqa: TID251

    request = EmbeddingReqInput(**arguments, rid=rid)
    try:
        async with aclosing(manager.generate_request(request, None)) as outputs:
            output: Mapping[str, Any] = await anext(outputs)
    except ValueError as error:
        raise to_invalid_request(error) from error
    finish_info = output["meta_info"]["finish_reason"]
    if finish_info is not None and finish_info["type"] == "abort":
        raise abort_error(finish_info, properties)
    return output


def read_vector(output: Mapping[str, Any]) -> Vector:
    """Returns the vector of a prompt, of length 1. Raises InternalError."""
    vector = np.asarray(output["embedding"], dtype=np.float32)
    length = float(np.linalg.norm(vector))
    if vector.ndim != 1 or not np.isfinite(length) or not length:
        raise InternalError(f"the model returned a vector of shape {vector.shape}, length {length}")
    # Not every pooler normalises.
    return (vector / length).astype(np.float32)


def read_score(output: Mapping[str, Any]) -> float:
    """Returns the score of a prompt. Raises InternalError."""
    values = np.asarray(output["embedding"], dtype=np.float64).reshape(-1)
    if len(values) != 1 or not np.isfinite(values[0]):
        raise InternalError(f"the model returned the score {output['embedding']!r:.100}")
    return float(values[0])
