"""Duration of a step of the simulated accelerator. Pure.

    step_s = (base_s + prefill_token_s * prefill_tokens
                     + decode_seq_s * decode_seqs
                     + kv_token_s * kv_tokens
                     + host_token_s * host_tokens) / speedup

prefill_tokens: prompt tokens computed in the step. decode_seqs: sequences that get one token.
kv_tokens: KV cache tokens that the step's attention reads. host_tokens: cached tokens of prompts
that the step loads from the host. With speedup 0 every step takes no time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds per step and per unit of work in it, before the speedup.

    The defaults are round numbers in the range of an 8B model on one mid-range accelerator: 12k
    prompt tokens/s, 6 ms for a step with one sequence, 11 ms with 256, 26 GB/s from the host.
    Raises ValueError for values that are negative or not finite.
    """

    base_s: float = 6e-3
    prefill_token_s: float = 1 / 12_000
    decode_seq_s: float = 20e-6
    kv_token_s: float = 2e-9
    host_token_s: float = 5e-6
    speedup: float = 1.0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{field.name}: {value} is negative or not finite")

    def step_s(
        self, prefill_tokens: int, decode_seqs: int, kv_tokens: int, host_tokens: int = 0
    ) -> float:
        """Returns the seconds of one step by the formula of this module."""
        return self.scaled(
            self.base_s
            + self.prefill_token_s * prefill_tokens
            + self.decode_seq_s * decode_seqs
            + self.kv_token_s * kv_tokens
            + self.host_token_s * host_tokens
        )

    def prefill_s(self, prefill_tokens: int) -> float:
        """Returns the seconds of a prefill beyond the steps it shares with others."""
        return self.scaled(self.prefill_token_s * prefill_tokens)

    def scaled(self, seconds: float) -> float:
        """Returns the time after the speedup."""
        return seconds / self.speedup if self.speedup else 0.0
