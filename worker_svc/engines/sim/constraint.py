"""Guided decoding of the simulated model: the next token among those that a grammar allows. Pure.

The formula, with x and the state of `token_oracle.py`, and A the ascending ids that the grammar
allows next, without EOS:

    r    = x >> 32
    next = eos_id                              if the grammar allows an end, and A is empty or
                                               r mod 2 == 0
           P[((x mod 2^32) * len(P)) >> 32]    otherwise

If (r >> 2) mod 2 == 0, P is the id of `"` alone or, if A does not have it, the ids of A that begin
with one of `}],<`; else it is those of A that are words. If there are none, P is A. These
delimiters end strings, arrays and objects early, and begin tool calls. The grammar is a function of
the output so far, so a client can compute a constrained output too, and another worker can continue
it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Final

import numpy as np
from llguidance import LLMatcher, LLTokenizer
from numpy.typing import NDArray

from common.errors import InvalidRequest
from common.request.grammar import ConstraintError, compile_constraint, next_mask
from common.request.preprocessed import GuidedDecoding
from worker_svc.engines.sim.token_oracle import TokenOracle

_FIELD: Final = "sampling_options.guided_decoding"
# Processor time of one mask of an output on average, and of many in a row.
MASK_S: Final = 0.002
MASKS_S: Final = 0.2
_QUOTE: Final = b'"'
_CLOSING: Final = b"}],<"

_Mask = NDArray[np.bool_]


class ConstraintCompiler:
    """Compiles constraints for the vocabulary of one model.

    - tokenizer_json: content of the file.
    - word_ids: ids of the model's words.
    - eos_id: ends the output.
    - cpu_time: of the calling thread, in seconds.
    """

    def __init__(
        self,
        tokenizer_json: str,
        word_ids: Sequence[int],
        eos_id: int,
        cpu_time: Callable[[], float],
    ) -> None:
        self._cpu_time = cpu_time
        self._tokenizer_json = tokenizer_json
        self._word_ids = word_ids
        self.eos_id = eos_id

    def compile(self, guided: GuidedDecoding, prompt: Sequence[int]) -> Constraint:
        """Returns the constraint after the prompt's tokens that are output already.

        Raises InvalidRequest if it is invalid, or does not allow those tokens.
        """
        try:
            matcher = compile_constraint(self._tokenizer, guided)
        except ConstraintError as error:
            raise InvalidRequest(f"Invalid '{_FIELD}': {error}.", _FIELD) from error
        generated = list(prompt[len(prompt) - (guided.prefix_tokens or 0) :])
        if generated and not matcher.consume_tokens(generated):
            text = "the constraint does not allow the tokens so far"
            raise InvalidRequest(text, f"{_FIELD}.prefix_tokens")
        classes = (*self._delimiters, self._words)
        return Constraint(matcher, classes, self.eos_id, self._cpu_time)

    @cached_property
    def _tokenizer(self) -> LLTokenizer:
        return LLTokenizer(self._tokenizer_json, eos_token=self.eos_id)

    @cached_property
    def _words(self) -> _Mask:
        return np.isin(np.arange(self._tokenizer.vocab_size), self._word_ids)

    @cached_property
    def _delimiters(self) -> tuple[_Mask, ...]:
        ids = range(self._tokenizer.vocab_size)
        texts = [self._tokenizer.decode_bytes([token]) for token in ids]
        return (
            np.array([text == _QUOTE for text in texts]),
            np.array([bool(text) and text[:1] in _CLOSING for text in texts]),
        )


class Constraint:
    """The state of a grammar in one output. Other outputs of the engine wait for its masks, so it
    fails if they take too long."""

    def __init__(
        self,
        matcher: LLMatcher,
        classes: Sequence[_Mask],
        eos_id: int,
        cpu_time: Callable[[], float],
    ) -> None:
        self._cpu_time = cpu_time
        # Processor time that is left for masks.
        self._left_s = MASKS_S
        self._matcher = matcher
        self._classes = classes
        self._eos_id = eos_id

    def next_token(self, oracle: TokenOracle, state: int) -> tuple[int, _Mask] | None:
        """Returns the token that follows `state`, which may be EOS, and by id which ones the
        grammar allows; None if it failed: it exceeded a limit of the library, or of time."""
        begin_s = self._cpu_time()
        try:
            mask = next_mask(self._matcher)
        except ConstraintError:
            return None
        self._left_s += MASK_S - (self._cpu_time() - begin_s)
        if self._left_s < 0:
            return None
        self._left_s = min(self._left_s, MASKS_S)
        bits = np.unpackbits(np.frombuffer(mask, dtype=np.uint8), bitorder="little")
        allowed = bits[: len(self._classes[0])].astype(bool)
        can_end = bool(allowed[self._eos_id])
        all_allowed = allowed.copy()
        allowed[self._eos_id] = False
        x = oracle.mix(state)
        draw = x >> 32
        if can_end and (draw % 2 == 0 or not allowed.any()):
            return self._eos_id, all_allowed
        preferred = self._classes[:-1] if (draw >> 2) % 2 == 0 else self._classes[-1:]
        pools = (np.flatnonzero(allowed & token_class) for token_class in preferred)
        pool = next((pool for pool in pools if len(pool)), np.flatnonzero(allowed))
        if not len(pool):
            return None
        return int(pool[((x & 0xFFFFFFFF) * len(pool)) >> 32]), all_allowed

    def accept(self, token: int) -> bool:
        """Advances over a token of the output. Returns False if the grammar does not allow it."""
        return self._matcher.consume_token(token)


def constraint_failed() -> InvalidRequest:
    """Returns the error of an output after a failure of its constraint."""
    return InvalidRequest("the constraint became too complex for the grammar library", _FIELD)
