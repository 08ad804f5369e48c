"""Learns from a server what it is: its API, model, tokenizer, sizes and KV events."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal
from urllib.parse import urlsplit

import httpx
import orjson
from prometheus_client.parser import text_string_to_metric_families

from common.errors import InvalidRequest, Unsupported
from common.rpc.channel import join_address
from worker_svc.engines.model_folder import find_missing_files, read_eos_token_ids
from worker_svc.engines.openai.client import ServerClient, error_of
from worker_svc.engines.openai.config import ServerConfig
from worker_svc.engines.openai.facts import KvAddresses, ServerFacts
from worker_svc.engines.openai.load import read_metrics
from worker_svc.engines.sglang.pooling import classifier_pooling
from worker_svc.engines.sglang.sampling import EngineProperties, usable_context
from worker_svc.engines.sglang.server_args import model_kv_index

WILDCARDS: Final = ("*", "0.0.0.0", "[::]", "::")

# Any, here and below: JSON of a server.
Json = Any


async def read_server(client: ServerClient, config: ServerConfig) -> ServerFacts:
    """Returns the facts of a server that serves.

    Raises InvalidRequest for a setting that does not fit it, Unsupported for a server that the
    adapter cannot use, and the errors of `ServerClient`.
    """
    models = await client.get_json("/v1/models") or {}
    listed = [one for one in models.get("data") or () if isinstance(one, dict) and one.get("id")]
    model = _choose_model(listed, config, client.url)
    if config.api in (None, "sglang"):
        info = await client.get_json("/model_info") or await client.get_json("/get_model_info")
        if info and "model_path" in info:
            return await _read_sglang(client, config, info, model, listed)
        if config.api == "sglang":
            raise InvalidRequest(f"{client.url} has no /model_info of SGLang", "server_api")
    if config.api == "vllm" or (config.api is None and model.get("owned_by") == "vllm"):
        return await _read_vllm(client, config, model, listed)
    return await _read_text_server(client, config, model)


async def find_address(url: str) -> str:
    """Returns host:port of a server, the host as an address: gateways resolve no names. "" if the
    name has none at the moment."""
    parts = urlsplit(url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    loop = asyncio.get_running_loop()
    try:
        rows = await loop.getaddrinfo(parts.hostname, port, type=socket.SOCK_STREAM)
    except OSError:
        return ""
    return join_address(str(rows[0][4][0]), port)


def _choose_model(listed: Sequence[Json], config: ServerConfig, url: str) -> Json:
    """Returns the entry of the model. A server that lists none is trusted to have the configured
    one: some list only what they have loaded before."""
    if config.model and not listed:
        return {"id": config.model}
    bases = [one for one in listed if not one.get("parent")]
    for one in bases:
        if config.model in (None, one["id"]):
            return one
    if not bases:
        raise InvalidRequest(f"{url} lists no model: set --server-model", "server_model")
    names = ", ".join(one["id"] for one in bases)
    text = f"{url} lists no model {config.model!r}; it lists: {names}"
    raise InvalidRequest(text, "server_model")


def _adapters(listed: Sequence[Json]) -> frozenset[str]:
    return frozenset(one["id"] for one in listed if one.get("parent"))


async def read_adapters(client: ServerClient) -> frozenset[str]:
    """Returns the LoRA adapters that the server lists."""
    models = await client.get_json("/v1/models") or {}
    return _adapters([one for one in models.get("data") or () if isinstance(one, dict)])


async def _read_text_server(client: ServerClient, config: ServerConfig, model: Json) -> ServerFacts:
    """Raises Unavailable while the server loads its model, which llama-server lists before."""
    if (health := await client.get("/health")).status_code == 503:
        raise error_of(503, health.content, client.url, health.headers)
    meta = model.get("meta")
    trained = meta.get("n_ctx_train") if isinstance(meta, dict) else None
    version, context, slots = "", model.get("max_model_len") or trained, None
    is_llama_server = model.get("owned_by") == "llamacpp"
    if is_llama_server:
        properties = await client.get_json("/props") or {}
        settings = properties.get("default_generation_settings") or {}
        version = properties.get("build_info") or ""
        context, slots = settings.get("n_ctx") or context, properties.get("total_slots")
    return ServerFacts(
        api="text",
        model=model["id"],
        version=str(version),
        context_length=config.context_length or context,
        max_num_seqs=slots,
        kv_off_reason="the server takes no token ids",
        no_index_reason="the server takes no token ids",
        has_load=_has_load(await client.get("/metrics")),
        is_llama_server=is_llama_server,
    )


def _has_load(metrics: httpx.Response) -> bool:
    if metrics.status_code != 200:
        return False
    try:
        return bool(read_metrics(metrics.text))
    except ValueError:  # it is no text of Prometheus
        return False


async def _read_sglang(
    client: ServerClient,
    config: ServerConfig,
    info: Json,
    model: Json,
    listed: Sequence[Json],
) -> ServerFacts:
    server = await client.get_json("/server_info") or await client.get_json("/get_server_info")
    server = server or {}
    if (mode := server.get("disaggregation_mode") or "null") != "null":
        raise Unsupported("server_urls", f"{client.url} serves only {mode} legs")
    folder = model_folder(config, info.get("tokenizer_path") or info["model_path"], client.url)
    known = model.get("max_model_len") or server.get("context_length")
    limits = (config.context_length, usable_context(known) if known else None)
    context = min((limit for limit in limits if limit), default=None)
    longest = server.get("max_req_input_len") or context or 2**31
    properties = EngineProperties(
        vocab_size=read_vocab_size(folder),
        context_length=context or 2**31,
        max_input_tokens=min(context or 2**31, longest),
        eos_ids=frozenset(read_eos_token_ids(folder)),
        loras=_adapters(listed),
        dp_size=server.get("dp_size") or 1,
        is_deterministic=bool(server.get("enable_deterministic_inference")),
        pooling="" if info.get("is_generation", True) else _sglang_pooling(folder),
    )
    _, no_index_reason = model_kv_index(
        is_hybrid=_is_hybrid(folder), is_speculative=bool(server.get("speculative_algorithm"))
    )
    addresses, off_reason = _sglang_addresses(server, config, client.url)
    chunked = server.get("chunked_prefill_size") or 0
    return ServerFacts(
        api="sglang",
        model=model["id"],
        version=str(server.get("version", "")),
        model_path=folder,
        properties=properties,
        context_length=context,
        page_size=server.get("page_size") or 1,
        total_kv_tokens=server.get("max_total_num_tokens"),
        max_num_seqs=server.get("max_running_requests"),
        max_num_batched_tokens=chunked if chunked > 0 else None,
        kv_addresses=addresses,
        kv_off_reason=off_reason,
        no_index_reason=no_index_reason,
        has_priorities=bool(server.get("enable_priority_scheduling")),
        has_min_tokens=not server.get("skip_tokenizer_init"),
        is_incremental=bool(server.get("incremental_streaming_output")),
        has_load=(await client.get("/v1/loads")).status_code == 200,
    )


def _sglang_pooling(folder: Path) -> Literal["embedding", "score"]:
    """Returns what a model that generates nothing computes; transformers counts two classes if it
    states none."""
    settings = _model_settings(folder)
    classes = len(settings.get("id2label") or ()) or settings.get("num_labels", 2)
    token_types = settings.get("type_vocab_size") or 0
    return classifier_pooling(settings.get("architectures") or (), classes, token_types)


def _sglang_addresses(
    server: Json, config: ServerConfig, url: str
) -> tuple[KvAddresses | None, str]:
    """Returns where events are published, and why they are not."""
    if server.get("disable_radix_cache"):
        return None, "prefix caching is off (--disable-radix-cache)"
    raw = server.get("kv_events_config")
    try:
        events = orjson.loads(raw) if isinstance(raw, str) and raw else raw or {}
    except orjson.JSONDecodeError:
        events = {}
    if events.get("publisher") != "zmq" and not config.kv_events_address:
        return None, "the server publishes no KV events: start it with --kv-events-config"
    stated = events.get("endpoint", "tcp://*:5557")
    replay = config.kv_replay_address or events.get("replay_endpoint")
    return _addresses(config.kv_events_address or stated, replay, url), ""


def _addresses(events: str, replay: str | None, url: str) -> KvAddresses:
    """Returns the addresses as others reach them."""
    return KvAddresses(
        resolve_address(events, url), resolve_address(replay, url) if replay else None
    )


async def _read_vllm(
    client: ServerClient, config: ServerConfig, model: Json, listed: Sequence[Json]
) -> ServerFacts:
    version = (await client.get_json("/version") or {}).get("version", "")
    metrics = await client.get("/metrics")
    cache = _cache_config(metrics.text) if metrics.status_code == 200 else {}
    folder = model_folder(config, model.get("root") or model["id"], client.url)
    context = config.context_length or model.get("max_model_len")
    page_size, blocks = _int(cache.get("block_size")), _int(cache.get("num_gpu_blocks"))
    addresses, off_reason = await _vllm_addresses(client, config)
    if cache.get("enable_prefix_caching") == "False":
        addresses, off_reason = None, "prefix caching is off"
    return ServerFacts(
        api="vllm",
        model=model["id"],
        version=str(version),
        model_path=folder,
        properties=EngineProperties(
            vocab_size=read_vocab_size(folder),
            context_length=context or 2**31,
            max_input_tokens=context or 2**31,
            eos_ids=frozenset(read_eos_token_ids(folder)),
            loras=_adapters(listed),
            is_deterministic=True,  # a seed of vLLM belongs to its request
        ),
        context_length=context,
        page_size=page_size,
        total_kv_tokens=page_size * blocks if page_size and blocks else None,
        kv_addresses=addresses,
        kv_off_reason=off_reason,
        no_index_reason=model_kv_index(is_hybrid=_is_hybrid(folder), is_speculative=False)[1],
        has_load=_has_load(metrics),
    )


async def _vllm_addresses(
    client: ServerClient, config: ServerConfig
) -> tuple[KvAddresses | None, str]:
    """Returns where events are published, and why they are not. Recent versions of vLLM (0.32)
    state the publisher of each rank."""
    replay = config.kv_replay_address
    if config.kv_events_address:
        return _addresses(config.kv_events_address, replay, client.url), ""
    sources = await client.get_json("/kv_event_sources")
    if sources is None:
        return None, "the server does not state where it publishes: set --server-kv-events"
    if len(sources) > 1:
        return None, "the server has several ranks, of which it chooses one itself"
    events: Mapping[str, Json] = next(iter(sources.values()), {})
    if events.get("publisher") != "zmq":
        return None, "the server publishes no KV events: start it with --kv-events-config"
    replay = replay or events.get("replay_endpoint") or ""
    return _addresses(events["endpoint"], replay, client.url), ""


def _cache_config(text: str) -> Mapping[str, str]:
    """Returns the labels of vLLM's `cache_config_info`."""
    for family in text_string_to_metric_families(text):
        if family.name.startswith("vllm:cache_config"):
            for sample in family.samples:
                return sample.labels
    return {}


