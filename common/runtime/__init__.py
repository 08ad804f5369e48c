"""Process-wide basics: configuration, environment, logs, traces, tasks.

Import it before structlog, which imports rich if it is installed, for tracebacks that no service
writes: a tenth of the time of a start.
"""

import sys

if "structlog" not in sys.modules and "rich" not in sys.modules:
    sys.modules["rich"] = None  # type: ignore[assignment]  # its import fails
    import structlog  # noqa: F401

    del sys.modules["rich"]
