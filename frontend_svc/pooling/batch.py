"""The prompts of one pooling request: each is a request of its own to the workers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence

from common.errors import MeshError
from common.request.preprocessed import TokenLogprob
from frontend_svc.request.gateway import Gateway
from frontend_svc.request.handle import RequestHandle
from frontend_svc.request.placement_request import PlacementRequest
from frontend_svc.request.types import RequestOutcome, RequestPlan

# Prompts of one request at workers at the same time. More would occupy the event loop for
# milliseconds at once, and fewer would leave engines idle.
IN_FLIGHT_MAX = 32


class PoolingBatch:
    """Runs the prompts of one request, IN_FLIGHT_MAX at a time, each by its plan and its placement
    request. on_chunk: receives the index of a prompt and the chunk with its result, in any order;
    raises MeshError if the chunk is invalid. responses: of the prompts that were opened."""

    def __init__(
        self,
        gateway: Gateway,
        prompts: Iterable[tuple[RequestPlan, PlacementRequest]],
        on_chunk: Callable[[int, bytes], None],
    ) -> None:
        self._gateway = gateway
        self._prompts = enumerate(prompts)
        self._on_chunk = on_chunk
        self._open: dict[int, RequestHandle] = {}
        self.responses: list[PromptResponse] = []
        self._done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def run(self) -> None:
        """Returns when all prompts are done. Raises the first MeshError. An error, and the
        cancellation of this call, end the prompts that still run."""
        for _ in range(IN_FLIGHT_MAX):
            self._open_next()
        try:
            await self._done
        finally:
            self._done.cancel()
            for handle in list(self._open.values()):
                handle.abort()

    def fail(self, error: MeshError) -> None:
        """Ends the batch; `run` raises the error."""
        if not self._done.done():
            self._done.set_exception(error)

    def _open_next(self) -> None:
        for index, (plan, placement) in self._prompts:
            response = PromptResponse(index, self._finished)
            self.responses.append(response)
            self._open[index] = self._gateway.open(plan, placement, response)
            return

    def _finished(self, index: int, chunk: bytes, outcome: RequestOutcome) -> None:
        del self._open[index]
        if self._done.done():
            return
        if outcome.error is not None:
            self.fail(outcome.error)
            return
        try:
            self._on_chunk(index, chunk)
        except MeshError as error:
            self.fail(error)
            return
        self._open_next()
        if not self._open:
            self._done.set_result(None)


class PromptResponse:
    """Receives the result of one prompt; of several attempts, the last one counts."""

    def __init__(self, index: int, on_end: Callable[[int, bytes, RequestOutcome], None]) -> None:
        self._index = index
        self._on_end = on_end
        self._chunk = b""
        self.first_token_at: float | None = None
        self.outcome: RequestOutcome | None = None

    def tokens(self, token_ids: list[int], logprobs: Sequence[TokenLogprob]) -> None:
        """Prompts that are not continued have no tokens."""

    def chunk(self, json: bytes) -> None:
        self._chunk = json

    def finished(self, outcome: RequestOutcome) -> None:
        self.outcome = outcome
        chunk, self._chunk = self._chunk, b""
        self._on_end(self._index, chunk, outcome)
