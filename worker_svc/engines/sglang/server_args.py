"""Arguments of SGLang's server, and their effect on KV events. Pure; no SGLang import."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any, Final

from common.errors import InvalidRequest
from common.registry.instances import KvIndex, Role
from worker_svc.engines.contract import KV_EVENTS_OFF
from worker_svc.engines.sglang.sampling import Arguments

# Arguments that the adapter sets; operators must not set them.
RESERVED_ARGUMENTS: Final = frozenset(
    {
        *("model_path", "served_model_name", "tokenizer_path", "skip_tokenizer_init"),
        *("incremental_streaming_output", "tokenizer_worker_num", "host", "context_length"),
        *("allow_auto_truncate", "kv_events_config", "disaggregation_mode"),
        *("disaggregation_bootstrap_port", "enable_priority_scheduling"),
        *("schedule_low_priority_values_first", "enable_custom_logit_processor"),
        *("custom_sigquit_handler", "enable_pd_role_switch"),
    }
)
_REORDERING_ARGUMENTS: Final = (
    *("enable_lora", "lora_paths", "enable_hierarchical_cache", "enable_lmcache"),
    "enable_prefill_delayer",
)
_NODES: Final = "engine_args.nnodes"
# Torch's own kernels, and a pool that fits any machine.
_CPU_ARGUMENTS: Final[Arguments] = MappingProxyType(
    {
        "device": "cpu",
        "attention_backend": "torch_native",
        "sampling_backend": "pytorch",
        "lora_backend": "torch_native",
        "disable_cuda_graph": True,
        "disable_overlap_schedule": True,
        "dtype": "float32",
        "max_total_tokens": 32_768,
        "mem_fraction_static": 0.3,
        "max_running_requests": 32,
        "sleep_on_idle": True,
    }
)


def resolve_page_size(operator_arguments: Arguments, block_size: int) -> int:
    """Returns the tokens per page after checking the operator's arguments.

    Raises InvalidRequest naming a reserved argument, or a page size that does not divide
    block_size.
    """
    for name in sorted(RESERVED_ARGUMENTS & operator_arguments.keys()):
        raise InvalidRequest(f"{name} is set by the worker itself", f"engine_args.{name}")
    page = operator_arguments.get("page_size", block_size)
    if type(page) is not int or page < 1 or block_size % page:
        raise InvalidRequest(
            f"page_size {page} does not divide the block size {block_size}", "engine_args.page_size"
        )
    return page


def check_nodes(operator_arguments: Arguments) -> None:
    """Raises InvalidRequest naming the argument if those of several nodes do not fit together."""
    nodes, rank = operator_arguments.get("nnodes", 1), operator_arguments.get("node_rank", 0)
    if type(nodes) is not int or nodes < 1:
        raise InvalidRequest(f"must be a number of nodes, at least 1, not {nodes!r}", _NODES)
    if type(rank) is not int or not 0 <= rank < nodes:
        text = f"must be in 0..{nodes - 1}, because nnodes is {nodes}, not {rank!r}"
        raise InvalidRequest(text, "engine_args.node_rank")
    ranks = operator_arguments.get("tp_size", 1) * operator_arguments.get("pp_size", 1)
    if nodes > 1 and ranks % nodes:
        text = f"{nodes} nodes do not divide the {ranks} ranks of tp_size and pp_size"
        raise InvalidRequest(text, _NODES)
    if nodes > 1 and not operator_arguments.get("dist_init_addr"):
        text = "several nodes need HOST:PORT of node 0, at which they meet"
        raise InvalidRequest(text, "engine_args.dist_init_addr")


def server_arguments(
    role: Role,
    operator_arguments: Arguments,
    *,
    is_cpu: bool,
    block_size: int,
    adapter_arguments: Arguments,
) -> dict[str, Any]:
    """Returns all server arguments; later of defaults, operator and adapter win.

    Raises InvalidRequest as `resolve_page_size`.
    """
    resolve_page_size(operator_arguments, block_size)
    arguments: dict[str, Any] = {
        "log_level": "error",
        # Guided JSON is compact, as documented.
        "constrained_json_disable_any_whitespace": True,
        "page_size": block_size,
        # Higher priorities go first in the queue; they do not preempt running requests.
        "disable_priority_preemption": True,
        # In decode steps; with the default, load reports lag by 15 steps.
        "load_snapshot_publish_interval": 4,
    }
    if is_cpu:
        arguments |= _CPU_ARGUMENTS
        if role != "aggregated":
            arguments["disaggregation_transfer_backend"] = "mooncake_tcp"
        if role == "decode":
            arguments["disaggregation_decode_retraction_backup"] = "cpu_tensor"
    return {**arguments, **operator_arguments, **adapter_arguments}


def serves_in_order(role: Role, resolved: Arguments) -> bool:
    """Returns `EngineConfig.serves_in_order`. Handoffs begin in any order; a request whose adapter
    or cached blocks are not loaded waits while later ones start."""
    reorders = any(resolved.get(name) for name in _REORDERING_ARGUMENTS)
    return role == "aggregated" and resolved.get("schedule_policy") == "fcfs" and not reorders


def model_kv_index(*, is_hybrid: bool, is_speculative: bool) -> tuple[KvIndex, str]:
    """Returns `EngineConfig.kv_index` and its reason; equal on all workers of a model."""
    if is_hybrid:
        reason = (
            "the model has a sliding window or recurrent state: a cached prefix may be unusable"
        )
        return "none", reason
    if is_speculative:
        return "none", "with speculative decoding events may not name single tokens"
    return "events", ""


def find_kv_events_off_reason(role: Role, resolved: Arguments, *, kv_events: bool) -> str:
    """Returns why a worker of shareable prefixes reports no events; "" if it does."""
    if role == "decode" and not resolved.get("disaggregation_decode_enable_radix_cache"):
        return "a decode worker keeps no prefixes"
    if resolved.get("disable_radix_cache"):
        return "prefix caching is off"
    return "" if kv_events else KV_EVENTS_OFF
