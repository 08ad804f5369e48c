"""A mesh with one worker process for servers that run already, and endpoint pickers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tests.kit.processes import Mesh, Service

PICKER_FLAGS = ("--ext-proc-port=0", "--metrics-port=0", "--notice-s=0.3")


class PickerMesh(Mesh):
    """urls: of the servers. No probes are sent to them, so that they count the requests of a
    test."""

    def __init__(
        self, folder: Path, urls: Sequence[str], *, router_flags: Sequence[str] = ()
    ) -> None:
        self._server_count = len(urls)
        worker_flags = ["--engine=openai", f"--server-urls={','.join(urls)}", "--canary-idle-s=0"]
        super().__init__(
            folder, workers=1, indexers=1, worker_flags=worker_flags, router_flags=router_flags
        )

    def is_complete(self) -> bool:
        """Whether the frontend is ready and has a worker for each server."""
        is_ready = self.http.get(f"{self.url}/ready").json()["ready"]
        workers = self.known_instance_ids("worker")
        return bool(is_ready) and len(workers) == self._server_count

    def add_picker(self, name: str, *flags: str) -> Service:
        """Starts a picker; returns it when its peers send it work."""
        registry = f"--registry-path={self.folder / 'registry'}"
        given = {flag.partition("=")[0] for flag in flags}
        own = [flag for flag in PICKER_FLAGS if flag.partition("=")[0] not in given]
        picker = Service("epp", [registry, *own, *flags], self.folder, name)
        self.services.append(picker)
        picker.wait_ready().wait_routable()
        return picker
