"""The contracts: generated code matches the .proto files, and these follow the project's rules."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from common.runtime.config import ServiceConfig
from common.streams.silence import ACKNOWLEDGE, SESSION, SYNC, SilenceRule

ROOT = Path(__file__).resolve().parents[2]
PROTOS = ROOT / "protos"
GENERATED = "kvmesh/*/v1/*_pb2*"
SOURCES = sorted(p.relative_to(PROTOS).as_posix() for p in PROTOS.glob("kvmesh/**/*.proto"))


@pytest.mark.slow
def test_generated_code_matches_the_protos(tmp_path: Path) -> None:
    binaries = str(Path(sys.executable).parent)
    copy = tmp_path / "protos"
    shutil.copytree(PROTOS, copy, ignore=shutil.ignore_patterns("*_pb2*", "__pycache__"))
    with_services = [s for s in SOURCES if "\nservice " in (PROTOS / s).read_text()]
    for outputs, sources in (
        (["--python_out=.", "--mypy_out=."], SOURCES),
        (["--grpc_python_out=.", "--mypy_grpc_out=."], with_services),
    ):
        command = [sys.executable, "-m", "grpc_tools.protoc", "-I.", *outputs, *sources]
        subprocess.run(
            command, cwd=copy, check=True, capture_output=True, env={"PATH": f"{binaries}:/usr/bin"}
        )
    generated = {p.relative_to(copy): p for p in copy.glob(GENERATED)}
    checked_in = {p.relative_to(PROTOS): p for p in PROTOS.glob(GENERATED)}
    assert generated.keys() == checked_in.keys(), "run: make proto"
    for name, path in generated.items():
        assert path.read_text() == checked_in[name].read_text(), f"{name}: run: make proto"


def test_every_message_field_enum_value_and_rpc_is_documented() -> None:
    statement = re.compile(
        r"^\s*((optional|repeated)\s+)?[\w.<>, ]+\s+\w+\s*=\s*\d+;"
        r"|^\s*rpc\s|^(message|service|enum)\s"
    )
    bare = []
    for source in SOURCES:
        lines = (PROTOS / source).read_text().splitlines()
        for number, line in enumerate(lines):
            if statement.match(line) and not lines[number - 1].strip().startswith("//"):
                bare.append(f"{source}:{number + 1}: {line.strip()}")
    assert not bare, "no comment:\n" + "\n".join(bare)


def test_folder_package_and_python_package_agree() -> None:
    for source in SOURCES:
        package = re.search(r"^package ([\w.]+);", (PROTOS / source).read_text(), re.MULTILINE)
        assert package is not None, source
        assert package.group(1) == Path(source).parent.as_posix().replace("/", ".")


@pytest.mark.parametrize(
    ("message", "rule"),
    [
        ("member.v1.AcknowledgeRequest", ACKNOWLEDGE),
        ("router.v1.SessionRequest", SESSION),
        ("router.v1.SyncRequest", SYNC),
    ],
)
def test_the_silence_rule_of_a_stream_is_stated_with_its_frame(
    message: str, rule: SilenceRule
) -> None:
    service, version, name = message.split(".")
    source = (PROTOS / f"kvmesh/{service}/{version}/{service}.proto").read_text()
    comment = re.search(rf"((^//.*\n)+)message {name} ", source, re.MULTILINE)
    assert comment is not None
    text = comment.group(1).replace("\n// ", " ")
    each = "each second" if rule.heartbeat_s == 1.0 else f"each {rule.heartbeat_s:g} s"
    assert each in text
    assert re.search(rf"Silence rule: [^.]* more than {rule.limit_s:g} s", text)


def test_the_silence_rule_of_acknowledgements_is_the_default_of_its_setting() -> None:
    assert ServiceConfig().routable_limit_s == ACKNOWLEDGE.limit_s
