"""The process that renders the prompts of one chat template: see `template_process.py`.

Frames are JSON values. The first request loads the template.
"""

from __future__ import annotations

import signal
import socket
import sys
from datetime import datetime
from typing import Any, Final

import orjson

from common.trials.child_process import frame, limit_memory, receive
from frontend_svc.prompts.control_tokens import ControlTokens
from frontend_svc.prompts.prompt import ChatTemplate, TemplateError

# Processor time of one prompt, and of loading the template. The longest conversations take 0.1 s.
RENDER_CPU_S: Final = 2.0
LOAD_CPU_S: Final = 4.0
MEMORY_BYTES_MAX: Final = 1 << 30
PROMPT_CHARS_MAX: Final = 64 << 20

# Any: JSON.
Json = dict[str, Any]


def _serve(connection: socket.socket) -> None:
    """Runs the process: loads one template and renders prompts until the frontend ends."""
    limit_memory(MEMORY_BYTES_MAX)
    load = orjson.loads(receive(connection))
    signal.setitimer(signal.ITIMER_PROF, LOAD_CPU_S)  # its signal ends the process
    try:
        template = ChatTemplate(
            load["source"], bos_token=load["bos_token"], eos_token=load["eos_token"]
        )
    except (TemplateError, MemoryError) as error:
        connection.sendall(frame(orjson.dumps({"error": str(error) or "out of memory"})))
        return
    signal.setitimer(signal.ITIMER_PROF, 0)
    variables, control = sorted(template.variables), ControlTokens(load["control_tokens"])
    reply: Json = {"variables": variables, "prints_tools": template.prints_tools}
    while True:
        connection.sendall(frame(orjson.dumps(reply)))
        replies = []
        for request in orjson.loads(receive(connection))["requests"]:
            signal.setitimer(signal.ITIMER_PROF, RENDER_CPU_S)
            replies.append(_render(template, control, request))
        signal.setitimer(signal.ITIMER_PROF, 0)
        reply = {"replies": replies}


def _render(template: ChatTemplate, control: ControlTokens, request: Json) -> Json:
    try:
        prompt = template.prompt(
            request["messages"],
            control,
            tools=request["tools"],
            template_kwargs=request["template_kwargs"],
            add_generation_prompt=request["add_generation_prompt"],
            now=datetime.fromisoformat(request["now"]),
        )
        if len(prompt.text) > PROMPT_CHARS_MAX:
            text = f"a prompt of {len(prompt.text)}/{PROMPT_CHARS_MAX} characters"
            return {"error": f"chat template: {text}"}
    except TemplateError as error:
        return {"error": str(error)}
    except MemoryError:
        return {"error": f"chat template: out of memory ({MEMORY_BYTES_MAX} bytes)"}
    if prompt.pieces is None:
        return {"text": prompt.text, "pieces": None}
    return {"pieces": prompt.pieces}


if __name__ == "__main__":
    with socket.socket(fileno=int(sys.argv[1])) as frontend:
        try:
            _serve(frontend)
        except (OSError, MemoryError):  # the frontend has ended, or sees the end of this process
            sys.exit(1)
