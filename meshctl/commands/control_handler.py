"""What `meshctl up` does on requests of the control socket."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass
from typing import Any

from common.errors import InvalidRequest, MeshError
from common.runtime.tasks import TaskGroup
from meshctl.mesh_file.document import MeshFileError
from meshctl.process.control import ControlRequest, Send
from meshctl.process.operations import Operations, Outcome
from meshctl.process.supervise import Child, Supervisor
from meshctl.view.screen import YELLOW, Screen


@dataclass(slots=True)
class ControlHandler:
    """Handles the requests. background: for restarts whose client does not wait."""

    supervisor: Supervisor
    operations: Operations
    screen: Screen
    background: TaskGroup

    # Any: JSON.
    async def handle(self, request: ControlRequest, send: Send, is_gone: Callable[[], bool]) -> Any:
        """Returns the result of a request. Raises MeshError, MeshFileError."""

        def report(name: str, state: str, detail: str) -> None:
            self._print(name, state, detail)
            send({"name": name, "state": state, "detail": detail})

        match request.command:
            case "status":
                return [_describe(child) for child in self.supervisor.children]
            case "drain":
                await self.operations.drain(_only_name(request), report, force=request.force)
                return {}
            case "start":
                await self.operations.start(_only_name(request), report)
                return {}
            case "scale":
                await self.operations.scale(request.counts, report)
                return {}
            case "stop":
                self._print("mesh", "draining", "meshctl down")
                self.supervisor.stop()
                return {}
        steps = self.operations.plan(request.names, request.new_first)
        planned = [asdict(step) for step in steps]
        if not request.wait:
            restart = self.operations.restart(steps, self._print, lambda: False, request.new_first)
            self.background.create_task(self._finish(restart))
            return {"planned": planned}
        send({"planned": planned})
        outcome = await self.operations.restart(steps, report, is_gone, request.new_first)
        return _summary(outcome)

    def _print(self, name: str, state: str, detail: str) -> None:
        # The screen shows lines of logs by itself.
        if state != "progress":
            self.screen.print_progress(name, state, detail)

    async def _finish(self, restart: Awaitable[Outcome]) -> None:
        try:
            await restart
        except (MeshError, MeshFileError) as error:
            self.screen.print_progress("mesh", "note", f"the restart ended: {error}", colour=YELLOW)


def _only_name(request: ControlRequest) -> str:
    if len(request.names) != 1:
        raise InvalidRequest(f"{request.command} takes the name of one member")
    return request.names[0]


# Any: JSON.
def _summary(outcome: Outcome) -> dict[str, Any]:
    failed = None
    if outcome.failed is not None:
        failed = {"name": outcome.failed[0], "reason": outcome.failed[1]}
    return {"replaced": [asdict(item) for item in outcome.replaced], "failed": failed}


def _describe(child: Child) -> dict[str, Any]:
    line = child.line
    return {
        "name": child.spec.name,
        "role": child.spec.role,
        "state": child.state.value,
        "pid": None if child.process is None else child.process.pid,
        "instance_id": None if line is None else line.instance_id,
        "addresses": {} if line is None else dict(line.addresses),
        "failures": child.restarts.failures,
        "error": child.start_error or child.end_reason,
    }
