"""Learns whether a server computes vectors or scores, of which form, and that token ids give those
of the text: with a tokenizer of another model they would be wrong without an error."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import httpx
import numpy as np

from common.errors import InvalidRequest, Unsupported
from common.request.embedding import Vector, shorten
from worker_svc.engines.openai.client import ServerClient, error_of
from worker_svc.engines.openai.config import ServerConfig
from worker_svc.engines.openai.detect import model_folder, read_vocab_size
from worker_svc.engines.openai.facts import ServerFacts
from worker_svc.engines.openai.pooling import (
    CLASSIFY_PATH,
    EMBEDDINGS_PATH,
    Prompt,
    Values,
    embeddings_body,
    read_values,
)
from worker_svc.engines.sglang.pooling import read_vector
from worker_svc.engines.sglang.sampling import EngineProperties

# What a start computes, with capitals and more than one token.
TEXT: Final = "Hello there, how are you?"
SECOND_TEXT: Final = "I am fine."
# Batches of another size round differently, in 16 bits by some thousandths.
TOLERANCE: Final = 0.02
NO_INDEX: Final = "vectors and scores are not routed by prefixes"


async def find_pooling(
    client: ServerClient, config: ServerConfig, facts: ServerFacts
) -> ServerFacts:
    """Returns the facts with those of a server that computes vectors or scores; the same facts of
    one that generates.

    Raises InvalidRequest if the tokenizer is not here or is another one, Unsupported if the server
    takes no token ids, and the errors of `ServerClient`.
    """
    match facts.api:
        case "sglang":  # it states what it computes
            pass
        case "vllm":
            facts = await _find_vllm_pooling(client, facts)
        case "text":
            if not await _is_embedding_server(client, config, facts):
                return facts
            facts = _with_tokenizer(client, config, facts)
    pooling, folder = facts.properties.pooling, facts.model_path
    if not pooling:
        return facts
    assert folder is not None, "that of the tokenizer"
    facts = replace(facts, kv_addresses=None, kv_off_reason=NO_INDEX, no_index_reason=NO_INDEX)
    if pooling == "embedding":
        return await _measure(client, facts, await _encode(folder, TEXT))
    if facts.api == "vllm":
        await _check_pairs(client, facts, await _encode(folder, TEXT, SECOND_TEXT))
    return facts


async def _find_vllm_pooling(client: ServerClient, facts: ServerFacts) -> ServerFacts:
    """vLLM has only the routes of what its model computes."""
    if await _embed(client, facts.model, TEXT) is not None:
        return replace(facts, properties=replace(facts.properties, pooling="embedding"))
    values = await _values(client, CLASSIFY_PATH, {"model": facts.model, "input": TEXT})
    if values is None:
        return facts
    if values.size != 1:
        text = f"{client.url} is a classifier of {values.size} classes"
        raise Unsupported("server_urls", f"{text}; the adapter serves scores of one class")
    return replace(facts, properties=replace(facts.properties, pooling="score"))


async def _is_embedding_server(
    client: ServerClient, config: ServerConfig, facts: ServerFacts
) -> bool:
    """Whether a server without an API of token ids serves vectors: by configuration, or because it
    computes them and does not generate. Some compute vectors with any model, but llama-server only
    with --embeddings."""
    if config.serve is not None and "embedding" not in config.serve:
        return False
    if await _embed(client, facts.model, TEXT) is None:
        return False
    if config.serve is not None or facts.is_llama_server:
        return True
    message = {"role": "user", "content": TEXT}
    body = {"model": facts.model, "messages": [message], "max_tokens": 1}
    return (await _post(client, "/v1/chat/completions", body)).status_code != 200


def _with_tokenizer(client: ServerClient, config: ServerConfig, facts: ServerFacts) -> ServerFacts:
    folder = model_folder(config, facts.model, client.url)
    limit = facts.context_length or 2**31
    properties = EngineProperties(
        vocab_size=read_vocab_size(folder),
        context_length=limit,
        max_input_tokens=limit,
        pooling="embedding",
    )
    return replace(facts, model_path=folder, properties=properties)


async def _measure(client: ServerClient, facts: ServerFacts, ids: list[int]) -> ServerFacts:
    """Returns the facts with the size of vectors, and whether they may be shortened.

    ids: those of TEXT.
    """
    if (vector := await _embed(client, facts.model, ids)) is None:
        text = f"{client.url} takes no token ids at {EMBEDDINGS_PATH}"
        raise Unsupported("server_urls", text)
    of_text = await _embed(client, facts.model, TEXT)
    # None: SGLang without a tokenizer.
    if of_text is not None and not _are_close(vector, of_text):
        text = f"{client.url} computes another vector for the token ids of a text than for the text"
        raise InvalidRequest(
            f"{text}: the tokenizer in {facts.model_path} is not that of its model", "model_path"
        )
    beside = await _embed(client, facts.model, [ids, ids[:2]])
    # None: a server that takes one prompt at a time.
    if beside is not None and not _are_close(vector, beside):
        text = f"{client.url} computes another vector for a prompt beside others than alone"
        raise Unsupported("server_urls", f"{text}; llama-server needs --kv-unified")
    half = max(1, len(vector) // 2)
    short = await _embed(client, facts.model, ids, dimensions=half)
    return replace(
        facts,
        embedding_size=len(vector),
        shorter_embeddings=short is not None and _are_close(short, shorten(vector, half)),
    )


async def _check_pairs(client: ServerClient, facts: ServerFacts, ids: list[int]) -> None:
    """Raises Unsupported if the score of the joined token ids of two texts is another one than the
    server's own for the texts, as with token types or a template."""
    texts = {"model": facts.model, "text_1": TEXT, "text_2": SECOND_TEXT}
    own = await _values(client, "/score", texts)
    found = await _values(client, CLASSIFY_PATH, {"model": facts.model, "input": ids})
    if own is None or found is None or not np.allclose(own, found, rtol=0, atol=TOLERANCE):
        text = f"{client.url} does not join the texts of a pair as its tokenizer does"
        raise Unsupported("server_urls", f"{text}, or takes no token ids at {CLASSIFY_PATH}")


