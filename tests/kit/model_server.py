"""A stand-in for an inference server: it speaks SGLang's `/generate`, vLLM's `/v1/completions`, or
("text") OpenAI's chats and completions with the pages of llama-server; or it computes vectors or
scores only, at the pages of these servers for them.

It is none of these servers: it computes each token from all tokens before it, so that a response
that continues elsewhere has the same tokens, and implements what the adapter calls. The real
servers are those of tests/adapters.

    with ModelServer("sglang") as server:
        ServerEngine(ServerConfig(server.url))
"""

from __future__ import annotations

import asyncio
import json
import math
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
from tokenizers import Tokenizer

from common.request.embedding import Vector, shorten, to_base64
from tests.kit.waiting import WAIT_S, until
from worker_svc.engines.sim.config import SIM_MODEL_DIR

CONTEXT_LENGTH = 2048
VOCABULARY = 4000
# Ids below are control tokens.
FIRST_ID = 10
MODEL = "stand-in"
VECTOR_SIZE = 12
_POOLING_PATHS = {"embedding": ("/v1/embeddings",), "score": ("/classify", "/score")}
_GENERATE_PATHS = {
    "sglang": ("/generate",),
    "vllm": ("/v1/completions",),
    "text": ("/v1/chat/completions", "/v1/completions"),
}
_TOKENIZER = Tokenizer.from_file(str(SIM_MODEL_DIR / "tokenizer.json"))


def next_token(ids: Sequence[int]) -> int:
    """Returns the token that follows these."""
    return FIRST_ID + (sum(ids[-8:]) * 31 + len(ids) * 7) % (VOCABULARY - FIRST_ID)


def vector_of(ids: Sequence[int]) -> Vector:
    """Returns the vector of a prompt."""
    values = np.random.default_rng(list(ids)).normal(size=VECTOR_SIZE)
    return (values / np.linalg.norm(values)).astype(np.float32)


def score_of(ids: Sequence[int]) -> float:
    """Returns the score of a joined pair."""
    return float(np.random.default_rng(list(ids)).random())


async def _read_body(reader: asyncio.StreamReader, head: Sequence[str]) -> bytes:
    """Returns the body after a head, of a known length or in chunks."""
    fields = dict(one.lower().split(": ", 1) for one in head if ": " in one)
    if fields.get("transfer-encoding") != "chunked":
        return await reader.readexactly(int(fields.get("content-length", "0")))
    body = b""
    # Ends: at the last chunk, or with the connection.
    while size := int((await reader.readline()).strip(), 16):
        body += await reader.readexactly(size)
        await reader.readline()
    await reader.readline()
    return body


