"""Real SGLang engines behind the whole mesh: HTTP requests and responses, KV events into the index.

Pairs serve requests without a pin; the pinned aggregated worker gives the expected output.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from random import Random

import pytest

from tests.kit.logs import logs_on_failure
from tests.sglang.conftest import POOL_TOKENS, Trio
from tests.sglang.sglang_mesh import MODEL, HttpMesh, Response
from tests.sglang.sglang_workers import WAIT_S, until

LENGTHS = (5, 15, 16, 17, 33, 64, 100, 129, 200, 256, 480, 511, 700)
PAGE = 16
CONTROL_TOKENS = 600


@pytest.fixture(autouse=True)
def _logs(mesh: HttpMesh, request: pytest.FixtureRequest) -> Iterator[None]:
    with logs_on_failure(mesh, request):
        yield


def prompt_of(rng: Random, tokens: int) -> list[int]:
    return [rng.randrange(3, 4000) for _ in range(tokens)]


def pair_of(trio: Trio) -> list[str]:
    return sorted(str(one.instance_id) for one in (trio.prefill, trio.decode))


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_a_pair_returns_over_http_what_one_worker_returns(
    trio: Trio, mesh: HttpMesh, stream: bool
) -> None:
    rng = Random(11 + stream)
    for length in LENGTHS:
        prompt = prompt_of(rng, length)
        alone, line = await mesh.complete_with_log(
            prompt, stream=stream, worker=trio.app.instance_id
        )
        assert line["workers"] == [str(trio.app.instance_id)]
        paired, line = await mesh.complete_with_log(prompt, stream=stream)
        assert sorted(line["workers"]) == pair_of(trio)
        assert paired.content == alone.content, f"{length} tokens"
        assert paired.content[1:] == ("length", length, 24)
        assert paired.text
        if stream:
            assert paired.events > 6
    await trio.prefill.settled()
    await trio.decode.settled()


async def test_choices_of_one_request_are_whole_responses(trio: Trio, mesh: HttpMesh) -> None:
    prompts = [prompt_of(Random(seed), 40) for seed in (118, 119)]
    body = {"model": MODEL, "max_tokens": 8, "temperature": 0, "seed": 5, "ignore_eos": True}
    singles = [
        (await mesh.http.post("/v1/completions", json=body | {"prompt": one})).json()
        for one in prompts
    ]
    texts = [single["choices"][0]["text"] for single in singles]
    response = await mesh.http.post("/v1/completions", json=body | {"prompt": prompts, "n": 2})
    choices = response.json()["choices"]
    assert [choice["index"] for choice in choices] == [0, 1, 2, 3]
    assert [choice["text"] for choice in choices] == [texts[0], texts[0], texts[1], texts[1]]
    assert response.json()["usage"]["completion_tokens"] == 32


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_a_chat_request_uses_the_same_pair(trio: Trio, mesh: HttpMesh, stream: bool) -> None:
    words = "Which way is the harbour, and who keeps the light at night? " * 3
    alone = await mesh.complete(words, stream=stream, worker=trio.app.instance_id)
    paired, line = await mesh.complete_with_log(words, stream=stream)
    assert sorted(line["workers"]) == pair_of(trio)
    assert paired.content == alone.content


async def test_predicted_cached_tokens_equal_actual_ones(trio: Trio, mesh: HttpMesh) -> None:
    rng = Random(13)

    async def cached(prompt: list[int], worker: int) -> tuple[int, int]:
        """Predicted and actual cached tokens of a prompt."""
        _, line = await mesh.complete_with_log(prompt, worker=worker)
        return line["predicted_cached_tokens"], line["cached_tokens"]

    for worker in (trio.app.instance_id, 0):
        prompt: list[int] = []
        for turn, more in enumerate((40, 200, 23, 16, 333)):
            known = len(prompt) // PAGE * PAGE
            prompt += prompt_of(rng, more)
            predicted, actual = await cached(prompt, worker)
            assert predicted == actual, f"turn {turn}"
            assert actual >= known, f"turn {turn}"
            # Each prompt has more whole blocks than the one before.
            whole = (len(prompt) - 1) // PAGE * PAGE
            async with asyncio.timeout(WAIT_S):
                while await cached(prompt, worker) != (whole, whole):
                    pass  # the router's index follows the engine


@pytest.mark.parametrize("is_pair", [False, True], ids=["one worker", "a pair"])
async def test_two_cache_salts_never_share_blocks(
    trio: Trio, mesh: HttpMesh, is_pair: bool
) -> None:
    prompt = prompt_of(Random(), 12 * PAGE + 1)
    worker = 0 if is_pair else trio.app.instance_id

    async def cached() -> list[tuple[int, int]]:
        """Predicted and actual cached tokens without a salt, and with each of two."""
        lines = [
            (await mesh.complete_with_log(prompt, worker=worker, **fields))[1]
            for fields in ({}, {"cache_salt": "a"}, {"cache_salt": "b"})
        ]
        return [(line["predicted_cached_tokens"], line["cached_tokens"]) for line in lines]

    assert await cached() == [(0, 0)] * 3
    whole = (12 * PAGE, 12 * PAGE)
    async with asyncio.timeout(WAIT_S):
        while await cached() != [whole] * 3:
            pass  # the router's index follows the engine
    _, line = await mesh.complete_with_log(prompt, worker=worker, cache_salt="c")
    assert (line["predicted_cached_tokens"], line["cached_tokens"]) == (0, 0)


async def test_prompt_and_output_have_the_limit_of_the_model_and_no_more(
    trio: Trio, mesh: HttpMesh
) -> None:
    limit, here = 4090, trio.app.instance_id
    prompt = prompt_of(Random(5), limit + 5)
    for output in (1, 6):
        whole = await mesh.complete(prompt[: limit - output], output, worker=here)
        assert whole.usage["completion_tokens"] == output
    for length in (limit, limit + 5):
        refused = await mesh.complete(prompt[:length], 1, worker=here)
        assert refused.status == 400
        assert refused.error is not None
        assert refused.error["code"] == "context_length_exceeded"
        assert f"maximum context length is {limit} tokens" in refused.error["message"]


async def test_a_seed_without_deterministic_inference_is_refused(
    trio: Trio, mesh: HttpMesh
) -> None:
    body = {"model": MODEL, "prompt": [5, 6], "max_tokens": 2, "seed": 1}
    response = await mesh.http.post("/v1/completions", json=body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "seed")
    greedy = await mesh.http.post("/v1/completions", json=body | {"temperature": 0})
    assert greedy.status_code == 200


async def test_the_index_equals_the_blocks_of_real_engines_under_eviction(
    trio: Trio, mesh: HttpMesh
) -> None:
    rng = Random(17)
    stored = 0
    for worker in (trio.app.instance_id, 0):
        for _ in range(POOL_TOKENS // 700 + 4):
            prompt = prompt_of(rng, 700)
            await mesh.complete(prompt, 2, worker=worker)
            stored += len(prompt) // PAGE
    publishers = {trio.app.instance_id, trio.prefill.instance_id}
    found = await mesh.until_verified(
        lambda rows: all(
            not (rows[one].extra or rows[one].missing or rows[one].error) for one in publishers
        ),
        "index and engines agree",
    )
    for worker in publishers:
        # The pool holds half of the stored blocks: the rest was evicted.
        assert POOL_TOKENS // PAGE // 2 < found[worker].equal <= POOL_TOKENS // PAGE
    assert stored > sum(found[worker].equal for worker in publishers)
    info = await trio.prefill.info()
    assert info.counters["kv_blocks"] == found[trio.prefill.instance_id].equal


async def test_a_client_that_leaves_while_decode_waits_for_kv_does_not_affect_others(
    trio: Trio, mesh: HttpMesh
) -> None:
    rng = Random(19)
    controls = [prompt_of(rng, 30 + 40 * one) for one in range(3)]
    here = trio.app.instance_id
    alone = await asyncio.gather(*(mesh.complete(p, CONTROL_TOKENS, worker=here) for p in controls))
    expected = [one.content for one in alone]
    responses = [Response() for _ in controls]
    loop = asyncio.get_running_loop()
    async with asyncio.TaskGroup() as tasks:
        streams = [
            tasks.create_task(mesh.complete(prompt, CONTROL_TOKENS, stream=True, into=response))
            for prompt, response in zip(controls, responses, strict=True)
        ]
        await until(lambda: all(response.events for response in responses), "decode has their KV")
        await trio.decode.settled()
        pids = trio.prefill.scheduler_pids()
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        try:
            victims = [
                tasks.create_task(mesh.complete(prompt_of(rng, 300), 50, stream=bool(one % 2)))
                for one in range(3)
            ]
            await trio.decode.settled(rooms=len(victims))
            assert not any(one.done() for one in (*streams, *victims)), "all are running"
            stopped = (await trio.decode.info()).counters["stopped"]
            began = loop.time()
            for victim in victims:
                victim.cancel()
            await asyncio.wait(victims)
            while (await trio.decode.info()).counters["stopped"] < stopped + len(victims):
                assert loop.time() - began < WAIT_S, "decode has not ended the requests"
                await asyncio.sleep(0.02)
        finally:
            for pid in pids:
                os.kill(pid, signal.SIGCONT)
    assert [one.result().content for one in streams] == expected
    await trio.prefill.settled()
    await trio.decode.settled()
    # The pair continues: equal prompts, equal responses.
    for prompt, (text, *_) in zip(controls, expected, strict=True):
        again = (await mesh.complete(prompt, 24)).text
        assert again
        assert text.startswith(again)
