"""Certificate files that change while a process runs."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from common.errors import InvalidRequest
from common.runtime.certificates import CertificateFiles
from tests.kit.certificates import Authority


def test_the_newest_files_that_fit_together_are_used(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    cert, key = authority.issue("a")
    files = CertificateFiles({"tls_cert_path": cert, "tls_key_path": key})
    first = files.newest()
    assert files.newest() is first
    assert time.time() < first.ends_at_s < time.time() + 400 * 86_400
    old_key = key.read_bytes()
    authority.issue("a")
    second = files.newest()
    assert second.cert != first.cert
    new_key = key.read_bytes()
    for broken in (old_key, b"", b"no PEM"):
        key.write_bytes(broken)
        assert files.newest() is second
    key.unlink()
    assert files.newest() is second
    key.write_bytes(new_key)
    assert files.newest().key == new_key


def test_files_that_cannot_be_used_are_refused_at_the_start(tmp_path: Path) -> None:
    cert, key = Authority(tmp_path).issue("a")
    with pytest.raises(InvalidRequest, match=f"--tls-key-path: cannot read {tmp_path}/none"):
        CertificateFiles({"tls_cert_path": cert, "tls_key_path": tmp_path / "none"})
    with pytest.raises(InvalidRequest, match="are --tls-cert-path, --tls-key-path PEM that fits"):
        CertificateFiles({"tls_cert_path": key, "tls_key_path": key})
