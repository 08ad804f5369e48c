"""Checks deploy/kubernetes without a cluster: `make k8s-check`.

    python -m tests.kubernetes [--no-run] [OVERLAY ...]

Renders each overlay with kustomize, and checks it by the schemas of three releases of Kubernetes,
by schemas of the custom resources, by security policies, and beside the code of the services
(`semantics.py`). Then it runs the pods of two overlays as processes (`run.py`, `gateway.py`). The
last line is JSON:

    passed, failed, skipped   names of checks; failed and skipped ones with the reason
    run                       figures of the run

The exit status is 1 if a check failed. A missing program is a failure with the install command.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

from tests.kubernetes import external, gateway, run
from tests.kubernetes.manifests import COMBINED, OVERLAYS, Manifests, copy_with_secrets, render
from tests.kubernetes.semantics import CHECKS

NOT_RUN: Final = {
    "cluster": "no API server, kubelet or network plugin can be installed here: scheduling,"
    " volumes, probes of a kubelet and the enforcement of network policies are not run",
    "autoscalers": "KEDA and the Prometheus operator need a cluster: schemas and queries are"
    " checked",
    "sglang": "needs GPUs: settings and manifests are checked",
    "images": "make compose-test builds and runs them",
}


@dataclass(slots=True)
class Report:
    """What the checks have found."""

    passed: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)

    def check(self, name: str, find_problems: Callable[[], list[str]]) -> None:
        """Runs a check, which returns problems."""
        try:
            problems = find_problems()
        except Exception as error:
            # A check that cannot be done is a failure.
            problems = [f"{type(error).__name__}: {error}"]
        if problems:
            self.failed[name] = "; ".join(problems)[-4000:]
            print(f"{name}: {self.failed[name]}", file=sys.stderr, flush=True)
        else:
            self.passed.append(name)


def check_overlay(report: Report, manifests: Manifests, folder: Path) -> None:
    """Checks the objects of an overlay."""
    name = manifests.name
    for check, find_problems in CHECKS.items():
        report.check(f"{name}/{check}", partial(find_problems, manifests))
    for release in external.RELEASES:
        report.check(
            f"{name}/schema/{release}",
            partial(external.schema_problems, manifests, release, folder),
        )
    report.check(f"{name}/schema/custom", lambda: external.resource_problems(manifests))


def main() -> int:
    """Runs the checks; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.kubernetes",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    known = (*OVERLAYS, *COMBINED)
    parser.add_argument("overlays", nargs="*", metavar="OVERLAY", help=", ".join(known))
    parser.add_argument("--no-run", action="store_true", help="do not run the pods as processes")
    options = parser.parse_args()
    if unknown := set(options.overlays) - set(known):
        parser.error(f"no such overlay: {', '.join(sorted(unknown))}")
    report, rendered = Report(), dict[str, Manifests]()
    # Any: figures by name.
    figures: dict[str, Any] = {}
    with TemporaryDirectory(prefix="kvmesh-k8s-") as name:
        folder = Path(name)
        kubernetes = copy_with_secrets(folder)

        def rendered_problems(overlay: str) -> list[str]:
            rendered[overlay] = render(kubernetes, overlay)
            return []

        for overlay in options.overlays or known:
            report.check(f"{overlay}/render", partial(rendered_problems, overlay))
            if overlay in rendered:
                check_overlay(report, rendered[overlay], folder)
        report.check("policies", lambda: external.policy_problems(rendered.values(), folder))
        if not options.no_run and run.OVERLAY in rendered:
            figures = run.check_run(report.check, rendered[run.OVERLAY], folder / "run")
        if not options.no_run and gateway.OVERLAY in rendered:
            gateway.check_run(report.check, rendered[gateway.OVERLAY], folder / "gateway-run")
    policies = {f"policy/{name}": reason for name, reason in external.EXEMPT.items()}
    skipped = NOT_RUN | policies
    if options.no_run:
        skipped["run"] = "--no-run"
    summary = {"passed": report.passed, "failed": report.failed, "skipped": skipped}
    print(json.dumps(summary | {"run": figures}), flush=True)
    return 1 if report.failed else 0


if __name__ == "__main__":
    sys.exit(main())
