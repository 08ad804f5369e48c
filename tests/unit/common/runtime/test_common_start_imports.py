"""What the processes of services import when they start; each import delays every start."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[4]
SERVICES = ("batch", "console", "epp", "indexer", "router", "worker")
UNUSED = {"attr", "cryptography", "httpcore", "httpx", "pygments", "rich"}


@pytest.mark.slow
@pytest.mark.parametrize("service", ["batch", "frontend"])
def test_a_start_imports_no_library_that_only_other_settings_need(service: str) -> None:
    """Tracebacks with rich, certificates, media from URLs: 0.1 to 0.2 s of CPU time."""
    script = f"import sys, {service}_svc.__main__; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True
    )
    imported = set(done.stdout.split())
    assert "structlog" in imported
    assert imported & UNUSED == set()


@pytest.mark.parametrize("service", SERVICES)
def test_each_service_imports_structlog_without_rich(service: str) -> None:
    """The frontend imports another module of the package first."""
    lines = (ROOT / f"{service}_svc" / "__main__.py").read_text().splitlines()
    first = next(
        line for line in lines if line.startswith(("import ", "from ")) and "__f" not in line
    )
    assert first.startswith("import common.runtime ")
