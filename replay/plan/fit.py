"""`python -m replay.plan.fit FILE`: writes the speeds of the latencies on standard input."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from replay.plan.speeds import Capacity, SpeedsError, fit


def main() -> int:
    try:
        found = json.loads(sys.stdin.read())
        speeds = fit(
            [(int(size), float(value)) for size, value in found["prompts"]],
            [(int(n), int(tokens), float(value)) for n, tokens, value in found["decodes"]],
            [(int(size), float(value)) for size, value in found.get("pauses", ())],
            Capacity(**found.get("capacity", {})),
        )
        Path(sys.argv[1]).write_text(speeds.to_json())
    except (OSError, ValueError, KeyError, TypeError, SpeedsError) as error:
        sys.stderr.write(f"meshctl plan: {error}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
