"""Runs every client and every application against a mesh; prints the tables.

    python -m tests.clients --clients .venv-clients [--write docs/clients.md] [NAME ...]

NAME: programs and applications to run, for example openai_sdk or codex; default: all. Exit status 1
if a cell fails.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import httpx

from tests.clients.applications import APPLICATIONS, ENGINE_FLAGS, Place, run_application
from tests.kit.processes import Mesh

FOLDER = Path(__file__).parent
LOGS = Path(".run") / "clients"
# By feature: its title.
FEATURES = {
    "chat": "chat",
    "streaming": "streaming",
    "tools": "tools",
    "tools_streamed": "tools, streamed",
    "parallel_tools": "parallel tools",
    "tool_results": "multi-turn with tool results",
    "agent": "agent loop",
    "json_schema": "JSON schema",
    "embeddings": "embeddings",
    "responses": "responses",
    "websocket": "responses over a WebSocket",
    "messages": "messages",
    "background": "responses in the background",
    "background_stream": "background, streamed and resumed",
    "conversations": "conversations",
    "batches": "files and batches",
}
# Features whose route an older mesh may lack.
ROUTES = {
    "embeddings": "embeddings",
    "responses": "responses",
    "messages": "messages",
    "background": "conversations",
    "background_stream": "conversations",
    "conversations": "conversations",
    "batches": "batches",
}
# An SDK that speaks only one other API has its features there.
PREFIX = "messages_"
PROGRAM_TIMEOUT_S = 300.0
Result = dict[str, str]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=Path, required=True)
    parser.add_argument("--write", type=Path)
    parser.add_argument("names", nargs="*")
    arguments = parser.parse_args()
    LOGS.mkdir(parents=True, exist_ok=True)
    clients: Path = arguments.clients.absolute()
    results = run_programs(arguments.names, clients)
    problems = run_applications(arguments.names, clients)
    table, list_ = format_table(results), format_applications(problems)
    print(table, list_, sep="\n\n")
    failures = [one for one in results if one["state"] == "FAIL"]
    for one in failures:
        print(f"FAIL {one['client']}: {one['feature']}: {one['detail']}")
    for name, problem in problems.items():
        if problem:
            print(f"FAIL {name}: {problem}")
    if arguments.write and not arguments.names:
        arguments.write.write_text(document(table, list_))
    return bool(failures) or any(problems.values())


def run_programs(names: Sequence[str], clients: Path) -> list[Result]:
    results: list[Result] = []
    if not (selected := programs(names)):
        return results
    node_modules = clients / "node"
    with (
        tempfile.TemporaryDirectory() as folder,
        Mesh(Path(folder), batches=1, worker_flags=["--speedup=20"]) as mesh,
    ):
        missing = missing_features(mesh.url)
        for program in selected:
            command = [str(clients / "bin" / "python"), str(program)]
            if program.suffix == ".mjs":
                # Node finds packages beside the program.
                shutil.copy(FOLDER / "node" / "cells.mjs", node_modules)
                command = ["node", str(shutil.copy(program, node_modules))]
            results += run_program([*command, *missing], program.stem, mesh.url)
    return results


def run_applications(names: Sequence[str], clients: Path) -> dict[str, str]:
    """Returns why an application does not work, by its name; "" if it does."""
    problems: dict[str, str] = {}
    for is_agent in (True, False):
        selected = [
            name
            for name, one in APPLICATIONS.items()
            if one.is_agent is is_agent and (not names or name in names)
        ]
        if not selected:
            continue
        flags = ENGINE_FLAGS if is_agent else ["--speedup=20"]
        with (
            tempfile.TemporaryDirectory() as folder,
            Mesh(Path(folder), workers=1, worker_flags=flags) as mesh,
        ):
            for name in selected:
                started_at = time.monotonic()
                home = Path(folder) / f"home-{name}"
                home.mkdir()
                place = Place(clients, home, mesh.url)
                log = (LOGS / f"{name}.log").absolute()
                problems[name] = run_application(APPLICATIONS[name], mesh, place, log)
                print(f"{name}: {time.monotonic() - started_at:.0f} s", file=sys.stderr)
    return problems


def programs(names: Sequence[str]) -> list[Path]:
    found = sorted([*FOLDER.glob("python/*.py"), *FOLDER.glob("node/*.mjs")])
    return [one for one in found if one.stem != "cells" and (not names or one.stem in names)]


def missing_features(url: str) -> list[str]:
    """The features without a route in this mesh."""
    found = []
    with httpx.Client(trust_env=False) as http:
        for feature, route in ROUTES.items():
            response = http.post(f"{url}/v1/{route}", json={})
            if response.status_code == 404:
                found.append(feature)
    if "messages" in found:
        found += [f"{PREFIX}{feature}" for feature in FEATURES]
    return found


def run_program(command: Sequence[str], name: str, url: str) -> list[Result]:
    """The results of one program; its other output is in a file."""
    started_at = time.monotonic()
    inherited = {k: v for k, v in os.environ.items() if "proxy" not in k.lower()}
    # Clients must send nothing elsewhere.
    settings = {
        "KVMESH_URL": url,
        "PYTHONPATH": "",
        "OPENAI_API_KEY": "none",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "LANGSMITH_TRACING": "false",
        "OPENAI_AGENTS_DISABLE_TRACING": "1",
    }
    log = LOGS / f"{name}.log"
    with log.open("w") as errors:
        try:
            done = subprocess.run(
                command,
                env=inherited | settings,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                timeout=PROGRAM_TIMEOUT_S,
            )
            output, status = done.stdout, done.returncode
        except subprocess.TimeoutExpired as error:
            output, status = (error.stdout or b"").decode(), -1
    results = list(parse_results(output.splitlines()))
    if status:
        detail = f"exit status {status}, see {log}"
        results.append({"client": name, "feature": "chat", "state": "FAIL", "detail": detail})
    print(f"{name}: {time.monotonic() - started_at:.0f} s", file=sys.stderr)
    return results


def parse_results(lines: Iterable[str]) -> Iterable[Result]:
    for line in lines:
        if line.startswith('{"client"'):
            result = json.loads(line)
            result["feature"] = result["feature"].removeprefix(PREFIX)
            yield result


def format_table(results: Sequence[Result]) -> str:
    clients = list(dict.fromkeys(one["client"] for one in results))
    states = {(one["client"], one["feature"]): one["state"] for one in results}
    lines = ["| client | " + " | ".join(FEATURES.values()) + " |"]
    lines.append("|---" * (len(FEATURES) + 1) + "|")
    for client in clients:
        cells = [states.get((client, feature), "") for feature in FEATURES]
        lines.append(f"| {client} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def format_applications(problems: Mapping[str, str]) -> str:
    lines = ["| application | version | |", "|---|---|---|"]
    for name, problem in problems.items():
        application = APPLICATIONS[name]
        version = versions()[application.package]
        lines.append(f"| {application.title} | {version} | {'FAIL' if problem else 'ok'} |")
    return "\n".join(lines)


def versions() -> dict[str, str]:
    """Returns the version of each package of the locks."""
    found = dict(json.loads((FOLDER / "agents/package.json").read_text())["dependencies"])
    for lock in FOLDER.glob("*/requirements.txt"):
        found |= dict(re.findall(r"(?m)^(\S+?)==(\S+)", lock.read_text()))
    return found


def document(table: str, applications: str) -> str:
    wanted = (FOLDER / "python/requirements.in").read_text()
    names = set(re.findall(r"(?m)^[a-z-]+", wanted))
    pins = re.findall(r"(?m)^(\S+?)==(\S+)", (FOLDER / "python/requirements.txt").read_text())
    python = ", ".join(f"{name} {version}" for name, version in pins if name in names)
    packages = json.loads((FOLDER / "node/package.json").read_text())["dependencies"]
    node = ", ".join(f"{name} {version}" for name, version in packages.items())
    return (
        "# Clients\n\n"
        "`make test-clients` runs each cell against a mesh of sim workers and writes this table. "
        "*ok*: the client's request has worked as with OpenAI. *-*: the mesh does not serve this "
        "API. Empty: the client has no such feature, or sends the same request for another one. "
        "The Anthropic SDK has all its features at `/v1/messages`.\n\n"
        f"{table}\n\nPython: {python}.\n\nNode: {node}.\n\n"
        "## Applications\n\n"
        "The target also starts applications with their default settings, offline. *ok*: exit "
        "status 0, the expected output, and no refused request. Agents call one of their tools and "
        "send its result; a scripted engine of the tests answers them.\n\n"
        f"{applications}\n"
    )


if __name__ == "__main__":
    sys.exit(main())
