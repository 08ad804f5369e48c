"""A chat with the mesh: streamed text and tool calls, tokens, timing and placement."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import aclosing

# Any: JSON.
from typing import Any

from nicegui import ui

from common.errors import MeshError
from console_svc.charts.tokens import arrivals
from console_svc.charts.units import NONE, duration, number, percent, rate
from console_svc.pages.conversation import (
    EXAMPLE_TOOLS,
    Response,
    parse_tools,
    tool_messages,
    user_message,
)
from console_svc.pages.figure import Figure
from console_svc.pages.frame import frame, refresh
from console_svc.pages.paging import Column
from console_svc.pages.parts import (
    Disclosure,
    Empty,
    Facts,
    Notice,
    box,
    button,
    choice,
    field,
    section,
    set_choices,
    text,
    text_input,
)
from console_svc.pages.requests import hit_text, path_text, request_href
from console_svc.pages.table import Table
from console_svc.state.actions import ChatRequest
from console_svc.state.console_state import ConsoleState

_DRAW_S = 0.1
_PLACEMENT_TRIES = 60
_TURNS_MAX = 40
_TOKENS_MAX = 4096
_NO_MODEL = (
    "No model is served",
    "Start a worker: `python -m worker_svc --model-name NAME`. The list of models follows at once.",
)


def define(state: ConsoleState) -> None:
    @ui.page("/playground", title="Playground · KVMesh")
    def page() -> None:
        lead = "Sends a real request through a frontend, and shows how it was served."
        with frame(state, "/playground", "Playground", lead):
            _Playground(state)


class _Playground:
    def __init__(self, state: ConsoleState) -> None:
        self._state = state
        self._messages: list[Mapping[str, Any]] = []
        self._task: asyncio.Task[None] | None = None
        self._empty = Empty(*_NO_MODEL)
        with box("kv-play"):
            with section("Conversation"):
                self._error = Notice("bad")
                with box("kv-panel") as self._turns:
                    self._hint = text("p", "Write a message below.", "kv-muted")
                self._live = _Live()
                self._build_composer()
            with section("Settings"):
                self._build_settings()
        with section("How it was served") as self._served_part:
            self._served = _Served(state)
        self._served_part.set_visibility(False)
        ui.context.client.on_delete(self._cancel)
        refresh(state, self._show_models)

    def _show_models(self) -> None:
        models = [model.name for model in self._state.models]
        models += [adapter.name for m in self._state.models for adapter in m.adapters]
        self._empty.show(not models)
        set_choices(self._model, models)

    def _build_composer(self) -> None:
        with field("Message", "play-message"):
            self._message = ui.textarea(value="Hello! Tell me about KV caches.")
            self._message.props('outlined dense autogrow for="play-message"').classes("w-full")
            self._message.on("keydown.ctrl.enter", self._send)
        with box("kv-row"):
            self._send_button = button("Send", self._send, "kv-primary")
            self._stop_button = button("Stop", self._cancel)
            self._stop_button.set_enabled(False)
            button("New conversation", self._reset)
            text("span", "Ctrl+Enter sends.", "kv-muted kv-small")

    def _build_settings(self) -> None:
        with box("kv-panel kv-stack"):
            self._model = choice("Model or adapter", "play-model", [], "", style="width: 100%")
            self._key = text_input(
                "API key",
                "play-key",
                props='type=password autocomplete="off"',
                placeholder="only if the mesh needs keys",
            )
            self._max_tokens = text_input(
                f"Output tokens, at most {_TOKENS_MAX}",
                "play-tokens",
                value="128",
                props="type=number min=1",
            )
            self._temperature = text_input(
                "Temperature",
                "play-temperature",
                placeholder="the model's own",
                props="type=number min=0 step=0.1",
            )
            with field("Tools (JSON list)", "play-tools"):
                self._tools = ui.textarea(placeholder="none")
                self._tools.props('outlined dense autogrow for="play-tools"').classes(
                    "w-full kv-mono"
                )
            button("Insert an example tool", lambda: self._tools.set_value(EXAMPLE_TOOLS))
            self._tool_choice = choice(
                "Tool choice",
                "play-choice",
                ["auto", "required", "none"],
                "auto",
                style="width: 100%",
            )

    def _request(self) -> ChatRequest:
        """Returns the request of the fields. Raises ToolsError, and ValueError for a number."""
        tools = parse_tools(str(self._tools.value or ""))
        max_tokens = int(self._max_tokens.value or 0)
        if not 1 <= max_tokens <= _TOKENS_MAX:
            raise ValueError(f"output tokens: must be 1 to {_TOKENS_MAX}, not {max_tokens}")
        temperature = str(self._temperature.value or "")
        return ChatRequest(
            model=str(self._model.value or ""),
            messages=tuple(self._messages),
            max_tokens=max_tokens,
            temperature=float(temperature) if temperature else None,
            tools=tools,
            tool_choice=str(self._tool_choice.value) if tools else None,
            api_key=str(self._key.value or ""),
        )

    async def _send(self) -> None:
        content = str(self._message.value or "").strip()
        if not content or self._task is not None:
            return
        self._add_turn("You", content, user_message(content))
        self._message.set_value("")
        await self._run()

    async def _run(self) -> None:
        """Sends the conversation, and shows the response until it ends."""
        self._error.show("")
        try:
            request = self._request()
        except ValueError as error:
            self._error.show(str(error))
            return
        response = Response()
        self._live.begin(response)
        self._set_busy(True)
        self._task = asyncio.create_task(self._stream(request, response))
        try:
            await self._task
        except asyncio.CancelledError:
            response.finish_reason = response.finish_reason or "stopped"
        except MeshError as error:
            self._error.show_error(error)
        finally:
            self._task = None
            self._set_busy(False)
            self._live.end()
        self._keep(response)

    async def _stream(self, request: ChatRequest, response: Response) -> None:
        async with aclosing(self._state.chat(request)) as deltas:
            async for delta in deltas:
                response.add(delta)

    def _keep(self, response: Response) -> None:
        """Adds the response to the conversation, and shows how it was served."""
        if response.text or response.reasoning or response.calls:
            self._messages.append(response.message())
            self._drop_old_turns()
            with self._turns:
                _show_response(response, self._results_sent)
        if response.request_id or response.arrivals_ms:
            self._served_part.set_visibility(True)
            self._served.show(response)

    async def _results_sent(self, results: Mapping[str, str]) -> None:
        if self._task is None:
            self._messages.extend(tool_messages(results))
            await self._run()

    def _add_turn(self, speaker: str, content: str, message: Mapping[str, Any]) -> None:
        self._hint.set_visibility(False)
        self._messages.append(message)
        self._drop_old_turns()
        with self._turns, box("kv-turn"):
            text("div", speaker, "kv-speaker")
            text("div", content, "kv-said")

    def _drop_old_turns(self) -> None:
        """Starts anew beyond the limit, so that a page has bounded memory."""
        if len(self._messages) > _TURNS_MAX:
            del self._messages[:-1]
            self._turns.clear()

    def _set_busy(self, is_busy: bool) -> None:
        self._send_button.set_enabled(not is_busy)
        self._stop_button.set_enabled(is_busy)

    def _cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()

    def _reset(self) -> None:
        self._cancel()
        self._messages.clear()
        self._turns.clear()
        with self._turns:
            self._hint = text("p", "Write a message below.", "kv-muted")
        self._served_part.set_visibility(False)
        self._error.show("")


class _Live:
    """The response while it arrives, drawn ten times a second."""

    def __init__(self) -> None:
        self._response = Response()
        with box("kv-panel kv-turn") as self._element:
            self._speaker = text("div", "Model", "kv-speaker")
            self._thought = text("div", classes="kv-thought")
            self._said = text("div", classes="kv-said")
            self._call = text("div", classes="kv-call kv-mono")
        self._element.props["aria-busy"] = "true"
        self._element.set_visibility(False)
        self._timer = ui.timer(_DRAW_S, self._draw, active=False)

    def begin(self, response: Response) -> None:
        self._response = response
        self._draw()
        self._element.set_visibility(True)
        self._timer.activate()

    def end(self) -> None:
        self._timer.deactivate()
        self._element.set_visibility(False)

    def _draw(self) -> None:
        response = self._response
        first = response.first_token_ms
        waiting = "waits for the first token" if first is None else f"first token {duration(first)}"
        self._speaker.set_text(f"Model · {waiting} · {len(response.arrivals_ms)} pieces")
        self._thought.set_text(response.reasoning)
        self._said.set_text(response.text)
        self._call.set_text("\n".join(f"{c.name}({c.arguments})" for c in response.calls.values()))
        for part in (self._thought, self._said, self._call):
            part.set_visibility(bool(part.text))


class _Served:
    """How the last response was served: timing and tokens at once, placement when it is known."""

    def __init__(self, state: ConsoleState) -> None:
        self._state = state
        self._response = Response()
        self._tries = 0
        self._facts = Facts("kv-facts kv-panel")
        with box("kv-panel"):
            self._figure = Figure("Time since the piece before, at its arrival.", height=150)
        twin = Disclosure("Arrivals as a table", lambda: None)
        with twin.element:
            columns: list[Column[tuple[int, float, float]]] = [
                Column("n", "Piece", lambda r: number(r[0]), is_number=True),
                Column("at", "Arrived", lambda r: duration(r[1]), is_number=True),
                Column("gap", "After the one before", lambda r: duration(r[2]), is_number=True),
            ]
            self._table = Table("Arrivals", columns, lambda r: str(r[0]), ("No piece", ""))
        self._timer = ui.timer(0.5, self._find, active=False)

    def show(self, response: Response) -> None:
        self._response, self._tries = response, 0
        times = response.arrivals_ms
        self._figure.show(arrivals(times))
        before = [0.0, *times]
        self._table.show([(n + 1, at, at - before[n]) for n, at in enumerate(times)])
        self._draw({"Served by": "waits for the record of the frontend"})
        self._timer.activate()

    def _find(self) -> None:
        """Shows the placement once the console has the request."""
        self._tries += 1
        row = self._state.find_request(self._response.request_id)
        if row is not None:
            self._draw(
                {
                    "Served by": path_text(row),
                    "Hit (predicted)": hit_text(row),
                    "In the router's queue": duration(row.queued_ms),
                    "Why this worker": ("waterfall and candidates", request_href(row.request_id)),
                }
            )
        elif self._tries >= _PLACEMENT_TRIES:
            self._draw({"Served by": "unknown: no frontend has a record of this request"})
        if row is not None or self._tries >= _PLACEMENT_TRIES:
            self._timer.deactivate()

    def _draw(self, placement: Mapping[str, str | tuple[str, str]]) -> None:
        response, usage = self._response, self._response.usage
        prompt, details = usage.get("prompt_tokens"), usage.get("prompt_tokens_details") or {}
        cached = details.get("cached_tokens")
        facts: dict[str, str | tuple[str, str]] = {
            "First token": duration(response.first_token_ms),
            "Total": duration(response.ended_ms),
            "Output tokens a second": rate(response.tokens_per_s),
            "Prompt": f"{number(prompt)} tokens",
            "Output": f"{number(usage.get('completion_tokens'))} tokens",
            "Ended by": response.finish_reason or NONE,
            "Request": response.request_id or NONE,
        }
        if cached is not None and prompt:
            facts["Cached"] = f"{number(cached)} tokens ({percent(cached / prompt)})"
        self._facts.show(facts | dict(placement))


def _show_response(response: Response, on_results: Any) -> None:
    """Adds a response to the conversation; a call has a field for its result."""
    with box("kv-turn"):
        text("div", f"Model · {response.finish_reason or 'not finished'}", "kv-speaker")
        if response.reasoning:
            text("div", response.reasoning, "kv-thought")
        if response.text:
            text("div", response.text, "kv-said")
        if response.calls:
            _show_calls(response, on_results)


def _show_calls(response: Response, on_results: Any) -> None:
    inputs: dict[str, ui.input] = {}
    for at, call in response.calls.items():
        text("div", f"{call.name}({call.arguments})", "kv-call kv-mono")
        id_ = f"play-result-{call.id or at}"
        inputs[call.id] = text_input(f"Result of {call.name}", id_, value='{"ok": true}')

    async def send() -> None:
        await on_results({id_: str(field_.value or "") for id_, field_ in inputs.items()})

    with box("kv-row"):
        button("Send the results", send)
