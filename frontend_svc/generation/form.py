"""The form that a request asks of its response, and whether a response has it (pure).

A response that ends by itself has the form completely, or it is an error. One that `max_tokens` or
a stop of the client ends may be incomplete, and `finish_reason` shows it.

The constraint is compiled again, for single bytes, with any white space in JSON that no pattern
forbids: engines differ in what they write there. Some apply it only behind the reasoning. It says
nothing about how an engine restricts the text around tool calls, so of these the calls themselves
are checked.

The engine has enforced the form; the check finds engines that did not. So a response that is not
checked in time is passed on.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from common.request.grammar import ConstraintError, matches_constraint
from common.request.preprocessed import GuidedDecoding, PreprocessedRequest
from frontend_svc.openai.body.tool_calls import ANY_OBJECT, ToolPlan
from frontend_svc.text.api_format import ChoiceResult
from frontend_svc.tools.deltas import CallArguments, CallStart, Reasoning

# Why a response may end without its form.
_INCOMPLETE_REASONS = ("length", "content_filter")


@dataclass(frozen=True, slots=True)
class ResponseForm:
    """What the choices of a response must be."""

    guided: GuidedDecoding | None
    """Constraint of the content; None: the content is free."""

    plan: ToolPlan | None
    """Tools; a forced plan needs calls in place of content."""

    reasoning_end: str = ""
    """Marker behind the reasoning; "": the model has none."""

    def problem(self, choice: ChoiceResult, text: str, is_late: Callable[[], bool]) -> str:
        """Returns what the form lacks; "" if nothing, or if nothing is known in time. Takes
        milliseconds, with large constraints up to seconds.

        - text: of the choice as the model wrote it, with its reasoning.
        - is_late: whether the time is used up.
        """
        end = choice.end
        if end.reason in _INCOMPLETE_REASONS or end.stop_string is not None:
            return ""
        calls: dict[int, tuple[str, list[str]]] = {}
        for delta in choice.deltas:
            match delta:
                case CallStart(index, name):
                    calls[index] = (name, [])
                case CallArguments(index, piece):
                    calls[index][1].append(piece)
        if calls:
            whole = {n: (name, "".join(arguments)) for n, (name, arguments) in calls.items()}
            return self._calls_problem(whole, is_late)
        if self.plan is not None and self.plan.is_forced:
            return "the response has no tool call"
        if self.guided is None:
            return ""
        is_split = any(isinstance(delta, Reasoning) for delta in choice.deltas)
        texts = self._constrained_texts(text, is_split=is_split)
        if any(_matches(self.guided, part, is_late) for part in texts):
            return ""
        return "the response does not match the constraint of the request"

    def _constrained_texts(self, text: str, *, is_split: bool) -> Iterable[str]:
        """Yields the texts to which the engine may have applied the constraint: one must match.
        is_split: whether the client receives the reasoning apart from the content."""
        yield text
        if is_split and self.reasoning_end and self.reasoning_end in text:
            _, _, answer = text.partition(self.reasoning_end)
            yield answer
            yield answer.lstrip()

    def _calls_problem(
        self, calls: Mapping[int, tuple[str, str]], is_late: Callable[[], bool]
    ) -> str:
        """Only the schema of a strict function is enforced for certain."""
        plan = self.plan
        if plan is None:
            return ""
        functions = {function.name: function for function in plan.functions}
        for name, arguments in calls.values():
            function = functions.get(name)
            if function is None and plan.is_forced:
                return f"the response calls the function {name!r}, which the request does not offer"
            is_strict = function is not None and function.is_strict
            if not (plan.is_forced or is_strict):
                continue
            schema = function.schema if function is not None and is_strict else ANY_OBJECT
            if not _matches(GuidedDecoding(json=dict(schema)), arguments, is_late):
                return f"the arguments of the call of {name!r} do not match its parameters"
        return ""


def _matches(guided: GuidedDecoding, text: str, is_late: Callable[[], bool]) -> bool:
    texts = [text]
    if guided.json is not None:
        try:
            # Engines may write a value in another form, such as an escaped slash.
            texts.append(json.dumps(json.loads(text), ensure_ascii=False))
        except (ValueError, RecursionError):
            return False
    try:
        return any(matches_constraint(guided, form, is_late) for form in texts)
    except ConstraintError:
        return True  # nothing is known


def form_of(
    request: PreprocessedRequest,
    plan: ToolPlan | None,
    *,
    has_stop_tokens: bool,
    reasoning_end: str = "",
) -> ResponseForm | None:
    """Returns the form of a response; None if it may have any. has_stop_tokens: whether the client
    names tokens that end it before it is complete. reasoning_end: of ResponseForm."""
    guided = request.sampling_options.guided_decoding
    if guided is not None and (guided.best_effort or guided.structural_tag is not None):
        guided = None
    needs_calls = plan is not None and (
        plan.is_forced or any(function.is_strict for function in plan.functions)
    )
    if has_stop_tokens or (guided is None and not needs_calls):
        return None
    return ResponseForm(guided, plan if needs_calls else None, reasoning_end)
