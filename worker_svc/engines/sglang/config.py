"""Settings of the SGLang engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from common.registry.instances import Role
from worker_svc.engines.sglang.make_model import TINY_MODEL_DIR


@dataclass(frozen=True, slots=True)
class SglangConfig:
    """Settings of the SGLang engine.

    model_path: a Hugging Face folder; None builds a tiny model with random weights. model: the
    public name. host: address where prefill listens for decode; advertise_host: the address that
    decode dials. bootstrap_port: 0 means any. handoff_timeout_s: how long a leg waits for its
    partner. transfer_group: "" derives it from page size, types, weights and layout. engine_args:
    further arguments of SGLang's server, by SGLang's names.
    """

    model: str = "kvmesh-sglang"
    model_path: Path | None = None
    role: Role = "aggregated"
    block_size: int = 16
    context_length: int | None = None
    host: str = "127.0.0.1"
    advertise_host: str = ""
    bootstrap_port: int = 0
    handoff_timeout_s: float = 10.0
    transfer_group: str = ""
    kv_events: bool = True
    engine_args: Mapping[str, Any] = field(default_factory=dict)

    @property
    def model_dir(self) -> Path:
        return self.model_path or TINY_MODEL_DIR

    @property
    def bootstrap_host(self) -> str:
        """Returns the address that decode dials."""
        return self.advertise_host or self.host
