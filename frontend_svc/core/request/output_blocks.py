"""By how many KV blocks an answer has grown, and how much of it is still to come (pure)."""

from __future__ import annotations

from typing import NamedTuple


class Grown(NamedTuple):
    """blocks: started since the last word, at least 1. decay_fraction: see `Growth.reached`."""

    blocks: int
    decay_fraction: float | None


class Growth:
    """One attempt's blocks beyond those of its prompt.

    With block size b (0: not known, then nothing is ever told), after g tokens of its own:

        blocks         = ceil((total_tokens + g) / b) - ceil(total_tokens / b), less those told
        decay_fraction = max(0, 1 - g / max(1, expected_output_tokens)), None if that is unknown

    Formula: as NVIDIA Dynamo documents it, but that all blocks crossed at once are told.

    Invariant: the blocks told of an attempt are those that its booking lacks. A booking is of one
    attempt and begins with its prompt's blocks; to one that goes on elsewhere what was generated
    before is prompt, and only the rest of the output is expected.
    """

    def __init__(
        self, total_tokens: int, block_size: int, expected_output_tokens: int | None
    ) -> None:
        self._total_tokens = total_tokens
        self._block_size = block_size
        self._expected = expected_output_tokens
        self._held = self._blocks(0)

    def reached(self, generated: int) -> Grown | None:
        """After so many tokens of the attempt's output; None if no block was started since."""
        if not self._block_size:
            return None
        held = self._blocks(generated)
        if held <= self._held:
            return None
        grown, self._held = held - self._held, held
        if self._expected is None:
            return Grown(grown, None)
        return Grown(grown, max(0.0, 1.0 - generated / max(1, self._expected)))

    def _blocks(self, generated: int) -> int:
        size = self._block_size
        return -(-(self._total_tokens + generated) // size) if size else 0
