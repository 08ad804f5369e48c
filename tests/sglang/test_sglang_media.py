"""Images on SGLang workers of a Gemma 3: answers, routing by content, and errors."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import os
import sys
import zlib
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

from tests.kit.logs import logs_on_failure
from tests.sglang.sglang_mesh import MODEL, HttpMesh
from tests.sglang.sglang_workers import START_S, WAIT_S, WorkerProcess
from tests.sglang.vision_model import IMAGE_TOKENS, START, write_vision_model

BLOCK, LENGTH = 16, 12
QUESTION = "What is the harbour behind the boats in this picture, and which way is it?"
# What the chat template prints for an image and the question.
PROMPT = f"<|im_start|>user\n{START}{QUESTION}<|im_end|>\n<|im_start|>assistant\n"
ARGUMENTS = {"enable_multimodal": True, "max_total_tokens": 8192}


def picture(seed: int, side: int = 0) -> bytes:
    """A PNG file of random squares; with a side, its header states a square of that many pixels."""
    from PIL import Image  # type: ignore[import-not-found]

    colours = np.random.default_rng(seed).integers(0, 256, (4, 6, 3), dtype=np.uint8)
    pixels = np.kron(colours, np.ones((10, 10, 1), np.uint8))
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    data = file.getvalue()
    if not side:
        return data
    header = b"IHDR" + side.to_bytes(4, "big") * 2 + data[24:29]
    return data[:12] + header + zlib.crc32(header).to_bytes(4, "big") + data[33:]


# Any, here and below: JSON.
def content(*images: bytes) -> list[Any]:
    urls = [f"data:image/png;base64,{base64.b64encode(one).decode()}" for one in images]
    parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return [*parts, {"type": "text", "text": QUESTION}]


@dataclass(frozen=True, slots=True)
class Pair:
    """Two workers in a mesh. own: what SGLang itself answers for `picture(0)` and `picture(1)`."""

    mesh: HttpMesh
    workers: list[WorkerProcess]
    own: list[dict[str, Any]]

    async def ask(self, *images: bytes, **fields: Any) -> tuple[str, int]:
        """Text and prompt tokens of an answer."""
        messages = [{"role": "user", "content": content(*images)}]
        found = await self.mesh.complete("", LENGTH, messages=messages, **fields)
        assert found.status == 200, found.error
        return found.text, found.usage["prompt_tokens"]

    async def logprobs(self, *images: bytes, worker: WorkerProcess) -> list[float]:
        """Log probabilities of the tokens of an answer by one worker."""
        body = {
            **{"model": MODEL, "max_tokens": LENGTH, "temperature": 0, "ignore_eos": True},
            **{"messages": [{"role": "user", "content": content(*images)}], "logprobs": True},
            "nvext": {"backend_instance_id": worker.instance_id},
        }
        response = await self.mesh.http.post("/v1/chat/completions", json=body)
        choice = response.json()["choices"][0]
        return [one["logprob"] for one in choice["logprobs"]["content"]]

    async def line(self, *images: bytes, **fields: Any) -> dict[str, Any]:
        """The log line of an answer."""
        messages = [{"role": "user", "content": content(*images)}]
        _, line = await self.mesh.complete_with_log(
            "", max_tokens=LENGTH, messages=messages, **fields
        )
        return line

    async def fill(self, image: bytes, worker: WorkerProcess) -> None:
        """Computes the image on one worker, and returns once the router has its blocks."""
        first = await self.line(image, worker=worker.instance_id)
        assert first["cached_tokens"] < 2 * BLOCK, first
        async with asyncio.timeout(WAIT_S):
            while True:
                line = await self.line(image, worker=worker.instance_id)
                assert line["cached_tokens"] > IMAGE_TOKENS
                if line["cached_tokens"] == line["predicted_cached_tokens"]:
                    return
                await asyncio.sleep(0.05)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def pair(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Pair]:
    folder = tmp_path_factory.mktemp("vision")
    model = folder / "model"
    await asyncio.to_thread(write_vision_model, model)
    start = partial(WorkerProcess.started, model=model, folder=folder, engine_args=ARGUMENTS)
    async with AsyncExitStack() as ended:
        workers = [
            await ended.enter_async_context(start("aggregated", name=f"vision{number}"))
            for number in range(2)
        ]
        own, *_ = await asyncio.gather(own_answers(folder, model), *(w.ready() for w in workers))
        registry, known = folder / "registry", {one.instance_id for one in workers}
        mesh = await ended.enter_async_context(HttpMesh.started(folder, registry, known))
        yield Pair(mesh, workers, own)


@pytest.fixture(autouse=True)
def _logs(pair: Pair, request: pytest.FixtureRequest) -> Iterator[None]:
    with logs_on_failure(pair.mesh, request):
        yield


async def own_answers(folder: Path, model: Path) -> list[dict[str, Any]]:
    files = [folder / f"{seed}.png" for seed in range(2)]
    for seed, file in enumerate(files):
        file.write_bytes(picture(seed))
    out, log = folder / "own.json", folder / "own.log"
    arguments = [str(one) for one in (model, out, LENGTH, PROMPT, *files)]
    with log.open("wb") as output:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "tests.sglang.own_images", *arguments),
            env={**os.environ, "PYTHONPATH": os.pathsep.join(["protos", "."])},
            stdout=output,
            stderr=output,
        )
        async with asyncio.timeout(START_S):
            await process.wait()
    assert out.exists(), log.read_text()[-4000:]
    found: list[dict[str, Any]] = json.loads(out.read_text())
    return found


async def test_answers_to_images_are_those_of_sglang_itself(pair: Pair) -> None:
    """SGLang reads the text of the prompt with its own processor; the mesh sends token ids."""
    found = [await pair.ask(picture(seed)) for seed in range(2)]
    assert found == [(one["text"], one["prompt_tokens"]) for one in pair.own]
    assert found[0][0] != found[1][0]


async def test_the_order_of_images_and_each_of_them_count(pair: Pair) -> None:
    orders = [(2, 3), (3, 2), (2, 2), (2,), ()]
    found = [
        [await pair.logprobs(*map(picture, one), worker=worker) for one in orders]
        for worker in (*pair.workers, pair.workers[0])
    ]
    for again in found[1:]:
        for one, other in zip(found[0], again, strict=True):
            assert one == pytest.approx(other, abs=1e-3)
    for one, other in combinations(found[0], 2):
        assert one != pytest.approx(other, abs=1e-2)


@pytest.mark.row("S1-30", "S1-68", "S2-37")
async def test_a_question_goes_to_the_worker_that_holds_its_image(pair: Pair) -> None:
    homes = {10: pair.workers[0], 11: pair.workers[1]}
    for seed, worker in homes.items():
        await pair.fill(picture(seed), worker)
    for seed, worker in homes.items():
        line = await pair.line(picture(seed))
        assert line["workers"] == [str(worker.instance_id)]
        assert line["cached_tokens"] == line["predicted_cached_tokens"] > IMAGE_TOKENS + BLOCK
    line = await pair.line(picture(12))
    assert line["cached_tokens"] == line["predicted_cached_tokens"] < 2 * BLOCK


async def test_a_damaged_image_and_too_many_are_refused(pair: Pair) -> None:
    damaged, vast = picture(0)[:60], picture(0, 1 << 15)
    refused = (([damaged], "invalid_media"), ([vast], "media_too_large"))
    for images, code in (*refused, ([picture(0)] * 9, "invalid_value")):
        messages = [{"role": "user", "content": content(*images)}]
        found = await pair.mesh.complete("", LENGTH, messages=messages)
        assert found.status == 400
        assert found.error is not None
        assert found.error["code"] == code, found.error
        assert "image" in str(found.error["param"])


async def test_an_image_token_outside_of_an_image_is_refused(pair: Pair) -> None:
    """SGLang would not mark the image's tokens then, and images would share blocks."""
    messages = [{"role": "user", "content": content(picture(0))}]
    body = {"model": MODEL, "messages": messages}
    tokens = (await pair.mesh.http.post("/tokenize", json=body)).json()["tokens"]
    start = max(tokens) - 2  # the ids of the three tokens follow each other
    assert tokens.count(start) == 1
    extensions = {"token_data": [*tokens, start]}
    found = await pair.mesh.complete("", LENGTH, messages=messages, nvext=extensions)
    assert found.status == 400
    assert "runs of 64 placeholders" in str(found.error), found.error
