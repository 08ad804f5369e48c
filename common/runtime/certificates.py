"""Certificates in PEM files, which a running process reads again when they change.

A new connection uses the newest files; open connections keep theirs. Files that cannot be read or
do not fit together, for example because only one of them has been replaced yet, leave the ones
before in use.
"""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import structlog

from common.errors import InvalidRequest
from common.runtime.config import flag_name

LOG = structlog.get_logger(__name__)

Stamp = tuple[tuple[int, int, int], ...]


@dataclass(frozen=True, slots=True)
class Pem:
    """The contents of certificate files, and the TLS contexts made from them."""

    cert: bytes = field(repr=False)
    """The certificate chain."""

    key: bytes = field(repr=False)
    ca: bytes = field(repr=False)
    """The authorities of peers; b"": none."""

    server_context: ssl.SSLContext = field(repr=False)
    """Of a server that requires no certificates of clients."""

    client_context: ssl.SSLContext | None = field(repr=False)
    """Of the client of HTTP/2 calls; None without authorities."""

    mutual_context: ssl.SSLContext | None = field(repr=False)
    """Of the server of HTTP/2 calls; None without authorities."""

    ends_at_s: float
    """Unix time at which the first certificate of the chain expires."""


class CertificateFiles:
    """paths: of certificate chain, key and perhaps authorities, in this order, by their settings.
    Raises InvalidRequest if they cannot be used."""

    def __init__(self, paths: Mapping[str, Path]) -> None:
        self._paths = paths
        self._stamp: Stamp = ()
        self._stamp, self._pem = self._read_stamp(), self._load()

    def newest(self) -> Pem:
        """Returns the files as of now. It costs a `stat` of each. Threads may call it."""
        stamp = self._read_stamp()
        if stamp != self._stamp:
            self._stamp = stamp
            try:
                self._pem = self._load()
            except InvalidRequest as error:
                LOG.error("certificates_rejected", error=error.message)
            else:
                LOG.info("certificates_loaded", paths=[str(path) for path in self._paths.values()])
        return self._pem

    def server_context(self) -> ssl.SSLContext:
        """Returns a context of a server without client certificates. It follows the files."""
        listening = _server_context(list(self._paths.values()))

        # In each handshake, also without a server name. Any: a socket or an SSLObject.
        def choose(connection: Any, _name: str | None, _context: ssl.SSLContext) -> None:
            connection.context = self.newest().server_context

        listening.sni_callback = choose
        return listening

    def _read_stamp(self) -> Stamp:
        """Changes with the files; a missing one counts as empty."""
        found = []
        for path in self._paths.values():
            try:
                stat = path.stat()
            except OSError:
                found.append((0, 0, 0))
            else:
                found.append((stat.st_mtime_ns, stat.st_size, stat.st_ino))
        return tuple(found)

    def _load(self) -> Pem:
        contents = []
        for setting, path in self._paths.items():
            try:
                contents.append(path.read_bytes())
            except OSError as error:
                raise InvalidRequest(
                    f"{flag_name(setting)}: cannot read {path}: {error.strerror}", setting
                ) from error
        try:
            paths = list(self._paths.values())
            server = _server_context(paths)
            has_peers = len(paths) > 2
            client = _client_context(paths) if has_peers else None
            mutual = _mutual_context(paths) if has_peers else None
            ends_at_s = _ends_at_s(contents[0])
        except (OSError, ValueError) as error:  # ssl.SSLError is an OSError.
            flags = ", ".join(map(flag_name, self._paths))
            raise InvalidRequest(
                f"are {flags} PEM that fits together? {error}", next(iter(self._paths))
            ) from error
        ca = b"".join(contents[2:])
        return Pem(contents[0], contents[1], ca, server, client, mutual, ends_at_s)


def _ends_at_s(chain: bytes) -> float:
    """Returns the Unix time at which the first certificate of a PEM file expires. Raises
    ValueError."""
    # Imported here: a process without certificates does not need it.
    from cryptography import x509

    certificates = x509.load_pem_x509_certificates(chain)
    return min(one.not_valid_after_utc.timestamp() for one in certificates)


def _server_context(paths: list[Path]) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.load_cert_chain(paths[0], paths[1])
    return context


def _mutual_context(paths: list[Path]) -> ssl.SSLContext:
    context = _server_context(paths)
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(paths[2])
    context.set_alpn_protocols(["h2"])
    return context


def _client_context(paths: list[Path]) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=paths[2])
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["h2"])
    context.load_cert_chain(paths[0], paths[1])
    return context
