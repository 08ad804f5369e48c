"""Bodies of `/v1/rerank` and `/v1/score`, and their responses (pure).

Rerank, as Cohere and Jina define it. Honoured: model, query, documents (texts, or objects with
`text`), top_n, return_documents, max_tokens_per_doc. Score, as vLLM defines it. Honoured: model,
text_1, text_2. Accepted without effect: user, and `CallerFields` of `openai/body/ignored.py`. Any
other name is refused as unknown.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar

import orjson
from pydantic import Discriminator, Field, Tag, ValidationError

from common.errors import InvalidRequest
from frontend_svc.openai.body.fields import (
    LIST,
    OBJECT,
    TEXT,
    U32,
    WRONG_TYPE,
    AtLeastOne,
    StrictModel,
    refuse,
    text_or_list,
    text_or_object,
    wrong_type,
)
from frontend_svc.openai.body.parsing import parse_json_object
from frontend_svc.openai.body.validation_errors import INVALID_VALUE, invalid_value
from frontend_svc.pooling.request import PROMPTS_MAX, TOO_MANY_TOKENS, PoolingRequest, Text

# Of all pairs of one request together: a long text may be in each of them.
CHARS_MAX = 1 << 23

_NO_TRUNCATION = "use max_tokens_per_doc of /v1/rerank"


class TextDocument(StrictModel):
    """A document as an object."""

    text: Text


Document = Annotated[
    Annotated[Text, Tag(TEXT)]
    | Annotated[TextDocument, Tag(OBJECT)]
    | Annotated[Any, wrong_type("a string, or an object with text"), Tag(WRONG_TYPE)],
    Discriminator(text_or_object),
]
Texts = Annotated[
    Annotated[Text, Tag(TEXT)]
    | Annotated[list[Text], Field(min_length=1, max_length=PROMPTS_MAX, fail_fast=True), Tag(LIST)]
    | Annotated[Any, wrong_type("a string, or a list of them"), Tag(WRONG_TYPE)],
    Discriminator(text_or_list),
]


class PairRequest(PoolingRequest):
    """A body with pairs of texts."""

    truncate_prompt_tokens: Annotated[object, refuse(_NO_TRUNCATION)] = None

    @property
    @abstractmethod
    def pairs(self) -> Sequence[tuple[str, str]]:
        """The pairs to score, in order."""

    @property
    def second_tokens_max(self) -> int | None:
        """Tokens of the second text of each pair, which is cut behind them; None: it is not."""
        return None


class RerankRequest(PairRequest):
    """The body of `/v1/rerank`."""

    prompts_field: ClassVar[str] = "documents"

    query: Text
    documents: Annotated[
        list[Document], Field(min_length=1, max_length=PROMPTS_MAX, fail_fast=True)
    ]

    top_n: U32 | None = None
    """The number of results. 0, or unset: all."""

    return_documents: bool | None = None
    """Whether results have their documents. Unset: they do."""

    max_tokens_per_doc: AtLeastOne | None = None
    """Longer documents are cut. Unset: they are refused if they do not fit."""

    max_chunks_per_doc: Annotated[object, refuse("documents are not split", 1)] = None

    @property
    def pairs(self) -> Sequence[tuple[str, str]]:
        return [(self.query, self.document(index)) for index in range(len(self.documents))]

    @property
    def second_tokens_max(self) -> int | None:
        return self.max_tokens_per_doc

    def document(self, index: int) -> str:
        """Returns the text of a document."""
        document = self.documents[index]
        return document.text if isinstance(document, TextDocument) else document

    def prompt_name(self, index: int) -> str:
        return f"documents[{index}]"


class ScoreRequest(PairRequest):
    """The body of `/v1/score`. One text is paired with each of the others, or two lists of the same
    length by position."""

    prompts_field: ClassVar[str] = "text_2"

    text_1: Texts
    text_2: Texts

    @property
    def pairs(self) -> Sequence[tuple[str, str]]:
        first, second = _as_list(self.text_1), _as_list(self.text_2)
        return list(zip(first * len(second) if len(first) == 1 else first, second, strict=True))

    def prompt_name(self, index: int) -> str:
        return "text_2" if isinstance(self.text_2, str) else f"text_2[{index}]"


def _as_list(texts: Any) -> list[str]:
    return [texts] if isinstance(texts, str) else texts


def parse_rerank(body: bytes) -> RerankRequest:
    """Returns a validated request. Raises InvalidRequest with the path of the first invalid field,
    and Unsupported for a known value that the server does not support."""
    try:
        request = RerankRequest.model_validate(parse_json_object(body))
    except ValidationError as error:
        raise invalid_value(error) from None
    check_chars(request)
    return request


def parse_score(body: bytes) -> ScoreRequest:
    """Returns a validated request. Raises as `parse_rerank`."""
    try:
        request = ScoreRequest.model_validate(parse_json_object(body))
    except ValidationError as error:
        raise invalid_value(error) from None
    first, second = len(_as_list(request.text_1)), len(_as_list(request.text_2))
    if first not in (1, second):
        text = f"expected {first} texts, as many as text_1 has, but got {second}"
        raise InvalidRequest(f"Invalid 'text_2': {text}.", "text_2", reason=INVALID_VALUE)
    check_chars(request)
    return request


def check_chars(request: PairRequest) -> None:
    """Raises InvalidRequest if all pairs together have more than CHARS_MAX characters."""
    if (chars := sum(len(first) + len(second) for first, second in request.pairs)) > CHARS_MAX:
        field = request.prompts_field
        text = f"expected at most {CHARS_MAX} characters in all pairs together, but got {chars}"
        message = f"Invalid '{field}': {text}; send several requests."
        raise InvalidRequest(message, field, reason=TOO_MANY_TOKENS)


def rerank_object(
    request: RerankRequest, scores: Sequence[float], response_id: str, model: str, tokens: int
) -> bytes:
    """Returns a response: the documents with the greatest scores first, of equal ones the first
    of the body. tokens: of all pairs."""
    order = sorted(range(len(scores)), key=lambda index: -scores[index])
    with_documents = request.return_documents is not False
    results = [
        {"index": index, "relevance_score": scores[index]}
        | ({"document": {"text": request.document(index)}} if with_documents else {})
        for index in order[: request.top_n or len(order)]
    ]
    return orjson.dumps(
        {"id": response_id, "model": model, "results": results, "usage": _usage(tokens)}
    )


def score_object(
    scores: Sequence[float], response_id: str, model: str, created: int, tokens: int
) -> bytes:
    """Returns a response: the scores in the order of the pairs. tokens: of all pairs."""
    data = [
        {"index": index, "object": "score", "score": score} for index, score in enumerate(scores)
    ]
    head = {"id": response_id, "object": "list", "created": created, "model": model}
    return orjson.dumps(head | {"data": data, "usage": _usage(tokens)})


def _usage(tokens: int) -> dict[str, int]:
    return {"prompt_tokens": tokens, "total_tokens": tokens}
