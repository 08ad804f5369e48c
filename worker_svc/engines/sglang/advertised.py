"""What a started SGLang serves, read from its tokenizer manager (Any: it has no types).

resolved: its server arguments, JSON-like values.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from common.kv.load import Load
from worker_svc.engines.contract import EngineConfig
from worker_svc.engines.sglang.config import SglangConfig
from worker_svc.engines.sglang.launch import model_checksum
from worker_svc.engines.sglang.pooling import pooling_of
from worker_svc.engines.sglang.sampling import (
    EngineProperties,
    supported_fields,
    usable_context,
)
from worker_svc.engines.sglang.server_args import model_kv_index, serves_in_order


def read_properties(
    config: SglangConfig, manager: Any, resolved: Mapping[str, Any]
) -> EngineProperties:
    """Returns what the translation of requests depends on; without images."""
    model = manager.model_config
    context = usable_context(model.context_len)
    return EngineProperties(
        role=config.role,
        vocab_size=model.vocab_size,
        context_length=context,
        max_input_tokens=min(context, manager.max_req_input_len),
        eos_ids=frozenset(model.hf_eos_token_id or ()),
        loras=frozenset(adapter.lora_name for adapter in resolved.get("lora_paths") or ()),
        dp_size=resolved["dp_size"],
        is_deterministic=bool(resolved["enable_deterministic_inference"]),
        pooling=pooling_of(model),
        continues_constraints=not resolved.get("speculative_algorithm"),
        has_lower_tiers=bool(resolved.get("enable_hierarchical_cache")),
        # Otherwise SGLang counts each token a step late, and the last one of the prompt.
        continues_penalties=bool(resolved.get("disable_overlap_schedule"))
        and not resolved.get("speculative_algorithm"),
    )


async def build_engine_config(
    config: SglangConfig,
    manager: Any,
    resolved: Mapping[str, Any],
    properties: EngineProperties,
    loads: Sequence[Load],
) -> EngineConfig:
    """Returns the properties of a started engine."""
    from sglang.srt.configs.hybrid_arch import mambaish_config  # type: ignore[import-not-found] # noqa: TID251

    model, images = manager.model_config, properties.images
    kv_index, reason = model_kv_index(
        is_hybrid=bool(model.is_hybrid_swa) or mambaish_config(model) is not None,
        is_speculative=bool(resolved.get("speculative_algorithm")),
    )
    chunked = resolved.get("chunked_prefill_size") or 0
    is_prefill = config.role == "prefill"
    return EngineConfig(
        model=str(config.model_dir),
        served_model_name=config.model,
        context_length=properties.context_length,
        kv_cache_block_size=config.block_size,
        total_kv_blocks=loads[0].kv_total_blocks if loads else None,
        max_num_seqs=_max_num_seqs(manager),
        # Without chunks, a prompt above max_prefill_tokens is computed in a step of its own.
        max_num_batched_tokens=chunked
        if chunked > 0
        else max(resolved.get("max_prefill_tokens") or 0, model.context_len),
        bootstrap_host=config.bootstrap_host if is_prefill else None,
        bootstrap_port=resolved["disaggregation_bootstrap_port"] if is_prefill else None,
        transfer_group=config.transfer_group or await _transfer_group(config, manager, resolved),
        local_prefill=config.role == "aggregated",
        loras=properties.loras,
        kv_index=kv_index,
        kv_index_reason=reason,
        dp_size=properties.dp_size,
        kinds=(properties.pooling,) if properties.pooling else ("chat", "completions"),
        embedding_size=model.hidden_size if properties.pooling == "embedding" else None,
        shorter_embeddings=bool(model.is_matryoshka),
        media={"image": images.input} if images else {},
        template_texts=images.template_texts if images else {},
        supported_fields=supported_fields(properties),
        serves_in_order=serves_in_order(config.role, resolved),
    )


def _max_num_seqs(manager: Any) -> int | None:
    snapshots = manager.load_snapshot_reader.read_all()
    return min((snapshot.max_running_requests for snapshot in snapshots), default=0) or None


async def _transfer_group(config: SglangConfig, manager: Any, resolved: Mapping[str, Any]) -> str:
    """Returns a name that is equal for engines with interchangeable KV pages."""
    from sglang.version import __version__  # type: ignore[import-not-found] # noqa: TID251

    checksum = await asyncio.to_thread(model_checksum, config.model_dir)
    dtype = str(manager.model_config.dtype).removeprefix("torch.")
    layout = "-".join(f"{name}{resolved.get(f'{name}_size') or 1}" for name in ("tp", "pp", "dp"))
    page, kv = resolved["page_size"], resolved["kv_cache_dtype"]
    return f"sglang-{__version__}-page{page}-{dtype}-{kv}-{layout}-{checksum}"
