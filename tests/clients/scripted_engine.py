"""An engine that follows the task in the prompt, so that an agent comes to its end.

    python -m worker_svc --engine tests.clients.scripted_engine:make --model-name sim \
        --tool-call-parser hermes FLAGS...

The last message of the user may have the text of `task`: the engine then calls that tool, if the
prompt lists it and has no result of a tool after that message. In all other cases it answers DONE.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace
from typing import Any, Final

from tokenizers import Tokenizer

from common.request.preprocessed import OutputOptions, SamplingOptions, TokenIds, usage
from worker_svc.config import WorkerConfig
from worker_svc.engines.contract import (
    EngineConfig,
    GenerateContext,
    LLMEngineOutput,
    PreprocessedRequest,
)
from worker_svc.engines.echo import EchoConfig, EchoEngine
from worker_svc.engines.sim.config import SIM_MODEL_DIR, load_sim_model
from worker_svc.engines.sim.jobs import SUPPORTED_FIELDS

DONE: Final = "The task is done."
# The arguments are base64, because agents write the task as JSON or with other quotation marks.
_CALL: Final = re.compile(r"Call the tool (\S+) with ([A-Za-z0-9+/=]+)\.")
_TURN: Final = "<|im_start|>"


def task(tool: str, arguments: dict[str, Any]) -> str:
    """Returns a task for an agent: one call of a tool. Any: JSON."""
    encoded = base64.b64encode(json.dumps(arguments).encode()).decode()
    return f"Call the tool {tool} with {encoded}."


def answer(prompt: str) -> str:
    """Returns the response to a prompt of the sim's chat template."""
    turns = prompt.split(_TURN)[1:-1]
    last_user = max((at for at, turn in enumerate(turns) if turn.startswith("user")), default=0)
    has_result = any(turn.startswith("tool") for turn in turns[last_user:])
    call = _CALL.search(turns[last_user]) if turns else None
    if call is None or has_result or f'"name": "{call[1]}"' not in prompt:
        return DONE
    arguments = json.loads(base64.b64decode(call[2]))
    call_text = json.dumps({"name": call[1], "arguments": arguments})
    return f"<tool_call>\n{call_text}\n</tool_call>"


class ScriptedEngine(EchoEngine):
    """Answers as the module describes, one token after another."""

    def __init__(self, config: EchoConfig) -> None:
        super().__init__(config)
        self._tokenizer = Tokenizer.from_file(str(SIM_MODEL_DIR / "tokenizer.json"))
        self._context_length = load_sim_model(SIM_MODEL_DIR).context_length

    async def start(self, worker_id: int) -> EngineConfig:
        config = await super().start(worker_id)
        return replace(
            config, context_length=self._context_length, supported_fields=SUPPORTED_FIELDS
        )

    async def generate(
        self, request: PreprocessedRequest, ctx: GenerateContext
    ) -> AsyncGenerator[LLMEngineOutput, None]:
        plain = replace(
            request,
            token_ids=TokenIds.of(self._answer(request.token_ids.tolist())),
            sampling_options=SamplingOptions(),
            output_options=OutputOptions(),
        )
        async for output in super().generate(plain, ctx):
            if output.completion_usage is not None:
                counts = usage(len(request.token_ids), output.completion_usage.completion_tokens)
                output = output.with_usage(counts)
            yield output

    def _answer(self, prompt: Sequence[int]) -> list[int]:
        text = self._tokenizer.decode(list(prompt), skip_special_tokens=False)
        ids: list[int] = self._tokenizer.encode(answer(text), add_special_tokens=False).ids
        return ids


def make(config: WorkerConfig) -> ScriptedEngine:
    return ScriptedEngine(EchoConfig(model=config.default_model_name))
