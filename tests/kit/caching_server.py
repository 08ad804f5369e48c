"""A stand-in for a stock SGLang server with a prefix cache, its OpenAI API and its KV events.

It is no SGLang. Like it, it renders chats with the template of the model folder, keeps the pages of
prompts and responses until it needs room, publishes them over ZeroMQ, and reports the cached tokens
of a request. The time of a request follows from the tokens that it computes.

    with CachingServer() as server:  # in a thread
    python -m tests.kit.caching_server --port 30000 --events-port 30001
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import threading
from collections import OrderedDict, deque
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, Final

import jinja2
import msgspec
import zmq
import zmq.asyncio
from tokenizers import Tokenizer

from tests.kit.model_server import MODEL, ModelServer, next_token
from worker_svc.engines.sim.config import SIM_MODEL_DIR

PAGE: Final = 16
TOPIC: Final = b"kv-events"
BATCHES_KEPT: Final = 10_000


class PageCache:
    """Full pages of token ids by the hash of all tokens up to their end; the least recently used
    page without a later one goes first.

    events: of SGLang's publisher, since `take`.
    """

    def __init__(self, pages_max: int) -> None:
        self._pages_max = pages_max
        self._pages: OrderedDict[int, None] = OrderedDict()
        # Any: an event before it is packed.
        self.events: list[dict[str, Any]] = []

    def __len__(self) -> int:
        return len(self._pages)

    def match(self, ids: Sequence[int]) -> int:
        """Returns how many tokens of a prompt are cached; at least one is computed."""
        count = 0
        for name, _ in _chain(ids[: len(ids) - 1]):
            if name not in self._pages:
                break
            count += PAGE
        return count

    def store(self, ids: Sequence[int]) -> None:
        """Keeps all full pages of a sequence."""
        chain = _chain(ids)
        parent: int | None = None
        for name, tokens in chain:
            if name not in self._pages:
                self._pages[name] = None
                self.events.append(
                    {
                        "type": "BlockStored",
                        "block_hashes": [name],
                        "parent_block_hash": parent,
                        "token_ids": tokens,
                        "block_size": PAGE,
                    }
                )
            parent = name
        # The first page was used last, so that a page goes before those in front of it.
        for name, _ in reversed(chain):
            self._pages.move_to_end(name)
        while len(self._pages) > self._pages_max:
            name, _ = self._pages.popitem(last=False)
            self.events.append({"type": "BlockRemoved", "block_hashes": [name]})

    def clear(self) -> None:
        self._pages.clear()
        self.events.append({"type": "AllBlocksCleared"})

    # Any: events before they are packed.
    def take(self) -> list[dict[str, Any]]:
        events, self.events = self.events, []
        return events


def _chain(ids: Sequence[int]) -> list[tuple[int, list[int]]]:
    """Returns name and tokens of each full page."""
    found, name = [], b""
    for at in range(0, len(ids) - PAGE + 1, PAGE):
        tokens = list(ids[at : at + PAGE])
        name = hashlib.blake2b(name + repr(tokens).encode(), digest_size=8).digest()
        found.append((int.from_bytes(name, "big", signed=True), tokens))
    return found


class CachingServer(ModelServer):
    """One server. prefill_tokens_per_s: speed of computed prompts, one at a time."""

    def __init__(
        self,
        *,
        pages_max: int = 4096,
        step_s: float = 0.002,
        prefill_tokens_per_s: float = 200_000.0,
        port: int = 0,
        events_port: int = 0,
    ) -> None:
        """events_port: of KV events; the next one is that of replays. 0: any two."""
        super().__init__("sglang", step_s=step_s, port=port)
        self.cache = PageCache(pages_max)
        self.cached_tokens = 0
        self.prompt_tokens = 0
        self.requests = 0
        self.paths: list[str] = []
        self._events_ports = (events_port, events_port and events_port + 1)
        self._prefill_s = 1 / prefill_tokens_per_s
        self._prefill_turn = asyncio.Lock()
        self._kept: deque[tuple[int, bytes]] = deque(maxlen=BATCHES_KEPT)
        self._sequence = 0
        self._live: zmq.asyncio.Socket | None = None

    @property
    def address(self) -> str:
        """host:port of its HTTP port."""
        return self.url.removeprefix("http://")

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        return Tokenizer.from_file(str(SIM_MODEL_DIR / "tokenizer.json"))

    @cached_property
    def _template(self) -> jinja2.Template:
        config = json.loads((SIM_MODEL_DIR / "tokenizer_config.json").read_text())
        environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)
        return environment.from_string(config["chat_template"])

    async def _serve(self) -> None:
        with zmq.asyncio.Context() as context:
            self._live = context.socket(zmq.PUB)
            replays: zmq.asyncio.Socket = context.socket(zmq.ROUTER)
            ports = []
            for socket, port in zip((self._live, replays), self._events_ports, strict=True):
                socket.set(zmq.LINGER, 0)
                socket.bind(f"tcp://127.0.0.1:{port or '*'}")
                endpoint = socket.getsockopt(zmq.LAST_ENDPOINT)
                assert isinstance(endpoint, bytes)
                ports.append(int(endpoint.decode().strip("\0").rpartition(":")[2]))
            self._events_ports = (ports[0], ports[1])
            task = asyncio.create_task(self._serve_replays(replays))
            try:
                await super()._serve()
            finally:
                task.cancel()
                await asyncio.wait([task])
                self._live.close(linger=0)
                replays.close(linger=0)

    async def _serve_replays(self, router: zmq.asyncio.Socket) -> None:
        # Ends: the server cancels it.
        while True:
            client, _, first = await router.recv_multipart()
            for sequence, payload in tuple(self._kept):
                if sequence >= int.from_bytes(first, "big"):
                    number = sequence.to_bytes(8, "big")
                    await router.send_multipart([client, b"", TOPIC, number, payload])
            end = (-1).to_bytes(8, "big", signed=True)
            await router.send_multipart([client, b"", b"", end, b""])

    async def _publish(self) -> None:
        events = self.cache.take()
        if not events or self._live is None:
            return
        payload = msgspec.msgpack.encode([0.0, events, 0])
        number = self._sequence.to_bytes(8, "big")
        self._kept.append((self._sequence, payload))
        self._sequence += 1
        await self._live.send_multipart([TOPIC, number, payload])

    # Any, here and below: JSON.
    def _pages(self) -> Mapping[str, Any]:
        pages = dict(super()._pages())
        events = {
            "publisher": "zmq",
            "endpoint": f"tcp://*:{self._events_ports[0]}",
            "replay_endpoint": f"tcp://*:{self._events_ports[1]}",
        }
        pages["/server_info"] |= {
            "kv_events_config": json.dumps(events),
            "chunked_prefill_size": 2048,
        }
        pages["/health"] = {}
        pages["/counts"] = {
            "cached_tokens": self.cached_tokens,
            "prompt_tokens": self.prompt_tokens,
            "requests": self.requests,
            "running": self.running,
        }
        return pages

    async def _route(
        self, writer: asyncio.StreamWriter, method: str, path: str, body: dict[str, Any]
    ) -> None:
        self.paths.append(path)
        if path == "/flush_cache":
            self.cache.clear()
            self.cached_tokens = self.prompt_tokens = self.requests = 0
            await self._publish()
        if path in ("/v1/chat/completions", "/v1/completions"):
            self.bodies.append(body)
            await self._complete_prompt(writer, path, body)
            return
        await super()._route(writer, method, path, body)

    def tokenize(self, path: str, body: Mapping[str, Any]) -> list[int]:
        """Returns the token ids of a body, as the server computes them."""
        if path == "/v1/chat/completions":
            fields = {"messages": body["messages"], "tools": body.get("tools")}
            text = self._template.render(**fields, add_generation_prompt=True)
            ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
            return ids
        prompt = body["prompt"]
        return list(prompt) if not isinstance(prompt, str) else self._tokenizer.encode(prompt).ids

    async def _prefill(self, prompt: Sequence[int]) -> int:
        """Computes a prompt; returns its cached tokens."""
        self.requests += 1
        self.prompt_tokens += len(prompt)
        async with self._prefill_turn:
            cached = self.cache.match(prompt)
            await asyncio.sleep((len(prompt) - cached) * self._prefill_s)
            self.cache.store(prompt)
        self.cached_tokens += cached
        await self._publish()
        return cached

    async def _keep(self, ids: Sequence[int]) -> None:
        self.cache.store(ids)
        await self._publish()

    async def _complete_prompt(
        self, writer: asyncio.StreamWriter, path: str, body: dict[str, Any]
    ) -> None:
        if body.get("model") != MODEL:
            text = f"no model {body.get('model')!r}"
            self._write(writer, 404, {"error": {"message": text}})
            return
        self.running += 1
        try:
            await self._complete_known(writer, path, body)
        finally:
            self.running -= 1

    async def _complete_known(
        self, writer: asyncio.StreamWriter, path: str, body: dict[str, Any]
    ) -> None:
        prompt = self.tokenize(path, body)
        cached = await self._prefill(prompt)
        limit = body.get("max_tokens") or body.get("max_completion_tokens") or 16
        is_stream = bool(body.get("stream"))
        if is_stream:
            writer.write(b"HTTP/1.1 200 X\r\ncontent-type: text/event-stream\r\n")
            writer.write(b"connection: close\r\n\r\n")
        output: list[int] = []
        for _ in range(limit):
            await asyncio.sleep(self.step_s)
            output.append(next_token([*prompt, *output]))
            if is_stream:
                text = self._tokenizer.decode(output[-1:])
                self._event(writer, {"choices": [_choice(path, text, "delta")]})
                await writer.drain()
            if writer.transport.is_closing():
                return
        await self._keep([*prompt, *output])
        usage = {
            "prompt_tokens": len(prompt),
            "completion_tokens": len(output),
            "prompt_tokens_details": {"cached_tokens": cached},
        }
        if is_stream:
            self._event(writer, {"choices": [], "usage": usage, "served_by": self.address})
            writer.write(b"data: [DONE]\n\n")
            return
        choice = _choice(path, self._tokenizer.decode(output), "message")
        content = {"choices": [choice], "usage": usage, "served_by": self.address}
        self._write(writer, 200, content | {"model": body["model"]})

    async def _generate(self, writer: asyncio.StreamWriter, body: dict[str, Any]) -> None:
        cached = await self._prefill(body["input_ids"])
        self._cached_of[id(body)] = cached
        try:
            await super()._generate(writer, body)
        finally:
            del self._cached_of[id(body)]

    @cached_property
    def _cached_of(self) -> dict[int, int]:
        """The cached tokens of open requests of `/generate`."""
        return {}

    def _sglang_chunk(
        self, body: dict[str, Any], output: list[int], is_stop: bool, is_end: bool
    ) -> dict[str, Any]:
        found = super()._sglang_chunk(body, output, is_stop, is_end)
        found["meta_info"]["cached_tokens"] = self._cached_of.get(id(body), 0)
        if is_end:
            self.cache.store([*body["input_ids"], *output])
            self._loop.create_task(self._publish())
        return found


def _choice(path: str, text: str, name: str) -> dict[str, Any]:
    if path == "/v1/completions":
        return {"index": 0, "text": text}
    return {"index": 0, name: {"role": "assistant", "content": text}}


def main() -> None:
    """Serves until killed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--events-port", type=int, default=0)
    parser.add_argument("--pages", type=int, default=4096)
    parser.add_argument("--step-s", type=float, default=0.002)
    parser.add_argument("--prefill-tokens-per-s", type=float, default=200_000.0)
    flags = parser.parse_args()
    server = CachingServer(
        pages_max=flags.pages,
        step_s=flags.step_s,
        prefill_tokens_per_s=flags.prefill_tokens_per_s,
        port=flags.port,
        events_port=flags.events_port,
    )
    with server:
        threading.Event().wait()


if __name__ == "__main__":
    main()
