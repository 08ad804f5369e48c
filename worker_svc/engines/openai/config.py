"""Settings of the adapter for one server."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

ServerApi: TypeAlias = Literal["sglang", "vllm", "text"]


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """Settings of the adapter for one server."""

    url: str
    """Base URL of the server, without /v1."""

    api: ServerApi | None = None
    """Which API to use; None: the server's answers decide."""

    model: str | None = None
    """The server's name of the model; None: the first one that it lists."""

    model_path: Path | None = None
    """Folder with tokenizer.json and tokenizer_config.json; None: the one that the server names, if
    it exists here."""

    key: str = ""
    """Bearer token; "": none."""

    ca_path: Path | None = None
    """PEM certificate authorities of an https server; None: those of the system."""

    serve: tuple[str, ...] | None = None
    """Requests to serve; None: the server's answers decide."""

    block_size: int = 16
    context_length: int | None = None
    connections_max: int = 1024
    start_s: float = 600.0
    """How long `start` waits for the server."""

    kv_events: bool = True
    kv_events_address: str = ""
    """tcp://HOST:PORT where rank 0 publishes; "": as the server states."""

    kv_replay_address: str = ""
    """tcp://HOST:PORT where rank 0 serves replays; "": as the server states, or none."""
