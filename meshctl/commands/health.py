"""`meshctl health ADDRESS`: the health of a gRPC port; for container health checks.

`meshctl/__main__.py` runs `meshctl health HOST:PORT` without this module.
"""

from __future__ import annotations

import json
import sys

import click

from meshctl.health_probe import health, is_address, probe
from meshctl.options import json_flag
from meshctl.usage import Command


def _checked(_ctx: click.Context, param: click.Parameter, text: str) -> str:
    if not is_address(text):
        raise click.BadParameter(f"{text!r}: must be HOST:PORT", param=param)
    return text


@click.command("health", cls=Command, options_metavar="[FLAGS]")
@click.argument("address", callback=_checked, metavar="HOST:PORT")
@click.option("--service", default="", metavar="NAME", help="One service of the port.")
@json_flag
def command(address: str, service: str, as_json: bool) -> int:
    """Requests the health of a gRPC port, and returns 1 if it is not SERVING.

    It sends no token and no certificate: under mutual TLS use the port of `--health-port`.
    """
    if not as_json:
        return health(address, service)
    status, error = probe(address, service)
    result = {"address": address, "status": status, "error": error or None}
    sys.stdout.write(json.dumps(result) + "\n")
    return 0 if status == "SERVING" else 1
