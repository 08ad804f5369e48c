"""Checks of settings, and of the files of secrets that they name (pure)."""

from __future__ import annotations

import stat
from collections.abc import Iterator

from meshctl.doctor.facts import Facts
from meshctl.doctor.findings import Finding, Subject
from meshctl.doctor.rules import finding

_OTHERS = stat.S_IRWXG | stat.S_IRWXO


def check_settings(facts: Facts) -> Iterator[Finding]:
    for problem in facts.setting_problems:
        setting = problem.partition(":")[0]
        yield finding("setting_invalid", Subject("setting", setting), problem, setting=setting)


def check_secret_files(facts: Facts) -> Iterator[Finding]:
    for file in facts.secret_files:
        subject = Subject("file", str(file.path))
        parts = {"path": file.path, "setting": file.setting}
        if file.mode is None or file.error:
            text = f"{file.setting} names it: {file.error or 'there is no such file'}"
            yield finding("secret_missing", subject, text, **parts)
        elif file.mode & _OTHERS:
            text = f"{file.setting} names it; its mode is {file.mode:04o}, allowed is 0600"
            yield finding("secret_readable", subject, text, **parts)
