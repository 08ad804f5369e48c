"""The DNS names in certificates, and those that state a role.

A certificate with the DNS name `<role>.<domain>` is that of a process of this role.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from cryptography import x509

# The role of tools, such as meshctl and grpcurl.
OPERATOR: Final = "operator"


def certificate_name(role: str, domain: str) -> str:
    """Returns the DNS name in the certificates of a role."""
    return f"{role}.{domain}"


def first_dns_names(chain: bytes) -> list[str]:
    """Returns the DNS names of the first certificate of a PEM file. Raises ValueError."""
    # Most processes have no certificates, and need not import it.
    from cryptography import x509

    return dns_names(x509.load_pem_x509_certificates(chain)[0])


def dns_names(certificate: x509.Certificate) -> list[str]:
    """Returns the alternative names that are DNS names. Raises ValueError."""
    from cryptography import x509

    try:
        extension = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName)
    except x509.ExtensionNotFound:
        return []
    return extension.value.get_values_for_type(x509.DNSName)
