"""The open sessions of frontends at this router, and which of them are superseded (pure)."""

from __future__ import annotations

from collections.abc import Iterator

from router_svc.core.booking import SessionHello


class FrontendSessions:
    """Sessions by number. Numbers are never used again."""

    def __init__(self) -> None:
        self._sessions: dict[int, SessionHello] = {}  # In order of opening.
        self._last_session = 0
        self._latest_generation: dict[int, int] = {}  # By frontend with a session here.

    def open(self, hello: SessionHello) -> int:
        self._latest_generation.setdefault(hello.frontend_id, hello.generation)
        self._last_session += 1
        self._sessions[self._last_session] = hello
        return self._last_session

    def close(self, session: int) -> int:
        frontend_id = self._sessions.pop(session).frontend_id
        if self.newest(frontend_id) is None:
            del self._latest_generation[frontend_id]
        return frontend_id

    def supersede(self, hello: SessionHello) -> list[int]:
        """Records a session of a frontend, here or at a peer; returns its newly superseded ones."""
        previous = self._latest_generation.get(hello.frontend_id, hello.generation)
        if previous >= hello.generation:
            return []
        self._latest_generation[hello.frontend_id] = hello.generation
        return [
            session
            for session, (frontend_id, generation) in self._sessions.items()
            if frontend_id == hello.frontend_id and generation >= previous
        ]

    def is_superseded(self, session: int) -> bool:
        """Returns whether its frontend has a later session, here or at a peer."""
        frontend_id, generation = self._sessions[session]
        return generation < self._latest_generation[frontend_id]

    def generation(self, session: int) -> int:
        """Returns the frontend's number of that session; 0: unknown."""
        return self._sessions[session].generation

    def newest(self, frontend_id: int) -> int | None:
        sessions = reversed(self._sessions.items())
        return next((s for s, hello in sessions if hello.frontend_id == frontend_id), None)

    def has_frontend(self, frontend_id: int) -> bool:
        return frontend_id in self._latest_generation

    def __iter__(self) -> Iterator[SessionHello]:
        return iter(self._sessions.values())
