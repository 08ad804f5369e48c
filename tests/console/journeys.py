"""What an operator does with the console, in a browser. Each journey raises AssertionError."""

from __future__ import annotations

import os
import re
import signal
import time
import uuid
from dataclasses import dataclass
from pathlib import Path

from playwright.sync_api import Page, expect

from tests.console.browser import Chromium, Visitor
from tests.console.mesh import ConsoleMesh, wait_for

PAGES = (
    ("overview", "/", "Overview"),
    ("requests", "/requests", "Requests"),
    ("index", "/index", "KV index"),
    ("tenants", "/tenants", "Tenants"),
    ("usage", "/usage", "Usage"),
    ("batches", "/batches", "Batches"),
    ("models", "/models", "Models"),
    ("keys", "/keys", "API keys"),
    ("playground", "/playground", "Playground"),
    ("replay", "/replay", "Replay"),
)
# Pages that show data under load.
FILLED = {"overview", "requests", "index", "tenants", "usage", "models", "keys"}
FOUND_S = 30.0
DIES_S = 30.0
RETURNS_S = 60.0
REVOKED_S = 10.0
LARGE_OPEN_S = 8.0


@dataclass
class Visit:
    """What a journey has at hand."""

    chromium: Chromium
    mesh: ConsoleMesh
    out: Path

    def shot(self, name: str) -> Path:
        return self.out / f"{name}.png"


def no_faults(visitor: Visitor) -> None:
    assert not visitor.faults, "; ".join(visitor.faults[:5])


def every_page_in_light_and_dark(visit: Visit) -> None:
    """Each page shows data, has no error and no foreign request, and satisfies axe."""
    found: list[str] = []
    for scheme in ("light", "dark"):
        with visit.chromium.visitor(visit.mesh.url, scheme=scheme) as visitor:
            visitor.log_in(visit.mesh.operator_key)
            for name, path, heading in PAGES:
                visitor.open(path, heading)
                if name in FILLED:
                    expect(visitor.page.locator("main td").first).to_be_visible()
                # Sleep: pictures are drawn after the first message.
                time.sleep(1.0)
                visitor.shoot(visit.shot(f"{name}-{scheme}"))
                found += [f"{name} {scheme}: {f}" for f in visitor.accessibility_faults()]
            found += [f"{scheme}: {fault}" for fault in visitor.faults]
    assert not found, "\n".join(found)


def find_a_request_its_waterfall_and_why_its_worker(visit: Visit) -> None:
    """The request just sent is found by its id; the link is drawn, the chosen worker stands out."""
    id_ = f"journey-{uuid.uuid4()}"
    status, _ = visit.mesh.chat(
        "Explain the handoff of KV blocks. " * 30, max_tokens=32, request_id=id_
    )
    assert status == 200
    with visit.chromium.visitor(visit.mesh.url) as visitor:
        visitor.log_in(visit.mesh.operator_key)
        page = visitor.page
        visitor.open("/requests", "Requests")
        _find_request(page, id_)
        visitor.page.get_by_role("heading", level=1, name="Request").wait_for()
        expect(page.get_by_text(id_, exact=True)).to_be_visible()
        chart = page.locator("section[aria-label=Waterfall] svg")
        expect(chart).to_be_visible()
        expect(chart.get_by_text("KV handoff")).to_be_visible()
        links = page.get_by_text(re.compile(r"decode on \S+ follows prefill on \S+"))
        expect(links.first).to_be_visible()
        why = page.locator("section[aria-label='Why this worker']")
        expect(why.get_by_text(re.compile(r"Prefill: candidates")).first).to_be_visible()
        assert why.locator("tr.kv-chosen").count() >= 2
        expect(why.get_by_text("Predicted against actual", exact=False)).to_be_visible()
        visitor.shoot(visit.shot("request-light"))
        page.emulate_media(color_scheme="dark")
        # Sleep: the theme follows the system.
        time.sleep(0.5)
        visitor.shoot(visit.shot("request-dark"))
        assert not visitor.accessibility_faults(), "; ".join(visitor.accessibility_faults())
        no_faults(visitor)


def find_a_request_that_is_not_sampled(visit: Visit) -> None:
    """Its timing and the reasons for its workers are shown, from the record of its frontend."""
    id_ = f"unsampled-{uuid.uuid4()}"
    traceparent = f"00-{uuid.uuid4().hex}-00f067aa0ba902b7-00"
    status, _ = visit.mesh.chat(
        "Explain the record of a request. " * 30,
        max_tokens=32,
        request_id=id_,
        traceparent=traceparent,
    )
    assert status == 200
    with visit.chromium.visitor(visit.mesh.url) as visitor:
        visitor.log_in(visit.mesh.operator_key)
        page = visitor.page
        visitor.open("/requests", "Requests")
        _find_request(page, id_)
        page.get_by_role("heading", level=1, name="Request").wait_for()
        expect(page.get_by_text("This request was not sampled", exact=False)).to_be_visible()
        chart = page.locator("section[aria-label=Waterfall] svg")
        expect(chart.get_by_text("prefill", exact=False).first).to_be_visible()
        why = page.locator("section[aria-label='Why this worker']")
        expect(why.get_by_text(re.compile(r"Prefill: candidates")).first).to_be_visible()
        assert why.locator("tr.kv-chosen").count() >= 2
        visitor.shoot(visit.shot("request-unsampled-light"))
        no_faults(visitor)


