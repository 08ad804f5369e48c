"""Reads whole blocks of tool calls, for forms without JSON arguments and unusual calls (pure)."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping
from typing import Any, NamedTuple, TypeAlias

# Any, here and below: JSON. The schemas of parameters, by function and parameter.
ParameterTypes: TypeAlias = Mapping[str, Mapping[str, Any]]

_XML_CALL = re.compile(r"\s*<function=([^>\s]+)>(.*?)</function>\s*", re.DOTALL)
_XML_PARAMETER = re.compile(r"<parameter=([^>\s]+)>(.*?)</parameter>", re.DOTALL)
_GLM_CALL = re.compile(r"\s*([^\n<]+?)\s*((?:<arg_key>.*)?)", re.DOTALL)
_GLM_PARAMETER = re.compile(r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>", re.DOTALL)


class Call(NamedTuple):
    """One tool call. arguments: JSON text of an object."""

    name: str
    arguments: str


def read_json_block(block: str, _: ParameterTypes) -> list[Call] | None:
    """Calls as JSON objects, in any order of keys: one, a list, or several with separators."""
    values: list[Any] = []
    decoder, position = json.JSONDecoder(), 0
    text = block.strip().removeprefix("<|python_tag|>").strip()
    while position < len(text):
        try:
            value, position = decoder.raw_decode(text, position)
        except (ValueError, RecursionError):
            return None
        values += value if isinstance(value, list) else [value]
        position = _skip_separators(text, position)
    calls = [_call_of(value) for value in values]
    valid = [call for call in calls if call is not None]
    return valid if valid and len(valid) == len(calls) else None


def _skip_separators(text: str, position: int) -> int:
    while position < len(text) and text[position] in " \t\r\n;,":
        position += 1
    return position


def _call_of(value: Any) -> Call | None:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    arguments = value.get("arguments", value.get("parameters"))
    if isinstance(arguments, str):  # JSON text, as in the OpenAI API
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            return None
    if not isinstance(arguments, dict | None):
        return None
    try:
        return Call(value["name"], _dump(arguments or {}))
    except ValueError:  # NaN or infinity, which Python's parser accepts
        return None


def read_xml_block(block: str, types: ParameterTypes) -> list[Call] | None:
    """`<function=NAME><parameter=KEY>VALUE</parameter></function>` (qwen3_coder)."""
    match = _XML_CALL.fullmatch(block)
    if match is None:
        return None
    pairs = _XML_PARAMETER.findall(match[2])
    return [_typed_call(match[1], [(key, _strip_line_ends(raw)) for key, raw in pairs], types)]


def read_glm_block(block: str, types: ParameterTypes) -> list[Call] | None:
    """`NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value>` (glm45)."""
    match = _GLM_CALL.fullmatch(block)
    if match is None:
        return None
    pairs = [(key.strip(), raw) for key, raw in _GLM_PARAMETER.findall(match[2])]
    return [_typed_call(match[1], pairs, types)]


def _strip_line_ends(raw: str) -> str:
    return raw.removeprefix("\n").removesuffix("\n")


def _typed_call(name: str, pairs: list[tuple[str, str]], types: ParameterTypes) -> Call:
    schemas = types.get(name, {})
    return Call(name, _dump({key: _typed_value(raw, schemas.get(key)) for key, raw in pairs}))


def _typed_value(raw: str, schema: Any) -> Any:
    """Returns the value of a parameter: text if its schema allows text only, else JSON if it is
    any."""
    if isinstance(schema, dict) and _is_text(schema):
        return raw
    text = raw.strip()
    try:
        value = json.loads(text)
        _dump(value)  # Python's parser accepts NaN and infinity.
        return value
    except (ValueError, RecursionError):
        python_constants = {"True": True, "False": False, "None": None}
        return python_constants.get(text, raw)


def _is_text(schema: Mapping[str, Any]) -> bool:
    if schema.get("type") == "string":
        return True
    values = schema.get("enum")
    return isinstance(values, list) and all(isinstance(value, str) for value in values)


def read_pythonic_block(block: str, _: ParameterTypes) -> list[Call] | None:
    """`[name(key=value, ...), ...]` with Python literals."""
    try:
        body = ast.parse(block.strip(), mode="eval").body
        if not isinstance(body, ast.List) or not body.elts:
            return None
        return [_pythonic_call(elt) for elt in body.elts]
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return None


def _pythonic_call(node: ast.expr) -> Call:
    if not isinstance(node, ast.Call) or node.args:
        raise ValueError("not a call with keywords")
    if any(keyword.arg is None for keyword in node.keywords):
        raise ValueError("not a call with keywords")
    arguments = {keyword.arg: ast.literal_eval(keyword.value) for keyword in node.keywords}
    return Call(ast.unparse(node.func), _dump(arguments))


def _dump(value: Any) -> str:
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except TypeError as error:  # a literal without a JSON form, for example a set
        raise ValueError(str(error)) from error
