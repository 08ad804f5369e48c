"""Counts the KV blocks that a response adds to its booking (pure)."""

from __future__ import annotations

from typing import NamedTuple


class NewOutputBlocks(NamedTuple):
    """blocks: started since the last report, at least 1. decay_fraction: see OutputBlockCounter."""

    blocks: int
    decay_fraction: float | None


class OutputBlockCounter:
    """One attempt's blocks beyond those of its prompt.

    With block size b (0: unknown, nothing is reported), after g tokens of the attempt's output:

        blocks         = ceil((total_tokens + g) / b) - ceil(total_tokens / b) - blocks reported
        decay_fraction = max(0, 1 - g / max(1, expected_output_tokens)), None if that is unknown

    Formula: as NVIDIA Dynamo documents it, except that all blocks crossed at once are reported.

    Invariant: the blocks reported for an attempt are those that its booking lacks. A booking
    belongs to one attempt and starts with the blocks of its prompt. For a migrated attempt the
    tokens generated before are prompt, and only the rest of the output is expected.
    """

    def __init__(
        self, total_tokens: int, block_size: int, expected_output_tokens: int | None
    ) -> None:
        self._total_tokens = total_tokens
        self._block_size = block_size
        self._expected_output_tokens = expected_output_tokens
        self._counted_blocks = self._blocks(0)

    def advance_to(self, generated: int) -> NewOutputBlocks | None:
        """Blocks started since the last call, after `generated` tokens of output; None if none."""
        if not self._block_size:
            return None
        total_blocks = self._blocks(generated)
        if total_blocks <= self._counted_blocks:
            return None
        new_blocks, self._counted_blocks = total_blocks - self._counted_blocks, total_blocks
        if self._expected_output_tokens is None:
            return NewOutputBlocks(new_blocks, None)
        return NewOutputBlocks(
            new_blocks, max(0.0, 1.0 - generated / max(1, self._expected_output_tokens))
        )

    def _blocks(self, generated: int) -> int:
        size = self._block_size
        return -(-(self._total_tokens + generated) // size) if size else 0