def _find_request(page: Page, id_: str) -> None:
    """Searches until the console has the request."""
    found = re.compile(r"/requests/.+")
    deadline = time.monotonic() + FOUND_S
    while time.monotonic() < deadline:
        page.get_by_label("Find by id").fill(id_)
        page.keyboard.press("Enter")
        # Either the page of the request opens, or a notice states that it is not here yet.
        page.wait_for_function(
            "() => location.pathname.startsWith('/requests/') ||"
            " [...document.querySelectorAll('main .kv-notice')].some((n) => n.checkVisibility())"
        )
        if found.search(page.url):
            return
        # Sleep: the console reads the spans each second.
        time.sleep(1.0)
        if found.search(page.url):
            return
    raise AssertionError(f"the console does not find the request {id_}")


def watch_a_worker_die_and_return(visit: Visit) -> None:
    """A killed worker leaves the list or shows its state, and returns under the same name."""
    (name, pid), *_ = sorted(visit.mesh.workers("decode").items())
    with visit.chromium.visitor(visit.mesh.url) as visitor:
        visitor.log_in(visit.mesh.operator_key)
        page = visitor.page
        visitor.open("/", "Overview")
        members = page.get_by_role("group", name="Members", exact=True)
        row = members.locator("tr").filter(has_text=name)
        expect(row.get_by_text("serving")).to_be_visible()
        os.kill(pid, signal.SIGKILL)
        events = page.get_by_role("group", name="Changes of members")
        changes = events.locator("tr").filter(has_text=name)
        wait_for(f"{name} is seen to die", lambda: changes.count() > 0, DIES_S)
        visitor.shoot(visit.shot("worker-died"))
        returned = changes.filter(has_text=re.compile("joined|serving"))
        wait_for(f"{name} is seen to return", lambda: returned.count() > 0, RETURNS_S)
        expect(row.get_by_text("serving").first).to_be_visible(timeout=RETURNS_S * 1000)
        visitor.shoot(visit.shot("worker-returned"))
        row.get_by_role("link", name=name).click()
        page.get_by_role("heading", level=1, name=name).wait_for()
        # Sleep: pictures are drawn after the first message.
        time.sleep(1.0)
        visitor.shoot(visit.shot("member-light"))
        no_faults(visitor)


def revoke_a_key(visit: Visit) -> None:
    """The key of a client is refused after its row's button and the confirmation."""
    mesh = visit.mesh
    key = mesh.create_key("leaver")
    (key_id,) = mesh.key_ids("leaver")
    wait_for(
        "the new key works", lambda: mesh.chat("Hi", key=key, max_tokens=2)[0] == 200, REVOKED_S
    )
    with visit.chromium.visitor(mesh.url) as visitor:
        visitor.log_in(mesh.operator_key)
        page = visitor.page
        visitor.open("/keys", "API keys")
        page.get_by_label("Filter").fill("leaver")
        page.get_by_role("button", name=f"Revoke {key_id}").click()
        dialog = page.get_by_role("dialog")
        expect(dialog).to_be_visible()
        # Sleep: the dialog fades in.
        time.sleep(0.5)
        visitor.shoot(visit.shot("keys-revoke"))
        dialog.get_by_role("button", name="Revoke the key").click()
        expect(page.get_by_text(f"{key_id} of leaver is revoked")).to_be_visible()
        wait_for("the key is refused", lambda: mesh.chat("Hi", key=key)[0] == 401, REVOKED_S)
        assert mesh.key_ids("leaver") == []
        no_faults(visitor)


def log_in_and_navigate_with_the_keyboard(visit: Visit) -> None:
    """Without a mouse: log in, skip to the content, change the page, order a table, open a row."""
    with visit.chromium.visitor(visit.mesh.url) as visitor:
        page = visitor.page
        page.goto("/")
        page.wait_for_url(re.compile("/login"))
        visitor.shoot(visit.shot("login-light"))
        page.keyboard.type(visit.mesh.operator_key)
        page.keyboard.press("Enter")
        page.get_by_role("heading", level=1, name="Overview").wait_for()
        page.keyboard.press("Tab")
        assert _focused(page) == "Skip to the content", _focused(page)
        page.keyboard.press("Enter")
        assert page.evaluate("() => document.activeElement.id") == "main"
        visitor.open("/", "Overview")
        _tab_to(page, "Requests")
        visitor.shoot(visit.shot("focus-light"))
        page.keyboard.press("Enter")
        page.get_by_role("heading", level=1, name="Requests").wait_for()
        expect(page.locator("main td a").first).to_be_visible()
        _tab_to(page, "Total")
        page.keyboard.press("Enter")
        heading = page.get_by_role("columnheader", name="Total")
        expect(heading).to_have_attribute("aria-sort", "ascending")
        for _ in range(40):
            page.keyboard.press("Tab")
            if page.evaluate(
                "() => (document.activeElement.getAttribute('href') || '').startsWith('/requests/')"
            ):
                break
        page.keyboard.press("Enter")
        page.get_by_role("heading", level=1, name="Request").wait_for()
        no_faults(visitor)


