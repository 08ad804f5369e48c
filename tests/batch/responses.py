"""Responses in the background as a client of the HTTP API sees them, on one conversation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from tests.batch.job import Calls, Json
from tests.kit.processes import MODEL
from tests.kit.waiting import wait_for

ENDED = ("completed", "incomplete", "failed", "cancelled")
TOKENS = 64


class BackgroundResponses(Calls):
    """Their items are in one conversation at their end."""

    def __init__(self, url: Callable[[], str], timeout_s: float) -> None:
        super().__init__(url, timeout_s)
        self._conversation = self.call("POST", "/v1/conversations").json()["id"]
        self._ids: list[str] = []

    def start(self, count: int) -> None:
        for _ in range(count):
            body = {
                "model": MODEL,
                "input": f"Say {len(self._ids)}.",
                "max_output_tokens": TOKENS,
                "background": True,
                "conversation": self._conversation,
                "nvext": {"ignore_eos": True},
            }
            self._ids.append(self.call("POST", "/v1/responses", json=body).json()["id"])

    def wait(self) -> Json:
        """Waits for the end of all; returns how many there are, how many have not ended well, and
        those whose items the conversation does not have once."""
        ended = [self._wait(response_id) for response_id in self._ids]
        items = Counter(self._items())
        failed = sum(one["status"] not in ("completed", "incomplete") for one in ended)
        misplaced = sum(
            items[item["id"]] != 1
            for one in ended
            if one["status"] in ("completed", "incomplete")
            for item in one["output"]
        )
        return {"responses": len(ended), "failed": failed, "misplaced": misplaced}

    def _wait(self, response_id: str) -> Json:
        def read() -> Json | None:
            found: Json = self.call("GET", f"/v1/responses/{response_id}").json()
            return found if found["status"] in ENDED else None

        return wait_for(read, f"{response_id} has ended", self.timeout_s) or {}

    def _items(self) -> list[str]:
        """Returns the ids of all items."""
        found: list[str] = []
        page: Json = {"has_more": True}
        path = f"/v1/conversations/{self._conversation}/items?order=asc&limit=100"
        while page["has_more"]:
            after = f"&after={found[-1]}" if found else ""
            page = self.call("GET", f"{path}{after}").json()
            found += [item["id"] for item in page["data"]]
        return found
