"""The output of the simulated model: each token follows from all tokens before it. Pure.

Given the prompt, a client, a checker or a test can compute the output, and so detect lost, repeated
or reordered tokens, even if another worker continued the stream.

The formula. All arithmetic is modulo 2^64; t[0..n-1] are the ids of prompt and output so far.

    state = S * B^n + sum over i of (t[i] + 1) * B^(n-1-i)        B = 0x9E6C63D0876A9A63
    x     = mix(state)                 the 64-bit finaliser of SplitMix64 (Stafford's variant 13)
    next  = eos_id                     if (x >> 32) mod eos_one_in == 0 and an end is allowed
            words[((x mod 2^32) * len(words)) >> 32]                            otherwise

S is 0x243F6A8885A308D3; with an adapter, that XOR the CRC-32 of its name, so that each adapter's
output differs from the model's and from other adapters'; with a seed, that XOR mix(seed + 1), so
that each seed has its own output (a request of temperature 0 has none). An end is not allowed while
EOS is ignored or fewer than `min_tokens` tokens were generated; the word of that position then
replaces EOS. The state advances by one token as state * B + token + 1. `eos_one_in` is about the
mean output length; 0 means that output never ends by itself.

A vector of the prompt: coordinate i is mix(state + i * 0x9E3779B97F4A7C15) as a signed 64-bit
integer; the whole is scaled to length 1. A score of the prompt: the upper 53 bits of mix(state XOR
0x243F6A8885A308D3), over 2^53. Equal prompts have equal vectors and scores, others unrelated ones.

Other sampling options do not appear: the model chooses the token of the highest logit, which is
`next` unless penalties or a logit bias change it (`logits.py`). Guided decoding has a formula of
its own, in `constraint.py`.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from common.request.embedding import Vector

DEFAULT_EOS_ONE_IN: Final = 96
"""Each output token ends the output with a probability of one in this many."""

_U64: Final = 0xFFFFFFFFFFFFFFFF
_U32: Final = 0xFFFFFFFF
_SEED: Final = 0x243F6A8885A308D3
_BASE: Final = 0x9E6C63D0876A9A63
# Ids hashed in one vectorised pass; bounds the stored powers (32 KiB).
_TOKENS_PER_PASS: Final = 4096


class TokenOracle:
    """The output function of one model.

    word_ids: token ids of the output, in the order of `sim.json`. eos_id: ends the output.
    Raises ValueError for an empty list, ids outside 0..2^32-1, EOS among the words, or a negative
    eos_one_in.
    """

    __slots__ = ("_eos_one_in", "_powers", "_word_count", "eos_id", "words")

    def __init__(
        self, word_ids: Sequence[int], eos_id: int, *, eos_one_in: int = DEFAULT_EOS_ONE_IN
    ) -> None:
        if not word_ids:
            raise ValueError("word_ids: at least one word is needed")
        if not all(0 <= word <= _U32 for word in (*word_ids, eos_id)):
            raise ValueError("word_ids, eos_id: token ids are integers from 0 to 2^32-1")
        if eos_id in word_ids:
            raise ValueError(f"eos_id: {eos_id} is among word_ids")
        if eos_one_in < 0:
            raise ValueError(f"eos_one_in: {eos_one_in} is below 0")
        self.eos_id = eos_id
        self.words = tuple(word_ids)
        self._word_count = len(self.words)
        self._eos_one_in = eos_one_in
        powers = np.full(_TOKENS_PER_PASS + 1, _BASE, dtype=np.uint64)
        powers[0] = 1
        # powers[i] is the weight of a pass's token i; powers[0] that of the previous state.
        self._powers = np.multiply.accumulate(powers)[::-1].copy()

    def state_of(
        self,
        token_ids: Sequence[int] | NDArray[Any],
        lora_name: str = "",
        seed: int | None = None,
    ) -> int:
        """Returns the state after these ids, each in 0..2^32-1. lora_name: "" for no adapter."""
        ids = np.asarray(token_ids, dtype=np.uint64)
        state = _SEED ^ zlib.crc32(lora_name.encode())
        if seed is not None:
            state ^= self.mix((seed + 1) & _U64)
        for start in range(0, len(ids), _TOKENS_PER_PASS):
            part = ids[start : start + _TOKENS_PER_PASS]
            weights = self._powers[_TOKENS_PER_PASS - len(part) :]
            terms = (part + np.uint64(1)) * weights[1:]
            state = (state * int(weights[0]) + int(terms.sum(dtype=np.uint64))) & _U64
        return state

    def advance(self, state: int, token: int) -> int:
        return (state * _BASE + token + 1) & _U64

    def next_token(self, state: int, *, can_end: bool = True) -> int:
        """Returns the token that follows `state`; never EOS unless `can_end`."""
        x = self.mix(state)
        if can_end and self._eos_one_in and (x >> 32) % self._eos_one_in == 0:
            return self.eos_id
        return self._word_of(x)

    def word(self, state: int) -> int:
        """Returns the word that `state` selects."""
        return self._word_of(self.mix(state & _U64))

    def _word_of(self, x: int) -> int:
        return self.words[((x & _U32) * self._word_count) >> 32]

    def embed(self, prompt: Sequence[int] | NDArray[Any], size: int, lora_name: str = "") -> Vector:
        """Returns the vector of a prompt, shape [size]."""
        steps = np.arange(size, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        x = steps + np.uint64(self.state_of(prompt, lora_name))
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        coordinates = (x ^ (x >> np.uint64(31))).view(np.int64).astype(np.float64)
        return (coordinates / np.linalg.norm(coordinates)).astype(np.float32)

    def score(self, prompt: Sequence[int] | NDArray[Any], lora_name: str = "") -> float:
        """Returns the score of a prompt."""
        return (self.mix(self.state_of(prompt, lora_name) ^ _SEED) >> 11) / 2**53

    @staticmethod
    def mix(state: int) -> int:
        """Returns 64 bits that are a function of `state`, the x of the formula."""
        x = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _U64
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _U64
        return x ^ (x >> 31)

    def continue_tokens(
        self,
        prompt: Sequence[int] | NDArray[Any],
        n: int,
        *,
        ignore_eos: bool = False,
        min_tokens: int = 0,
        lora_name: str = "",
    ) -> list[int]:
        """Returns the output for `prompt`: at most `n` tokens, without the EOS that ends it."""
        state = self.state_of(prompt, lora_name)
        tokens: list[int] = []
        while len(tokens) < n:
            token = self.next_token(state, can_end=not ignore_eos and len(tokens) >= min_tokens)
            if token == self.eos_id:
                break
            tokens.append(token)
            state = self.advance(state, token)
        return tokens
