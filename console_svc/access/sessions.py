"""Sessions of operators (pure).

The console keeps the hash of a session's token, not the token. A session ends by a logout, after
IDLE_S without a request, after LONGEST_S, or when its API key is revoked or expires. What the
operator has open then, such as a websocket, ends with it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from hashlib import sha256

IDLE_S = 8 * 3600.0
LONGEST_S = 24 * 3600.0
# More end the session that was idle for the longest time.
SESSIONS_MAX = 256


@dataclass(frozen=True, slots=True)
class Operator:
    """A person at a browser. key_id, tenant, key_sha256: of the API key; "": a one-time link."""

    key_id: str = ""
    tenant: str = ""
    key_sha256: str = field(default="", repr=False)

    @property
    def name(self) -> str:
        """For logs and pages."""
        return self.key_id or "one-time link"


@dataclass(slots=True, eq=False)
class Session:
    """A login. Times are seconds of a monotonic clock."""

    operator: Operator
    began_s: float
    seen_s: float
    on_end: set[Callable[[], None]] = field(default_factory=set)
    """Called at the end of the session."""


class Sessions:
    """The open sessions, by the hash of their token."""

    def __init__(self, new_token: Callable[[], str]) -> None:
        """new_token: returns a random text of 256 bits."""
        self._new_token = new_token
        self._sessions: dict[str, Session] = {}

    def __len__(self) -> int:
        return len(self._sessions)

    def begin(self, operator: Operator, now_s: float) -> str:
        """Returns the token of a new session."""
        if len(self._sessions) >= SESSIONS_MAX:
            self._end(min(self._sessions, key=lambda key: self._sessions[key].seen_s))
        token = self._new_token()
        self._sessions[_hash(token)] = Session(operator, now_s, now_s)
        return token

    def find(self, token: str, now_s: float) -> Session | None:
        """Returns the session of a request, which is not idle then."""
        key = _hash(token)
        session = self._sessions.get(key)
        if session is None:
            return None
        if _is_over(session, now_s):
            self._end(key)
            return None
        session.seen_s = now_s
        return session

    def end(self, token: str) -> None:
        """Ends a session. Idempotent."""
        self._end(_hash(token))

    def sweep(self, now_s: float, is_valid: Callable[[Operator], bool]) -> None:
        """Ends the sessions that are over, and those of operators that are not valid any more. An
        open page counts as use."""
        for key, session in tuple(self._sessions.items()):
            if session.on_end:
                session.seen_s = now_s
            if _is_over(session, now_s) or not is_valid(session.operator):
                self._end(key)

    def end_all(self) -> None:
        for key in tuple(self._sessions):
            self._end(key)

    def _end(self, key: str) -> None:
        session = self._sessions.pop(key, None)
        if session is not None:
            for callback in tuple(session.on_end):
                callback()


def _is_over(session: Session, now_s: float) -> bool:
    return now_s - session.seen_s > IDLE_S or now_s - session.began_s > LONGEST_S


def _hash(token: str) -> str:
    return sha256(token.encode()).hexdigest()
