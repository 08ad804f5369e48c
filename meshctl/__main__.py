"""`python -m meshctl COMMAND`, and the console script `meshctl`."""

from __future__ import annotations

import sys

from common import env
from meshctl.options import parse
from meshctl.up import up


def main() -> None:
    """Exits with the command's status."""
    environ = env.environ()
    sys.exit(up(parse(sys.argv[1:], environ), environ))


if __name__ == "__main__":
    main()
