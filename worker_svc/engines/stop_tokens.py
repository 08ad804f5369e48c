"""Stop tokens of a request, equal for all engines. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from common.request.preprocessed import FinishReason, PreprocessedRequest

# Stop conditions over tokens; frontends match stop strings.
TOKEN_STOP_CONDITIONS: Final = (
    *("max_tokens", "min_tokens", "ignore_eos"),
    *("stop_token_ids_hidden", "stop_token_ids_visible"),
)


@dataclass(frozen=True, slots=True)
class StopToken:
    """Effect of a stop token. is_visible: whether it is part of the output."""

    reason: FinishReason
    is_visible: bool = False


def stop_tokens_of(
    request: PreprocessedRequest, model_eos_ids: Iterable[int]
) -> dict[int, StopToken]:
    """Returns the stop tokens of a request, by id; none with `ignore_eos`.

    EOS overrides hidden ids, into which frontends merge EOS; visible ids override both.
    """
    stop = request.stop_conditions
    if stop.ignore_eos:
        return {}
    stops = dict.fromkeys(stop.stop_token_ids_hidden, StopToken(FinishReason.STOP))
    eos_ids = (*model_eos_ids, *request.eos_token_ids)
    stops |= dict.fromkeys(eos_ids, StopToken(FinishReason.EOS))
    visible = StopToken(FinishReason.STOP, is_visible=True)
    return stops | dict.fromkeys(stop.stop_token_ids_visible, visible)
