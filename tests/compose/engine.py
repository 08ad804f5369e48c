"""A container engine for tests: podman, without a Docker engine and without an image registry.

Images are built on the host's network. Containers run in namespaces of their own (`unshare`): no
port of the host is taken, and rules of netfilter, mounts and processes end with the namespaces.
Images, in FOLDER/store, are kept for the next run; FOLDER/run has the state of this one.
"""

from __future__ import annotations

import http.client
import json
import os
import resource
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from tests.kit.waiting import wait_for

ROOT = Path(__file__).parents[2]
BINARIES = Path(sys.executable).parent
COMPOSE_FILES = ("docker-compose.yml", "tests/compose/stand_ins.yml")
# A file of each Debian package that is needed.
PACKAGES: Mapping[str, tuple[str, ...]] = {
    "podman": ("/usr/bin/podman",),
    "runc": ("/usr/bin/runc", "/usr/sbin/runc"),
    "netavark": ("/usr/lib/podman/netavark",),
    "aardvark-dns": ("/usr/lib/podman/aardvark-dns",),
    "catatonit": ("/usr/bin/catatonit", "/usr/libexec/podman/catatonit"),
    "iptables": ("/usr/sbin/iptables",),
    "iproute2": ("/usr/sbin/ip", "/sbin/ip"),
    "mmdebstrap": ("/usr/bin/mmdebstrap",),
    "util-linux": ("/usr/bin/unshare",),
}
BASE = "localhost/kvmesh-test/base:1"
BASE_PACKAGES = "python3,python3-venv,ca-certificates"
CA_BUNDLE = Path("/etc/ssl/certs/ca-certificates.crt")
# Where pip finds packages, if the environment of this host names it.
PIP_VARIABLES = ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS")
# How long single steps may take; a build compiles modules on a machine that may be busy.
BUILD_S, STEP_S, UP_S = 1500.0, 60.0, 300.0
LOG_CHARS_SHOWN = 3000


class EngineFailed(Exception):
    """A step of the engine failed; the message has its command and the end of its output."""


def _pip_folders() -> list[str]:
    """Returns the folders in which pip finds packages on this host."""
    words = os.environ.get("PIP_FIND_LINKS", "").split()
    return [word for word in words if os.path.isdir(word)]


def missing_packages() -> list[str]:
    """Returns the Debian packages that are missing."""
    return [name for name, paths in PACKAGES.items() if not any(map(os.path.exists, paths))]


