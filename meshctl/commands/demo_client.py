"""The client of the demo: a conversation of two turns through the OpenAI SDK, with routing reasons.

usage: python -m meshctl.commands.demo_client OUT.json
environment: OPENAI_BASE_URL, KVMESH_REGISTRY, KVMESH_REGISTRY_PATH, KVMESH_CONSUL_URL
"""

from __future__ import annotations

import asyncio
import json
import signal
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from openai import OpenAI
from openai.types.chat import ChatCompletionMessageParam

from common.registry.instances import Instance
from common.registry.open import open_registry
from common.registry.registry import Registry
from common.rpc import channel as rpc
from common.runtime import env
from common.runtime.config import ServiceConfig
from kvmesh.router.v1 import router_pb2, router_pb2_grpc

MODEL = "sim"
# Several KV blocks long, so that the second turn has a KV hit.
SYSTEM = (
    "You answer for a small mesh of services. Each word of your answers follows from the "
    "words before it, so that a reader who has the words before can check every one of yours. "
    "Keep your answers short, be kind to your readers, and do not repeat yourself."
)
QUESTIONS = ("What is a prefix cache good for?", "And which requests benefit from it most?")
# A reader's pause; the KV events of the turn reach the router in it.
TURN_PAUSE_S = 0.6
TIMEOUT_S = 15.0
FIND_ROUTER_TIMEOUT_S = 15.0
LOAD_REPORTS_TIMEOUT_S = 30.0


def main() -> None:
    """Runs the conversation and writes the results to OUT.json."""
    # On Ctrl-C only the parent process, the demo, prints a message.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    asyncio.run(_wait_for_load_reports())
    client = OpenAI()
    messages: list[ChatCompletionMessageParam] = [{"role": "system", "content": SYSTEM}]
    turns = []
    for question in QUESTIONS:
        messages.append({"role": "user", "content": question})
        print(f"\nuser       {question}\nassistant ", end="", flush=True)
        text, usage, request_id = _send_chat(client, messages)
        print()
        messages.append({"role": "assistant", "content": text})
        explanation = asyncio.run(_explain(request_id))
        for reason in explanation["reasons"]:
            print(f"  routing  {reason}")
        print(
            f"  cache    predicted {explanation['predicted_cached_tokens']}, actual "
            f"{usage['cached_tokens']} of {usage['prompt_tokens']} prompt tokens"
        )
        turns.append({"text": text, "request_id": request_id, **usage, **explanation})
        time.sleep(TURN_PAUSE_S)
    Path(sys.argv[1]).write_text(json.dumps(turns))


def _send_chat(
    client: OpenAI, messages: list[ChatCompletionMessageParam]
) -> tuple[str, dict[str, int], str]:
    """Returns the streamed text, its token counts, and the request id."""
    stream = client.chat.completions.create(
        model=MODEL,
        messages=messages,
        max_tokens=24,
        stream=True,
        stream_options={"include_usage": True},
    )
    pieces, usage, response_id = [], {"prompt_tokens": 0, "cached_tokens": 0}, ""
    for chunk in stream:
        response_id = chunk.id
        if chunk.choices and chunk.choices[0].delta.content:
            pieces.append(chunk.choices[0].delta.content)
            print(pieces[-1], end="", flush=True)
        if chunk.usage is not None:
            details = chunk.usage.prompt_tokens_details
            usage["prompt_tokens"] = chunk.usage.prompt_tokens
            usage["cached_tokens"] = (details.cached_tokens or 0) if details is not None else 0
    return "".join(pieces), usage, response_id.removeprefix("chatcmpl-")


@asynccontextmanager
async def _router() -> AsyncIterator[router_pb2_grpc.RouterServiceStub]:
    environ = env.environ()
    registry = open_registry(
        ServiceConfig(
            registry="consul" if environ.get("KVMESH_REGISTRY") == "consul" else "file",
            registry_path=Path(environ["KVMESH_REGISTRY_PATH"]),
            consul_url=environ.get("KVMESH_CONSUL_URL", "http://127.0.0.1:8500"),
        )
    )
    try:
        router = await wait_for_router(registry)
    finally:
        await registry.close()
    async with rpc.channel(router.address) as channel:
        yield router_pb2_grpc.RouterServiceStub(channel)


async def wait_for_router(
    registry: Registry, find_timeout_s: float = FIND_ROUTER_TIMEOUT_S
) -> Instance:
    """Returns a registered router. Raises SystemExit after `find_timeout_s`.

    Consul lists only instances that passed their last check, so a healthy router can be missing
    for a moment on a busy machine.
    """
    try:
        async with asyncio.timeout(find_timeout_s), registry.watch("default") as watch:
            while not (routers := watch.current.of("router")):
                await watch.next()
    except TimeoutError:
        raise SystemExit(f"no router in the registry within {find_timeout_s:g} s") from None
    return routers[0]


async def _wait_for_load_reports() -> None:
    """Waits until the router has a load report of every worker, through the indexer.

    Before that the router serves by load only, without KV hits.
    """
    deadline = time.monotonic() + LOAD_REPORTS_TIMEOUT_S
    async with _router() as stub:
        while time.monotonic() < deadline:
            router_state: router_pb2.DumpResponse = await rpc.unary(
                stub.Dump, router_pb2.DumpRequest(), timeout_s=TIMEOUT_S
            )
            if router_state.workers and all(
                w.HasField("report_age_ms") for w in router_state.workers
            ):
                return
            await asyncio.sleep(0.05)
    raise SystemExit(
        f"the router has no load report of some worker after {LOAD_REPORTS_TIMEOUT_S:g} s"
    )


# Any: a JSON tree.
async def _explain(request_id: str) -> dict[str, Any]:
    async with _router() as stub:
        response: router_pb2.ExplainResponse = await rpc.unary(
            stub.Explain, router_pb2.ExplainRequest(request_id=request_id), timeout_s=TIMEOUT_S
        )
    return {
        "reasons": list(response.decision.reasons),
        "predicted_cached_tokens": response.decision.predicted_cached_tokens,
    }


if __name__ == "__main__":
    main()
