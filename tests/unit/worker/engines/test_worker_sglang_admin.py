"""Operations on SGLang's tokenizer manager that need no SGLang."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from common.errors import Conflict, Unimplemented
from worker_svc.engines.sglang import admin


def manager(success: bool) -> Any:
    async def flush_cache() -> SimpleNamespace:
        return SimpleNamespace(success=success)

    return SimpleNamespace(flush_cache=flush_cache)


async def test_a_flush_that_sglang_rejects_is_a_conflict() -> None:
    await admin.flush_cache(manager(success=True))
    with pytest.raises(Conflict, match="still has requests"):
        await admin.flush_cache(manager(success=False))


@pytest.mark.parametrize("resolved", [{}, {"dp_size": 1}, {"enable_lora": True, "dp_size": 2}])
def test_adapters_need_sglang_with_lora_and_one_rank(resolved: dict[str, Any]) -> None:
    admin.check_adapters({"enable_lora": True, "dp_size": 1})
    with pytest.raises(Unimplemented, match="sglang engine loads and unloads adapters only"):
        admin.check_adapters(resolved)


def test_sleep_needs_the_memory_saver_of_sglang() -> None:
    admin.check_sleep({"enable_memory_saver": True})
    with pytest.raises(Unimplemented, match="sglang engine sleeps only"):
        admin.check_sleep({"enable_memory_saver": False})
