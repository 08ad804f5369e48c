"""`python -m frontend_svc`: runs a frontend."""

from __future__ import annotations

import sys
from functools import partial
from typing import NoReturn

from common.runtime import env
from common.runtime.config import read_config_or_exit
from common.service.base import serve
from frontend_svc.app import FrontendApp
from frontend_svc.config import FrontendConfig
from frontend_svc.processes.parent import run_processes
from frontend_svc.processes.siblings import Siblings


def main() -> NoReturn:
    config, warnings = read_config_or_exit(FrontendConfig, "FRONTEND", env.environ(), sys.argv[1:])

    def serve_process(process_config: FrontendConfig, siblings: Siblings) -> NoReturn:
        build = partial(FrontendApp, siblings=siblings)
        serve("frontend", process_config, build, warnings if siblings.slot == 0 else ())

    if config.processes > 1:
        run_processes(config, serve_process)
    serve("frontend", config, FrontendApp, warnings)


if __name__ == "__main__":
    main()
