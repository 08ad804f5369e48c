"""What tests have failed."""

from __future__ import annotations

import pytest

# Whether a test has failed so far; set by `tests/conftest.py`.
HAS_FAILED = pytest.StashKey[bool]()
