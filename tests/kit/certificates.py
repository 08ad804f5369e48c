"""Certificates for tests, made with the openssl command."""

from __future__ import annotations

import functools
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path

import pytest

_KEY = "-newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes"


@functools.cache
def _openssl() -> str:
    if (found := shutil.which("openssl")) is None:
        pytest.skip("needs the openssl command to make certificates")
    return found


class Authority:
    """A certificate authority in a folder. ca: its certificate."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.ca = folder / "ca.pem"
        self._key = folder / "ca.key"
        self._run(f"req -x509 {_KEY} -days 2 -subj /CN=ca -keyout {self._key} -out {self.ca}")

    def issue(
        self, name: str, names: Iterable[str] = ("IP:127.0.0.1",), *, days: int = 2
    ) -> tuple[Path, Path]:
        """Writes NAME.pem and NAME.key, in place of earlier ones; their paths. names: alternative
        names, such as DNS:a.example. days: validity; negative: expired."""
        cert, key, request = (self.folder / f"{name}.{kind}" for kind in ("pem", "key", "csr"))
        extensions = self.folder / f"{name}.ext"
        extensions.write_text(f"subjectAltName={','.join(names)}\n")
        self._run(f"req {_KEY} -subj /CN={name} -keyout {key} -out {request}")
        self._run(
            f"x509 -req -in {request} -CA {self.ca} -CAkey {self._key} -CAcreateserial"
            f" -days {days} -extfile {extensions} -out {cert}"
        )
        return cert, key

    def _run(self, command: str) -> None:
        subprocess.run([_openssl(), *command.split()], check=True, capture_output=True, timeout=30)
