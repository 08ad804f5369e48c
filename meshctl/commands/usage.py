"""`meshctl usage`: the tokens that clients used, as the sum of all frontends."""

from __future__ import annotations

import asyncio
import json
import re
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime

import click

from common.errors import Unavailable
from common.inspection.gateway import GatewayError, admin_url, new_http_client
from common.inspection.usage import read_usage
from common.usage import (
    COUNTS,
    DAY_S,
    DIMENSIONS,
    HOUR_S,
    Dimension,
    UsageBucket,
    UsageCounts,
    UsageKey,
    UsagePage,
    UsageQuery,
    join,
    total,
)
from meshctl.options import REGISTRY_FLAGS, MeshCommand, MeshConfig, json_flag
from meshctl.view.members import read_members
from meshctl.view.screen import align

# Periods up to this are counted in hours, longer ones in days.
HOURS_MAX_S = 7 * DAY_S
# Most buckets of a page by their width.
_PAGE_LIMITS = {HOUR_S: 168, DAY_S: 31}
_UNITS_S = {"h": HOUR_S, "d": DAY_S}
_NEEDS_KEY = "set OPENAI_API_KEY to a key with the scope admin, or KVMESH_METRICS_KEY"


def _read_since(ctx: click.Context, param: click.Parameter, value: str) -> float:
    """Returns the Unix seconds of `24h` or `7d` before now, or of a date."""
    if match := re.fullmatch(r"([1-9][0-9]{0,3})([hd])", value):
        return time.time() - int(match[1]) * _UNITS_S[match[2]]
    try:
        at = datetime.fromisoformat(value)
    except ValueError:
        message = f"expected 24h, 7d or a date such as 2026-11-01, not {value!r}"
        raise click.BadParameter(message, ctx, param) from None
    return (at if at.tzinfo is not None else at.replace(tzinfo=UTC)).timestamp()


@click.command("usage", cls=MeshCommand, config=MeshConfig, flags=REGISTRY_FLAGS)
@click.option(
    "--since",
    callback=_read_since,
    default="24h",
    metavar="TIME",
    help="Start: 24h or 7d before now, or a date of UTC; default 24h. It is rounded down to the "
    "hour, and to the day if it is more than 7 days ago.",
)
@click.option(
    "--by",
    type=click.Choice(DIMENSIONS),
    multiple=True,
    default=("tenant", "model"),
    help="A row for each tenant, key, model or adapter; repeat it for several. Default: tenant and "
    "model.",
)
@json_flag
@click.pass_obj
def command(
    environ: Mapping[str, str],
    config: MeshConfig,
    since: float,
    by: tuple[Dimension, ...],
    as_json: bool,
) -> int:
    """Shows requests and tokens by tenant, key, model or adapter, as the sum of all frontends.

    With API keys, OPENAI_API_KEY must have the permission `admin`; KVMESH_METRICS_KEY is used for a
    metrics port of its own. The status is 1 if a frontend cannot be read.
    """
    now_s = int(time.time())
    width_s = HOUR_S if now_s - since <= HOURS_MAX_S else DAY_S
    dimensions = tuple(dict.fromkeys(by))
    query = UsageQuery(int(since), now_s + 1, width_s, dimensions, _PAGE_LIMITS[width_s])
    key = config.metrics_key or environ.get("OPENAI_API_KEY")
    report = asyncio.run(gather_usage(config, key, query))
    if as_json:
        sys.stdout.write(json.dumps(report.json_object()) + "\n")
    else:
        sys.stdout.write(report.text())
    for problem in report.problems:
        sys.stderr.write(f"meshctl: {problem}\n")
    return 1 if report.problems else 0


@dataclass(frozen=True, slots=True)
class Report:
    """The use of a mesh. problems: a sentence for each frontend that was not read."""

    by: Sequence[Dimension]
    buckets: Sequence[UsageBucket]
    problems: Sequence[str]

    @property
    def rows(self) -> list[tuple[UsageKey, UsageCounts]]:
        """The sums of the period, the greatest first."""
        sums = total(self.buckets, self.by)
        return sorted(sums.items(), key=lambda row: (-row[1].tokens, row[0]))

    @property
    def total(self) -> UsageCounts:
        return total(self.buckets, ()).get(UsageKey(), UsageCounts())

    @property
    def start(self) -> str | None:
        """Start of the period, after it was rounded; None if no frontend was read."""
        if not self.buckets:
            return None
        return datetime.fromtimestamp(self.buckets[0].start_s, UTC).isoformat()

    def json_object(self) -> dict[str, object]:
        rows = [{name: getattr(key, name) for name in self.by} | asdict(c) for key, c in self.rows]
        return {
            "since": self.start,
            "rows": rows,
            "total": asdict(self.total),
            "problems": list(self.problems),
        }

    def text(self) -> str:
        """Returns the table, or a line if there is none."""
        if not self.rows:
            return "" if self.start is None else f"no requests since {self.start}\n"
        header = [name.upper().removesuffix("_TOKENS") for name in (*self.by, *COUNTS)]
        header[len(self.by) + 1] = "FAILED"
        lines = [header]
        for key, counts in self.rows:
            names = (getattr(key, name) or "-" for name in self.by)
            lines.append([*names, *_cells(counts)])
        if self.by:
            lines.append(["total", *[""] * (len(self.by) - 1), *_cells(self.total)])
        return "".join(f"{line}\n" for line in align(lines)) + f"since {self.start}\n"


def _cells(counts: UsageCounts) -> list[str]:
    return [str(getattr(counts, name)) for name in COUNTS]


async def gather_usage(config: MeshConfig, key: str | None, query: UsageQuery) -> Report:
    """Returns the use of a mesh. Raises Unavailable if no frontend is registered."""
    frontends = (await read_members(config)).of("frontend")
    # The processes of a frontend have one URL.
    urls = sorted({admin_url(frontend) for frontend in frontends if frontend.http_address})
    if not urls:
        raise Unavailable("no frontend is registered; `meshctl status` lists the members")
    found = await asyncio.gather(*(_read_frontend(config, key, url, query) for url in urls))
    pages = [page for result in found if not isinstance(result, str) for page in result]
    problems = [result for result in found if isinstance(result, str)]
    return Report(query.by, join(pages), problems)


async def _read_frontend(
    config: MeshConfig, key: str | None, url: str, query: UsageQuery
) -> Sequence[UsagePage] | str:
    """Returns all pages of a frontend, or why they cannot be read."""
    try:
        async with new_http_client(key, config, url) as http:
            return await read_usage(http, url, query)
    except GatewayError as error:
        cause = _NEEDS_KEY if error.status in (401, 403) else str(error)
        return f"no usage of {url}: {cause}"
