"""Embeddings by SGLang, for a model started with `is_embedding` (0.5.23)."""

from __future__ import annotations

from contextlib import aclosing
from typing import Any

import numpy as np

from common.errors import InternalError
from common.request.embedding import Vector
from worker_svc.engines.sglang.sampling import (
    Arguments,
    EngineProperties,
    abort_error,
    to_invalid_request,
)


# Any: SGLang's tokenizer manager has no types.
async def embed(
    manager: Any, arguments: Arguments, rid: str, properties: EngineProperties
) -> Vector:
    """Returns the vector of a prompt, of length 1. Cancelling the call ends it in SGLang, too.

    Raises InvalidRequest, or the error of a request that SGLang aborted.
    """
    from sglang.srt.managers.io_struct import EmbeddingReqInput  # type: ignore[import-not-found] # noqa: TID251

    request = EmbeddingReqInput(**arguments, rid=rid)
    try:
        async with aclosing(manager.generate_request(request, None)) as outputs:
            output = await anext(outputs)
    except ValueError as error:
        raise to_invalid_request(error) from error
    finish_info = output["meta_info"]["finish_reason"]
    if finish_info is not None and finish_info["type"] == "abort":
        raise abort_error(finish_info, properties)
    vector = np.asarray(output["embedding"], dtype=np.float32)
    length = float(np.linalg.norm(vector))
    if vector.ndim != 1 or not np.isfinite(length) or not length:
        raise InternalError(f"SGLang returned a vector of shape {vector.shape}, length {length}")
    # Not every pooler normalises.
    return (vector / length).astype(np.float32)
