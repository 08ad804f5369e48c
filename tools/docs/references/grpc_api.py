"""The gRPC API, from the comments of the .proto files."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
    FileDescriptorSet,
    ServiceDescriptorProto,
)
from grpc_tools import protoc

from tools.docs.markdown import slug
from tools.docs.references.text import code, page, prose, table

PROTOS: Final = Path(__file__).parents[3] / "protos"
# The messages of protobuf itself.
_WELL_KNOWN: Final = Path(protoc.__file__).parent / "_proto"
_NOTE: Final = """Every gRPC port serves health and reflection, so `grpcurl ADDRESS list` works \
without these files. [Security](../security.md#trust-boundaries) states which caller may send \
what. A field without a mark may be absent: its value is then 0, an empty text or list."""
# Numbers of fields in descriptor.proto, of which the paths of comments consist.
_MESSAGES: Final = 4
_ENUMS: Final = 5
_SERVICES: Final = 6
_MEMBERS: Final = 2
_NESTED: Final = 3
_NESTED_ENUMS: Final = 4

Comments = dict[tuple[int, ...], str]


def grpc_page() -> str:
    """Returns the page of all services, then of the messages of each package."""
    files = sorted(_files(), key=lambda file: file.name)
    parts = [_NOTE, "## Services"]
    for file in files:
        comments = _comments(file)
        for index, service in enumerate(file.service):
            parts += _service(file.package, service, (_SERVICES, index), comments)
    for file in files:
        comments = _comments(file)
        parts.append(f"## {code(file.name)}")
        for index, message in enumerate(file.message_type):
            parts += _message(f"{file.package}.", message, (_MESSAGES, index), comments)
        for index, enum in enumerate(file.enum_type):
            parts += _enum(f"{file.package}.", enum, (_ENUMS, index), comments)
    return page("gRPC services and messages", "the comments of `protos`", *parts)


def _files() -> list[FileDescriptorProto]:
    """Returns the descriptors of all .proto files, with their comments."""
    names = sorted(path.relative_to(PROTOS).as_posix() for path in PROTOS.rglob("*.proto"))
    with tempfile.NamedTemporaryFile(suffix=".binpb") as file:
        arguments = [
            f"-I{PROTOS}",
            f"-I{_WELL_KNOWN}",
            f"-o{file.name}",
            "--include_source_info",
            *names,
        ]
        if protoc.main(["protoc", *arguments]):
            raise RuntimeError(f"protoc cannot read {PROTOS}")
        return list(FileDescriptorSet.FromString(Path(file.name).read_bytes()).file)


def _comments(file: FileDescriptorProto) -> Comments:
    return {
        tuple(place.path): " ".join((place.leading_comments or place.trailing_comments).split())
        for place in file.source_code_info.location
    }


def _service(
    package: str, service: ServiceDescriptorProto, path: tuple[int, ...], comments: Comments
) -> Iterator[str]:
    yield f"### {code(f'{package}.{service.name}')}"
    yield prose(comments.get(path, ""))
    yield table(
        ["call", "request", "response", "meaning"],
        (
            [
                code(method.name),
                ("stream of " if method.client_streaming else "") + _type(method.input_type),
                ("stream of " if method.server_streaming else "") + _type(method.output_type),
                prose(comments.get((*path, _MEMBERS, index), "")),
            ]
            for index, method in enumerate(service.method)
        ),
    )


def _message(
    outer: str, message: DescriptorProto, path: tuple[int, ...], comments: Comments
) -> Iterator[str]:
    if message.options.map_entry:
        return
    name = f"{outer}{message.name}"
    yield f"### {_short(name)}"
    yield prose(comments.get(path, ""))
    if message.field:
        maps = {nested.name: nested for nested in message.nested_type if nested.options.map_entry}
        yield table(
            ["field", "number", "type", "meaning"],
            (
                [
                    code(field.name),
                    str(field.number),
                    _field_type(message, field, maps),
                    prose(comments.get((*path, _MEMBERS, index), "")),
                ]
                for index, field in enumerate(message.field)
            ),
        )
    for index, nested in enumerate(message.nested_type):
        yield from _message(f"{name}.", nested, (*path, _NESTED, index), comments)
    for index, enum in enumerate(message.enum_type):
        yield from _enum(f"{name}.", enum, (*path, _NESTED_ENUMS, index), comments)


def _enum(
    outer: str, enum: EnumDescriptorProto, path: tuple[int, ...], comments: Comments
) -> Iterator[str]:
    yield f"### {_short(outer + enum.name)}"
    yield prose(comments.get(path, ""))
    yield table(
        ["value", "number", "meaning"],
        (
            [
                code(value.name),
                str(value.number),
                prose(comments.get((*path, _MEMBERS, index), "")),
            ]
            for index, value in enumerate(enum.value)
        ),
    )


def _field_type(
    message: DescriptorProto, field: FieldDescriptorProto, maps: dict[str, DescriptorProto]
) -> str:
    if entry := maps.get(field.type_name.rpartition(".")[2]):
        key, value = entry.field
        return f"map from {_scalar(key)} to {_scalar(value)}"
    if field.label == FieldDescriptorProto.LABEL_REPEATED:
        return f"list of {_scalar(field)}"
    if field.proto3_optional:
        return f"optional {_scalar(field)}"
    if field.HasField("oneof_index"):
        return f"{_scalar(field)}, one of {code(message.oneof_decl[field.oneof_index].name)}"
    return _scalar(field)


def _scalar(field: FieldDescriptorProto) -> str:
    if field.type_name:
        return _type(field.type_name)
    return FieldDescriptorProto.Type.Name(field.type).removeprefix("TYPE_").lower()


def _type(name: str) -> str:
    """Returns a link to a message or an enum of this page, or its name.

    name: as in descriptors, with its package: `.kvmesh.router.v1.Booking`.
    """
    if not name.startswith(".kvmesh."):
        return code(name.lstrip("."))
    short = _short(name.lstrip("."))
    return f"[{short}](#{slug(short)})"


def _short(name: str) -> str:
    """Returns a name without `kvmesh`, by which packages of several services differ."""
    return name.removeprefix("kvmesh.")
