"""Operations on a running mesh: replaces, stops and starts members, one at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from common.errors import Conflict, InvalidRequest
from meshctl.process.rollout import Member, Step, check_drain, plan, select
from meshctl.process.routable import Waiting
from meshctl.process.supervise import Child, State, Supervisor
from meshctl.services import ServiceSpec, check_counts

POLL_S = 0.1
# Missing peers are reported this long after the process is ready, then when they change.
QUIET_S = 2.0

# A start that takes longer shows the last line of its log in this interval.
START_REPORT_S = 10.0

# Progress: the member, its state (`progress`: a line of its log), and details.
Report = Callable[[str, str, str], None]


@dataclass(frozen=True, slots=True)
class Replaced:
    """A replaced member. after_s: from the beginning of its replacement to its end; routable_s: to
    the moment when the new process was routable."""

    name: str
    new_first: bool
    routable_s: float
    after_s: float


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a rolling restart did. failed: the member at which it stopped, and the reason."""

    replaced: Sequence[Replaced]
    failed: tuple[str, str] | None = None


class Operations:
    """Changes the members of one mesh.

    - specs: returns what the mesh file describes now, with other numbers of members of some groups.
      Raises MeshFileError.
    - counts: returns the number of members of each group, with others for some groups.
    - rotate_log: see `ProcessLauncher`.
    - undo_start: gives log and sockets back to a process beside which another one has failed.
    - last_log_line: of a service.
    - find_missing: returns which peers do not send work to a ready member yet.
    - stop_listening: closes the port of a frontend that does not start again.
    - routable_s: time in which a ready member must become routable.
    """

    def __init__(
        self,
        supervisor: Supervisor,
        *,
        specs: Callable[[Mapping[str, int]], Sequence[ServiceSpec]],
        counts: Callable[[Mapping[str, int]], Mapping[str, int]],
        rotate_log: Callable[[str], None],
        undo_start: Callable[[ServiceSpec], None],
        last_log_line: Callable[[str], str],
        find_missing: Callable[[Child], Awaitable[Waiting]],
        stop_listening: Callable[[str], None],
        environ: Mapping[str, str],
        routable_s: float,
        start_report_s: float = START_REPORT_S,
    ) -> None:
        self._supervisor = supervisor
        self._specs = specs
        self._read_counts = counts
        self._counts: dict[str, int] = {}
        self._rotate_log = rotate_log
        self._undo_start = undo_start
        self._last_log_line = last_log_line
        self._start_report_s = start_report_s
        self._find_missing = find_missing
        self._stop_listening = stop_listening
        self._environ = environ
        self._routable_s = routable_s
        self._current = ""

    def members(self) -> list[Member]:
        """Returns the members; one that is replaced is its newer process."""
        by_name = {child.spec.name: child for child in self._supervisor.children}
        return [
            Member(
                child.spec,
                child.state is State.READY,
                "" if child.line is None else child.line.instance_id,
            )
            for child in by_name.values()
        ]

    def plan(self, names: Sequence[str], new_first: bool | None) -> list[Step]:
        """Returns the replacements of a rolling restart. Raises InvalidRequest, Conflict.

        names: see `select`; without names, drained members stay stopped.
        """
        self._check_free()
        members = self.members()
        selected = [
            member
            for member in select(members, names)
            if names or self._child(member.spec.name).state is not State.STOPPED
        ]
        return plan(members, selected, self._environ, new_first=new_first)

    def restart(
        self,
        steps: Sequence[Step],
        report: Report,
        is_cancelled: Callable[[], bool],
        new_first: bool | None = None,
    ) -> Awaitable[Outcome]:
        """Replaces members one after the other; stops at the first that does not become routable,
        or cannot be replaced any more.

        Other operations are refused from the call on. is_cancelled: whether to stop after the
        present member. new_first: as for the plan. Raises Conflict, MeshFileError.
        """
        self._check_free()
        self._current = "a restart"
        return self._replace_all(steps, report, is_cancelled, new_first)

    async def _replace_all(
        self,
        steps: Sequence[Step],
        report: Report,
        is_cancelled: Callable[[], bool],
        new_first: bool | None,
    ) -> Outcome:
        """Replaces members, and admits other operations again at its end."""
        replaced: list[Replaced] = []
        try:
            specs = await self._read_specs()
            if failed := self._find_obstacle(steps, new_first, specs):
                report(failed[0], "failed", failed[1])
                return Outcome(replaced, failed)
            for step in steps:
                if is_cancelled():
                    return Outcome(replaced, (step.name, "the command was interrupted"))
                self._current = f"a restart of {step.name}"
                result = await self._replace_now(step, new_first, specs, report)
                if isinstance(result, str):
                    report(step.name, "failed", result)
                    return Outcome(replaced, (step.name, result))
                replaced.append(result)
            return Outcome(replaced)
        finally:
            self._current = ""

    def _find_obstacle(
        self, steps: Sequence[Step], new_first: bool | None, specs: Mapping[str, ServiceSpec]
    ) -> tuple[str, str] | None:
        """Returns the first member that cannot be replaced by what the file describes now, with the
        reason: then no replacement begins."""
        for step in steps:
            try:
                self._plan_now(step.name, new_first, specs)
            except InvalidRequest as error:
                return step.name, error.message
        return None

    def _plan_now(
        self, name: str, new_first: bool | None, specs: Mapping[str, ServiceSpec]
    ) -> Step:
        """Returns the replacement by the present members. Raises InvalidRequest."""
        members = self.members()
        selected = [member for member in members if member.spec.name == name]
        (step,) = plan(members, selected, self._environ, new_first=new_first, successors=specs)
        return step

    async def _replace_now(
        self,
        step: Step,
        new_first: bool | None,
        specs: Mapping[str, ServiceSpec],
        report: Report,
    ) -> Replaced | str:
        # Since the plan was made, members of its role may have ended, or become ready.
        try:
            step = self._plan_now(step.name, new_first, specs)
        except InvalidRequest as error:
            return error.message
        if step.fixed:
            report(step.name, "note", f"old first: two processes cannot have its {step.fixed}")
        return await self._replace(step, specs.get(step.name), report)

    async def drain(self, name: str, report: Report, *, force: bool = False) -> None:
        """Stops a member, which does not start again. Raises InvalidRequest, Conflict.

        force: also the last live member of a role.
        """
        with self._alone(f"a drain of {name}"):
            members = self.members()
            member = select(members, [name])[0] if force else check_drain(members, name)
            child = self._child(member.spec.name)
            began = self._now()
            report(child.spec.name, "draining", "")
            # The process has the port until it accepts no more.
            self._stop_listening(child.spec.name)
            await self._supervisor.end(child)
        report(child.spec.name, "drained", f"after {self._now() - began:.1f} s")

    async def start(self, name: str, report: Report) -> None:
        """Starts a drained or failed member, and waits until it is routable. Raises InvalidRequest,
        Conflict."""
        with self._alone(f"a start of {name}"):
            (member, *others) = select(self.members(), [name])
            old = self._child(member.spec.name)
            if others or old.state not in (State.STOPPED, State.FAILED):
                raise InvalidRequest(f"{name}: is {old.state}; start takes one stopped member")
            spec = (await self._read_specs()).get(old.spec.name, old.spec)
            result = await self._replace(Step(spec.name, new_first=False), spec, report)
        if isinstance(result, str):
            raise InvalidRequest(f"{name}: {result}")

    async def scale(self, counts: Mapping[str, int], report: Report) -> None:
        """Starts and drains members until groups have other numbers, those with the highest numbers
        first. Raises InvalidRequest, Conflict, MeshFileError."""
        with self._alone("a change of the number of members"):
            check_counts(await asyncio.to_thread(self._read_counts, self._counts), counts)
            before, self._counts = self._counts, {**self._counts, **counts}
            try:
                specs = await self._read_specs()
            except BaseException:
                self._counts = before
                raise
            present = {child.spec.name: child for child in self._supervisor.children}
            added = [spec for name, spec in specs.items() if name not in present]
            surplus = [child for name, child in present.items() if name not in specs]
            for child in surplus:
                report(child.spec.name, "draining", "")
                self._stop_listening(child.spec.name)
            await asyncio.gather(*map(self._supervisor.end, surplus))
            for child in surplus:
                self._supervisor.remove(child)
                report(child.spec.name, "drained", "")
            failed = await asyncio.gather(*(self._add(spec, report) for spec in added))
        if problem := "; ".join(filter(None, failed)):
            raise InvalidRequest(problem)

    async def _add(self, spec: ServiceSpec, report: Report) -> str:
        """Starts a further member, and waits until it is routable; the reason if it is not."""
        began = self._now()
        alike = [c for c in self._supervisor.children if c.spec.group == spec.group]
        child = self._supervisor.add(spec, after=alike[-1] if alike else None)
        report(spec.name, "starting", "")
        if problem := await self._await_routable(child, report):
            report(spec.name, "failed", problem)
            return f"{spec.name}: {problem}"
        report(spec.name, "routable", f"after {self._now() - began:.1f} s")
        return ""

    async def _replace(
        self, step: Step, spec: ServiceSpec | None, report: Report
    ) -> Replaced | str:
        """Returns the reason of a failure as text."""
        supervisor, began = self._supervisor, self._now()
        old = self._child(step.name)
        self._rotate_log(step.name)
        if not step.new_first:
            if old.process is not None:
                report(step.name, "draining", "")
            await supervisor.end(old)
        report(step.name, "starting", "beside the old process" if step.new_first else "")
        new = supervisor.add(old.spec if spec is None else spec, after=old)
        if not step.new_first:
            supervisor.remove(old)
        problem = await self._await_routable(new, report)
        routable_s = self._now() - began
        if problem:
            if step.new_first:
                await supervisor.end(new)
                supervisor.remove(new)
                self._undo_start(old.spec)
                if supervisor.is_given_up(step.name):
                    self._stop_listening(step.name)
            return problem
        report(step.name, "routable", f"after {routable_s:.1f} s")
        if step.new_first:
            await supervisor.end(old)
            supervisor.remove(old)
        after_s = self._now() - began
        report(step.name, "replaced", f"after {after_s:.1f} s")
        return Replaced(step.name, step.new_first, round(routable_s, 3), round(after_s, 3))

    async def _await_start(self, child: Child, report: Report) -> str:
        """Waits until a process is ready; the reason if its start failed. The supervisor ends a
        start whose log does not grow."""
        ready = asyncio.ensure_future(self._supervisor.wait_ready(child))
        try:
            while not (await asyncio.wait([ready], timeout=self._start_report_s))[0]:
                report(child.spec.name, "progress", self._last_log_line(child.spec.name))
            return ready.result()
        finally:
            ready.cancel()

    async def _await_routable(self, child: Child, report: Report) -> str:
        """Waits until the peers can use a member; the reason if they cannot."""
        if problem := await self._await_start(child, report):
            return problem
        ready_at, reported = self._now(), ""
        while missing := (waiting := await self._find_missing(child)).missing:
            waited_s = self._now() - ready_at
            if child.state is not State.READY:
                return child.end_reason or "it ended"
            if waited_s > self._routable_s:
                return f"not routable within {self._routable_s:g} s: {missing}"
            if waited_s > QUIET_S and missing != reported:
                report(child.spec.name, "waiting", missing)
                reported = missing
            await asyncio.sleep(POLL_S)
        if waiting.given_up:
            report(child.spec.name, "given up", waiting.given_up)
        return ""

    async def _read_specs(self) -> dict[str, ServiceSpec]:
        # In a thread: it checks the mesh file with a child process.
        specs = await asyncio.to_thread(self._specs, self._counts)
        return {spec.name: spec for spec in specs}

    def _child(self, name: str) -> Child:
        return next(c for c in reversed(self._supervisor.children) if c.spec.name == name)

    @contextmanager
    def _alone(self, what: str) -> Iterator[None]:
        """Refuses other operations until the block is left. Raises Conflict."""
        self._check_free()
        self._current = what
        try:
            yield
        finally:
            self._current = ""

    def _check_free(self) -> None:
        if self._current:
            raise Conflict(f"{self._current} is under way", reason="BUSY")

    def _now(self) -> float:
        return asyncio.get_running_loop().time()
