"""The worker's configuration: flags `--...` and variables `KVMESH_WORKER_...`."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from common.errors import InvalidRequest
from common.runtime.config import ServiceConfig, at_least, between, setting
from worker_svc.card import ENDPOINT_KINDS, find_missing_files, served_model_type
from worker_svc.engines.sglang.server_args import resolve_page_size


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerConfig(ServiceConfig):
    """What a worker can be told."""

    stable_name: str = field(
        default="",
        metadata=setting(
            "Name that survives restarts, one per replica: the mesh sees only the newest of a name."
            " Empty: none."
        ),
    )
    engine: Literal["sim", "echo", "sglang"] = field(
        default="sim",
        metadata=setting("sglang is the real one; sim needs no GPU; echo repeats the prompt."),
    )
    role: Literal["aggregated", "prefill", "decode"] = field(
        default="aggregated",
        metadata=setting("prefill and decode split requests in two; not the echo engine."),
    )
    handoff: Literal["bootstrap", "completed"] = field(
        default="bootstrap",
        metadata=setting("Prefill: both legs start at once, or decode when prefill has ended."),
    )
    bootstrap_port: int = field(
        default=0,
        metadata=setting(
            "Where prefill waits for decode; 0: any free port.", check=between(0, 65535)
        ),
    )
    transfer_group: str = field(
        default="",
        metadata=setting("Workers that can move KV to each other; empty: by model and block size."),
    )
    transfer_gb_per_s: float = field(
        default=25.0,
        metadata=setting(
            "KV from a sim, 10^9 bytes a second; your network's.", check=at_least(1e-6)
        ),
    )
    handoff_timeout_s: float = field(
        default=10.0,
        metadata=setting(
            "How long a leg waits for the other; below deadlines.", check=at_least(0.1)
        ),
    )
    local_prefill: bool = field(
        default=True,
        metadata=setting("Decode: compute prompts that come without a handoff; else refuse them."),
    )
    model_name: str | None = field(
        default=None,
        metadata=setting(
            "What clients put in `model`, the same on replicas; unset: sim, or what an engine of"
            " your own says."
        ),
    )
    model_path: Path | None = field(
        default=None,
        metadata=setting(
            "Folder with tokenizer.json and tokenizer_config.json; for sim also with a sim.json, as"
            " python -m worker_svc.engines.sim.make_model writes it. Unset: the sim model's."
        ),
    )
    serve: tuple[str, ...] = field(
        default=ENDPOINT_KINDS,
        metadata=setting("chat, completions or both; less where the model can do one only."),
    )
    context_length: int | None = field(
        default=None,
        metadata=setting("Tokens of prompt and answer; below the model's own.", check=at_least(2)),
    )
    block_size: int = field(
        default=16,
        metadata=setting("Tokens a KV block; the engine's page size.", check=at_least(1)),
    )
    total_kv_blocks: int = field(
        default=16384,
        metadata=setting("KV blocks of the sim; less to see evictions.", check=at_least(1)),
    )
    max_num_seqs: int = field(
        default=256, metadata=setting("Requests the sim computes at once.", check=at_least(1))
    )
    max_num_batched_tokens: int = field(
        default=8192, metadata=setting("Tokens the sim computes in a step.", check=at_least(1))
    )
    speedup: float = field(
        default=1.0,
        metadata=setting("How often the sim outruns real time; 0: infinitely.", check=at_least(0)),
    )
    prefill_tokens_per_s: float = field(
        default=12_000.0,
        metadata=setting("Prompt tokens the sim computes a second; your GPU's.", check=at_least(1)),
    )
    step_ms: float = field(
        default=6.0,
        metadata=setting("Milliseconds of a sim step with one sequence.", check=at_least(0)),
    )
    requests_max: int = field(
        default=4096,
        metadata=setting("Requests inside at once, queued ones included.", check=at_least(1)),
    )
    kv_events: bool = field(
        default=True,
        metadata=setting("Tell indexers which KV blocks are cached; off: routers only guess."),
    )
    card_inline_bytes: int = field(
        default=1 << 20,
        metadata=setting(
            "Larger files of the model stay out of the registry, and frontends ask workers for"
            " them; less where the registry must stay small.",
            check=at_least(0),
        ),
    )
    canary_idle_s: float = field(
        default=30.0,
        metadata=setting(
            "Silence of the engine before it is probed; 0: never, if your engine has no probes.",
            check=at_least(0),
        ),
    )
    canary_timeout_s: float = field(
        default=10.0,
        metadata=setting(
            "How long a probe may take until health says NOT_SERVING; above your longest step.",
            check=at_least(0.1),
        ),
    )
    metrics_port: int | None = field(
        default=None,
        metadata=setting(
            "Serve Prometheus metrics over HTTP on this port (0: any); set it to be scraped.",
            check=between(0, 65535),
        ),
    )
    taints: tuple[str, ...] = field(
        default=(), metadata=setting("Marks that routing constraints match, e.g. zone=a.")
    )
    loras: tuple[str, ...] = field(
        default=(), metadata=setting("Adapters that the sim has; requests name one of them.")
    )
    engine_args: str = field(
        default="",
        metadata=setting('More arguments of SGLang, a JSON object: {"tp_size": 2}.'),
    )

    @property
    def default_model_name(self) -> str:
        """What an engine that comes with the worker calls its model."""
        return self.model_name or "sim"

    def problems(self) -> list[str]:
        """Contradictions between fields."""
        found = ServiceConfig.problems(self)
        try:
            served_model_type(self.serve)
        except ValueError as error:
            found.append(f"serve: {error}")
        if self.model_path is not None and (missing := find_missing_files(self.model_path)):
            found.append(f"model_path: {self.model_path} has no {' and no '.join(missing)}")
        if self.engine == "echo" and self.role != "aggregated":
            found.append("role: the echo engine has no prefill and decode")
        if self.engine == "sim" and self.max_num_seqs > self.max_num_batched_tokens:
            found.append("max_num_seqs: must be at most max_num_batched_tokens")
        if self.loras and self.engine != "sim":
            found.append(f"loras: the {self.engine} engine is not told of adapters here")
        if self.engine == "sglang":
            found += self._sglang_problems()
        elif self.engine_args:
            found.append(f"engine_args: the {self.engine} engine takes none")
        return found

    def _sglang_problems(self) -> list[str]:
        found = []
        module = find_spec("sglang")
        if module is None or module.origin is None:
            found.append("engine: SGLang is not installed here; see deploy/sglang/venv.sh")
        if self.role != "aggregated" and self.handoff != "bootstrap":
            found.append("handoff: SGLang's legs start at once, so it must be bootstrap")
        try:
            arguments = json.loads(self.engine_args or "{}")
            if isinstance(arguments, dict):
                resolve_page_size(arguments, self.block_size)
            else:
                found.append("engine_args: must be a JSON object")
        except ValueError as error:
            found.append(f"engine_args: is not JSON: {error}")
        except InvalidRequest as error:
            found.append(f"{error.field}: {error.message}")
        return found
