"""Proofs of the mesh token, which is never sent: signed registry entries and authenticated calls.

    entry: `<expiry, Unix s> <MAC>` over the stored text of an instance, which names its namespace,
           service, role, id and address
    call:  `KVMesh-1 <Unix ms> <nonce> <address> <MAC>` over method, time, nonce and the address
           that the caller dialled
    reply: MAC over the call's credential

MACs are HMAC-SHA256 under keys derived from the token, one for each use. The derivation is slow
(scrypt), because a reader of the registry can try guesses of the token against a MAC. Threats and
limits: docs/security.md.
"""

from __future__ import annotations

import functools
import hashlib
import hmac
import re
import secrets
from collections import OrderedDict
from collections.abc import Collection

from common.errors import Overloaded, Unauthenticated

CALL_SCHEME = "KVMesh-1"
ENTRY_VALID_S = 7200
ENTRY_RENEWED_AFTER_S = 3600
# Also the largest difference between the clocks of two hosts.
CALL_VALID_S = 60
NONCES_MAX = 1 << 16

_SALT = b"kvmesh mesh token 1"
_KEY_SALT = b"kvmesh mesh key 1"
_STAMP = re.compile(r"([0-9]{1,16}) ([0-9a-f]{32}) ([^ ]+)")


class MeshSecret:
    """The keys of a mesh token."""

    def __init__(self, token: str) -> None:
        root = _derive_root(token)
        self._entry_key, self._call_key, self._reply_key, self._document_key = (
            hmac.digest(root, use, "sha256") for use in (b"entry", b"call", b"reply", b"document")
        )

    def sign_entry(self, text: bytes, now_s: float) -> str:
        """Returns the signature of an entry that is published now."""
        expiry = str(int(now_s) + ENTRY_VALID_S)
        return f"{expiry} {_mac(self._entry_key, expiry.encode(), text)}"

    def check_entry(self, text: bytes, signature: str, now_s: float) -> None:
        """Raises Unauthenticated unless a member of the mesh signed `text` and it is valid."""
        expiry, _, mac = signature.partition(" ")
        if not expiry.isdecimal():
            raise Unauthenticated("the entry is not signed: its process has no mesh token")
        if not _equal(mac, _mac(self._entry_key, expiry.encode(), text)):
            raise Unauthenticated("the entry's signature is wrong: forged, or another mesh token")
        if int(expiry) < now_s:
            raise Unauthenticated(f"the entry's signature expired {now_s - int(expiry):.0f} s ago")

    def sign_document(self, text: bytes) -> str:
        """Returns the signature of a document, which has no owner that could renew it: it does not
        expire."""
        return _mac(self._document_key, text)

    def check_document(self, text: bytes, signature: str) -> None:
        """Raises Unauthenticated unless a process with the mesh token signed `text`."""
        if not _equal(signature, _mac(self._document_key, text)):
            raise Unauthenticated("no process with the mesh token has signed the document")

    def sign_call(self, method: str, address: str, now_s: float) -> str:
        """Returns the credential of one call. address: dialled, `host:port`."""
        stamp = new_call_stamp(address, now_s)
        mac = _mac(self._call_key, method.encode(), stamp.encode())
        return f"{CALL_SCHEME} {stamp} {mac}"

    def reply_to(self, credential: str) -> str:
        """Returns what a member replies to a credential, and no other process can."""
        return _mac(self._reply_key, credential.encode())

    def check_call(self, method: str, credential: str) -> str:
        """Returns the stamp of a credential that a member made. Raises Unauthenticated."""
        scheme, _, rest = credential.partition(" ")
        if scheme != CALL_SCHEME or rest.count(" ") != 3:
            raise Unauthenticated(
                f"a proof of the mesh token is required: authorization: {CALL_SCHEME} ..."
            )
        stamp, _, mac = rest.rpartition(" ")
        if not _equal(mac, _mac(self._call_key, method.encode(), stamp.encode())):
            raise Unauthenticated("the caller's mesh token is wrong")
        return stamp


def new_call_stamp(address: str, now_s: float) -> str:
    """Returns what limits a proof to one call: `<Unix ms> <nonce> <address>`. address: dialled,
    `host:port`."""
    return f"{now_s * 1000:.0f} {secrets.token_hex(16)} {address}"


def key_fingerprint(mesh_key: str) -> str:
    """Returns what members advertise of the mesh key, so that tools find members with another one;
    "" without one. It has 24 bits: they confirm a guess of a short key, and no random one."""
    if not mesh_key:
        return ""
    digest = hashlib.scrypt(mesh_key.encode(), salt=_KEY_SALT, n=1 << 14, r=8, p=1, dklen=3)
    return digest.hex()


class FreshCalls:
    """Accepts the stamp of each call once."""

    def __init__(self, addresses: Collection[str]) -> None:
        """addresses: under which peers dial this process; read at each call."""
        self._addresses = addresses
        # Nonce -> Unix time at which its stamp is invalid; by order of arrival.
        self._nonces: OrderedDict[str, float] = OrderedDict()

    def check(self, stamp: str, now_s: float) -> None:
        """Raises Unauthenticated for a stamp of another peer or time, or one that was used before,
        and Overloaded if NONCES_MAX calls came within 2 * CALL_VALID_S."""
        parts = _STAMP.fullmatch(stamp)
        if parts is None:
            raise Unauthenticated("the proof of the call has no time, nonce and address")
        time_ms, nonce, address = parts.groups()
        if address not in self._addresses:
            raise Unauthenticated(
                f"the call is for {address}, and this process is"
                f" {', '.join(sorted(self._addresses))}; check --advertise-host"
            )
        age_s = now_s - int(time_ms) / 1000
        if abs(age_s) > CALL_VALID_S:
            raise Unauthenticated(
                f"the call's time differs by {age_s:.0f} s, allowed are {CALL_VALID_S} s;"
                " check the clocks of both hosts"
            )
        nonces = self._nonces
        while nonces and next(iter(nonces.values())) < now_s:
            nonces.popitem(last=False)
        if nonce in nonces:
            raise Unauthenticated("the call's credential was used before")
        if len(nonces) >= NONCES_MAX:
            raise Overloaded(1.0, f"too many calls: {NONCES_MAX} in {2 * CALL_VALID_S} s")
        nonces[nonce] = now_s + 2 * CALL_VALID_S


@functools.lru_cache(maxsize=8)
def _derive_root(token: str) -> bytes:
    return hashlib.scrypt(token.encode(), salt=_SALT, n=1 << 14, r=8, p=1, dklen=32)


def _mac(key: bytes, *parts: bytes) -> str:
    """Returns the code of the parts in order; only the last may contain NUL."""
    return hmac.digest(key, b"\0".join(parts), "sha256").hex()


def _equal(given: str, expected: str) -> bool:
    return hmac.compare_digest(given.encode(), expected.encode())
