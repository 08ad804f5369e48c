"""Vectors and scores of prompts by a server: its requests and responses. Pure.

A vector is that of `/v1/embeddings`, which SGLang, vLLM, llama-server and OpenAI take token ids at.
A score is that of `/classify`, for a classifier of one class of SGLang or vLLM.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any, Final, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
import orjson

from common.errors import Unsupported
from worker_svc.engines.contract import (
    CompletionUsage,
    LLMEngineOutput,
    PreprocessedRequest,
    chunk,
    usage,
)
from worker_svc.engines.openai.facts import ServerFacts
from worker_svc.engines.sglang.sampling import build_pooling_arguments

EMBEDDINGS_PATH: Final = "/v1/embeddings"
CLASSIFY_PATH: Final = "/classify"
# Of vectors, classes, and of a pair of texts.
_VALUE_NAMES: Final = ("embedding", "probs", "score")

Pooling: TypeAlias = Literal["embedding", "score"]
# What a server returns for one prompt: coordinates, or values of classes.
Values: TypeAlias = npt.NDArray[np.float32]
Prompt: TypeAlias = str | list[int] | list[list[int]]


# Any, here and below: JSON.
def embeddings_body(model: str, prompt: Prompt, **fields: Any) -> dict[str, Any]:
    """Returns a request for the vector of one prompt, or of several."""
    return {"model": model, "input": prompt, "encoding_format": "base64", **fields}


def read_values(content: bytes) -> Values:
    """Returns the values of the first prompt of a response. Servers may ignore that base64 was
    requested. Raises AttributeError, LookupError, TypeError or ValueError for another response."""
    found = orjson.loads(content)
    entry = found.get("data", (found,))[0]
    (value,) = (entry[name] for name in _VALUE_NAMES if name in entry)
    if isinstance(value, str):
        return np.frombuffer(base64.b64decode(value, validate=True), dtype="<f4")
    return np.atleast_1d(np.asarray(value, dtype=np.float32))


class PoolingCall:
    """A `TokenStream` of one JSON object. values: of its response, None before it."""

    is_streamed = False

    def __init__(self, path: str, body: Mapping[str, Any], rid: str, prompt_tokens: int) -> None:
        self.path = path
        self.body = body
        self.rid = rid
        self.values: Values | None = None
        self._prompt_tokens = prompt_tokens

    def convert(self, data: bytes) -> LLMEngineOutput | None:
        """Takes the values. Returns the terminal output."""
        self.values = read_values(data)
        return chunk.stop().with_usage(self.usage())

    def end(self) -> LLMEngineOutput | None:
        """Returns None: the response is the terminal output."""
        return None

    def usage(self) -> CompletionUsage:
        """Returns the tokens of the prompt."""
        return usage(self._prompt_tokens, 0)


def open_pooling(
    request: PreprocessedRequest,
    facts: ServerFacts,
    pooling: Pooling,
    priority: int | None,
    rid: str,
) -> PoolingCall:
    """Returns the call for one prompt. pooling: what is requested of it. rid: for servers that
    abort by it. Raises Unsupported, InvalidRequest and PromptTooLong."""
    if facts.properties.pooling != pooling:
        raise Unsupported("model", f"the server computes no {pooling}s of this model")
    arguments = build_pooling_arguments(request, facts.properties, pooling, priority)
    prompt, lora = arguments["input_ids"], arguments["lora_path"]
    is_sglang = facts.api == "sglang"
    model = facts.model if is_sglang or lora is None else lora
    body = embeddings_body(model, prompt)
    path = EMBEDDINGS_PATH
    if pooling == "score":
        path = CLASSIFY_PATH
        body = {"input_ids": prompt} if is_sglang else {"model": model, "input": prompt}
    if is_sglang:
        body["rid"] = rid
        if lora is not None:
            body["lora_path"] = lora
        if facts.has_priorities:
            body["priority"] = arguments["priority"]
    return PoolingCall(path, body, rid if is_sglang else "", len(prompt))
