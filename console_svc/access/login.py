"""Logins: by an API key with the scope `admin`, or by a one-time link."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import structlog

from common.access.key_file import KeyFile
from common.access.login_links import redeem
from common.api_keys import Permission, hash_of
from common.errors import MeshError, Overloaded, Unauthenticated
from console_svc.access.failures import LoginFailures
from console_svc.access.sessions import Operator, Session, Sessions

CREDENTIAL_CHARS_MAX = 512

log = structlog.get_logger()


class Logins:
    """Begins and finds the sessions of one console."""

    def __init__(
        self,
        sessions: Sessions,
        failures: LoginFailures,
        folder: Path,
        keys: KeyFile | None,
        clock: Callable[[], float],
        now_s: Callable[[], float],
    ) -> None:
        """
        - folder: of the one-time links.
        - keys: None: no API key logs in.
        - clock: monotonic seconds.
        - now_s: Unix seconds.
        """
        self._sessions = sessions
        self._failures = failures
        self._folder = folder
        self._keys = keys
        self._clock = clock
        self._now_s = now_s
        self.succeeded = 0
        self.failed = 0

    @property
    def has_keys(self) -> bool:
        return self._keys is not None

    @property
    def open_sessions(self) -> int:
        return len(self._sessions)

    def by_key(self, text: str, address: str) -> str:
        """Returns the token of a new session. address: of the client. Raises Unauthenticated,
        PermissionDenied, and Overloaded after too many failures."""
        return self._begin(address, lambda: self.identify(text.strip()))

    def by_link(self, token: str, address: str) -> str:
        """Returns the token of a new session; the link is used then. Raises as `by_key`. Failures
        before do not delay it: any page can make a browser of this host open wrong links."""
        if len(token) <= CREDENTIAL_CHARS_MAX and redeem(self._folder, token, self._now_s()):
            return self._begin_session(Operator(), address)

        def refuse() -> Operator:
            raise Unauthenticated(
                "this link was used, or is older than ten minutes: "
                "`meshctl console` prints a new one",
                reason="INVALID_LINK",
            )

        return self._begin(address, refuse)

    def identify(self, key: str) -> Operator:
        """Returns the operator with an API key. Raises Unauthenticated and PermissionDenied."""
        if self._keys is None or not key or len(key) > CREDENTIAL_CHARS_MAX:
            raise Unauthenticated("the API key is not valid", reason="INVALID_API_KEY")
        caller = self._keys.find(key.encode())
        caller.require(Permission.ADMIN)
        return Operator(caller.key_id, caller.tenant, hash_of(key.encode()))

    def find(self, token: str) -> Session | None:
        """Returns the session of a cookie."""
        return self._sessions.find(token, self._clock()) if token else None

    def end(self, token: str) -> None:
        session = self.find(token)
        if session is not None:
            log.info("operator_logged_out", operator=session.operator.name)
        self._sessions.end(token)

    def sweep(self) -> None:
        """Ends the sessions that are over, and those whose key was revoked or expired."""
        self._sessions.sweep(self._clock(), self._is_valid)

    def end_all(self) -> None:
        self._sessions.end_all()

    def _is_valid(self, operator: Operator) -> bool:
        if not operator.key_sha256:
            return True
        try:
            assert self._keys is not None, "a key began it"
            self._keys.find_hash(operator.key_sha256).require(Permission.ADMIN)
        except MeshError:
            return False
        return True

    def _begin(self, address: str, prove: Callable[[], Operator]) -> str:
        now = self._clock()
        if wait_s := self._failures.wait_s(address, now):
            text = f"too many failed logins; try again in {wait_s:.0f} s"
            raise Overloaded(wait_s, text, reason="LOGIN_FAILURES")
        try:
            operator = prove()
        except MeshError as error:
            self._failures.add(address, now)
            self.failed += 1
            log.warning("login_refused", address=address, reason=error.reason)
            raise
        return self._begin_session(operator, address)

    def _begin_session(self, operator: Operator, address: str) -> str:
        self.succeeded += 1
        log.info("operator_logged_in", operator=operator.name, address=address)
        return self._sessions.begin(operator, self._clock())
