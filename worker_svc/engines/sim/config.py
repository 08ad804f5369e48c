"""Settings of the simulated engine, and the part of a model folder that it uses."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

from pydantic import TypeAdapter, ValidationError

from common.errors import InvalidRequest, NotFound
from common.registry.instances import Role
from common.request.media import MediaInput
from worker_svc.engines.handoff import HandoffTimeouts
from worker_svc.engines.sim.timing import Timing
from worker_svc.engines.sim.token_oracle import DEFAULT_EOS_ONE_IN

SIM_MODEL_DIR: Final = Path(__file__).parent / "model"
_MEDIA: Final = TypeAdapter(dict[str, MediaInput])


@dataclass(frozen=True, slots=True)
class SimModel:
    """The part of a model folder that the simulation uses; eos_ids[0] is the id the model emits.

    tokenizer_json: content of the file, for guided decoding. vocab_size: ids are below it; 0: no id
    is above those of the words and of EOS. media: see `ModelCard`."""

    word_ids: tuple[int, ...]
    eos_ids: tuple[int, ...]
    context_length: int
    tokenizer_json: str = ""
    vocab_size: int = 0
    media: Mapping[str, MediaInput] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        used = max(*self.word_ids, *self.eos_ids) + 1
        object.__setattr__(self, "vocab_size", max(self.vocab_size, used))


def load_sim_model(folder: Path) -> SimModel:
    """Reads `sim.json`, `generation_config.json` and `tokenizer.json`.

    Raises NotFound or InvalidRequest.
    """
    sim = _read_object(folder / "sim.json")
    eos: Any = _read_object(folder / "generation_config.json").get("eos_token_id")
    eos_ids = eos if isinstance(eos, list) else [eos]
    words: Any = sim.get("word_ids")
    context_length: Any = sim.get("context_length")
    for name, ids in (("word_ids", words), ("eos_token_id", eos_ids)):
        if not isinstance(ids, list) or not ids or not all(type(item) is int for item in ids):
            raise InvalidRequest(f"{folder}: {name} must be a list of token ids", "model_path")
    if type(context_length) is not int or context_length < 2:
        raise InvalidRequest(f"{folder}: context_length must be an integer above 1", "model_path")
    vocab_size: Any = sim.get("vocab_size", 0)
    if type(vocab_size) is not int:
        raise InvalidRequest(f"{folder}: vocab_size must be an integer", "model_path")
    try:
        media = _MEDIA.validate_python(sim.get("media", {}))
    except ValidationError as error:
        raise InvalidRequest(f"{folder}: media: {error.errors()[0]['msg']}", "model_path") from None
    tokenizer = folder / "tokenizer.json"
    tokenizer_json = tokenizer.read_text("utf-8") if tokenizer.is_file() else ""
    return SimModel(tuple(words), tuple(eos_ids), context_length, tokenizer_json, vocab_size, media)


def _read_object(path: Path) -> Mapping[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise NotFound(
            f"{path} does not exist; the sim engine needs it in --model-path; create it with "
            "python -m worker_svc.engines.sim.make_model",
            field="model_path",
        ) from None
    except ValueError as error:
        raise InvalidRequest(f"{path} is not JSON: {error}", "model_path") from None
    if not isinstance(value, dict):
        raise InvalidRequest(f"{path} must contain a JSON object", "model_path")
    return value


@dataclass(frozen=True, slots=True)
class SimHandoffConfig:
    """Settings of prefill and decode.

    Raises ValueError for a value out of range.
    """

    role: Role = "aggregated"
    """The legs this engine accepts."""

    mode: Literal["bootstrap", "completed"] = "bootstrap"
    """`bootstrap` advertises host and port, so that both legs start at once. `completed` advertises
    neither: prefill ends first, and its `disaggregated_params` locate the KV."""

    host: str = "127.0.0.1"
    """Where prefill listens."""

    port: int = 0
    """Where prefill listens; 0 means any."""

    advertise_host: str = ""
    """The address that peers dial; empty: `host`."""

    transfer_group: str = ""
    """Engines of equal groups can move KV between each other; empty: model and block size."""

    local_prefill: bool = True
    """Whether a decode engine computes prompts that come without a handoff."""

    gb_per_s: float = 25.0
    """10^9 bytes per second on the link of a prefill worker."""

    bytes_per_token: int = 131_072
    """Size of the KV."""

    latency_s: float = 1e-3
    """Of each transfer."""

    chunk_pages: int = 64
    """Pages per write."""

    timeout_s: float = 10.0
    """See `HandoffTimeouts`."""

    abort_s: float = 2.0
    """See `HandoffTimeouts`."""

    lease_s: float = 30.0
    """See `HandoffTimeouts`."""

    rooms_max: int = 4096
    """Limit of rooms and connections."""

    def __post_init__(self) -> None:
        sizes = ("gb_per_s", "bytes_per_token", "chunk_pages", "rooms_max")
        for name in (*sizes, "timeout_s", "abort_s", "lease_s"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name}: must be above 0")
        if self.latency_s < 0:
            raise ValueError("latency_s: must not be negative")
        if not 0 <= self.port < 65536:
            raise ValueError("port: must be in 0..65535")

    @property
    def timeouts(self) -> HandoffTimeouts:
        return HandoffTimeouts(self.timeout_s, self.abort_s, self.lease_s)


@dataclass(frozen=True, slots=True)
class SimConfig:
    """Settings of the simulated engine. Sizes are in tokens, blocks or sequences, as named.

    Raises ValueError for a value out of range.
    """

    model: str = "kvmesh-sim"
    served_model_name: str | None = None
    model_dir: Path = SIM_MODEL_DIR
    context_length: int | None = None
    """None: the model's."""

    block_size: int = 16
    total_kv_blocks: int = 16_384
    host_kv_blocks: int = 0
    """Blocks that the host keeps after the device has evicted them; 0: none."""

    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    mixed_steps: bool = True
    """Whether prompts and further tokens share a step."""

    max_waiting: int = 1024
    """Limit of queued requests."""

    prefix_caching: bool = True
    eos_one_in: int = DEFAULT_EOS_ONE_IN
    """See `token_oracle.py`."""

    embedding_size: int = 384
    """Coordinates of a vector."""

    timing: Timing = field(default=Timing())
    loras: frozenset[str] = frozenset()
    """Adapters that requests may name."""

    mesh_key: bytes = b""
    """Key of the block names."""

    startup_s: float = 0.0
    """Duration of `start`."""

    handoff: SimHandoffConfig = field(default=SimHandoffConfig())
    """Role, and how KV moves."""

    def __post_init__(self) -> None:
        if not 1 <= self.max_num_seqs <= self.max_num_batched_tokens:
            raise ValueError("max_num_seqs: must be in 1..max_num_batched_tokens")
        if self.block_size < 1 or self.total_kv_blocks < 1:
            raise ValueError("block_size, total_kv_blocks: must be at least 1")
        if self.host_kv_blocks < 0:
            raise ValueError("host_kv_blocks: must not be negative")
        if self.max_waiting < 1:
            raise ValueError("max_waiting: must be at least 1")
        if self.context_length is not None and self.context_length < 2:
            raise ValueError("context_length: must be at least 2, for prompt and output")
        if self.embedding_size < 1:
            raise ValueError("embedding_size: must be at least 1")
        if self.startup_s < 0:
            raise ValueError("startup_s: must not be negative")
