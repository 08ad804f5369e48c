"""Tokenizers of cards in trials: those that load or encode without end are refused by name."""

from __future__ import annotations

import asyncio
import resource

import pytest

from common.errors import InvalidRequest
from common.registry.card import Artifact, ModelCard
from common.trials.trials import Trials
from frontend_svc.models.tokenizer_files import PREPARE
from frontend_svc.models.tokenizer_trials import TokenizerTrials
from tests.kit.bombs import TOKENIZER_BOMBS
from worker_svc.engines.sim.config import SIM_MODEL_DIR

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]


@pytest.fixture(scope="module")
def trials() -> Trials:
    return Trials((PREPARE,))


def card(name: str, tokenizer: bytes) -> ModelCard:
    return ModelCard(name=name, artifacts={"tokenizer.json": Artifact.of(tokenizer)})


@pytest.mark.parametrize("name", TOKENIZER_BOMBS)
async def test_a_tokenizer_without_end_is_refused_and_others_pass(
    trials: Trials, name: str
) -> None:
    tokenizers = TokenizerTrials(trials)
    before_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    bomb = card("bomb", TOKENIZER_BOMBS[name]())
    refused = asyncio.create_task(tokenizers.check(bomb))
    good = (SIM_MODEL_DIR / "tokenizer.json").read_bytes()
    assert (await tokenizers.check(card("good", good))).expansion_max >= 1.0
    with pytest.raises(InvalidRequest, match=r"^tokenizer\.json: ") as error:
        await refused
    print(error.value.message)
    assert error.value.field == "artifacts.tokenizer.json"
    grown_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kb
    assert grown_kb < 50_000
