"""Signatures of registry entries: whatever can write to the store cannot add a member."""

from __future__ import annotations

import time
from collections.abc import Callable

from common.runtime.mesh_auth import ENTRY_RENEWED_AFTER_S, ENTRY_VALID_S, MeshSecret


class EntrySigner:
    """Signs and checks entries under the mesh token; without one, neither. now_s: Unix time."""

    def __init__(self, token: str | None, now_s: Callable[[], float] = time.time) -> None:
        self._secret = None if token is None else MeshSecret(token)
        self._now_s = now_s

    def sign(self, text: bytes) -> str:
        """Returns the signature of an entry's stored text; "" without a token."""
        return "" if self._secret is None else self._secret.sign_entry(text, self._now_s())

    def check(self, text: bytes, signature: str) -> None:
        """Raises Unauthenticated unless a process with the mesh token signed the text and the
        signature is still valid. To be called once per entry read, not per poll: a member with
        an unchanged entry stays."""
        if self._secret is not None:
            self._secret.check_entry(text, signature, self._now_s())

    def is_old(self, signature: str) -> bool:
        """Returns whether the owner should sign again."""
        if not signature:
            return False
        signed_s = int(signature.partition(" ")[0]) - ENTRY_VALID_S
        return self._now_s() - signed_s > ENTRY_RENEWED_AFTER_S


UNSIGNED = EntrySigner(None)
