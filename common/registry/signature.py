"""Signatures of registry entries: whatever can write to the store cannot add a member, and no
member can write the entry of another one."""

from __future__ import annotations

import time
from collections.abc import Callable

from common.registry.instances import Instance
from common.runtime.member_key import MemberKeys
from common.runtime.mesh_auth import ENTRY_RENEWED_AFTER_S, ENTRY_VALID_S, MeshSecret


class EntrySigner:
    """Signs and checks entries under the mesh token and the keys of members; without them, neither.

    token: the mesh token, or None.
    now_s: Unix time.
    members: the key of this process, and those of its peers; None: none.
    """

    def __init__(
        self,
        token: str | None,
        now_s: Callable[[], float] = time.time,
        *,
        members: MemberKeys | None = None,
    ) -> None:
        self._secret = None if token is None else MeshSecret(token)
        self._now_s = now_s
        self._members = MemberKeys() if members is None else members

    def seal(self, instance: Instance) -> bytes:
        """Returns the JSON of an instance; that of this process with the proof of its key."""
        own = self._members.own
        raw = instance.to_json()
        return raw if own is None or own.id != instance.id else own.seal(raw)

    def check_seal(self, raw: bytes, instance_id: int) -> None:
        """Raises Unauthenticated if the instance has a key and did not make its JSON."""
        self._members.check_entry(raw, instance_id)

    def sign(self, text: bytes) -> str:
        """Returns the signature of an entry's stored text; "" without a token."""
        return "" if self._secret is None else self._secret.sign_entry(text, self._now_s())

    def check(self, text: bytes, signature: str) -> None:
        """Raises Unauthenticated unless a process with the mesh token signed the text and the
        signature is still valid. To be called once per entry read, not per poll: a member with
        an unchanged entry stays."""
        if self._secret is not None:
            self._secret.check_entry(text, signature, self._now_s())

    def sign_document(self, text: bytes) -> str:
        """Returns the signature of a document without an owner; "" without a token."""
        return "" if self._secret is None else self._secret.sign_document(text)

    def check_document(self, text: bytes, signature: str) -> None:
        """Raises Unauthenticated unless a process with the mesh token signed the text."""
        if self._secret is not None:
            self._secret.check_document(text, signature)

    def is_old(self, signature: str) -> bool:
        """Returns whether the owner should sign again."""
        if not signature:
            return False
        signed_s = int(signature.partition(" ")[0]) - ENTRY_VALID_S
        return self._now_s() - signed_s > ENTRY_RENEWED_AFTER_S


UNSIGNED = EntrySigner(None)
