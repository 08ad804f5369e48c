"""Requests that wait at frontends because no worker serves their model (pure)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from common.errors import InvalidRequest

# Of one frontend.
MODELS_MAX = 1024


class Demand:
    """The latest counts of each session of a frontend, by model.

    A count of 0 names a model that the frontend is configured to serve.
    """

    def __init__(self) -> None:
        self._by_session: dict[int, Mapping[str, int]] = {}

    def replace(self, session: int, requests: Mapping[str, int]) -> None:
        """Stores the counts of a session. Raises InvalidRequest for too many models."""
        if len(requests) > MODELS_MAX:
            text = f"too many models: {len(requests)}/{MODELS_MAX}"
            raise InvalidRequest(text, "awaiting")
        self._by_session[session] = requests

    def end_session(self, session: int) -> None:
        self._by_session.pop(session, None)

    def by_model(self) -> Counter[str]:
        """Returns the sum over the sessions, with 0 for configured models."""
        total = Counter[str]()
        for requests in self._by_session.values():
            for model, count in requests.items():
                total[model] += count
        return total