def _focused(page: Page) -> str:
    text: str = page.evaluate("() => (document.activeElement.innerText || '').trim()")
    return text


def _tab_to(page: Page, name: str, limit: int = 60) -> None:
    """Presses Tab until the element of this text has the focus, and checks that it is visible."""
    for _ in range(limit):
        page.keyboard.press("Tab")
        if _focused(page) == name:
            style = page.evaluate("() => getComputedStyle(document.activeElement).outlineStyle")
            assert style != "none", f"the focus on {name} is not visible"
            return
    raise AssertionError(f"{name} is not reached with {limit} tabs")


def chat_in_the_playground(visit: Visit) -> None:
    """A chat is streamed; tokens, timing and placement follow, and lead to the request."""
    with visit.chromium.visitor(visit.mesh.url) as visitor:
        visitor.log_in(visit.mesh.operator_key)
        page = visitor.page
        visitor.open("/playground", "Playground")
        page.get_by_label("API key").fill(visit.mesh.keys["acme"])
        page.get_by_label("Message").fill("Say something about caches.")
        page.get_by_role("button", name="Send", exact=True).click()
        served = page.locator("section[aria-label='How it was served']")
        expect(served).to_be_visible()
        why = served.get_by_role("link", name="waterfall and candidates")
        expect(why).to_be_visible(timeout=30_000)
        visitor.shoot(visit.shot("playground-served-light"))
        page.emulate_media(color_scheme="dark")
        # Sleep: the theme follows the system.
        time.sleep(0.5)
        visitor.shoot(visit.shot("playground-served-dark"))
        why.click()
        page.get_by_role("heading", level=1, name="Request").wait_for()
        no_faults(visitor)


def compare_policies_on_a_trace(visit: Visit) -> None:
    """A replay shows its figures as a table and pictures."""
    with visit.chromium.visitor(visit.mesh.url) as visitor:
        visitor.log_in(visit.mesh.operator_key)
        page = visitor.page
        visitor.open("/replay", "Replay")
        page.get_by_label("Requests, at most").fill("120")
        page.get_by_role("button", name="Run", exact=True).click()
        results = page.get_by_role("group", name="Results by policy")
        expect(results.locator("td").first).to_be_visible(timeout=90_000)
        # Sleep: pictures are drawn after the first message.
        time.sleep(1.0)
        visitor.shoot(visit.shot("replay-done-light"))
        no_faults(visitor)


def change_the_theme_and_sign_out(visit: Visit) -> None:
    """The chosen theme stays after a new page; after a sign-out every page needs a login."""
    with visit.chromium.visitor(visit.mesh.url) as visitor:
        visitor.log_in(visit.mesh.operator_key)
        page = visitor.page
        visitor.open("/", "Overview")
        for _ in range(2):
            page.get_by_role("button", name="Theme").click()
        expect(page.get_by_role("button", name="Theme: dark")).to_be_visible()
        visitor.open("/models", "Models")
        expect(page.locator("body.body--dark")).to_be_visible()
        page.get_by_role("button", name="Sign out").click()
        page.goto("/requests")
        page.wait_for_url(re.compile("/login"))


JOURNEYS = (
    every_page_in_light_and_dark,
    find_a_request_its_waterfall_and_why_its_worker,
    find_a_request_that_is_not_sampled,
    watch_a_worker_die_and_return,
    revoke_a_key,
    log_in_and_navigate_with_the_keyboard,
    chat_in_the_playground,
    compare_policies_on_a_trace,
    change_the_theme_and_sign_out,
)


def look_at_a_thousand_workers(chromium: Chromium, url: str, out: Path) -> None:
    """Pages of a large mesh open in seconds, and stay small."""
    with chromium.visitor(url) as visitor:
        for name, path, heading in PAGES[:3]:
            begun = time.monotonic()
            visitor.open(path, heading)
            expect(visitor.page.locator("main td").first).to_be_visible()
            took_s = time.monotonic() - begun
            assert took_s < LARGE_OPEN_S, f"{name}: {took_s:.1f} s"
            # Sleep: pictures are drawn after the first message.
            time.sleep(2.0)
            nodes = visitor.page.evaluate("() => document.querySelectorAll('*').length")
            assert nodes < 8_000, f"{name}: {nodes} elements"
            visitor.shoot(out / f"large-{name}-light.png")
        no_faults(visitor)
