"""The base of Attach transports that tests fill."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

from common.request.token_stream import ResponseFrame


class PulledTransport(ABC):
    """Delivers the frames that `read` returns, until None."""

    @abstractmethod
    async def read(self) -> ResponseFrame | None: ...

    async def deliver(self, receive: Callable[[ResponseFrame], None]) -> None:
        """See Transport."""
        while (frame := await self.read()) is not None:
            receive(frame)
