"""A YAML text as values, with the place of each key (pure)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import yaml

KeyPath = tuple[str | int, ...]
DEPTH_MAX = 16


class MeshFileError(Exception):
    """The mesh file cannot be used. `problems`: one line a problem, each with its place."""

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = tuple(dict.fromkeys(problems))
        super().__init__("\n".join(self.problems))


@dataclass(frozen=True, slots=True)
class Document:
    """The content of a file. places: line and column of each key, from 1."""

    name: str
    value: object
    places: Mapping[KeyPath, tuple[int, int]]

    def problem(self, path: KeyPath, message: str) -> str:
        """Returns the line about a key: `FILE:LINE:COLUMN: KEY: MESSAGE`. A key that the file does
        not have is reported at the nearest key above it."""
        known = path
        while known and known not in self.places:
            known = known[:-1]
        line, column = self.places.get(known, (1, 1))
        key = f"{key_text(path)}: " if path else ""
        return f"{self.name}:{line}:{column}: {key}{message}"


def key_text(path: KeyPath) -> str:
    """Returns a path as text: `workers[0].engine`."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


def read_document(name: str, text: str) -> Document:
    """Returns the content of a YAML text. Raises MeshFileError."""
    loader = yaml.SafeLoader(text)
    try:
        node = loader.get_single_node()
        builder = _Builder(name, loader)
        value = {} if node is None else builder.build(node, ())
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = "" if mark is None else f":{mark.line + 1}:{mark.column + 1}"
        message = error.problem or error.context or "is not YAML"
        raise MeshFileError([f"{name}{place}: {message}"]) from None
    except yaml.YAMLError as error:
        raise MeshFileError([f"{name}: {' '.join(str(error).split())}"]) from None
    finally:
        loader.dispose()
    if builder.problems:
        raise MeshFileError(builder.problems)
    return Document(name, value, builder.places)


class _Builder:
    def __init__(self, name: str, loader: yaml.SafeLoader) -> None:
        self._name = name
        self._loader = loader
        self.places: dict[KeyPath, tuple[int, int]] = {}
        self.problems: list[str] = []

    def build(self, node: yaml.Node, path: KeyPath) -> object:
        self.places.setdefault(path, _place(node))
        if len(path) > DEPTH_MAX:
            self._report(node, f"is nested deeper than {DEPTH_MAX} levels")
            return None
        match node:
            case yaml.MappingNode():
                return self._mapping(node, path)
            case yaml.SequenceNode():
                return [self.build(item, (*path, i)) for i, item in enumerate(node.value)]
        value: object = self._loader.construct_object(node)
        return value

    def _mapping(self, node: yaml.MappingNode, path: KeyPath) -> dict[str, object]:
        values: dict[str, object] = {}
        for key_node, value_node in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                self._report(key_node, "a key must be a text")
                continue
            key = str(key_node.value)
            if key in values:
                first = self.places[(*path, key)][0]
                self._report(
                    key_node, f"{key_text((*path, key))}: given twice, first in line {first}"
                )
                continue
            self.places[(*path, key)] = _place(key_node)
            values[key] = self.build(value_node, (*path, key))
        return values

    def _report(self, node: yaml.Node, message: str) -> None:
        line, column = _place(node)
        self.problems.append(f"{self._name}:{line}:{column}: {message}")


def _place(node: yaml.Node) -> tuple[int, int]:
    return node.start_mark.line + 1, node.start_mark.column + 1