class Engine:
    """podman with its storage in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._socket = folder / "run" / "podman.sock"
        settings = folder / "settings"
        settings.mkdir(parents=True, exist_ok=True)
        store, run = folder / "store", folder / "run"
        files = min(32768, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
        run.mkdir(exist_ok=True)
        (settings / "storage.conf").write_text(
            f'[storage]\ndriver = "overlay"\ngraphroot = "{store}"\nrunroot = "{run}/storage"\n'
        )
        (settings / "containers.conf").write_text(
            '[engine]\nruntime = "runc"\nevents_logger = "file"\ncgroup_manager = "cgroupfs"\n'
            f'compat_api_enforce_docker_hub = false\ntmp_dir = "{run}/libpod"\n'
            '[containers]\nlog_driver = "k8s-file"\n'
            f'default_ulimits = ["nofile={files}:{files}", "nproc=4096:4096"]\n'
            f'[network]\nnetwork_backend = "netavark"\nnetwork_config_dir = "{run}/networks"\n'
        )
        shim = settings / "docker"
        shim.write_text(f'#!/bin/sh\nshift\nexec "{BINARIES}/docker-compose" "$@"\n')
        shim.chmod(0o755)
        self.env = {
            **{name: value for name, value in os.environ.items() if "KVMESH" not in name},
            "PATH": f"{settings}:{BINARIES}:/usr/local/sbin:/usr/sbin:/sbin:{os.environ['PATH']}",
            "CONTAINERS_STORAGE_CONF": str(settings / "storage.conf"),
            "CONTAINERS_CONF": str(settings / "containers.conf"),
            "DOCKER_HOST": f"unix://{self._socket}",
            "COMPOSE_FILE": ":".join(COMPOSE_FILES),
            "DISABLE_HC_SYSTEMD": "true",  # `_check_health` runs the checks, also without systemd.
        }

    def run(self, *command: str, timeout_s: float = STEP_S) -> str:
        """Returns the standard output of a command. Raises EngineFailed."""
        try:
            done = subprocess.run(
                command,
                cwd=ROOT,
                env=self.env,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=timeout_s,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise EngineFailed(f"{' '.join(command)}: not within {timeout_s:g} s") from error
        if done.returncode != 0:
            output = (done.stdout + done.stderr)[-LOG_CHARS_SHOWN:].strip()
            raise EngineFailed(f"{' '.join(command)}: status {done.returncode}\n{output}")
        return done.stdout

    def podman(self, *arguments: str, timeout_s: float = STEP_S) -> str:
        return self.run("podman", *arguments, timeout_s=timeout_s)

    def compose(self, *arguments: str, timeout_s: float = STEP_S) -> str:
        return self.run("docker-compose", *arguments, timeout_s=timeout_s)

    # Any: the compose file as JSON.
    def services(self, *profiles: str) -> dict[str, Any]:
        """Returns the services of the compose file and of some profiles, by name."""
        flags = [word for profile in profiles for word in ("--profile", profile)]
        config = json.loads(self.compose(*flags, "config", "--format", "json"))
        services: dict[str, Any] = config["services"]
        return services

    def base_image(self) -> str:
        """Returns the image BASE of the environment, else a stand-in of Debian's packages, which it
        builds if it is missing."""
        if os.environ.get("BASE"):
            return os.environ["BASE"]
        if self._has_image(BASE):
            return BASE
        archive, context = self.folder / "base.tar", self.folder / "base"
        release = dict(
            line.split("=", 1) for line in Path("/etc/os-release").read_text().splitlines()
        )
        mirrors = self.run(
            "apt-get", "indextargets", "--format", "$(REPO_URI)", "Created-By: Packages"
        ).split()
        mirror = next(url for url in mirrors if url.rstrip("/").endswith("debian"))
        self.run(
            *("mmdebstrap", "--quiet", "--variant=minbase", f"--include={BASE_PACKAGES}"),
            *(release["VERSION_CODENAME"], str(archive), mirror),
            timeout_s=BUILD_S,
        )
        self.podman("import", "-q", str(archive), f"{BASE}-bare", timeout_s=BUILD_S)
        archive.unlink()
        # As on this host: certificate authorities for pip.
        context.mkdir(exist_ok=True)
        shutil.copy(CA_BUNDLE, context / "ca.crt")
        (context / "pip.conf").write_text(f"[global]\ncert = {CA_BUNDLE}\n")
        (context / "Dockerfile").write_text(
            f"FROM {BASE}-bare\nCOPY ca.crt {CA_BUNDLE}\nCOPY pip.conf /etc/pip.conf\n"
        )
        self._build(context, context / "Dockerfile", BASE)
        return BASE

    def build(self, base: str, profiles: tuple[str, ...], *, is_compiled: bool) -> dict[str, float]:
        """Builds the images of the compose file and of profiles, and the stand-ins; returns the
        seconds of each."""
        images = {
            service["image"]: service["build"]["target"]
            for service in self.services(*profiles).values()
            if "build" in service
        }
        took_s = {}
        source = self._copy_tree()
        for image, target in images.items():
            started = time.monotonic()
            pip = [f"{name}={os.environ[name]}" for name in PIP_VARIABLES if name in os.environ]
            file = source / "deploy/Dockerfile"
            args = (
                f"BASE={base}",
                f"SGLANG_BASE={base}",
                f"COMPILE={'yes' if is_compiled else 'no'}",
                *pip,
            )
            self._build(source, file, image, target, args)
            took_s[image] = round(time.monotonic() - started, 1)
        started = time.monotonic()
        context = self.folder / "stand-ins"
        context.mkdir(exist_ok=True)
        consul = self.run("deploy/consul_get.sh", str(ROOT / ".tools"), timeout_s=BUILD_S).strip()
        shutil.copy(consul, context / "consul")
        for target in ("consul", "prometheus"):
            file = ROOT / "tests/compose/Dockerfile"
            self._build(context, file, f"kvmesh-test/{target}", target, (f"BASE={base}",))
        took_s["stand-ins"] = round(time.monotonic() - started, 1)
        return took_s

    def _copy_tree(self) -> Path:
        """Returns a copy of the tree: a file that is edited meanwhile would split the images."""
        copy = self.folder / "source"
        shutil.rmtree(copy, ignore_errors=True)
        files = self.run("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard")
        for name in filter(None, files.split("\0")):
            if (ROOT / name).is_file():
                (copy / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, copy / name)
        return copy

    def _build(
        self, context: Path, file: Path, image: str, target: str = "", args: tuple[str, ...] = ()
    ) -> None:
        # Only the format `docker` has health checks.
        self.run(
            *("nice", "-n", "5", "podman", "build", "-q", "--pull=never", "--format=docker"),
            *("--network=host", "-t", image, "-f", str(file)),
            *(("--target", target) if target else ()),
            *(word for arg in args for word in ("--build-arg", arg)),
            *(f"--volume={path}:{path}:ro" for path in _pip_folders()),
            str(context),
            timeout_s=BUILD_S,
        )

    def _has_image(self, image: str) -> bool:
        done = subprocess.run(["podman", "image", "exists", image], env=self.env, check=False)
        return done.returncode == 0

    def image_mb(self, image: str) -> float:
        """Returns the size of an image, with its base, in 10^6 bytes."""
        return round(int(self.podman("image", "inspect", "-f", "{{.Size}}", image)) / 1e6, 1)

    @contextmanager
    def served(self) -> Iterator[None]:
        """Serves Docker's API and runs health checks. In namespaces of this process only."""
        self.run("ip", "link", "set", "lo", "up")
        # State that podman keeps outside of its folders.
        self.run("mount", "-t", "tmpfs", "tmpfs", "/run")
        # Without servers: the host's are not reachable here, and each query would wait 5 s for one.
        resolver = self.folder / "settings" / "resolv.conf"
        resolver.write_text("options timeout:1 attempts:1\n")
        self.run("mount", "--bind", str(resolver), "/etc/resolv.conf")
        log = self.folder / "service.log"
        ended = threading.Event()
        with (
            log.open("wb") as output,
            subprocess.Popen(
                ["podman", "system", "service", "--time=0", f"unix://{self._socket}"],
                env=self.env,
                stdout=output,
                stderr=output,
            ) as service,
        ):
            checks = threading.Thread(target=self._check_health, args=(ended,))
            try:
                wait_for(self._socket.exists, "podman serves")
                checks.start()
                yield
            finally:
                ended.set()
                if checks.ident is not None:
                    checks.join()
                service.terminate()

    def _check_health(self, ended: threading.Event) -> None:
        """Runs the health check of each container when it is due: each second until it is healthy,
        then each five."""
        due_at: dict[str, float] = {}
        while not ended.wait(0.2):
            now = time.monotonic()
            for container in self._api("GET", "/containers/json") or ():
                name = container["Id"]
                if container["State"] != "running" or due_at.get(name, 0.0) > now:
                    continue
                found = self._api("GET", f"/containers/{name}/healthcheck") or {}
                due_at[name] = now + (5.0 if found.get("Status") == "healthy" else 1.0)

    # Any: JSON.
    def _api(self, method: str, path: str) -> Any:
        """Returns the response of podman's API, None for an error."""
        connection = http.client.HTTPConnection("podman", timeout=STEP_S)
        try:
            connection.sock = socket.socket(socket.AF_UNIX)
            connection.sock.settimeout(STEP_S)
            connection.sock.connect(str(self._socket))
            connection.request(method, f"/v4.0.0/libpod{path}")
            response = connection.getresponse()
            return json.loads(response.read()) if response.status in (200, 409) else None
        except (OSError, ValueError, http.client.HTTPException):
            return None
        finally:
            connection.close()


def in_namespaces(arguments: list[str]) -> list[str]:
    """Returns the command that runs this program in namespaces of its own; their processes end with
    it."""
    return [
        *("unshare", "--net", "--mount", "--pid", "--fork", "--mount-proc", "--kill-child"),
        *("catatonit", "--"),  # It reaps the processes that podman leaves.
        *(sys.executable, "-m", "tests.compose", *arguments),
    ]


def remove_groups() -> None:
    """Removes the empty control groups that podman leaves."""
    for parent in Path("/sys/fs/cgroup").glob("**/libpod_parent"):
        for folder in (*sorted((p for p in parent.rglob("*") if p.is_dir()), reverse=True), parent):
            with suppress(OSError):  # Another podman uses it.
                folder.rmdir()
