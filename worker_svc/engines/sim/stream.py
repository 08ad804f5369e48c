"""One request of the simulated engine, between the scheduler and its generator."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace

from common.errors import MeshError
from common.request.preprocessed import JsonValue, PromptTokensDetails
from worker_svc.engines.contract import (
    CompletionUsage,
    FinishReason,
    LLMEngineOutput,
    usage,
)
from worker_svc.engines.sim.scheduler import SimSequence


@dataclass(slots=True, eq=False)
class Stream:
    """One request between the scheduler and its generator.

    is_awaiting_handoff: whether the terminal chunk of a prefill leg waits until decode or a
    lease has its KV. params: what the leg then hands to decode. has_host_tier: whether cached
    tokens may be on the host.
    """

    sequence: SimSequence
    is_awaiting_handoff: bool
    has_host_tier: bool = False
    params: dict[str, JsonValue] | None = None
    delivered: int = 0
    error: MeshError | None = None
    _waiter: asyncio.Future[None] | None = None

    @property
    def has_new_output(self) -> bool:
        return len(self.sequence.output) > self.delivered and not self.sequence.job.is_handed_over

    @property
    def is_done(self) -> bool:
        return self.sequence.end is not None and not self.is_awaiting_handoff and not self.error

    async def wait_for_update(self) -> None:
        """Returns after the next `wake`."""
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def take(self) -> LLMEngineOutput:
        tokens = tuple(self.sequence.output[self.delivered :])
        self.delivered += len(tokens)
        logprobs = self.sequence.logprobs[self.delivered - len(tokens) : self.delivered]
        return LLMEngineOutput(token_ids=tokens, logprobs=logprobs)

    def take_terminal(self) -> LLMEngineOutput:
        """Returns the terminal chunk, with the remaining tokens."""
        end = self.sequence.end
        assert end is not None, "only an ended sequence has a terminal chunk"
        return replace(
            self.take(),
            finish_reason=end,
            stop_reason=self.sequence.stop_token if end is FinishReason.STOP else None,
            completion_usage=self.usage(),
            disaggregated_params=self.params,
        )

    def usage(self) -> CompletionUsage:
        sequence = self.sequence
        details = PromptTokensDetails(
            cached_tokens=sequence.cached_tokens or 0,
            host_cached_tokens=sequence.host_cached_tokens if self.has_host_tier else None,
        )
        return replace(usage(sequence.prompt_tokens, self.delivered), prompt_tokens_details=details)
