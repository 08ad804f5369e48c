"""Log probabilities of a prompt as parts of a response (pure).

A prompt may have a million tokens, so they are sent in parts, each of them a chunk of the slot on
the Attach stream: a JSON list with one entry `[token, logprob, [[token, logprob], ...]]` for each
token of the prompt, from the second one on. The first token has no probability.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import orjson

from common.request.preprocessed import TokenLogprob, TopLogprob

# Below a fifth of the largest frame with 20 alternatives for each.
ENTRIES_PER_PART: Final = 64


def dump_parts(logprobs: Sequence[TokenLogprob]) -> Iterator[bytes]:
    """Yields the parts, in order."""
    for start in range(0, len(logprobs), ENTRIES_PER_PART):
        part = logprobs[start : start + ENTRIES_PER_PART]
        yield orjson.dumps(
            [
                [entry.token_id, entry.logprob, [[top.token_id, top.logprob] for top in entry.top]]
                for entry in part
            ]
        )


def load_part(part: bytes) -> list[TokenLogprob]:
    return [
        TokenLogprob(token, logprob, tuple(TopLogprob(*top) for top in tops))
        for token, logprob, tops in orjson.loads(part)
    ]
