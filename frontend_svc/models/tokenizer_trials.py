"""Tokenizers of cards that were loaded in a trial, within its limits."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from typing import Final

from common.errors import InvalidRequest
from common.registry.card import ModelCard
from common.trials.trial import Trial, TrialExceeded, TrialRefused
from common.trials.trial_slots import TrialSlots
from common.trials.trials import Trials
from frontend_svc.models.tokenizer_files import LIMITS, TRIAL, TriedTokenizer

_SLOTS: Final = 2
_WAITING_MAX: Final = 64
# Then the catalog tries again.
_WAIT_S: Final = 300.0
_PASSED_MAX: Final = 256
_FIELD: Final = "artifacts.tokenizer.json"


class TokenizerTrials:
    """Loads the tokenizer of each new card in a trial: that of one model waits for those of at most
    two others."""

    def __init__(self, trials: Trials) -> None:
        self._trials = trials
        self._slots = TrialSlots(_SLOTS, waiting_max=_WAITING_MAX)
        # By SHA-256 of a file.
        self._passed: OrderedDict[str, TriedTokenizer] = OrderedDict()

    async def check(self, card: ModelCard) -> TriedTokenizer:
        """Raises InvalidRequest if the card's file is invalid or exceeds a limit, Overloaded if the
        trial gets no processor, and Unavailable if no process can be started."""
        artifact = card.artifacts.get("tokenizer.json")
        if artifact is None or (raw := artifact.inline) is None:
            return TriedTokenizer(1.0, ())  # `build_model` refuses the card
        digest = artifact.sha256
        if (passed := self._passed.get(digest)) is not None:
            return passed
        loop = asyncio.get_running_loop()
        async with self._slots.slot(card.name, loop.time() + _WAIT_S):
            if (passed := self._passed.get(digest)) is not None:  # while this one waited
                return passed
            passed = await self._try(raw)
            self._passed[digest] = passed
            if len(self._passed) > _PASSED_MAX:
                self._passed.popitem(last=False)
            return passed

    async def _try(self, raw: bytes) -> TriedTokenizer:
        try:
            result = await self._trials.run(Trial(TRIAL, (raw,), LIMITS))
        except (TrialRefused, TrialExceeded) as error:
            raise InvalidRequest(f"tokenizer.json: {error}", _FIELD) from error
        factor, control_tokens = result
        return TriedTokenizer(float(factor), tuple(map(str, control_tokens)))
