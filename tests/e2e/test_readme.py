"""The commands of the README and of docs/start.md work as written."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from common.runtime.free_ports import free_ports
from tests.kit.waiting import wait_for

ROOT = Path(__file__).resolve().parents[2]
PAGES = "".join((ROOT / name).read_text() for name in ("README.md", "docs/start.md"))
# Both pages have the first commands.
SHELL = list(dict.fromkeys(re.findall(r"```sh\n(.*?)```", PAGES, re.DOTALL)))
PYTHON = re.findall(r"```python\n(.*?)```", PAGES, re.DOTALL)
YAML = re.findall(r"```yaml\n(.*?)```", PAGES, re.DOTALL)
WAIT_S = 60.0
# Commands that a test below runs as written, by their first words.
RUN_HERE = ("make run", "curl -N", "grpcurl -plaintext")
# Commands that run elsewhere, with the place.
RUN_ELSEWHERE = {
    "make test": ".ci/run",
    "make test-compiled": ".ci/run",
    "make test-sglang": ".ci/run; it needs 9 GB of memory",
    "make demo": "test_demo.py: it takes two minutes on a busy machine",
}


def test_each_block_of_the_first_pages_is_run_or_has_a_reason() -> None:
    for block in SHELL:
        is_here = block.startswith(RUN_HERE)
        assert is_here != (block.strip() in RUN_ELSEWHERE), f"run this in a test:\n{block}"
    assert {block.strip() for block in SHELL} >= set(RUN_ELSEWHERE)
    assert len(PYTHON) == 1
    assert set(re.findall(r"^```(\w+)$", PAGES, re.MULTILINE)) == {"sh", "python", "yaml"}


def test_the_first_mesh_file_is_valid(tmp_path: Path) -> None:
    (text,) = YAML
    file = tmp_path / "mesh.yaml"
    file.write_text(text)
    command = [sys.executable, "-m", "meshctl", "up", "-f", str(file), "--check"]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=WAIT_S, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_readme_names_make_run_and_the_commands_of_ci() -> None:
    assert SHELL[0].strip() == "make run"
    assert any(block.strip() == "make test" for block in SHELL)
    commands = [
        line
        for line in (ROOT / ".ci/run").read_text().splitlines()
        if line and not line.startswith(("#", "set ", "cd "))
    ]
    assert commands == ["make test", "make test-compiled", "make test-sglang"]
    assert {block.strip() for block in SHELL} >= set(commands)


@pytest.mark.slow
def test_make_run_serves_and_the_curl_the_sdk_status_and_grpcurl_work(tmp_path: Path) -> None:
    port = free_ports(2)
    flags = f"--http-port {port} --console-port {port + 1} --registry-path {tmp_path}/registry"
    flags += f" --log-dir {tmp_path}/logs"
    env = {k: v for k, v in os.environ.items() if not k.startswith(("KVMESH_", "MAKE", "MFLAGS"))}
    out = tmp_path / "out"
    with out.open("wb") as file:
        # The README's command with other ports and folders: a mesh in use is not disturbed.
        mesh = subprocess.Popen(
            [*SHELL[0].split(), f"PY={sys.executable}", f"ARGS={flags}"],
            cwd=ROOT,
            env=env,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        await_text(out, "> Say hello to the mesh.", mesh)
        (curl,) = [block for block in SHELL if block.startswith("curl")]
        response = subprocess.run(
            ["bash", "-c", curl.replace(":8000", f":{port}")],
            capture_output=True,
            text=True,
            timeout=WAIT_S,
            check=True,
        ).stdout
        assert response.count("data: ") > 10, response
        assert response.rstrip().endswith("data: [DONE]"), response
        example = subprocess.run(
            [sys.executable, "-c", PYTHON[0].replace(":8000", f":{port}")],
            capture_output=True,
            text=True,
            timeout=WAIT_S,
            check=True,
        ).stdout
        assert len(example.split()) >= 8, example
        listed = subprocess.run(
            [
                "make",
                "-s",
                "status",
                f"PY={sys.executable}",
                f"ARGS=--registry-path {tmp_path}/registry",
            ],
            cwd=ROOT,
            env=env,
            capture_output=True,
            text=True,
            timeout=WAIT_S,
            check=True,
        ).stdout
        assert listed.count("serving") == 5, listed
        found = re.search(r"^worker-0 +ready +\d+ +(\S+)", out.read_text(), re.MULTILINE)
        assert found is not None, out.read_text()
        (grpcurl,) = [block for block in SHELL if block.startswith("grpcurl")]
        response = subprocess.run(
            ["bash", "-ec", grpcurl.replace("ADDRESS", found[1])],
            env={**env, "PATH": f"{Path(sys.executable).parent}:{env['PATH']}"},
            capture_output=True,
            text=True,
            timeout=WAIT_S,
            check=True,
        ).stdout
        assert "kvmesh.engine.v1.EngineService\n" in response, response
        assert response.count('"token_ids"') == 4, response
    finally:
        os.killpg(mesh.pid, signal.SIGINT)
        try:
            status = mesh.wait(WAIT_S)
        except subprocess.TimeoutExpired:
            os.killpg(mesh.pid, signal.SIGKILL)
            raise
    # make is interrupted too, so its own status proves nothing: meshctl's output counts.
    output = out.read_text()
    assert output.count("stopped") >= 5, output
    assert output.count("exit status 0") >= 5, output
    assert status in (0, 2, -signal.SIGINT), output


def await_text(path: Path, text: str, process: subprocess.Popen[bytes]) -> None:
    def has_text() -> bool:
        shown = path.read_text()
        assert text in shown or process.poll() is None, f"make run ended:\n{shown}"
        return text in shown

    wait_for(has_text, f"the output has {text!r}")


@pytest.mark.slow
def test_the_commands_that_start_one_service_run_as_written(tmp_path: Path) -> None:
    (shell,) = re.findall(r"run `(\. \S+/activate)` in a new shell", PAGES)
    commands = re.findall(r"^\|.*\| `(python -m \w+_svc)` \|", PAGES, re.MULTILINE)
    assert len(commands) == 4
    activate = ROOT / shell.split()[1]
    if not activate.exists():
        pytest.skip(f"the tests run in another environment than {activate}")
    port = free_ports(1)
    env = {k: v for k, v in os.environ.items() if not k.startswith("KVMESH_")}
    env |= {"KVMESH_REGISTRY_PATH": f"{tmp_path}/registry", "KVMESH_FRONTEND_HTTP_PORT": f"{port}"}
    out = tmp_path / "out"
    script = "\n".join([shell, *(f"{command} &" for command in commands), "wait"])
    with out.open("wb") as file:
        services = subprocess.Popen(
            ["bash", "-c", script],
            cwd=ROOT,
            env=env,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    (curl,) = [block for block in SHELL if block.startswith("curl")]
    try:

        def responds() -> bool:
            assert services.poll() is None, out.read_text()
            done = subprocess.run(
                ["bash", "-c", curl.replace(":8000", f":{port}")],
                capture_output=True,
                text=True,
                timeout=WAIT_S,
                check=False,
            )
            return done.stdout.rstrip().endswith("data: [DONE]")

        wait_for(responds, "the services respond", WAIT_S)
    finally:
        os.killpg(services.pid, signal.SIGKILL)
        services.wait(WAIT_S)


@pytest.mark.slow
def test_the_commands_for_api_keys_run_as_written(tmp_path: Path) -> None:
    text = (ROOT / "docs/operate/keys.md").read_text()
    commands = [
        line
        for block in re.findall(r"```sh\n(.*?)```", text, re.DOTALL)
        for line in block.split("\n")
    ]
    environ = {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": f"{ROOT / 'protos'}{os.pathsep}{ROOT}",
    }
    folder = tmp_path / ".venv/bin"
    folder.mkdir(parents=True)
    command_file = folder / "meshctl"
    command_file.write_text(f'#!/bin/sh\nexec {sys.executable} -m meshctl "$@"\n')
    command_file.chmod(0o755)
    outputs: list[str] = []
    for command in filter(None, commands):
        # The id in the text is that of another file.
        found = re.findall(r"^(key_\w+)", "\n".join(outputs), re.MULTILINE)
        done = subprocess.run(
            ["bash", "-c", re.sub(r"key_3f2a91c0", found[-1] if found else "", command)],
            cwd=tmp_path,
            env=environ,
            capture_output=True,
            text=True,
            timeout=WAIT_S,
            check=False,
        )
        assert done.returncode == 0, f"{command}\n{done.stderr}"
        outputs.append(done.stdout)
    assert outputs[0].startswith("kvmesh_")
    assert len(outputs) == 5


@pytest.mark.parametrize("path", sorted((ROOT / "docs").rglob("*.md")), ids=lambda path: path.name)
def test_no_command_of_a_document_needs_an_installed_meshctl(path: Path) -> None:
    """`make setup` installs the dependencies, not the package with its console script; a block
    may install it."""
    blocks = re.findall(r"```(?:sh)?\n(.*?)```", path.read_text(), re.DOTALL)
    others = [block for block in blocks if "pip install 'kvmesh" not in block]
    assert not [line for block in others for line in block.split("\n") if line[:8] == "meshctl "]
