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
    """Settings of the SGLang engine."""

    model: str = "kvmesh-sglang"
    """The public name."""

    model_path: Path | None = None
    """A Hugging Face folder; None builds a tiny model with random weights."""

    role: Role = "aggregated"
    block_size: int = 16
    context_length: int | None = None
    host: str = "127.0.0.1"
    """Address where prefill listens for decode."""

    advertise_host: str = ""
    """The address that decode dials."""

    bootstrap_port: int = 0
    """0 means any."""

    handoff_timeout_s: float = 10.0
    """How long a leg waits for its partner."""

    transfer_group: str = ""
    """Empty: it is derived from page size, types, weights and layout."""

    kv_events: bool = True
    engine_args: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments of SGLang's server, by SGLang's names."""

    @property
    def model_dir(self) -> Path:
        return self.model_path or TINY_MODEL_DIR

    @property
    def bootstrap_host(self) -> str:
        """Returns the address that decode dials."""
        return self.advertise_host or self.host
