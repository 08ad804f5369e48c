"""`python -m meshctl COMMAND`, and the console script `meshctl`."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence


def main() -> None:
    if sys.argv[1:2] == ["health"]:
        # Before the imports of the other commands, which take five times its CPU time.
        from meshctl.commands import health

        sys.exit(health.main(sys.argv[2:]))
    import structlog

    from common.runtime import env

    # Standard output carries results only.
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    sys.exit(run_command(sys.argv[1:], env.environ()))


def run_command(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    """Returns the exit status. Exits 0 for --help, 2 with a message for a bad argument."""
    from meshctl import options
    from meshctl.commands.status import status
    from meshctl.commands.up import up

    match argv:
        case ["up", *flags]:
            return up(options.parse_up(flags, environ), environ)
        case ["status", *flags]:
            config, key, as_json = options.parse_status(flags, environ)
            return status(config, key, as_json=as_json)
        case ["keys", *flags]:
            from meshctl.commands.keys import keys

            return keys(flags, environ)
        case ["doctor", *flags]:
            from meshctl.commands.doctor import run

            return run(flags, environ)
        case ["replay", *flags]:
            from meshctl.commands.replay import replay

            return replay(flags)
        case ["demo", *flags]:
            registry = options.parse_demo(flags)
            # Imported here: it needs the openai package, a development dependency.
            from meshctl.commands.demo import demo

            return demo(registry, environ)
    raise options.command_error(argv)


if __name__ == "__main__":
    main()
