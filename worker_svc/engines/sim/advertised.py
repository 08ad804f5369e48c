"""What a simulated engine advertises."""

from __future__ import annotations

from collections.abc import Mapping

from common.request.media import MediaInput
from worker_svc.engines.contract import EngineConfig
from worker_svc.engines.sim.config import SimConfig


def advertised_config(
    config: SimConfig,
    *,
    context_length: int,
    supported_fields: frozenset[str],
    media: Mapping[str, MediaInput],
    kv_index_reason: str,
    endpoint: tuple[str, int] | tuple[None, None],
) -> EngineConfig:
    """Returns the properties of a started engine. endpoint: of the rooms of a prefill engine."""
    handoff = config.handoff
    is_bootstrap = handoff.mode == "bootstrap"
    group = handoff.transfer_group or f"sim/{config.model}/{config.block_size}"
    return EngineConfig(
        model=config.model,
        served_model_name=config.served_model_name,
        context_length=context_length,
        kv_cache_block_size=config.block_size,
        total_kv_blocks=config.total_kv_blocks,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        kv_index="events" if config.prefix_caching else "none",
        kv_index_reason=kv_index_reason,
        bootstrap_host=endpoint[0] if is_bootstrap else None,
        bootstrap_port=endpoint[1] if is_bootstrap else None,
        transfer_group="" if handoff.role == "aggregated" else group,
        local_prefill={"aggregated": True, "prefill": False}.get(
            handoff.role, handoff.local_prefill
        ),
        loras=config.loras,
        media=media,
        supported_fields=supported_fields,
        kinds=("chat", "completions", "embedding"),
        # Frontends of earlier releases refuse a card with this kind.
        kinds_on_request=("score",),
        software="sim",
        embedding_size=config.embedding_size,
        shorter_embeddings=True,
        # KV of other workers arrives in any order.
        serves_in_order=handoff.role == "aggregated",
    )