async def _embed(client: ServerClient, model: str, prompt: Prompt, **fields: Any) -> Vector | None:
    """Returns the vector of a prompt, of the first one of several; None if there is none."""
    values = await _values(client, EMBEDDINGS_PATH, embeddings_body(model, prompt, **fields))
    return None if values is None else read_vector({"embedding": values})


async def _post(client: ServerClient, path: str, body: Mapping[str, Any]) -> httpx.Response:
    """Raises Overloaded, Unavailable and WorkerLost for a server that may respond later."""
    response = await client.try_post(path, body)
    if response.status_code in (429, 503):
        raise error_of(response.status_code, response.content, client.url, response.headers)
    return response


async def _values(client: ServerClient, path: str, body: Mapping[str, Any]) -> Values | None:
    """Returns what a server computes; None if it does not. Raises as `_post`."""
    response = await _post(client, path, body)
    if response.status_code != 200:
        return None
    try:
        return read_values(response.content)
    except (AttributeError, LookupError, TypeError, ValueError):
        return None


async def _encode(folder: Path, text: str, pair: str | None = None) -> list[int]:
    """Returns the token ids of a text, or of a pair as the tokenizer joins it. Raises
    InvalidRequest."""
    # Imported here: other servers need no tokenizer.
    from tokenizers import Tokenizer

    path = folder / "tokenizer.json"

    def encode() -> list[int]:
        tokenizer = Tokenizer.from_file(str(path))
        tokenizer.no_truncation()
        tokenizer.no_padding()
        ids: list[int] = tokenizer.encode(text, pair).ids
        return ids

    try:
        return await asyncio.to_thread(encode)
    except Exception as error:  # the library raises plain Exception
        raise InvalidRequest(f"{path} cannot be used: {error}", "model_path") from error


def _are_close(one: Vector, other: Vector) -> bool:
    """Whether two vectors of length 1 are equal but for rounding."""
    return one.shape == other.shape and bool(np.linalg.norm(one - other) < TOLERANCE)
