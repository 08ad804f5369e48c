"""One-time links of a console."""

from __future__ import annotations

from pathlib import Path

import pytest

from common.access import login_links
from common.access.login_links import LINK_S, LINKS_MAX, create_link, redeem
from common.errors import PermissionDenied

URL = "http://127.0.0.1:8070"


def test_a_link_logs_in_once(tmp_path: Path) -> None:
    folder = tmp_path / "console"
    link = create_link(folder, URL, "secret", 1000.0)
    assert link == f"{URL}/login?token=secret"
    assert "secret" not in "".join(path.name for path in folder.iterdir())
    assert not redeem(folder, "other", 1001.0)
    assert redeem(folder, "secret", 1001.0)
    assert not redeem(folder, "secret", 1002.0)


def test_an_old_link_does_not_log_in(tmp_path: Path) -> None:
    create_link(tmp_path / "c", URL, "secret", 1000.0)
    assert not redeem(tmp_path / "c", "secret", 1000.0 + LINK_S + 1)


def test_unused_links_are_bounded_and_old_ones_are_removed(tmp_path: Path) -> None:
    folder = tmp_path / "console"
    for number in range(LINKS_MAX + 5):
        create_link(folder, URL, f"token-{number}", 1000.0 + number)
    assert len(list(folder.glob("*.link"))) == LINKS_MAX
    assert not redeem(folder, "token-0", 1050.0)
    create_link(folder, URL, "new", 1000.0 + 2 * LINK_S)
    assert len(list(folder.glob("*.link"))) == 1


def test_a_folder_into_which_others_can_write_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "console"
    folder.mkdir()
    folder.chmod(0o777)
    with pytest.raises(PermissionDenied, match="chmod 700"):
        create_link(folder, URL, "secret", 1000.0)


def test_a_console_that_was_replaced_leaves_the_address_of_its_successor(tmp_path: Path) -> None:
    login_links.write_url(tmp_path, "http://127.0.0.1:1")
    login_links.write_url(tmp_path, "http://127.0.0.1:2")
    login_links.remove_url(tmp_path, "http://127.0.0.1:1")
    assert login_links.read_url(tmp_path) == "http://127.0.0.1:2"
    login_links.remove_url(tmp_path, "http://127.0.0.1:2")
    assert login_links.read_url(tmp_path) == ""
