"""The stored form of desired adapters: JSON, and the signature of a process with the mesh token."""

from __future__ import annotations

from collections.abc import Iterable

import structlog

from common.errors import InvalidRequest, Unauthenticated
from common.registry.adapters import ADAPTER_BYTES_MAX, DesiredAdapter
from common.registry.signature import EntrySigner

LOG = structlog.get_logger(__name__)


class AdapterDocuments:
    """Writes and reads the documents of one client of a registry. What cannot be read is logged
    once and left out."""

    def __init__(self, signer: EntrySigner) -> None:
        self._signer = signer
        self._refused: set[bytes] = set()

    def encode(self, namespace: str, adapter: DesiredAdapter) -> bytes:
        """Returns the document of an adapter."""
        text = adapter.to_json()
        return text + b"\n" + self._signer.sign_document(_signed(namespace, text)).encode()

    def decode(
        self, namespace: str, documents: Iterable[tuple[str, bytes]]
    ) -> tuple[DesiredAdapter, ...]:
        """Returns the adapters of documents, by name. documents: keys in the store, contents."""
        found, refused = [], set()
        for key, raw in documents:
            try:
                found.append(self._read(namespace, key, raw))
            except (InvalidRequest, Unauthenticated) as error:
                refused.add(raw)
                if raw not in self._refused:
                    LOG.warning("adapter_document_refused", key=key, error=error.message)
        self._refused = refused
        return tuple(sorted(found, key=lambda adapter: adapter.name))

    def _read(self, namespace: str, key: str, raw: bytes) -> DesiredAdapter:
        if len(raw) > ADAPTER_BYTES_MAX:
            raise InvalidRequest(f"it has {len(raw)}/{ADAPTER_BYTES_MAX} bytes", "adapter")
        text, _, signature = raw.partition(b"\n")
        self._signer.check_document(_signed(namespace, text), signature.decode(errors="replace"))
        adapter = DesiredAdapter.from_json(text)
        if adapter.key != key:
            raise InvalidRequest(f"it holds the adapter {adapter.name!r}", "name")
        return adapter


def _signed(namespace: str, text: bytes) -> bytes:
    """Returns what is signed: a document is of one namespace."""
    return namespace.encode() + b"\0" + text
