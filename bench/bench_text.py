"""Measure the frontend's text path on the sim model; print one JSON line.

    PYTHONPATH=protos:. python bench/bench_text.py [--repeats 9]

Each figure is the best of `--repeats` passes over the corpus of the sim model: nanoseconds a token
for detokenising (by tokens per call) and for stop strings, a call for response chunks, and
microseconds for rendering a chat.
"""

from __future__ import annotations

import json
import time
import timeit
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import orjson
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from bench.measure import parse_settings, print_report
from frontend_svc.metrics.families import DeploymentState
from frontend_svc.openai.body.parsing import parse_chat
from frontend_svc.openai.output.sse import ChunkKind, ChunkWriter
from frontend_svc.prompts.prompt import ChatTemplate
from frontend_svc.text.detokenizer import Detokenizer, StreamDetokenizer, Vocabulary
from frontend_svc.text.stop_strings import StopStringMatcher

MODEL_DIR = Path(__file__).parent.parent / "worker_svc/engines/sim/model"
TOKENS_PER_CALL = (1, 4, 16, 256)
STOPS: dict[str, list[str]] = {
    "none": [],
    "one": ["\n\nUser:"],
    "four": ["</s>", "###", "\n\n", "<|end|>"],
}
TURNS = 16


def main() -> None:
    repeats: int = parse_settings(__doc__, repeats=9).repeats
    tokenizer = Tokenizer.from_file(str(MODEL_DIR / "tokenizer.json"))
    lines = (MODEL_DIR / "corpus.txt").read_text("utf-8").splitlines(keepends=True)
    ascii_ids = tokenizer.encode("".join(line for line in lines if line.isascii())).ids
    other_ids = tokenizer.encode("".join(line for line in lines if not line.isascii())).ids
    result = {
        "detokenize_ns_per_token": {
            "ascii": detokenize_figures(ascii_ids, repeats),
            "other_scripts": detokenize_figures(other_ids, repeats),
            "through_the_tokenizer": best(
                lambda: StreamDetokenizer(tokenizer).feed(ascii_ids), len(ascii_ids), repeats
            ),
            "decode_stream": best(
                lambda: decode_stream(tokenizer, ascii_ids), len(ascii_ids), repeats
            ),
        },
        "stop_ns_per_token": stop_figures(ascii_ids, repeats),
        "sse_ns": sse_figures(repeats),
        "render_us": {str(turns): render_us(turns, repeats) for turns in (1, TURNS)},
    }
    settings = {"repeats": repeats, "vocabulary": tokenizer.get_vocab_size()}
    print_report("text", settings, result)


def best(work: Callable[[], object], count: int, repeats: int) -> float:
    """Nanoseconds per item of the fastest pass of `work` over `count` items."""
    fastest = float("inf")
    for _ in range(repeats):
        start = time.perf_counter_ns()
        work()
        fastest = min(fastest, time.perf_counter_ns() - start)
    return round(fastest / count, 1)


def detokenize_figures(ids: Sequence[int], repeats: int) -> dict[str, float]:
    vocabulary = Vocabulary.from_tokenizer_json((MODEL_DIR / "tokenizer.json").read_bytes())

    def feed_all(chunks: list[Sequence[int]]) -> None:
        feed = Detokenizer(vocabulary).feed
        for chunk in chunks:
            feed(chunk)

    def in_calls_of(size: int) -> float:
        chunks = [ids[start : start + size] for start in range(0, len(ids), size)]
        return best(lambda: feed_all(chunks), len(ids), repeats)

    return {str(size): in_calls_of(size) for size in TOKENS_PER_CALL}


def decode_stream(tokenizer: Tokenizer, ids: Sequence[int]) -> None:
    stream = DecodeStream(skip_special_tokens=True)
    for token_id in ids:
        stream.step(tokenizer, token_id)


def stop_figures(ids: Sequence[int], repeats: int) -> dict[str, float]:
    vocabulary = Vocabulary.from_tokenizer_json((MODEL_DIR / "tokenizer.json").read_bytes())
    pieces = [piece for piece in Detokenizer(vocabulary).feed(ids) if "\n" not in piece]

    def feed_all(stop_strings: list[str]) -> None:
        feed = StopStringMatcher(stop_strings).feed
        for piece in pieces:
            feed(piece)

    return {
        name: best(partial(feed_all, stop_strings), len(pieces), repeats)
        for name, stop_strings in STOPS.items()
    }


def render_us(turns: int, repeats: int) -> float:
    config = json.loads((MODEL_DIR / "tokenizer_config.json").read_text("utf-8"))
    template = ChatTemplate(config["chat_template"], bos_token=None, eos_token=config["eos_token"])
    messages = [{"role": "user", "content": "What is the time? " * 20} for _ in range(turns)]
    now = datetime(2025, 1, 1, tzinfo=UTC)
    return round(best(lambda: template.render(messages, now=now), 1, repeats * 10) / 1000, 1)


def sse_figures(repeats: int) -> dict[str, float]:
    """Nanoseconds of the work per content chunk and per request."""
    response_id = "chatcmpl-0123456789abcdef0123456789abcdef"
    content = ChunkWriter(ChunkKind.CHAT, response_id, "a-model", 1_700_000_000).content
    meter = DeploymentState(lambda: {"m"}).begin("m", "chat_completions", True)
    messages = [{"role": "user", "content": "some words " * 20}] * 10
    body = orjson.dumps({"model": "m", "messages": messages, "stream": True, "max_tokens": 100})

    def whole_dump() -> bytes:
        """For comparison: a chunk that is serialized each time."""
        delta = {"content": " token"}
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": None}
        chunk = {
            "id": response_id,
            "object": "chat.completion.chunk",
            "created": 1_700_000_000,
            "model": "a-model",
            "system_fingerprint": None,
            "choices": [choice],
        }
        return b"data: " + orjson.dumps(chunk) + b"\n\n"

    works: dict[str, Callable[[], object]] = {
        "content": lambda: content(" token"),
        "whole_dump": whole_dump,
        "empty_call": lambda: None,
        "meter_tokens": lambda: meter.tokens(1, 1.0),
        "writer": lambda: ChunkWriter(ChunkKind.CHAT, response_id, "m", 1),
        "parse_chat_10_messages": lambda: parse_chat(body),
    }
    calls = 10_000
    return {
        name: best(partial(timeit.timeit, work, number=calls), calls, repeats)
        for name, work in works.items()
    }


if __name__ == "__main__":
    main()
