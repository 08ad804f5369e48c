"""The documentation: `python -m tools.docs reference | check | site`.

- reference: writes the pages that are generated from the code.
- check: links of all pages, and whether the generated pages are those of the code.
- site: the same, then builds the site with Sphinx and checks it. Its last line is
  {"passed", "failed", "skipped"}; links to other servers are listed, not fetched: skipped.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Final

from tools.docs.links import LinkReport, check_links
from tools.docs.references.pages import PAGES, stale_pages, write_pages
from tools.docs.site import check_site
from tools.style.sources import ROOT, tracked_files

SITE: Final = Path("build/site")
DOCTREES: Final = Path("build/doctrees")
EXTERNAL: Final = Path("build/external-links.txt")


def pages() -> list[Path]:
    """Returns the tracked pages; the links of a template are those of the page made of it."""
    names = tracked_files("*.md")
    return [ROOT / name for name in names if not name.endswith(".template.md")]


def check() -> tuple[LinkReport, list[str]]:
    """Returns the report on the links of all pages, and what is stale."""
    return check_links(ROOT, pages()), stale_pages(ROOT)


def build() -> list[str]:
    """Builds the site. Returns its warnings, each of which is a failure.

    Runs Sphinx of the environment `.venv-docs`.
    """
    for folder in (SITE, DOCTREES):
        shutil.rmtree(ROOT / folder, ignore_errors=True)
    sphinx = [str(ROOT / ".venv-docs/bin/python"), "-m", "sphinx", "-q", "-n", "-b", "html"]
    folders = ["-c", "docs", "-d", str(DOCTREES), ".", str(SITE)]
    done = subprocess.run(
        [*sphinx, *folders], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if done.returncode:
        return [f"Sphinx ended with status {done.returncode}:\n{done.stderr}"]
    return [line for line in done.stderr.splitlines() if line.strip()]


def build_and_check() -> bool:
    """Builds the site and prints what is wrong, then the summary. Returns whether all passed."""
    sources, stale = check()
    warnings = build()
    built = check_site(ROOT / SITE)
    external = sorted(set(sources.external))
    (ROOT / EXTERNAL).write_text("".join(f"{page}\t{target}\n" for page, target in external))
    failures = [*sources.dead, *stale, *warnings, *built.dead]
    checked = sources.checked + built.checked
    built_pages = len(list((ROOT / SITE).rglob("*.html")))
    print("\n".join([*failures, f"{built_pages} pages in {SITE}, external links in {EXTERNAL}"]))
    failed = len(failures)
    passed = checked + len(PAGES) - len(sources.dead) - len(built.dead) - len(stale)
    print(json.dumps({"passed": passed, "failed": failed, "skipped": len(external)}))
    return not failed


def main(arguments: Sequence[str]) -> int:
    """Returns the exit status."""
    match arguments:
        case ["reference"]:
            write_pages(ROOT)
            return 0
        case ["check"]:
            sources, stale = check()
            return _report([*sources.dead, *stale], f"documentation: {sources.checked} links")
        case ["site"]:
            return 0 if build_and_check() else 1
    print(__doc__, file=sys.stderr)
    return 2


def _report(failures: Collection[str], verdict: str) -> int:
    print("\n".join(failures) or verdict)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
