"""Operations of AdminService on SGLang's tokenizer manager.

SGLang's results are unions of successes and failures; here a failure is a typed error.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from common.errors import Conflict, InvalidRequest, Unimplemented

# Any, here and below: SGLang's objects have no types.


def check_adapters(resolved: Mapping[str, Any]) -> None:
    """Raises Unimplemented if this SGLang cannot load adapters while it runs."""
    if not resolved.get("enable_lora") or resolved.get("dp_size") != 1:
        raise Unimplemented(
            "the sglang engine loads and unloads adapters only with engine_args"
            ' {"enable_lora": true} and one data-parallel rank'
        )


def check_sleep(resolved: Mapping[str, Any]) -> None:
    """Raises Unimplemented if this SGLang cannot release its memory."""
    if not resolved.get("enable_memory_saver"):
        raise Unimplemented(
            'the sglang engine sleeps only with engine_args {"enable_memory_saver": true}'
        )


async def flush_cache(manager: Any) -> None:
    """Clears the prefix cache. Raises Conflict while SGLang still has requests."""
    result = await manager.flush_cache()
    if not result.success:
        raise Conflict("SGLang did not flush its cache: it still has requests; retry")


async def load_lora(manager: Any, name: str, uri: str) -> frozenset[str]:
    """Loads an adapter from a folder (file://) or a Hugging Face name. Returns all adapters.

    SGLang may unload the least recently used one for it. Raises InvalidRequest with SGLang's text.
    """
    from sglang.srt.managers.io_struct import LoadLoRAAdapterReqInput  # type: ignore[import-not-found] # noqa: TID251

    if not uri:
        raise InvalidRequest("uri must not be empty", "uri")
    path = uri.removeprefix("file://")
    # SGLang would search the Hugging Face Hub.
    if path != uri and not await asyncio.to_thread(Path(path).is_dir):
        raise InvalidRequest(f"the worker has no folder {path}", "uri")
    request = LoadLoRAAdapterReqInput(lora_name=name, lora_path=path)
    return _adapters_of(await manager.load_lora_adapter(request), "uri")


async def unload_lora(manager: Any, name: str) -> frozenset[str]:
    """Unloads an adapter after its running requests. Returns all others."""
    from sglang.srt.managers.io_struct import UnloadLoRAAdapterReqInput  # noqa: TID251

    result = await manager.unload_lora_adapter(UnloadLoRAAdapterReqInput(lora_name=name))
    return _adapters_of(result, "name")


async def sleep(manager: Any) -> None:
    """Releases weights and KV cache; SGLang must be idle."""
    from sglang.srt.managers.io_struct import ReleaseMemoryOccupationReqInput  # noqa: TID251

    await flush_cache(manager)
    await manager.release_memory_occupation(ReleaseMemoryOccupationReqInput())


async def wake(manager: Any) -> None:
    """Allocates weights and KV cache again."""
    from sglang.srt.managers.io_struct import ResumeMemoryOccupationReqInput  # noqa: TID251

    await manager.resume_memory_occupation(ResumeMemoryOccupationReqInput())


def _adapters_of(result: Any, field: str) -> frozenset[str]:
    if not result.success:
        raise InvalidRequest(f"SGLang: {result.error_message}", field)
    return frozenset(result.loaded_adapters or ())


def abort_requests(manager: Any) -> None:
    """Ends all requests by SGLang's handler of an abort from the scheduler."""
    from sglang.srt.managers.io_struct import AbortReq  # noqa: TID251

    for rid in tuple(manager.rid_to_state):
        manager._handle_abort_req(AbortReq(rid=rid, abort_message="the engine is gone"))
