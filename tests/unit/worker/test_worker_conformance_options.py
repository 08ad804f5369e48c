"""The help text of the conformance kit."""

from __future__ import annotations

from dataclasses import fields

import pytest

from common.runtime.config import flag_name
from worker_svc.conformance.__main__ import main
from worker_svc.conformance.harness import TimeLimits


def test_help_explains_every_option(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit):
        main(["--help"])
    lines = [line.split("  ") for line in capsys.readouterr().out.splitlines()]
    help_by_flag = {
        line[1].split()[0]: line[-1].strip() for line in lines if len(line) > 2 and line[1]
    }
    assert help_by_flag.keys() == {
        *("MODULE:ENGINE", "-h,", "--arg"),
        *(flag_name(limit.name) for limit in fields(TimeLimits)),
    }
    assert all(len(text) > 20 for text in help_by_flag.values()), help_by_flag
    assert help_by_flag["--stop-s"].endswith("(default 0.25)")
