"""Log probabilities as the JSON of chat completions and of completions (pure)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from frontend_svc.text.api_format import TokenText


# Any: JSON.
def logprobs_object(tokens: Sequence[TokenText], *, is_chat: bool) -> dict[str, Any] | None:
    """Returns the `logprobs` of a choice or of a chunk; None without tokens."""
    if not tokens:
        return None
    if is_chat:
        content = [
            {**_entry(token), "top_logprobs": [_entry(other) for other in token.top]}
            for token in tokens
        ]
        return {"content": content, "refusal": None}
    has_top = any(token.top for token in tokens)
    return {
        "tokens": [token_text(token.raw) for token in tokens],
        "token_logprobs": [token.logprob for token in tokens],
        "top_logprobs": [_top(token) for token in tokens] if has_top else None,
        "text_offset": [token.offset for token in tokens],
    }


def token_id_text(token_id: int) -> bytes:
    """Returns a token written as its id, as in vLLM."""
    return f"token_id:{token_id}".encode()


def token_text(raw: bytes) -> str:
    """Returns the text of a token; bytes that are no complete character are written as `\\xNN`."""
    return raw.decode(errors="backslashreplace")


def _entry(token: TokenText) -> dict[str, Any]:
    return {"token": token_text(token.raw), "logprob": token.logprob, "bytes": list(token.raw)}


def _top(token: TokenText) -> dict[str, float] | None:
    """Returns the alternatives and the token itself; None without a probability. Of several with
    one text the most probable counts."""
    if token.logprob is None:
        return None
    values: dict[str, float] = {}
    alternatives: Iterable[TokenText] = (*token.top, token)
    for alternative in alternatives:
        assert alternative.logprob is not None, "only tokens of a prompt have none"
        values.setdefault(token_text(alternative.raw), alternative.logprob)
    return values
