"""The tools of a Responses body as functions of a chat, and names of their calls (pure).

A chat has one list of functions. Functions of a namespace get a name with that of the namespace;
their calls have both names again. The first of them has the description of the namespace too. Tools
that only a server of the vendor can run are left out, so the model cannot call them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from common.errors import Unsupported
from frontend_svc.openai.body.fields import HostedTool
from frontend_svc.openai.body.schema import FunctionDefinition, Tool
from frontend_svc.responses.schema import (
    FunctionTool,
    NamespaceTool,
    ResponsesRequest,
)

_SEPARATOR: Final = "__"


@dataclass(frozen=True, slots=True)
class FunctionNames:
    """Names of the functions of a chat."""

    namespaces: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    """Name in the chat -> namespace, name in it; others are in none."""

    def call_fields(self, name: str) -> dict[str, str]:
        """Returns the fields of a call that name its function."""
        if name not in self.namespaces:
            return {"name": name}
        namespace, own_name = self.namespaces[name]
        return {"name": own_name, "namespace": namespace}


@dataclass(frozen=True, slots=True)
class ChatTools:
    """The tools of a chat."""

    functions: Sequence[Tool]

    paths: Sequence[str]
    """Of each function in the body of the client."""

    names: FunctionNames

    omitted: Sequence[str]
    """Types of the tools that are left out."""


def name_in_chat(namespace: str | None, name: str) -> str:
    """Returns the name of a function in a chat."""
    if namespace is None:
        return name
    return f"{namespace.removesuffix(_SEPARATOR)}{_SEPARATOR}{name}"


def names_in_response(tools: Iterable[Mapping[str, Any]]) -> FunctionNames:
    """Returns the names of the functions of a response.

    - tools: of its object. Any: JSON.
    """
    return FunctionNames(
        {
            name_in_chat(tool["name"], inner["name"]): (tool["name"], inner["name"])
            for tool in tools
            if tool["type"] == "namespace"
            for inner in tool["tools"]
        }
    )


def chat_tools(request: ResponsesRequest) -> ChatTools:
    """Returns the tools of a request. Raises Unsupported if all of them would be left out."""
    functions: list[Tool] = []
    paths: list[str] = []
    namespaces: dict[str, tuple[str, str]] = {}
    for path, namespace, tool in _functions(request):
        name, description = tool.name, tool.description
        if namespace is not None:
            name = name_in_chat(namespace.name, tool.name)
            namespaces[name] = (namespace.name, tool.name)
            if tool is namespace.tools[0]:
                description = "\n".join(filter(None, (namespace.description, description)))
        functions.append(_chat_function(name, description or None, tool))
        paths.append(path)
    tools = request.tools or ()
    hosted = [(index, tool) for index, tool in enumerate(tools) if isinstance(tool, HostedTool)]
    if hosted and not functions:
        text = "the server runs no tools; only tools of type 'function' are available"
        raise Unsupported(f"tools[{hosted[0][0]}].type", text)
    omitted = tuple(dict.fromkeys(tool.type for _, tool in hosted))
    return ChatTools(functions, paths, FunctionNames(namespaces), omitted)


def _functions(
    request: ResponsesRequest,
) -> Iterator[tuple[str, NamespaceTool | None, FunctionTool]]:
    """Yields the path, the namespace and the tool of each function."""
    for index, tool in enumerate(request.tools or ()):
        match tool:
            case FunctionTool():
                yield f"tools[{index}]", None, tool
            case NamespaceTool():
                for number, inner in enumerate(tool.tools):
                    yield f"tools[{index}].tools[{number}]", tool, inner


def _chat_function(name: str, description: str | None, tool: FunctionTool) -> Tool:
    # Without validation: a name may be longer with its namespace.
    function = FunctionDefinition.model_construct(
        name=name, description=description, parameters=tool.parameters, strict=tool.strict
    )
    return Tool(type="function", function=function)
