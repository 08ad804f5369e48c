"""`python -m meshctl COMMAND`, and the console script `meshctl`."""

from __future__ import annotations

import sys


def main() -> None:
    if sys.argv[1:2] == ["health"]:
        # Before the imports of the other commands, which take five times its CPU time.
        from meshctl.commands import health

        sys.exit(health.main(sys.argv[2:]))
    _run_command()


def _run_command() -> None:
    import structlog

    from common.runtime import env
    from meshctl.commands.status import status
    from meshctl.commands.up import up
    from meshctl.options import (
        DemoOptions,
        KeysOptions,
        ReplayOptions,
        StatusOptions,
        UpOptions,
        parse,
    )

    # Standard output carries results only.
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    environ = env.environ()
    match parse(sys.argv[1:], environ):
        case UpOptions() as options:
            sys.exit(up(options, environ))
        case StatusOptions(config, as_json):
            sys.exit(status(config, as_json=as_json))
        case KeysOptions(flags):
            from meshctl.commands.keys import keys

            sys.exit(keys(flags, environ))
        case ReplayOptions(flags):
            from meshctl.commands.replay import replay

            sys.exit(replay(flags))
        case DemoOptions(registry):
            # Imported here: it needs the openai package, a development dependency.
            from meshctl.commands.demo import demo

            sys.exit(demo(registry, environ))


if __name__ == "__main__":
    main()
