"""`meshctl console`: a link that logs in to the console once."""

from __future__ import annotations

import json
import secrets
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import click

from common.access.login_links import DEFAULT_FOLDER, LINK_S, create_link, read_url
from common.errors import MeshError
from meshctl.options import json_flag
from meshctl.usage import Command

LOGIN_PATH_VARIABLE = "KVMESH_CONSOLE_LOGIN_PATH"
TOKEN_BYTES = 32


@click.command("console", cls=Command, options_metavar="[FLAGS]")
@click.option(
    "--login-path",
    metavar="DIR",
    type=click.Path(path_type=Path),
    help=f"Folder of the console, or {LOGIN_PATH_VARIABLE}; default {DEFAULT_FOLDER}.",
)
@json_flag
@click.pass_obj
def command(environ: Mapping[str, str], login_path: Path | None, as_json: bool) -> int:
    """Prints a link that logs in to the console of this host once, within ten minutes.

    It needs no API key: whoever can write into the folder of the console can log in.
    """
    folder = login_path or Path(environ.get(LOGIN_PATH_VARIABLE) or DEFAULT_FOLDER)
    url = read_url(folder)
    if not url:
        sys.stderr.write(
            f"meshctl console: no console serves {folder}; start one with `meshctl up --consoles 1`"
            " or `python -m console_svc`, in this folder or with the same --login-path\n"
        )
        return 1
    try:
        link = new_link(folder, url)
    except (OSError, MeshError) as error:
        sys.stderr.write(f"meshctl console: {error}\n")
        return 1
    sys.stdout.write(f"{json.dumps({'link': link, 'expires_s': LINK_S}) if as_json else link}\n")
    return 0


def new_link(folder: Path, url: str) -> str:
    """Returns a new link. url: of the console. Raises OSError and PermissionDenied."""
    return create_link(folder, url, secrets.token_urlsafe(TOKEN_BYTES), time.time())
