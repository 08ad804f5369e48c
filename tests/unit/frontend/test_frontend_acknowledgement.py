"""What a frontend needs to be routable."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

from common.errors import NotFound
from common.registry.card import ModelCard
from frontend_svc.acknowledgement import Acknowledgement
from frontend_svc.members import Members
from frontend_svc.models.catalog import ModelCatalog
from tests.kit.catalogs import follow_and_load
from tests.kit.instances import snapshot_of, worker
from tests.kit.waiting import until

WORKER = replace(worker(1), card_checksum="c")


async def test_a_model_that_is_being_loaded_is_progress_and_a_failed_load_is_not() -> None:
    may_respond = asyncio.Event()

    async def get_card(_: str) -> ModelCard:
        await may_respond.wait()
        raise NotFound("there is no such card")

    models = ModelCatalog(get_card, now_s=lambda: 0.0, mesh_key=b"")
    unused: Any = None
    frontend = Acknowledgement(Members(), models, unused, unused)
    loading = asyncio.create_task(follow_and_load(models, snapshot_of(WORKER)))
    await until(lambda: models.loading, "the card is loading")
    assert frontend.own_need(WORKER) == "its card is loading"
    assert frontend.is_in_progress(WORKER)
    may_respond.set()
    await loading
    assert "missing model deployment card" in frontend.own_need(WORKER)
    assert not frontend.is_in_progress(WORKER)
    may_respond.clear()
    retry = asyncio.create_task(models.load())
    await until(lambda: models.loading, "the card is loaded again")
    assert not frontend.is_in_progress(WORKER), "the first attempt has failed"
    may_respond.set()
    await retry
