"""Measure the frontend's content chunks: nanoseconds each, best of several rounds; one JSON line.

PYTHONPATH=protos:. python bench/bench_sse.py
"""

from __future__ import annotations

import timeit
from collections.abc import Callable

import orjson

from bench.measure import print_report
from frontend_svc.core.openai.parsing import parse_chat
from frontend_svc.core.openai.sse import ChunkKind, ChunkWriter
from frontend_svc.metrics.families import DeploymentState, Endpoint

CALLS = 100_000
ROUNDS = 7
TOKEN = " token"


def best_ns(call: Callable[[], object], calls: int = CALLS) -> float:
    return round(min(timeit.repeat(call, number=calls, repeat=ROUNDS)) / calls * 1e9, 1)


def whole_dump(response_id: str) -> bytes:
    """The cost of a chunk that is serialized each time."""
    choice = {"index": 0, "delta": {"content": TOKEN}, "logprobs": None, "finish_reason": None}
    chunk = {
        "id": response_id,
        "object": "chat.completion.chunk",
        "created": 1_700_000_000,
        "model": "a-model",
        "system_fingerprint": None,
        "choices": [choice],
    }
    return b"data: " + orjson.dumps(chunk) + b"\n\n"


def main() -> None:
    response_id = "chatcmpl-0123456789abcdef0123456789abcdef"
    writer = ChunkWriter(ChunkKind.CHAT, response_id, "a-model", 1_700_000_000)
    content = writer.content
    meter = DeploymentState(lambda: {"m"}).begin("m", Endpoint.CHAT_COMPLETIONS, True)
    messages = [{"role": "user", "content": "some words " * 20}] * 10
    body = orjson.dumps({"model": "m", "messages": messages, "stream": True, "max_tokens": 100})
    result = {
        "content_ns": best_ns(lambda: content(TOKEN)),
        "whole_dump_ns": best_ns(lambda: whole_dump(response_id)),
        "empty_call_ns": best_ns(lambda: None),
        "meter_tokens_ns": best_ns(lambda: meter.tokens(1, 1.0)),
        "writer_ns": best_ns(lambda: ChunkWriter(ChunkKind.CHAT, response_id, "m", 1), CALLS // 10),
        "parse_chat_10_messages_ns": best_ns(lambda: parse_chat(body), CALLS // 50),
    }
    print_report("sse", {"calls": CALLS, "rounds": ROUNDS}, result)


if __name__ == "__main__":
    main()
