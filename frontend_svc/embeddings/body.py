"""Bodies of `/v1/embeddings` and their responses (pure).

Honoured: model, input (a text, token ids, or up to PROMPTS_MAX of them), encoding_format (float,
base64), dimensions. Accepted without effect: user, and `CallerFields` of
`openai/body/ignored.py`. Any other name is refused as unknown.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Annotated, Any, ClassVar, Literal, cast

import orjson
from pydantic import Discriminator, Field, Tag, ValidationError

from common.errors import InvalidRequest
from common.request.embedding import Vector, to_base64
from common.request.preprocessed import TokenIds
from frontend_svc.openai.body.fields import (
    LIST,
    MANY_PROMPTS,
    TEXT,
    TOKEN_IDS,
    U32,
    WRONG_TYPE,
    AtLeastOne,
    prompt_kind,
    wrong_type,
)
from frontend_svc.openai.body.parsing import parse_json_object
from frontend_svc.openai.body.validation_errors import invalid_value
from frontend_svc.openai.output.json_bytes import compact_json
from frontend_svc.pooling.request import PROMPTS_MAX, TOKENS_MAX, PoolingRequest, Text

_Tokens = Annotated[list[U32], Field(min_length=1, max_length=TOKENS_MAX, fail_fast=True)]


class EmbeddingRequest(PoolingRequest):
    """The body of `/v1/embeddings`."""

    prompts_field: ClassVar[str] = "input"

    input: Annotated[
        Annotated[Text, Tag(TEXT)]
        | Annotated[
            list[Text], Field(min_length=1, max_length=PROMPTS_MAX, fail_fast=True), Tag(LIST)
        ]
        | Annotated[_Tokens, Tag(TOKEN_IDS)]
        | Annotated[list[_Tokens], Field(max_length=PROMPTS_MAX, fail_fast=True), Tag(MANY_PROMPTS)]
        | Annotated[Any, wrong_type("a string, token ids, or a list of them"), Tag(WRONG_TYPE)],
        Discriminator(prompt_kind),
    ]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: AtLeastOne | None = None

    @property
    def texts(self) -> list[str] | None:
        """The inputs to tokenize, in order; None if the client sent token ids."""
        if isinstance(self.input, str):
            return [self.input]
        # The first item determines the branch of the union, which type checkers cannot follow.
        return cast("list[str]", self.input) if isinstance(self.input[0], str) else None

    @property
    def token_lists(self) -> list[list[int]]:
        """The inputs as token ids, in order, if the client sent such."""
        if isinstance(self.input[0], list):
            return cast("list[list[int]]", self.input)
        return [cast("list[int]", self.input)]

    def prompt_name(self, index: int) -> str:
        is_single = isinstance(self.input, str) or isinstance(self.input[0], int)
        return "input" if is_single else f"input[{index}]"


def parse_embedding(body: bytes) -> EmbeddingRequest:
    """Returns a validated request. Raises InvalidRequest with the path of the first invalid field,
    and Unsupported for a known value that the server does not support."""
    try:
        return EmbeddingRequest.model_validate(parse_json_object(body))
    except ValidationError as error:
        raise invalid_value(error) from None


def check_vocabulary(request: EmbeddingRequest, inputs: Sequence[TokenIds], size: int) -> None:
    """Raises InvalidRequest for a token id that is not below `size`."""
    for index, token_ids in enumerate(inputs):
        largest = token_ids.largest
        if largest >= size:
            name = request.prompt_name(index)
            text = f"token {largest} is not in the vocabulary of {size}"
            raise InvalidRequest(f"Invalid '{name}': {text}.", name)


def embedding_entry(index: int, vector: Vector, encoding_format: str | None) -> bytes:
    """Returns one entry of `data`. encoding_format: None: float."""
    value = to_base64(vector) if encoding_format == "base64" else vector
    entry = {"object": "embedding", "index": index, "embedding": value}
    return compact_json(entry)


def embedding_list(entries: Iterable[bytes], model: str, tokens: int) -> list[bytes]:
    """Returns the parts of a whole response. tokens: of all inputs."""
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    end = orjson.dumps({"object": "list", "model": model, "usage": usage})
    parts = [b'{"data":[']
    for entry in entries:
        parts += (entry, b",")
    parts[-1] = b"],"
    return [*parts, end[1:]]
