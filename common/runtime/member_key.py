"""Keys of members: an instance proves that it has its id.

Each instance of a mesh with a mesh token or mutual TLS makes a key pair (Ed25519) at its start, and
keeps it in memory. Its id is a hash of the public key. So the public key and a signature prove the
id to any process, without the registry:

    entry: the last field of the instance's JSON, `"proof":"<public key> <signature>"`, over the
           text before it
    call:  `<Unix ms> <nonce> <address> <public key> <signature>` over method, time, nonce and the
           address that the caller dialled
    reply: `<public key> <signature>` over the proof of the caller

Ids outside MEMBER_IDS have no key: those of earlier versions, and of meshes without token and TLS.
ADR 0046 has the reasons and the strength.
"""

from __future__ import annotations

import functools
import hashlib
import re
from collections import OrderedDict
from typing import Final

from common.errors import Unauthenticated
from common.instance_ids import MEMBER_IDS
from common.runtime.mesh_auth import new_call_stamp

# Keys that a process keeps; later ones replace the oldest.
KEYS_MAX = 1 << 16

ENTRY_USE: Final = b"entry"
CALL_USE: Final = b"call"
REPLY_USE: Final = b"reply"

_SALT = b"kvmesh member 1"
_PROOF = re.compile(r"([0-9a-f]{64}) ([0-9a-f]{128})")
_PROOF_FIELD = b',"proof":"'


class MemberKey:
    """The key pair of this instance. It ends with the process."""

    id: int
    """The id of the instance, in MEMBER_IDS."""

    def __init__(self) -> None:
        # Imported here: it takes 20 ms, and meshes without secrets do not need it.
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

        self._key = Ed25519PrivateKey.generate()
        self._public = self._key.public_key().public_bytes_raw()
        self.id = _member_id(self._public)

    def sign(self, use: bytes, text: bytes) -> str:
        """Returns the proof that this instance made a text. use: separates kinds of texts."""
        return f"{self._public.hex()} {self._key.sign(_signed(use, text)).hex()}"

    def sign_call(self, method: str, address: str, now_s: float) -> str:
        """Returns the proof of one call. address: dialled, `host:port`."""
        stamp = new_call_stamp(address, now_s)
        return f"{stamp} {self.sign(CALL_USE, _call_text(method, stamp))}"

    def seal(self, entry: bytes) -> bytes:
        """Returns the JSON object of an entry with its proof as the last field."""
        body = entry.removesuffix(b"}")
        proof = self.sign(ENTRY_USE, body).encode()
        return body + _PROOF_FIELD + proof + b'"}'


class MemberKeys:
    """The key of this process, and those of members that have proved their ids to it."""

    def __init__(self, own: MemberKey | None = None, *, is_required: bool = False) -> None:
        """Creates it.

        own: None: this process is no member, or one without a key.
        is_required: whether peers must prove ids in MEMBER_IDS.
        """
        self.own = own
        self.is_required = is_required
        # Id -> public key, oldest first. The first key of an id stays: another one with the same
        # hash is an attack.
        self._known: OrderedDict[int, str] = OrderedDict()

    def check(self, use: bytes, text: bytes, proof: str) -> int:
        """Returns the id of the member that made a text. Raises Unauthenticated."""
        from cryptography.exceptions import InvalidSignature
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

        parts = _PROOF.fullmatch(proof)
        if parts is None:
            raise Unauthenticated("this is no proof of a member's key")
        public, signature = parts.groups()
        try:
            key = Ed25519PublicKey.from_public_bytes(bytes.fromhex(public))
            key.verify(bytes.fromhex(signature), _signed(use, text))
        except (InvalidSignature, ValueError) as error:
            raise Unauthenticated("the signature of the member's key is wrong") from error
        member_id = _member_id(bytes.fromhex(public))
        if self._known.setdefault(member_id, public) != public:
            raise Unauthenticated(f"instance {member_id} has another key")
        if len(self._known) > KEYS_MAX:
            self._known.popitem(last=False)
        return member_id

    def check_call(self, method: str, proof: str) -> tuple[int, str]:
        """Returns the id of a caller, and the stamp of its call, which the caller of this function
        checks. Raises Unauthenticated."""
        stamp, _, key_proof = proof.rpartition(" ")
        stamp, _, public = stamp.rpartition(" ")
        return self.check(CALL_USE, _call_text(method, stamp), f"{public} {key_proof}"), stamp

    def check_entry(self, entry: bytes, instance_id: int) -> None:
        """Raises Unauthenticated if the instance has a key and did not make the entry."""
        if not self.is_required or instance_id not in MEMBER_IDS:
            return
        body, _, rest = entry.rpartition(_PROOF_FIELD)
        if not body:
            raise Unauthenticated(f"the entry has no proof of the key of instance {instance_id}")
        proof = rest.removesuffix(b'"}').decode(errors="replace")
        owner_id = self.check(ENTRY_USE, body, proof)
        if owner_id != instance_id:
            raise Unauthenticated(f"instance {owner_id} made the entry of instance {instance_id}")


# The hash is slow, because a second key with the same hash must not be found.
@functools.lru_cache(maxsize=4096)
def _member_id(public: bytes) -> int:
    digest = hashlib.scrypt(public, salt=_SALT, n=1 << 7, r=8, p=1, dklen=8)
    return MEMBER_IDS.start + int.from_bytes(digest, "big") % len(MEMBER_IDS)


def _signed(use: bytes, text: bytes) -> bytes:
    return b"kvmesh " + use + b"\0" + text


def _call_text(method: str, stamp: str) -> bytes:
    return f"{method}\0{stamp}".encode()
