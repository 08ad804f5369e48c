"""The logits of the simulated model, for requests that change them. Pure.

The model chooses the token of the highest logit. Without changes that is the token of
`token_oracle.py` (or of `constraint.py`), so requests without them need no logits. The formula,
with the state and `mix` of `token_oracle.py`:

    logit(chosen)          = 10
    logit(rival k)         = 10 - k / 2        k = 1..7; words[((mix(state + k * G) mod 2^32) *
                                               len(words)) >> 32], G = 0x9E3779B97F4A7C15
    logit(other words)     = 1
    logit(all other ids)   = -20

An id that is several of these has the highest logit. A grammar, and an end that is not allowed,
exclude ids. Then, in this order, with c the count of a token in the output:

    repetition_penalty     divides a positive logit, multiplies a negative one, if the token occurs
                           in the prompt or the output
    frequency_penalty      logit - frequency_penalty * c
    presence_penalty       logit - presence_penalty, if c > 0
    logit_bias             logit + bias

Of equal logits the lowest id wins. Log probabilities are the log-softmax of the changed logits
times 1/2 + (mix(state) mod 1024) / 1024, so they differ between positions; excluded ids have none.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from common.request.preprocessed import SamplingOptions, TokenLogprob, TopLogprob
from worker_svc.engines.sim.token_oracle import TokenOracle

RIVALS: Final = 7
_CHOSEN_LOGIT: Final = 10.0
_RIVAL_STEP: Final = 0.5
_WORD_LOGIT: Final = 1.0
_OTHER_LOGIT: Final = -20.0
# A repetition penalty near 0 makes no infinite logit, of which no log probability is a number.
_LOGIT_MAX: Final = 1e300
_GOLDEN_GAMMA: Final = 0x9E3779B97F4A7C15

Logits = NDArray[np.float64]


class LogitModel:
    """The logits of one model. vocab_size: above every word id and EOS."""

    def __init__(self, oracle: TokenOracle, vocab_size: int) -> None:
        self._oracle = oracle
        self._words = np.full(vocab_size, _OTHER_LOGIT)
        self._words[list(oracle.words)] = _WORD_LOGIT

    def logprob(self, state: int, logits: Logits, token: int, alternatives: int) -> TokenLogprob:
        """Returns the natural log probabilities of a token and of the most probable ones."""
        logits = logits * (0.5 + self._oracle.mix(state) % 1024 / 1024)
        highest = logits.max()
        log_sum = highest + np.log(np.exp(logits - highest).sum())
        order = np.argsort(-logits, kind="stable")[:alternatives]
        top = [TopLogprob(int(token_id), float(logits[token_id] - log_sum)) for token_id in order]
        return TokenLogprob(
            token,
            float(logits[token] - log_sum),
            tuple(alternative for alternative in top if np.isfinite(alternative.logprob)),
        )

    def of_prompt(
        self, state: int, token_ids: Sequence[int], alternatives: int
    ) -> list[TokenLogprob]:
        """Returns the log probabilities of given tokens, the first of which follows `state`."""
        logprobs = []
        for token in token_ids:
            logits = self.logits(state, self._oracle.next_token(state), can_end=True)
            logprobs.append(self.logprob(state, logits, token, alternatives))
            state = self._oracle.advance(state, token)
        return logprobs

    def logits(
        self, state: int, chosen: int, *, can_end: bool, allowed: NDArray[np.bool_] | None = None
    ) -> Logits:
        """Returns the logits after `state`, shape [vocab_size]. chosen: the token of the formula.
        allowed: by id, those that a grammar allows; it decides the end itself."""
        logits = self._words.copy()
        for number in range(RIVALS, 0, -1):
            rival = self._oracle.word(state + number * _GOLDEN_GAMMA)
            logits[rival] = _CHOSEN_LOGIT - _RIVAL_STEP * number
        logits[chosen] = _CHOSEN_LOGIT
        if allowed is not None:
            logits[: len(allowed)][~allowed[: len(logits)]] = -np.inf
            logits[len(allowed) :] = -np.inf
        elif not can_end:
            logits[self._oracle.eos_id] = -np.inf
        return logits


@dataclass(slots=True)
class LogitChanges:
    """The changes that one request makes, with the counts of its output so far."""

    repetition: float
    frequency: float
    presence: float
    bias_ids: NDArray[np.int64]
    biases: Logits
    prompt_ids: NDArray[np.int64]
    output: Counter[int] = field(default_factory=Counter)

    @staticmethod
    def of(options: SamplingOptions, prompt: Sequence[int] | NDArray[Any]) -> LogitChanges | None:
        """Returns the changes of a request; None if it makes none. The last `prefix_tokens` of the
        prompt count as output."""
        repetition = options.repetition_penalty or 1.0
        frequency, presence = options.frequency_penalty or 0.0, options.presence_penalty or 0.0
        bias: Mapping[int, float] = options.logit_bias
        if not bias and (repetition, frequency, presence) == (1.0, 0.0, 0.0):
            return None
        ids = np.asarray(prompt, dtype=np.int64)
        prompt_tokens = len(ids) - (options.prefix_tokens or 0)
        return LogitChanges(
            repetition,
            frequency,
            presence,
            np.array(list(bias.keys()), dtype=np.int64),
            np.array(list(bias.values()), dtype=np.float64),
            np.unique(ids[:prompt_tokens]),
            Counter(ids[prompt_tokens:].tolist()),
        )

    def apply(self, logits: Logits) -> Logits:
        """Changes the logits in place, and returns them."""
        generated = np.fromiter(self.output.keys(), dtype=np.int64, count=len(self.output))
        if self.repetition != 1.0:
            seen = np.union1d(self.prompt_ids[self.prompt_ids < len(logits)], generated)
            present = logits[seen]
            limited = np.clip(present, 0, _LOGIT_MAX * self.repetition)
            logits[seen] = np.where(
                present > 0, limited / self.repetition, present * self.repetition
            )
        counts = np.fromiter(self.output.values(), dtype=np.float64, count=len(self.output))
        logits[generated] -= self.presence + self.frequency * counts
        logits[self.bias_ids] += self.biases
        return logits
