"""The inputs of one embeddings request: each is a request of its own to the workers."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence

from common.errors import MeshError
from common.request.embedding import Vector, load_vector
from common.request.preprocessed import FinishReason, TokenLogprob, usage
from frontend_svc.core.peers.placement_query import Query
from frontend_svc.core.request.types import RequestOutcome, RequestPlan
from frontend_svc.request.gateway import Gateway
from frontend_svc.request.handle import RequestHandle

# Inputs of one request at workers at the same time. More would occupy the event loop for
# milliseconds at once, and fewer would leave engines idle.
IN_FLIGHT_MAX = 32


class EmbeddingBatch:
    """Runs the inputs of one request, IN_FLIGHT_MAX at a time, each by its plan and placed by its
    query. on_vector: receives the index of an input and its vector, in any order."""

    def __init__(
        self,
        gateway: Gateway,
        inputs: Sequence[tuple[RequestPlan, Query]],
        on_vector: Callable[[int, Vector], None],
    ) -> None:
        self._gateway = gateway
        self._waiting = deque(enumerate(inputs))
        self._on_vector = on_vector
        self._open: dict[int, RequestHandle] = {}
        self._outcomes: list[RequestOutcome] = []
        self._done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def run(self) -> None:
        """Returns when all inputs are done. Raises the first MeshError. An error, and the
        cancellation of this call, end the inputs that still run."""
        for _ in range(IN_FLIGHT_MAX):
            self._open_next()
        try:
            await self._done
        finally:
            self._done.cancel()
            for handle in list(self._open.values()):
                handle.client_gone()

    def outcome(self) -> RequestOutcome:
        """The outcome of the whole request, as far as its inputs have ended."""
        errors = [one.error for one in self._outcomes if one.error is not None]
        return RequestOutcome(
            finish_reason=FinishReason.ERROR if errors else FinishReason.STOP,
            error=errors[0] if errors else None,
            usage=usage(sum(one.usage.prompt_tokens for one in self._outcomes), 0),
            attempts=max((one.attempts for one in self._outcomes), default=0),
            worker_ids=tuple({w: None for one in self._outcomes for w in one.worker_ids}),
            placed=None,
        )

    def _open_next(self) -> None:
        if self._waiting:
            index, (plan, query) = self._waiting.popleft()
            self._open[index] = self._gateway.open(plan, query, _InputSink(index, self._finished))

    def _finished(self, index: int, chunk: bytes, outcome: RequestOutcome) -> None:
        del self._open[index]
        if self._done.done():
            return
        self._outcomes.append(outcome)
        if outcome.error is not None:
            self._done.set_exception(outcome.error)
            return
        try:
            self._on_vector(index, load_vector(chunk))
        except MeshError as error:
            self._done.set_exception(error)
            return
        self._open_next()
        if not self._open:
            self._done.set_result(None)


class _InputSink:
    """Receives the vector of one input; of several attempts, the last one counts."""

    def __init__(self, index: int, on_end: Callable[[int, bytes, RequestOutcome], None]) -> None:
        self._index = index
        self._on_end = on_end
        self._chunk = b""

    def tokens(self, token_ids: list[int], logprobs: Sequence[TokenLogprob]) -> None:
        """Embeddings have no tokens."""

    def chunk(self, json: bytes) -> None:
        self._chunk = json

    def finished(self, outcome: RequestOutcome) -> None:
        self._on_end(self._index, self._chunk, outcome)