def _int(value: str | None) -> int | None:
    return int(value) if value is not None and value.isdecimal() else None


def model_folder(config: ServerConfig, named: str, url: str) -> Path:
    """Returns the folder with the tokenizer. Raises InvalidRequest if it is not here."""
    folder = config.model_path or Path(named)
    if missing := find_missing_files(folder):
        text = (
            f"{url} serves {named!r}; {folder} has no {missing[0]} on this host: set --model-path"
            " to a folder with the tokenizer of the model"
        )
        raise InvalidRequest(text, "model_path")
    return folder


def read_vocab_size(folder: Path) -> int:
    """Returns the number of ids of the model; 2**32 if its configuration is not here."""
    settings = _model_settings(folder)
    return settings.get("vocab_size") or 2**32


def _is_hybrid(folder: Path) -> bool:
    """Whether some layers keep less than the whole prefix: a sliding window, or a state."""
    settings = _model_settings(folder)
    types = settings.get("layer_types") or ()
    return any(one != "full_attention" for one in types)


def _model_settings(folder: Path) -> dict[str, Json]:
    path = folder / "config.json"
    settings = orjson.loads(path.read_bytes()) if path.is_file() else {}
    return {**settings, **(settings.get("text_config") or {})}


def resolve_address(endpoint: str, url: str) -> str:
    """Returns an endpoint at which a server publishes as others reach it: with the host of its URL
    in place of a wildcard."""
    scheme, _, rest = endpoint.partition("://")
    host, _, port = rest.rpartition(":")
    if scheme == "tcp" and host in WILDCARDS:
        name = urlsplit(url).hostname or "127.0.0.1"
        return f"tcp://{f'[{name}]' if ':' in name else name}:{port}"
    return endpoint