class ModelServer:
    """One server on a free port, in a thread of its own. step_s: seconds for each token, or for a
    prompt. pooling: what it computes of prompts, "": their continuation. model_dir: its model."""

    def __init__(
        self,
        api: Literal["sglang", "vllm", "text"],
        *,
        step_s: float = 0.002,
        port: int = 0,
        pooling: Literal["", "embedding", "score"] = "",
        model_dir: Path = SIM_MODEL_DIR,
    ) -> None:
        self.api = api
        self.pooling = pooling
        self.model_dir = model_dir
        # Whether its vectors may be shortened, and texts have those of their token ids.
        self.shortens = True
        self.has_other_tokenizer = False
        # Whether a prompt beside others has the vector of its last token.
        self.splits_prompts = False
        self.generates_too = False
        # Of "text": chats that it still refuses because it is busy.
        self.busy_chats = 0
        # Status and error of each request for a vector; None: it computes them.
        self.refusal: tuple[int, dict[str, Any]] | None = None
        self.step_s = step_s
        self.bodies: list[dict[str, Any]] = []
        self.aborted: list[str] = []
        self.running = 0
        # Bodies of the prompts whose values it computes at present.
        self.computed_prompts: list[dict[str, Any]] = []
        self.loras: dict[str, str] = {}
        # Of all its calls; empty: it needs none.
        self.key = ""
        # Whether it neither answers nor computes.
        self.is_frozen = False
        # Of "vllm": the publishers of KV events by rank, as it states them; None: it does not.
        self.kv_sources: dict[str, dict[str, str]] | None = None
        # Of "vllm": its response to a flush; None: it has none.
        self.flush_response: dict[str, bool] | None = {"success": True}
        # Of "text": whether it loads its model, lists it, ends streams by [DONE], reports its load.
        self.is_loading = False
        self.lists_models = True
        self.sends_done = True
        self.has_metrics = True
        self.owner = "llamacpp"
        self._port = port
        self._loop = asyncio.new_event_loop()
        self._is_ready = threading.Event()
        self._ended = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="model server", daemon=True)
        self._tasks: set[asyncio.Task[None]] = set()

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._is_ready.wait(WAIT_S)
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def close(self) -> None:
        """Ends the server and its connections, as a process that is killed. Idempotent."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._ended.set)
            self._thread.join(WAIT_S)

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        server = await asyncio.start_server(self._connected, "127.0.0.1", self._port)
        self._port = server.sockets[0].getsockname()[1]
        self._is_ready.set()
        await self._ended.wait()
        server.close()
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = self._loop.create_task(self._respond(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _respond(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            with suppress(ConnectionError, asyncio.IncompleteReadError):
                head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
                method, path, _ = head[0].split(" ")
                body = await _read_body(reader, head)
                await self._pause(0)
                if self.key and f"authorization: bearer {self.key}" not in map(str.lower, head):
                    self._write(writer, 401, {"error": "Unauthorized"})
                    return
                content = json.loads(body) if body else {}
                if path in _POOLING_PATHS.get(self.pooling, ()):
                    await self._pool(reader, writer, path, content)
                else:
                    await self._route(writer, method, path, content)
                await writer.drain()
        finally:
            writer.transport.abort() if self._ended.is_set() else writer.close()

    async def _pause(self, pause_s: float) -> None:
        await asyncio.sleep(pause_s)
        if self.is_frozen:
            await until(lambda: not self.is_frozen, "it goes on", math.inf, poll_s=0.01)

    # Any, here and below: JSON.
    async def _route(
        self, writer: asyncio.StreamWriter, method: str, path: str, body: dict[str, Any]
    ) -> None:
        if path in _GENERATE_PATHS[self.api] and (self.generates_too or not self.pooling):
            if self.busy_chats:
                self.busy_chats -= 1
                self._write(writer, 503, {"error": {"message": "busy"}})
                return
            self.bodies.append(body)
            await (self._complete if self.api == "text" else self._generate)(writer, body)
            return
        if path == "/health" and self.is_loading:
            self._write(writer, 503, {"error": {"message": "Loading model"}})
            return
        if (method, path) == ("POST", "/abort_request"):
            self.aborted.append(body["rid"])
            self._write(writer, 200, {})
            return
        if path.removeprefix("/v1") == "/load_lora_adapter":
            self.loras[body["lora_name"]] = body["lora_path"]
        elif path.removeprefix("/v1") == "/unload_lora_adapter":
            self.loras.pop(body["lora_name"])
        elif path == "/reset_prefix_cache" and self.flush_response is not None:
            self._write(writer, 200, self.flush_response)
            return
        elif path != "/flush_cache" and path not in self._pages():
            self._write(writer, 404, {"error": {"message": f"no {path}"}})
            return
        self._write(writer, 200, self._pages().get(path, {}))

    async def _pool(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        path: str,
        body: dict[str, Any],
    ) -> None:
        """Responds with the values of one prompt, if its client does not disconnect before."""
        self.bodies.append(body)
        self.computed_prompts.append(body)
        self.running += 1
        begun_at = self._loop.time()
        try:
            # Ends: after step_s, or when its client disconnects.
            while self._loop.time() < begun_at + self.step_s:
                await self._pause(0.001)
                if reader.at_eof():
                    return
        finally:
            self.running -= 1
            self.computed_prompts.remove(body)
        if self.refusal is not None:
            self._write(writer, self.refusal[0], {"error": self.refusal[1]})
            return
        if path == "/v1/embeddings":
            size = body.get("dimensions")
            if size and not self.shortens and self.api != "text":
                self._write(writer, 400, {"error": {"message": "no matryoshka"}})
                return
            prompts = self._prompts_of(body)
            is_split = self.splits_prompts and len(prompts) > 1
            vectors = [vector_of(ids[-1:] if is_split else ids) for ids in prompts]
            short = [shorten(one, size if self.shortens else None) for one in vectors]
            is_text = "encoding_format" in body
            entries = [{"embedding": to_base64(one) if is_text else one.tolist()} for one in short]
            self._write(writer, 200, {"data": entries})
            return
        (ids,) = self._prompts_of(body)
        score = score_of(ids)
        if self.api == "sglang":
            self._write(writer, 200, {"embedding": [score], "meta_info": {}})
        else:
            entry = {"score": score} if path == "/score" else {"probs": [score]}
            self._write(writer, 200, {"data": [entry]})

    def _prompts_of(self, body: dict[str, Any]) -> list[list[int]]:
        """Returns the token ids of each prompt."""
        prompt: Any = body.get("input", body.get("input_ids", body.get("text_1")))
        if isinstance(prompt, str):
            ids: list[int] = _TOKENIZER.encode(prompt, body.get("text_2")).ids
            return [[*ids, 7] if self.has_other_tokenizer else ids]
        return prompt if isinstance(prompt[0], list) else [prompt]

    def _pages(self) -> Mapping[str, Any]:
        base = {"id": MODEL, "max_model_len": CONTEXT_LENGTH, "root": str(self.model_dir)}
        adapters = [{"id": name, "parent": MODEL, "root": at} for name, at in self.loras.items()]
        owner = {"owned_by": self.api}
        pages: dict[str, Any] = {"/v1/models": {"data": [base | owner, *adapters]}}
        if self.api == "text":
            return self._text_pages()
        if self.api == "vllm":
            text = f'vllm:num_requests_running{{model="x"}} {self.running}.0\n'
            text += 'vllm:cache_config_info{block_size="16",num_gpu_blocks="512"} 1.0\n'
            sources = {} if self.kv_sources is None else {"/kv_event_sources": self.kv_sources}
            return pages | {"/version": {"version": "0.0"}, "/metrics": text} | sources
        load = {
            "dp_rank": 0,
            "num_running_reqs": self.running,
            "num_waiting_reqs": 0,
            "num_used_tokens": 0,
        }
        return pages | {
            "/model_info": {
                "model_path": str(self.model_dir),
                "is_generation": not self.pooling,
            },
            "/server_info": {"version": "0.0", "page_size": 16, "max_total_num_tokens": 8192},
            "/v1/loads": {"loads": [load]},
        }

    def _text_pages(self) -> Mapping[str, Any]:
        model = {"id": MODEL, "owned_by": self.owner, "meta": {"n_ctx_train": 4 * CONTEXT_LENGTH}}
        found: dict[str, Any] = {"/v1/models": {"data": [model] if self.lists_models else []}}
        found["/props"] = {
            "default_generation_settings": {"n_ctx": CONTEXT_LENGTH},
            "total_slots": 4,
        }
        if self.has_metrics:
            text = f"llamacpp:requests_processing {self.running}\n"
            found["/metrics"] = text + "llamacpp:requests_deferred 0\nllamacpp:n_decode_total 5\n"
        return found

    def _write(self, writer: asyncio.StreamWriter, status: int, content: Any) -> None:
        raw = content.encode() if isinstance(content, str) else json.dumps(content).encode()
        head = f"HTTP/1.1 {status} X\r\ncontent-length: {len(raw)}\r\nconnection: close\r\n\r\n"
        writer.write(head.encode() + raw)

    async def _generate(self, writer: asyncio.StreamWriter, body: dict[str, Any]) -> None:
        is_sglang = self.api == "sglang"
        sampling = body["sampling_params"] if is_sglang else body
        prompt = body["input_ids" if is_sglang else "prompt"]
        limit = sampling["max_new_tokens" if is_sglang else "max_tokens"]
        stops = () if sampling.get("ignore_eos") else sampling.get("stop_token_ids", ())
        least = sampling.get("min_new_tokens" if is_sglang else "min_tokens") or 0
        writer.write(b"HTTP/1.1 200 X\r\ncontent-type: text/event-stream\r\n")
        writer.write(b"connection: close\r\n\r\n")
        self.running += 1
        output: list[int] = []
        try:
            # Ends: at the limit of the request, or when its client disconnects.
            while True:
                await self._pause(self.step_s)
                output.append(next_token([*prompt, *output]))
                is_stop = output[-1] in stops and len(output) > least
                is_end = is_stop or len(output) == limit
                describe = self._sglang_chunk if is_sglang else self._vllm_chunk
                self._event(writer, describe(body, output, is_stop, is_end))
                await writer.drain()
                if writer.transport.is_closing():
                    return
                if is_end:
                    break
        finally:
            self.running -= 1
        if not is_sglang:
            usage = {"prompt_tokens": len(prompt), "completion_tokens": len(output)}
            self._event(writer, {"choices": [], "usage": usage})
        writer.write(b"data: [DONE]\n\n")

    async def _complete(self, writer: asyncio.StreamWriter, body: dict[str, Any]) -> None:
        """Streams OpenAI chunks, one number for each token."""
        writer.write(b"HTTP/1.1 200 X\r\ncontent-type: text/event-stream\r\n")
        writer.write(b"connection: close\r\n\r\n")
        self.running += 1
        limit = body.get("max_tokens", 4)
        try:
            for at in range(limit):
                await self._pause(self.step_s)
                reason = "length" if at + 1 == limit else None
                choice = {"index": 0, "delta": {"content": f"{at} "}, "finish_reason": reason}
                self._event(writer, {"model": MODEL, "choices": [choice], "usage": None})
                await writer.drain()
                if writer.transport.is_closing():
                    return
        finally:
            self.running -= 1
        if (body.get("stream_options") or {}).get("include_usage"):
            usage = {"prompt_tokens": 3, "completion_tokens": limit, "total_tokens": 3 + limit}
            self._event(writer, {"model": MODEL, "choices": [], "usage": usage})
        if self.sends_done:
            writer.write(b"data: [DONE]\n\n")

    def _event(self, writer: asyncio.StreamWriter, content: Any) -> None:
        writer.write(b"data: " + json.dumps(content).encode() + b"\n\n")

    def _sglang_chunk(
        self, body: dict[str, Any], output: list[int], is_stop: bool, is_end: bool
    ) -> dict[str, Any]:
        reason = None
        if is_end:
            reason = {"type": "stop", "matched": output[-1]} if is_stop else {"type": "length"}
        meta: dict[str, Any] = {"finish_reason": reason, "cached_tokens": 0}
        if body.get("return_logprob"):
            meta["output_token_logprobs"] = [[-1.0, token, None] for token in output]
            tops = [[[-1.0, token, None], [-2.0, token + 1, None]] for token in output]
            meta["output_top_logprobs"] = [top[: body["top_logprobs_num"]] for top in tops]
        return {"output_ids": output, "meta_info": meta}

    def _vllm_chunk(
        self, body: dict[str, Any], output: list[int], is_stop: bool, is_end: bool
    ) -> dict[str, Any]:
        token = output[-1]
        choice: dict[str, Any] = {
            "token_ids": [token],
            "finish_reason": ("stop" if is_stop else "length") if is_end else None,
            "stop_reason": token if is_stop else None,
        }
        if body.get("logprobs") is not None:
            top = {f"token_id:{token}": -1.0, f"token_id:{token + 1}": -2.0}
            choice["logprobs"] = {"token_logprobs": [-1.0], "top_logprobs": [top]}
        return {"choices": [choice]}
