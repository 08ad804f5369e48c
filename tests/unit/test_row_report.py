"""The row report, and the detection of running services on which it relies."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.row_report import Outcomes, Row, judge, read_rows, report_lines

TEXT = """
A mention of S1-04 in prose.
- [ ] S1-01 shown **Here:** under another name.
- [ ] S1-02 a type *(open: no service has it)*  - [ ] **[TRAP]** S1-03 part *(core: not shown)*
- [ ] S1-10 without a test
- [ ] S2-01 a field **Here (refused):** refused by name.  - [ ] S2-02 **Here (other):** a stream.
- [ ] S2-03 a field  - [ ] S2-04 another field
"""


def test_rows_and_classes_are_read_from_list_items() -> None:
    assert read_rows(TEXT) == [
        Row("S1-01", "service", ""),
        Row("S1-02", "open", "no service has it"),
        Row("S1-03", "core", "not shown"),
        Row("S1-10", "service", ""),
        Row("S2-01", "refused", "refused by name."),
        Row("S2-02", "other", "a stream."),
        Row("S2-03", "service", ""),
        Row("S2-04", "service", ""),
    ]
    with pytest.raises(ValueError, match="S1-01"):
        read_rows(TEXT + "- [ ] S1-01 again\n")


PASSED, THROUGH, FAILED = Outcomes(passed=1), Outcomes(1, 1), Outcomes(1, 1, 1)


@pytest.mark.parametrize(
    ("kind", "outcomes", "proof"),
    [
        ("service", THROUGH, "service"),
        ("service", PASSED, "open"),
        ("service", FAILED, "open"),
        ("service", Outcomes(), "open"),
        ("core", PASSED, "core"),
        ("core", Outcomes(), "open"),
        ("core", FAILED, "open"),
        ("other", THROUGH, "other"),
        ("other", PASSED, "open"),
        ("refused", THROUGH, "refused"),
        ("refused", PASSED, "open"),
        ("open", THROUGH, "open"),
    ],
)
def test_a_row_counts_only_by_a_service_or_with_a_reason(
    kind: str, outcomes: Outcomes, proof: str
) -> None:
    row = Row("S1-01", kind, "a reason")  # type: ignore[arg-type]
    assert judge(row, outcomes, ["S1-01"])[0] == proof


@pytest.mark.parametrize(
    ("kind", "planted", "proof"),
    [
        ("service", ["S2-03"], "service"),
        ("service", ["S2-04"], "open"),
        ("core", [], "core"),
        ("other", [], "other"),
        ("refused", [], "refused"),
    ],
)
def test_a_service_proof_counts_only_with_a_planted_defect(
    kind: str, planted: list[str], proof: str
) -> None:
    row = Row("S2-03", kind, "a reason")  # type: ignore[arg-type]
    assert judge(row, THROUGH, planted)[0] == proof


def test_the_report_has_one_line_a_group_and_one_an_open_row() -> None:
    outcomes = {"S1-01": THROUGH, "S1-02": PASSED, "S1-03": PASSED}
    outcomes |= {f"S2-0{number}": THROUGH for number in range(1, 5)}
    assert report_lines(read_rows(TEXT), outcomes, {"S1-01", "S2-03"}) == [
        "S1 2/4 (service 1, core 1, other 0, refused 0, open 2)",
        "   S1-02 open: no service has it",
        "   S1-10 open: no marked test passed",
        "S2 1/4 (service 1, core 0, other 1, refused 1, open 1)",
        "   other: S2-02",
        "   refused: S2-01",
        "   S2-04 open: no planted defect shows that its tests observe its effect",
    ]


SCRIPT = """
import asyncio, http.server, threading
import httpx
from tests.service_traffic import ServiceTraffic

traffic = ServiceTraffic()
traffic.install()
from kvmesh.router.v1 import router_pb2
from tests.kit.local_router import local_router

def seen():
    found = traffic.is_through_service
    traffic.begin()
    return found

server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), http.server.SimpleHTTPRequestHandler)
threading.Thread(target=server.serve_forever, daemon=True).start()
httpx.get(f"http://127.0.0.1:{server.server_port}/", trust_env=False)
print("another server", seen())

async def main():
    async with local_router() as router:
        await router.add_workers(1)
        print("no call", seen())
        await router.unary("Dump", router_pb2.DumpRequest())
        print("a call", seen())

asyncio.run(main())
"""


@pytest.mark.slow
def test_only_calls_to_services_of_the_product_are_detected() -> None:
    environment = {"PYTHONPATH": os.pathsep.join(sys.path), "PATH": os.environ["PATH"]}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    lines = [line for line in done.stdout.splitlines() if line.endswith((" True", " False"))]
    assert lines == ["another server False", "no call False", "a call True"], done.stderr
