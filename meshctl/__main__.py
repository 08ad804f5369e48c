"""`meshctl COMMAND`, also `python -m meshctl COMMAND`."""

from __future__ import annotations

import sys


def main() -> None:
    if sys.argv[1:2] == ["health"] and len(sys.argv) == 3:
        # As container engines run it: without the imports of a command, which take most of its CPU
        # time.
        from meshctl.health_probe import health, is_address

        if is_address(sys.argv[2]):
            sys.exit(health(sys.argv[2]))
    import structlog

    from common.runtime import env
    from meshctl.cli import run_command

    # Standard output carries results only.
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    sys.exit(run_command(sys.argv[1:], env.environ()))


if __name__ == "__main__":
    main()
