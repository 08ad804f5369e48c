"""How pairs of texts become token ids."""

from __future__ import annotations

import asyncio
import time

import pytest

from common.registry.card import Artifact, ModelCard
from frontend_svc.models.served_model import PAIRS_INLINE_MAX, ServedModel, build_model
from frontend_svc.models.tokenizer_files import TriedTokenizer
from worker_svc.engines.sim.config import SIM_MODEL_DIR


@pytest.fixture(scope="module")
def model() -> ServedModel:
    raw = (SIM_MODEL_DIR / "tokenizer.json").read_bytes()
    files = {"tokenizer.json": Artifact.of(raw), "tokenizer_config.json": Artifact.of(b"{}")}
    card = ModelCard(name="m", artifacts=files)
    return build_model(card, created=0, mesh_key=b"k" * 32, tried=TriedTokenizer(1.0, ()))


async def test_pairs_are_joined_as_the_tokenizer_joins_them(model: ServedModel) -> None:
    pairs = [("one question", f"document {number}, of words") for number in range(3)]
    expected = [model.tokenizer.encode(*pair).ids for pair in pairs]
    assert await model.encode_pairs(pairs) == expected
    many = pairs * PAIRS_INLINE_MAX
    assert await model.encode_pairs(many) == expected * PAIRS_INLINE_MAX
    first, second = pairs[0]
    end = model.tokenizer.encode(second, add_special_tokens=False).offsets[1][1]
    expected_cut = model.tokenizer.encode(first, second[:end]).ids
    assert await model.encode_pairs([(first, second)], 2) == [expected_cut] != expected[:1]


async def test_a_long_pair_is_encoded_beside_the_event_loop(model: ServedModel) -> None:
    task = asyncio.create_task(model.encode_pairs([("question", "a few words " * 150_000)], 10))
    turns, until = 0, time.monotonic() + 60
    while not task.done() and time.monotonic() < until:
        # Sleep: gives the loop one turn.
        await asyncio.sleep(0.001)
        turns += 1
    assert len((await task)[0]) > 10
    # With the GIL held, the loop has a turn for each call of the tokenizer.
    assert turns > 20
