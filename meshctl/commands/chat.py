"""`meshctl chat [MODEL]`: a conversation with a model, over the HTTP API of a frontend."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from http import HTTPStatus

# Any: JSON.
from typing import Any

import click
import httpx

from common.errors import MeshError, NotFound, Unavailable
from common.inspection.gateway import (
    GatewayError,
    api_url,
    chat_chunks,
    chunk_text,
    find_frontend,
    new_http_client,
)
from meshctl.options import REGISTRY_FLAGS, MeshCommand, MeshConfig, json_flag
from meshctl.view.members import names_by_id, read_members

# Facts that the frontend adds to a response; they need the permission `explain`.
_EXTRA_FIELDS = {"extra_fields": ["worker_id"]}

Message = dict[str, str]


@click.command("chat", cls=MeshCommand, config=MeshConfig, flags=REGISTRY_FLAGS)
@click.argument("model", default="")
@click.option("--prompt", metavar="TEXT", help="Send this text only, print the response and end.")
@click.option("--system", metavar="TEXT", default="", help="Message of the role system.")
@click.option("--max-tokens", metavar="N", type=int, help="Longest response, in tokens.")
@click.option("--url", default="", help="URL of a frontend. Unset: the first of the registry.")
@json_flag
@click.pass_obj
def command(
    environ: Mapping[str, str],
    config: MeshConfig,
    model: str,
    prompt: str | None,
    system: str,
    max_tokens: int | None,
    url: str,
    as_json: bool,
) -> int:
    """Sends messages to a model, and prints the responses as they arrive.

    MODEL is the first model of the frontend by default. Each line of the input is a message of one
    conversation, until its end or Ctrl-C; Ctrl-C in a response ends the response only. Standard
    error shows the worker, the time to the first token and the speed of each response. The variable
    OPENAI_API_KEY is the API key.
    """
    if as_json and prompt is None:
        raise click.UsageError("--json: needs --prompt", click.get_current_context())
    chat = asyncio.run(_open(config, model, url, environ.get("OPENAI_API_KEY")))
    if max_tokens is not None:
        chat.options["max_tokens"] = max_tokens
    if system:
        chat.messages.append({"role": "system", "content": system})
    if prompt is not None:
        return chat.send(prompt, as_json=as_json)
    return _converse(chat)


@dataclass
class _Chat:
    """A conversation, and what its requests have in common. names: of members, by their id."""

    config: MeshConfig
    api_key: str | None
    url: str
    model: str
    names: Mapping[str, str]
    messages: list[Message] = field(default_factory=list)
    options: dict[str, object] = field(default_factory=lambda: {"nvext": _EXTRA_FIELDS})

    def send(self, text: str, *, as_json: bool = False) -> int:
        """Sends a message and prints the response; returns the exit status."""
        self.messages.append({"role": "user", "content": text})
        answer = _Answer(self.names)
        try:
            asyncio.run(self._receive(answer, is_shown=not as_json))
        except GatewayError as error:
            self.messages.pop()
            sys.stderr.write(f"meshctl chat: {error}\n")
            return 1
        except KeyboardInterrupt:
            answer.finish_reason = "interrupted"
        self.messages.append({"role": "assistant", "content": answer.text})
        if as_json:
            sys.stdout.write(json.dumps(answer.json_object(self.model)) + "\n")
        else:
            sys.stdout.write("\n")
            sys.stdout.flush()
            sys.stderr.write(f"  {answer.summary()}\n")
        return 0

    async def _receive(self, answer: _Answer, *, is_shown: bool) -> None:
        async with (
            new_http_client(self.api_key, self.config, self.url) as http,
            aclosing(self._chunks(http)) as chunks,
        ):
            async for chunk in chunks:
                piece = answer.add(chunk, time.monotonic())
                if is_shown:
                    sys.stdout.write(piece)
                    sys.stdout.flush()

    async def _chunks(self, http: httpx.AsyncClient) -> AsyncGenerator[dict[str, Any], None]:
        """Yields the events of a response; without the facts that the key does not permit."""
        body: dict[str, object] = {
            "model": self.model,
            "messages": self.messages,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        try:
            async with aclosing(chat_chunks(http, self.url, body | self.options)) as chunks:
                async for chunk in chunks:
                    yield chunk
        except GatewayError as error:
            if error.status != HTTPStatus.FORBIDDEN or not self.options.pop("nvext", None):
                raise
            async with aclosing(self._chunks(http)) as chunks:
                async for chunk in chunks:
                    yield chunk


@dataclass
class _Answer:
    """A response, as far as it has arrived."""

    names: Mapping[str, str]
    started_at: float = field(default_factory=time.monotonic)
    first_at: float | None = None
    """Arrival of the first text."""
    last_at: float = 0.0
    text: str = ""
    response_id: str = ""
    finish_reason: str = ""
    workers: dict[str, str] = field(default_factory=dict)
    """The worker of the leg `prefill` or `decode`: its stable name, or its id."""
    usage: dict[str, Any] = field(default_factory=dict)

    def add(self, chunk: dict[str, Any], now: float) -> str:
        """Adds an event; returns its text."""
        self.response_id = chunk.get("id") or self.response_id
        self.usage = chunk.get("usage") or self.usage
        for choice in chunk["choices"]:
            self.finish_reason = choice.get("finish_reason") or self.finish_reason
        ids = (chunk.get("nvext") or {}).get("worker_id") or {}
        for leg in ("prefill", "decode"):
            if worker_id := ids.get(f"{leg}_worker_id"):
                self.workers[leg] = self.names.get(str(worker_id), str(worker_id))
        piece = chunk_text(chunk)
        if piece:
            self.first_at = now if self.first_at is None else self.first_at
            self.last_at = now
            self.text += piece
        return piece

    @property
    def ttft_ms(self) -> float | None:
        return None if self.first_at is None else 1000 * (self.first_at - self.started_at)

    @property
    def tokens_per_s(self) -> float | None:
        """Of the tokens after the first one."""
        count = self.usage.get("completion_tokens", 0) - 1
        if self.first_at is None or count < 1 or self.last_at <= self.first_at:
            return None
        return float(count / (self.last_at - self.first_at))

    def summary(self) -> str:
        parts = [" -> ".join(self.workers.values())]
        if self.usage:
            parts.append(f"{self.usage.get('completion_tokens')} tokens")
        if self.ttft_ms is not None:
            parts.append(f"first token after {self.ttft_ms:.1f} ms")
        if self.tokens_per_s is not None:
            parts.append(f"{self.tokens_per_s:.1f} tokens/s")
        parts += [self.finish_reason, self.response_id]
        return ", ".join(filter(None, parts))

    def json_object(self, model: str) -> dict[str, object]:
        return {
            "id": self.response_id,
            "model": model,
            "text": self.text,
            "finish_reason": self.finish_reason,
            "workers": self.workers,
            "ttft_ms": None if self.ttft_ms is None else round(self.ttft_ms, 1),
            "tokens_per_s": None if self.tokens_per_s is None else round(self.tokens_per_s, 1),
            "usage": self.usage,
        }


async def _open(config: MeshConfig, model: str, url: str, api_key: str | None) -> _Chat:
    """Returns an empty conversation. Raises Unavailable without a frontend or a model."""
    names: dict[str, str] = {}
    try:
        snapshot = await read_members(config)
        names, url = names_by_id(snapshot), url or api_url(find_frontend(snapshot))
    except MeshError:
        # With a URL the registry only has the names.
        if not url:
            raise
    url = url.rstrip("/").removesuffix("/v1")
    return _Chat(config, api_key, url, model or await _first_model(config, url, api_key), names)


async def _first_model(config: MeshConfig, url: str, api_key: str | None) -> str:
    async with new_http_client(api_key, config, url) as http:
        try:
            response = await http.get(f"{url}/v1/models")
            if response.status_code == HTTPStatus.UNAUTHORIZED:
                raise Unavailable(f"{url} needs an API key: set OPENAI_API_KEY")
            listed = [str(entry["id"]) for entry in response.raise_for_status().json()["data"]]
        except httpx.HTTPError as error:
            message = f"{url} does not list its models: {error or type(error).__name__}"
            raise Unavailable(message) from error
    if not listed:
        raise NotFound(f"{url} serves no model")
    return listed[0]


def _converse(chat: _Chat) -> int:
    """Sends each line of the input; returns the status of the last response."""
    status = 0
    for line in _read_lines(f"{chat.model} at {chat.url}; Ctrl-D ends"):
        if line.strip():
            status = chat.send(line)
    return status


def _read_lines(greeting: str) -> Iterator[str]:
    is_terminal = sys.stdin.isatty()
    if is_terminal:
        sys.stderr.write(f"{greeting}\n")
    # Ends: with the input, or Ctrl-C.
    while True:
        try:
            yield input("> " if is_terminal else "")
        except (EOFError, KeyboardInterrupt):
            if is_terminal:
                sys.stderr.write("\n")
            return
