"""A model that two kinds of engine serve: a started response stays with its kind."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.integration.test_server_adapter import expected
from tests.kit.model_server import MODEL, ModelServer
from tests.kit.processes import Mesh
from tests.kit.waiting import wait_for

PROMPT = list(range(20, 60))


class FileMesh(Mesh):
    """A mesh with one worker process for the servers of a file."""

    def serve(self, *servers: ModelServer) -> None:
        """Makes these the servers, and waits until the frontend has a worker for each."""
        (self.folder / "servers").write_text("".join(f"{one.url}\n" for one in servers))

        def is_complete() -> bool:
            return len(self.known_instance_ids("worker")) == len(servers)

        wait_for(is_complete, f"{len(servers)} servers")

    def is_complete(self) -> bool:
        return bool(self.http.get(f"{self.url}/ready").json()["ready"])

    # Any: JSON.
    def stream(self, found: list[Any], count: int) -> threading.Thread:
        """Reads a stream in a thread: its events."""

        def read() -> None:
            body = {"model": MODEL, "prompt": PROMPT, "max_tokens": count, "ignore_eos": True}
            body |= {"stream": True, "nvext": {"extra_fields": ["completion_token_ids"]}}
            url = f"{self.url}/v1/completions"
            with self.http.stream("POST", url, json=body, timeout=60) as response:
                found.extend(
                    json.loads(line[6:])
                    for line in response.iter_lines()
                    if line.startswith("data: {")
                )

        thread = threading.Thread(target=read)
        thread.start()
        return thread


def long_prompts(server: ModelServer) -> list[int]:
    """Lengths of the prompts of clients; those of probes are short."""
    prompts = [one.get("input_ids") or one.get("prompt") for one in server.bodies]
    return [len(one) for one in prompts if one and len(one) >= len(PROMPT)]


@pytest.mark.slow
def test_a_started_stream_continues_on_its_own_engine_or_not_at_all(
    tmp_path: Path,
) -> None:
    count = 600
    with (
        ModelServer("sglang", step_s=0.1) as first,
        ModelServer("sglang", step_s=0.004) as same,
        ModelServer("vllm", step_s=0.004) as other,
    ):
        servers = tmp_path / "servers"
        servers.write_text(f"{first.url}\n")
        flags = ["--engine=openai", f"--server-file={servers}", "--metrics-port=0"]
        # One card for both: less than either states.
        flags.append("--context-length=2000")
        wait = ["--worker-wait-s=1"]
        with FileMesh(tmp_path, workers=1, worker_flags=flags, frontend_flags=wait) as mesh:
            events: list[Any] = []
            thread = mesh.stream(events, count)
            wait_for(lambda: len(events) > 3, "it has tokens of the first server")
            mesh.serve(first, other, same)
            first.close()
            thread.join(60)
            tokens = [one["nvext"]["completion_token_ids"] for one in events if "nvext" in one]
            assert tokens == [expected(PROMPT, count)]
            assert long_prompts(same)
            assert not long_prompts(other)
            # One of its kind is left, and is lost as well.
            events.clear()
            same.step_s = other.step_s = 0.05
            thread = mesh.stream(events, count)
            # The router may have chosen either of the two.
            wait_for(lambda: len(events) > 3, "it has tokens")
            begun_here = same if same.running else other
            rest = other if begun_here is same else same
            begun_here.close()
            thread.join(60)
            names = (begun_here.api, rest.api)
            text = json.dumps(events[-1])
            assert f"its engine ({names[1]}, not {names[0]}, which began the response)" in text
            assert len(events) < count, "it was cut, and did not continue"
            assert mesh.post_completion("new", PROMPT, model=MODEL).status_code == 200
