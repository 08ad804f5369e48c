"""A batch as a client of the HTTP API sees it."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

import httpx

from tests.kit.processes import MODEL
from tests.kit.waiting import wait_for

ENDPOINT = "/v1/completions"
ENDED = ("completed", "failed", "expired", "cancelled")
# Any: JSON.
Json = dict[str, Any]


def bodies(lines: int, *, groups: int, prefix: int, tokens: int) -> list[Json]:
    """Returns bodies in groups with a common beginning, mixed. prefix: its words."""
    chance = Random(7)
    beginnings = [" ".join(str(chance.randrange(10)) for _ in range(prefix)) for _ in range(groups)]
    found = [
        {
            "model": MODEL,
            "prompt": f"{beginnings[n % groups]} Summarize {n}.",
            "max_tokens": tokens,
            "ignore_eos": True,
        }
        for n in range(lines)
    ]
    chance.shuffle(found)
    return found


class Calls:
    """Calls of the HTTP API. url: of a frontend, asked for each call, which is repeated while that
    is not there."""

    def __init__(self, url: Callable[[], str], timeout_s: float = 600.0) -> None:
        self._url = url
        self.timeout_s = timeout_s
        self._http = httpx.Client(trust_env=False, timeout=60.0)

    def close(self) -> None:
        self._http.close()

    def call(self, method: str, path: str, **arguments: Any) -> httpx.Response:
        def response() -> httpx.Response | None:
            try:
                found = self._http.request(method, f"{self._url()}{path}", **arguments)
            except (httpx.HTTPError, IndexError):
                return None
            return None if found.status_code >= 500 else found

        found = wait_for(response, f"{method} {path} has a response", self.timeout_s)
        assert found is not None
        assert found.status_code == 200, f"{method} {path}: {found.status_code} {found.text[:500]}"
        return found


class Job(Calls):
    """A batch."""

    id = ""

    def create(self, lines: Sequence[Json]) -> None:
        """Uploads the lines and begins the batch."""
        rows = [
            {"custom_id": f"line-{n}", "method": "POST", "url": ENDPOINT, "body": body}
            for n, body in enumerate(lines)
        ]
        content = "\n".join(map(json.dumps, rows)).encode()
        form: Json = {"data": {"purpose": "batch"}, "files": {"file": ("lines.jsonl", content)}}
        file = self.call("POST", "/v1/files", **form).json()
        body = {"input_file_id": file["id"], "endpoint": ENDPOINT, "completion_window": "24h"}
        self.id = self.call("POST", "/v1/batches", json=body).json()["id"]

    def read(self) -> Json:
        found: Json = self.call("GET", f"/v1/batches/{self.id}").json()
        return found

    def done(self) -> int:
        """Returns the lines with a result."""
        counts = self.read()["request_counts"]
        return int(counts["completed"]) + int(counts["failed"])

    def cancel(self) -> None:
        self.call("POST", f"/v1/batches/{self.id}/cancel")
        self.wait()

    def wait(self) -> Json:
        """Waits for its end; returns the batch."""
        return (
            wait_for(
                lambda: found if (found := self.read())["status"] in ENDED else None,
                f"{self.id} has ended",
                self.timeout_s,
            )
            or {}
        )

    def rows(self) -> list[Json]:
        """Returns the rows of its output and error file."""
        batch = self.read()
        found: list[Json] = []
        for file_id in (batch["output_file_id"], batch["error_file_id"]):
            if file_id is not None:
                text = self.call("GET", f"/v1/files/{file_id}/content").text
                found += map(json.loads, text.splitlines())
        return found


def completeness(rows: Sequence[Json], lines: int) -> tuple[int, int, int]:
    """Returns missing lines, repeated ones, and those without a successful response."""
    counts = Counter(row["custom_id"] for row in rows)
    expected = {f"line-{n}" for n in range(lines)}
    missing = len(expected - counts.keys())
    repeated = counts.total() - len(counts)
    failed = sum(row["response"] is None or row["response"]["status_code"] != 200 for row in rows)
    return missing, repeated, failed


def hit_rate(rows: Sequence[Json]) -> float:
    """Returns the share of the prompt tokens that were cached."""
    usages = [row["response"]["body"]["usage"] for row in rows]
    cached: int = sum(usage["prompt_tokens_details"]["cached_tokens"] for usage in usages)
    prompts: int = sum(usage["prompt_tokens"] for usage in usages)
    return cached / max(1, prompts)


def tokens_per_s(job: Job, tokens: int, seconds: float) -> float:
    """Returns the output tokens of a batch in an interval that begins now. tokens: of a line."""
    before, started_at = job.done(), time.monotonic()
    # Sleep: the interval that is measured.
    time.sleep(seconds)
    return (job.done() - before) * tokens / (time.monotonic() - started_at)
