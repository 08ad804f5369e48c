"""Configuration of the worker: flags `--...` and variables `KVMESH_WORKER_...`."""

from __future__ import annotations

import json
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, NonNegativeFloat, NonNegativeInt, PositiveInt

from common.errors import InvalidRequest
from common.runtime.config import Names, Port, ServiceConfig
from common.runtime.plugins import ENGINES, check_plugin_name, import_factory
from worker_svc.card import served_model_type
from worker_svc.engines.model_folder import find_missing_files
from worker_svc.engines.sglang.server_args import check_nodes, resolve_page_size


def url_problem(url: str) -> str:
    """Returns why a text is no base URL of a server; "" if it is one."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        return f"{url!r}: {error}"
    if parts.scheme not in ("http", "https") or not parts.hostname or port == 0:
        return f"{url!r} is no URL such as http://10.0.0.7:30000"
    if parts.path.rstrip("/") or parts.query or parts.fragment or parts.username:
        return f"{url!r} must have no path, query or user: without /v1"
    return ""


def _validate_engine(name: str) -> str:
    if check_plugin_name(name, ENGINES) not in ENGINES:
        import_factory(name, "an LLMEngine")
    return name


class WorkerConfig(ServiceConfig):
    """The settings of a worker."""

    engine: Annotated[str, AfterValidator(_validate_engine)] = "sim"
    """sglang is the real engine; sim needs no GPU; echo repeats the prompt; openai stands for
    servers that run already (server_urls). module:factory is an engine of your own: the factory
    receives this configuration."""
    role: Literal["aggregated", "prefill", "decode"] = "aggregated"
    """prefill and decode workers share a request. The echo engine supports aggregated only."""
    handoff: Literal["bootstrap", "completed"] = "bootstrap"
    """bootstrap: both legs start at once. completed: decode starts after prefill has ended."""
    bootstrap_port: Port = 0
    """Port on which prefill waits for decode. 0: any."""
    transfer_group: str = ""
    """Workers of one group can transfer KV to each other. Empty: by model and block size."""
    transfer_gb_per_s: Annotated[float, Field(ge=1e-6)] = 25.0
    """KV transfer rate of the sim in 10^9 bytes per second."""
    handoff_timeout_s: Annotated[float, Field(ge=0.1)] = 10.0
    """Seconds a leg waits for the other one. Must be below the deadline of requests."""
    local_prefill: bool = True
    """Decode worker: compute prompts that arrive without a handoff. Off: refuse them."""
    model_name: str | None = None
    """The `model` of client requests, the same on all replicas. Unset: sim, or the name that a
    custom engine reports."""
    model_aliases: Names = ()
    """Further names of the model, which clients may use as `model`."""
    model_path: Path | None = None
    """Folder with tokenizer.json and tokenizer_config.json; for the sim also with sim.json, as
    written by python -m worker_svc.engines.sim.make_model. Unset: the model of the sim."""
    serve: Names | None = None
    """Some of chat, completions, embedding, score, if the worker shall not serve what its engine
    serves by default. The sim serves scores only if they are named here. Unset: the default."""
    tool_call_parser: str | None = None
    """How the model writes tool calls: hermes, qwen25, qwen3, qwen3_coder, glm45, llama3_json,
    mistral, pythonic, deepseek_v3, deepseek_v3_1, kimi_k2, gpt_oss. Unset: hermes for the built-in
    models, no tool calls for others."""
    reasoning_parser: str | None = None
    """How the model marks its reasoning: basic, qwen3, glm45, deepseek_r1, deepseek_v3_1, kimi,
    granite, gpt_oss. Unset: responses have no separate reasoning."""
    control_tokens_in_text: bool = False
    """Control tokens in messages of clients, for example <|im_end|>, act as such. By default they
    are ordinary text, which cannot end a message."""
    context_length: Annotated[int, Field(ge=2)] | None = None
    """Maximum tokens of prompt and response, below the limit of the model."""
    block_size: PositiveInt = 16
    """Tokens per KV block: the page size of the engine."""
    total_kv_blocks: PositiveInt = 16384
    """KV blocks of the sim. Lower it to cause evictions."""
    host_kv_blocks: NonNegativeInt = 0
    """KV blocks that the sim keeps on its host when the device evicts them. 0: none."""
    dp_size: PositiveInt = 1
    """Data-parallel ranks of the sim, each with a cache and a queue of its own. For SGLang: dp_size
    of engine_args."""
    max_num_seqs: PositiveInt = 256
    """Maximum of requests that the sim computes at once."""
    max_num_batched_tokens: PositiveInt = 8192
    """Maximum of tokens that the sim computes in one step."""
    mixed_steps: bool = True
    """The sim computes prompts and further tokens in one step. Off: prompts first, in steps of
    their own, as SGLang does by default."""
    speedup: NonNegativeFloat = 1.0
    """Speed of the sim as a multiple of real time. 0: no delays."""
    prefill_tokens_per_s: Annotated[float, Field(ge=1)] = 12_000.0
    """Prompt tokens that the sim computes per second."""
    step_ms: NonNegativeFloat = 6.0
    """Milliseconds of a sim step with one sequence."""
    requests_max: PositiveInt = 4096
    """Maximum of concurrent requests, including queued ones."""
    grammar_compile_s: Annotated[float, Field(gt=0)] = 4.0
    """Seconds of processor time in which the grammar of a request must compile. At least that of
    the frontends."""
    kv_events: bool = True
    """Publish KV events to indexers. Off: routers approximate the cache from their decisions."""
    card_inline_bytes: NonNegativeInt = 1 << 20
    """Model files above this size are not stored in the registry; frontends fetch them from
    workers. Lower it if the registry must stay small."""
    canary_idle_s: NonNegativeFloat = 30.0
    """Idle seconds of the engine before a probe. 0: no probes, for engines without them."""
    canary_timeout_s: Annotated[float, Field(ge=0.1)] = 10.0
    """Seconds until a probe without an answer sets health to NOT_SERVING. At least the step limit
    that the worker has measured."""
    step_limit_s: Annotated[float, Field(ge=0.5)] = 2.0
    """Seconds without a step after which a frontend moves the requests of an engine with short
    steps. For longer steps the worker measures the limit; docs/operate/failures.md has the
    formula."""
    step_limit_max_s: Annotated[float, Field(ge=0.5)] = 60.0
    """Largest step limit in seconds, also that of the first step of an engine. Must exceed the
    longest step, graph capture and compilation included."""
    taints: Names = ()
    """Marks that routing constraints match, such as zone=a."""
    loras: Names = ()
    """Adapters of the sim, or of an engine of your own."""
    engine_args: str = ""
    """Further arguments of SGLang as a JSON object: {"tp_size": 2}. An engine of your own gets the
    text."""

    server_urls: Names = ()
    """Base URLs of inference servers that run already, such as http://10.0.0.7:30000, for the
    engine openai: SGLang, vLLM, or any OpenAI API. Each becomes a worker of its own."""
    server_file: Path | None = None
    """File with such URLs, one a line; its changes apply within seconds."""
    server_dns: str | None = None
    """URL whose host name stands for several servers, one for each of its addresses; looked up
    every few seconds."""
    server_api: Literal["sglang", "vllm", "text"] | None = None
    """How to use the servers. text: pass the bodies of clients through. Unset: their answers
    decide."""
    server_model: str | None = None
    """The model to serve, by the servers' name for it. Unset: the first one that they list."""
    server_key: str | None = Field(default=None, repr=False)
    """Secret that the servers expect as a bearer token (their --api-key)."""
    server_ca_path: Path | None = None
    """PEM certificate authorities of https servers. Unset: those of the system."""
    server_kv_events: str = ""
    """tcp://HOST:PORT where the server publishes KV events; with the host *, at the host of each
    server. Empty: as SGLang and recent versions of vLLM state themselves."""
    server_kv_replay: str = ""
    """tcp://HOST:PORT where the server replays KV events, as server_kv_events. Empty: as the
    server states itself."""
    server_start_s: Annotated[float, Field(ge=0)] = 600.0
    """Seconds to wait for a server that does not respond yet when the worker starts."""
    server_connections: PositiveInt = 1024
    """Maximum of connections to one server; each running request has one."""

    @property
    def default_model_name(self) -> str:
        """Model name of a built-in engine."""
        return self.model_name or "sim"

    @property
    def card_tool_call_parser(self) -> str | None:
        """The parser that the model's card names."""
        is_built_in = self.model_path is None and self.engine != "openai"
        return self.tool_call_parser or ("hermes" if is_built_in else None)

    def problems(self) -> list[str]:
        found = super().problems()
        try:
            if self.serve is not None:
                served_model_type(self.serve)
        except ValueError as error:
            found.append(f"serve: {error}")
        if self.model_path is not None and (missing := find_missing_files(self.model_path)):
            found.append(f"model_path: {self.model_path} has no {' and no '.join(missing)}")
        if self.engine == "echo" and self.role != "aggregated":
            found.append("role: the echo engine only supports aggregated")
        if self.engine == "sim" and self.max_num_seqs > self.max_num_batched_tokens:
            found.append("max_num_seqs: must be at most --max-num-batched-tokens")
        if self.dp_size > 1 and self.engine != "sim":
            found.append("dp_size: only of the sim; SGLang has dp_size in --engine-args")
        if self.dp_size > 1 and self.role != "aggregated":
            found.append("dp_size: the sim has ranks as an aggregated worker only")
        if self.step_limit_max_s < self.step_limit_s:
            found.append("step_limit_max_s: must be at least --step-limit-s")
        if self.loras and self.engine in ("echo", "sglang", "openai"):
            found.append(f"loras: the {self.engine} engine has no such setting")
        found += self._server_problems()
        if self.engine == "sglang":
            found += self._sglang_problems()
        elif self.engine_args and self.engine in ENGINES:
            found.append(f"engine_args: the {self.engine} engine takes none")
        return found

    @property
    def is_further_node(self) -> bool:
        """Whether the process is a node above 0 of an SGLang engine, which serves nothing."""
        arguments = json.loads(self.engine_args or "{}") if self.engine == "sglang" else {}
        return bool(arguments.get("node_rank"))

    @property
    def has_several_servers(self) -> bool:
        """Whether the process serves several servers, or a number that changes."""
        return bool(self.server_file or self.server_dns or len(self.server_urls) > 1)

    def _server_problems(self) -> list[str]:
        """Returns the problems of the settings of servers that run already."""
        found = []
        names = [one for one in type(self).model_fields if one.startswith("server_")]
        fields = type(self).model_fields
        used = [one for one in names if getattr(self, one) != fields[one].default]
        if self.engine != "openai":
            return [f"{one}: only the engine openai has this setting" for one in used]
        sources = (self.server_urls, self.server_file, self.server_dns)
        if sum(map(bool, sources)) != 1:
            found.append("server_urls: set one of --server-urls, --server-file, --server-dns")
        for name, urls in (("server_urls", self.server_urls), ("server_dns", (self.server_dns,))):
            found += [f"{name}: {p}" for url in urls if url and (p := url_problem(url))]
        for name in ("server_kv_events", "server_kv_replay"):
            value = getattr(self, name)
            if value and not re.fullmatch(r"tcp://[^:/]+:[0-9]+|tcp://\[[^]]+\]:[0-9]+", value):
                found.append(f"{name}: {value!r} is not tcp://HOST:PORT")
            if value and self.has_several_servers and not value.startswith("tcp://*:"):
                found.append(
                    f"{name}: must be tcp://*:PORT, because each server has its own address"
                )
        if self.server_ca_path is not None and not self.server_ca_path.is_file():
            found.append(f"server_ca_path: there is no file {self.server_ca_path}")
        if self.role != "aggregated":
            found.append("role: the openai engine only supports aggregated")
        if self.has_several_servers and self.stream_port:
            found.append("stream_port: must be 0, because each server becomes a worker of its own")
        if self.has_several_servers and self.metrics_port:
            found.append("metrics_port: must be 0, because each server becomes a worker of its own")
        if self.server_dns and not self.server_dns.startswith("http://"):
            found.append("server_dns: must be http, because certificates do not name addresses")
        return found

    def _sglang_problems(self) -> list[str]:
        found = []
        module = find_spec("sglang")
        if module is None or module.origin is None:
            found.append("engine: SGLang is not installed; see deploy/sglang/venv.sh")
        if self.role != "aggregated" and self.handoff != "bootstrap":
            found.append("handoff: must be bootstrap, because SGLang starts both legs at once")
        try:
            arguments = json.loads(self.engine_args or "{}")
            if isinstance(arguments, dict):
                resolve_page_size(arguments, self.block_size)
                check_nodes(arguments)
            else:
                found.append("engine_args: must be a JSON object")
        except ValueError as error:
            found.append(f"engine_args: is not JSON: {error}")
        except InvalidRequest as error:
            found.append(f"{error.field}: {error.message}")
        return found
