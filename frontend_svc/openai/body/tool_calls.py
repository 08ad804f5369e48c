"""The tools of a body: which calls its response may or must have (pure)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from common.errors import InvalidRequest, Unsupported
from common.request.preprocessed import GuidedDecoding
from frontend_svc.openai.body.guided import Constraint, check_end, not_combined
from frontend_svc.openai.body.schema import ChatRequest, FunctionDefinition
from frontend_svc.openai.body.validation_errors import INVALID_VALUE
from frontend_svc.tools.blocks import ParameterTypes
from frontend_svc.tools.formats import HERMES, CallFormat

_NO_PARAMETERS: Final = {"type": "object", "properties": {}, "additionalProperties": False}
ANY_OBJECT: Final = {"type": "object"}


@dataclass(frozen=True, slots=True)
class UsableFunction:
    """A function that the response may call. field: its path in the body.

    schema: of its arguments; `check_schema` may replace it by ANY_OBJECT."""

    name: str
    field: str
    # Any: a JSON schema.
    schema: Mapping[str, Any]
    is_strict: bool


@dataclass(frozen=True, slots=True)
class ToolPlan:
    """The calls of a response. is_forced: it consists of calls. is_single: at most one call."""

    call_format: CallFormat
    functions: Sequence[UsableFunction]
    is_forced: bool
    is_single: bool

    @property
    def types(self) -> ParameterTypes:
        """The schemas of the functions' parameters."""
        return {
            function.name: function.schema.get("properties") or {} for function in self.functions
        }


def plan_tools(request: ChatRequest, call_format: CallFormat | None) -> ToolPlan | None:
    """Returns the plan of a request; None if its response has no calls. call_format: the model's.

    Raises Unsupported for tools of a model without tool calls, and for strict functions of a model
    that does not write its calls as JSON; InvalidRequest for parameters that are no object."""
    usable = {tool.function.name for tool in request.usable_tools}
    if not usable:
        return None
    if call_format is None:
        text = "the model's card names no tool call parser (--tool-call-parser of its workers)"
        raise Unsupported("tools", text)
    functions = [
        _usable_function(tool.function, request.tool_path(index))
        for index, tool in enumerate(request.tools or ())
        if tool.function.name in usable
    ]
    is_named = not isinstance(request.tool_choice, str | None)
    is_forced = is_named or request.tool_choice == "required"
    strict = next((function for function in functions if function.is_strict), None)
    if call_format.tag is None and (is_forced or strict is not None):
        if strict is not None and not is_forced and call_format.begin != HERMES.begin:
            text = "the model does not write its calls as JSON; set tool_choice to required"
            raise Unsupported(f"{strict.field}.strict", text)
        call_format = HERMES  # a grammar makes the model write it
    is_single = is_named or request.parallel_tool_calls is False
    return ToolPlan(call_format, functions, is_forced, is_single)


def _usable_function(function: FunctionDefinition, field: str) -> UsableFunction:
    schema = function.parameters or _NO_PARAMETERS
    if schema.get("type", "object") != "object":
        text = f"Invalid '{field}.parameters': expected a schema of type object."
        raise InvalidRequest(text, f"{field}.parameters", reason=INVALID_VALUE)
    return UsableFunction(function.name, field, {"type": "object", **schema}, bool(function.strict))


def constraint_with_tools(
    request: ChatRequest, plan: ToolPlan, other: Constraint | None
) -> Constraint | None:
    """Returns the constraint of a response with tools. other: what the request asks for apart
    from them.

    Raises InvalidRequest if both cannot be combined, or the end is fixed by another field."""
    if other is not None and other.guided.json is None:
        raise not_combined(other.field, "'tools'")
    if other is not None and other.guided.whitespace_pattern is not None:
        raise not_combined("guided_whitespace_pattern", "'tools'")
    if plan.call_format.tag is None:
        return other
    if other is None or plan.is_forced:
        form = _tags_format(plan, at_least_one=plan.is_forced)
    else:
        json_form = {"type": "json_schema", "json_schema": other.guided.json}
        form = {"type": "or", "elements": [json_form, _tags_format(plan, at_least_one=True)]}
    is_strict = any(function.is_strict for function in plan.functions)
    best_effort = not (plan.is_forced or is_strict or other is not None)
    constraint = Constraint(
        GuidedDecoding(
            structural_tag={"type": "structural_tag", "format": form},
            best_effort=best_effort or None,
        ),
        "tools" if other is None else other.field,
    )
    try:
        check_end(request, constraint.field)
    except InvalidRequest:
        if best_effort:
            return None
        raise
    return constraint


# Any: JSON.
def _tags_format(plan: ToolPlan, *, at_least_one: bool) -> dict[str, Any]:
    """Returns the calls as `triggered_tags` of XGrammar's structural tags."""
    assert plan.call_format.tag is not None, "the arguments are JSON"
    tags = []
    for function in plan.functions:
        begin, end = plan.call_format.tag(function.name)
        content = {"type": "json_schema", "json_schema": dict(function.schema)}
        tags.append({"begin": begin, "content": content, "end": end})
    return {
        "type": "triggered_tags",
        "triggers": [plan.call_format.begin],
        "tags": tags,
        "at_least_one": at_least_one,
        "stop_after_first": plan.is_single,
    }


def with_any_arguments(function: UsableFunction) -> UsableFunction:
    """Returns the function with arguments of any form."""
    return replace(function, schema=ANY_OBJECT)
