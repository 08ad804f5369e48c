"""Facts about certificates: of files, and as ports present them."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Iterable, Iterator
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    PublicFormat,
    load_pem_private_key,
)

from common.runtime.certificate_names import dns_names
from meshctl.doctor.collect.settings import Settings
from meshctl.doctor.facts import CertificateFacts

# A certificate, with its key if a setting names one.
_FIELDS = {
    "tls_cert_path": "tls_key_path",
    "http_tls_cert_path": "http_tls_key_path",
    "tls_ca_path": None,
    "consul_ca_path": None,
}


def read_certificates(sources: Iterable[Settings]) -> Iterator[CertificateFacts]:
    """Yields the certificates of all files that settings name, each file once."""
    seen = set()
    for source in sources:
        for field, key_field in _FIELDS.items():
            path = source.path(field)
            if path is not None and path.absolute() not in seen:
                seen.add(path.absolute())
                yield from _read_file(path, source.path(key_field) if key_field else None)


def _read_file(path: Path, key_path: Path | None) -> Iterator[CertificateFacts]:
    place = str(path)
    try:
        certificates = x509.load_pem_x509_certificates(path.read_bytes())
        if key_path is not None:
            key = load_pem_private_key(key_path.read_bytes(), None)
            if _public(key.public_key()) != _public(certificates[0].public_key()):
                yield CertificateFacts(place, error=f"the key in {key_path} is of another one")
                return
    except OSError as error:
        yield CertificateFacts(place, error=f"{error.filename}: {error.strerror}")
    except (ValueError, TypeError) as error:
        yield CertificateFacts(place, error=f"it is no PEM: {error}")
    else:
        for certificate in certificates:
            yield _facts(place, certificate)


# Any public key; the types of cryptography differ by algorithm.
def _public(key: object) -> bytes:
    encoded: bytes = key.public_bytes(  # type: ignore[attr-defined]
        Encoding.DER, PublicFormat.SubjectPublicKeyInfo
    )
    return encoded


def _facts(place: str, certificate: x509.Certificate) -> CertificateFacts:
    try:
        names = dns_names(certificate)
    except ValueError:
        names = []
    name = names[0] if names else certificate.subject.rfc4514_string()
    return CertificateFacts(
        place,
        name or "a certificate without a name",
        certificate.not_valid_before_utc.timestamp(),
        certificate.not_valid_after_utc.timestamp(),
    )


async def read_presented(
    address: str, own: tuple[Path, Path] | None, limit_s: float
) -> CertificateFacts | None:
    """Returns the certificate that a port presents; None if there is none.

    own: certificate and key of doctor, which ports with mutual TLS require.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    # It is read, and not trusted.
    context.verify_mode = ssl.CERT_NONE
    context.set_alpn_protocols(["h2", "http/1.1"])
    host, _, port = address.rpartition(":")
    try:
        if own is not None:
            context.load_cert_chain(*own)
        async with asyncio.timeout(limit_s):
            _, writer = await asyncio.open_connection(host.strip("[]"), int(port), ssl=context)
        try:
            connection = writer.get_extra_info("ssl_object")
            raw = connection.getpeercert(binary_form=True)
        finally:
            writer.close()
        return None if raw is None else _facts(address, x509.load_der_x509_certificate(raw))
    except (OSError, TimeoutError, ValueError):
        return None
