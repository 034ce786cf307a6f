"""The page in a real browser, if there is one: Chromium with Playwright."""

from __future__ import annotations

import json
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote
from urllib.request import urlopen

import pytest

import readergroup as rg
from readergroup.serve.documents import changes
from tests.readergroup.serve.serving import GROUP, STREAM, TOKEN, filled, served, set_aside
from tests.waiting import PATIENCE_SECONDS, busyness, until

playwright = pytest.importorskip("playwright.sync_api", reason="no Playwright here: pip install playwright")

#: Where systems have a Chromium of their own. Playwright's own is used otherwise.
PROGRAMS = ("chromium", "chromium-browser", "google-chrome")
DEAD = "shop/orders-dead"
EVIL = "<img src=x onerror=alert(1)>"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    program = next(filter(None, map(shutil.which, PROGRAMS)), None)
    with playwright.sync_playwright() as running:
        try:
            opened = running.chromium.launch(executable_path=program, args=["--no-sandbox"])
        except playwright.Error as error:
            pytest.skip(f"no browser here: {str(error).splitlines()[0]}")
        yield opened
        opened.close()


class Page:
    """A page, and what went wrong in it."""

    def __init__(self, browser: Any, **options: Any) -> None:
        self.context = browser.new_context(**options)
        self.page = self.context.new_page()
        self.page.set_default_timeout(PATIENCE_SECONDS * 1000)
        self.errors: list[str] = []
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("dialog", lambda dialog: self.errors.append(dialog.message))
        self.page.on("console", lambda said: said.type == "error" and self.errors.append(said.text))

    def __enter__(self) -> Page:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.context.close()

    def sees(self, selector: str, text: str) -> None:
        self.page.locator(selector, has_text=text).first.wait_for()


@pytest.fixture
def url(tmp_path: Path) -> str:
    address = f"sqlite:///{tmp_path}/shop.db"
    with filled(address):
        return address


SCALES = f"""
import sys, time, readergroup as rg
with rg.connect(sys.argv[1]) as client:
    print(time.monotonic(), flush=True)
    client.streams.scale({STREAM!r}, split=[0])
"""
READS = f"""
import sys, readergroup as rg
with rg.connect(sys.argv[1]) as client:
    with client.groups.get({GROUP!r}).reader(sys.argv[2]) as reader:
        print("joined", flush=True)
        for event in reader: pass
"""
READER_TIMEOUT_SECONDS = 2.0


def check_shown(what: str, since: float, promised_seconds: float) -> None:
    """Compare the time with what the page promises: three times as much, and more on a machine that is busy."""
    took, slack = time.monotonic() - since, 3 * busyness()
    print(f"{what}: shown after {took:.2f} s, promised within {promised_seconds:g} s, checked {slack:.1f} times that")
    assert took < promised_seconds * slack


def test_the_page_shows_a_split_a_killed_reader_and_a_replay_in_time(url: str, browser: Any) -> None:
    with rg.connect(url) as client:
        client.groups.get(GROUP).configure(reader_timeout_seconds=READER_TIMEOUT_SECONDS)
        set_aside(client, DEAD, 2)
    with ExitStack() as running:
        address, _ = running.enter_context(served(url, "--allow-writes"))
        shown = running.enter_context(Page(browser))
        shown.page.goto(f"{address}#group={GROUP}")
        shown.sees("#segments tbody th", f"{STREAM}/0")
        assert shown.page.locator("#pictures rect").count() == 4

        scaling = running.enter_context(program(SCALES, url))
        since = float(scaling.stdout.readline())
        shown.sees("#segments tbody th", f"{STREAM}/5")
        check_shown("a split", since, 2)
        shown.sees("#notices", "segments: 5 to read")
        shown.sees("#segments tbody td", "waits for 1 predecessor")

        readers = [running.enter_context(program(READS, url, name)) for name in ("first", "second")]
        for reader in readers:
            assert reader.stdout.readline() == "joined\n"
        shown.sees("#readers tbody th", "first")
        shown.sees("#segments tbody td", "second")
        shown.sees("#legend li", "second")
        since = time.monotonic()
        readers[1].send_signal(signal.SIGKILL)
        shown.sees("#notices", "second was declared dead")
        check_shown("a killed reader", since, READER_TIMEOUT_SECONDS + 2)
        shown.page.locator("#readers tbody th", has_text="second").wait_for(state="detached")
        shown.sees("#legend li", "second")  # the picture keeps the past
        until(lambda: shown.page.locator("#segments tbody td", has_text="first").count() == 5)

        shown.page.get_by_role("button", name=DEAD).click()
        letters = shown.page.locator("#letters tbody tr")
        until(lambda: letters.count() == 2)
        replayed = letters.first.get_attribute("data-key")
        letters.first.get_by_role("button", name="Replay").click()
        shown.page.get_by_role("dialog", name=f"Replay the dead letter {replayed}?").wait_for()
        assert letters.count() == 2
        shown.page.locator("#confirm-do").click()
        until(lambda: letters.count() == 1)
        assert letters.first.get_attribute("data-key") != replayed
        with rg.connect(url) as client:
            (left,) = client.dead_letters(DEAD).list()
            assert str(left.pointer) != replayed
        shown.sees("#letter-streams tbody td", "1")
        assert shown.errors == []


@contextmanager
def program(text: str, *arguments: str) -> Iterator[Any]:
    """A program in a process of its own, killed at the end."""
    with subprocess.Popen([sys.executable, "-c", text, *arguments], stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def test_the_page_goes_on_after_its_group_is_deleted(url: str, browser: Any) -> None:
    with served(url, "--interval", "0.2") as (address, _), Page(browser) as shown, rg.connect(url) as client:
        client.groups.create("other", streams=[STREAM])
        shown.page.goto(f"{address}#group={GROUP}")
        shown.sees("#segments tbody th", f"{STREAM}/0")
        client.groups.delete(GROUP)
        shown.sees("#group-error", "This group was deleted.")
        shown.page.locator("#groups tbody th", has_text=GROUP).wait_for(state="detached")
        shown.sees("#groups tbody th", "other")
        client.groups.create(GROUP, streams=[STREAM])
        shown.page.locator("#group-error").wait_for(state="hidden")
        shown.sees("#segments tbody th", f"{STREAM}/0")
        assert shown.errors == []


def test_whatever_a_store_holds_is_shown_as_text(url: str, browser: Any) -> None:
    """Names are checked when they are made, but a store may be written by other means."""
    with served(url, "--allow-writes") as (address, _), Page(browser) as shown:
        with urlopen(f"{address}groups/{GROUP}", timeout=PATIENCE_SECONDS) as answer:
            group = json.load(answer)
        group = {
            **hostile(group),
            "wanted_readers": None,
            "spans": [{**hostile(each), "owner": EVIL} for each in group["spans"]],
        }
        group["is_weighed"] = True
        group["retries"] = {"waiting": 1e300, "is_partial": True, "next_at": -1e300}
        group["segments"][0] |= {"load": EVIL, "events": 1e300, "bytes": 1e300, "seconds": 1e300}
        group["readers"] = [{"reader": EVIL, "segments": 1, "lease_seconds": 1.0, "expired": False}]
        group["checkpoints"] = [{"number": 1, "name": EVIL, "is": EVIL}]
        overview = {
            "groups": [group],
            "groups_left_out": 0,
            "states": [{"name": EVIL, "bytes": 1, "has_updates": True}],
            "states_left_out": 0,
            "unreadable": [{"group": EVIL, "error": EVIL}],
            "dead_letters": [{"stream": EVIL, "pending": 1, "is_partial": False}],
        }
        events = {"overview": {**overview, "error": EVIL}, "group": group, "notice": {"at": 1.0, "text": EVIL}}
        body = "".join(f"event: {name}\ndata: {json.dumps(data)}\n\n" for name, data in events.items())
        shown.page.route("**/events?*", lambda route: route.fulfill(content_type="text/event-stream", body=body))
        letter = dict.fromkeys(("letter", "key", "stream", "event", "error", "data"), EVIL)
        letter |= {"at": 1.0, "attempts": 1, "bytes": 1, "is_text": True, "status": "pending", "headers": {EVIL: EVIL}}
        page = {"stream": EVIL, "older": EVIL, "letters": [letter]}
        shown.page.route("**/dead-letters?*", lambda route: route.fulfill(json=page))
        shown.page.goto(f"{address}#group={quote(EVIL)}")
        for place in (
            "#groups tbody th",
            "#states tbody th",
            "#notices li",
            "#segments tbody th",
            "#segments tbody td",
        ):
            shown.sees(place, EVIL)
        shown.sees("#summary", "events or more wait for a retry, the next in 0 s")
        shown.sees("#segments tbody td.load", "NaN")
        for place in ("#readers tbody th", "#checkpoints tbody th", "#legend li", "figcaption", "#group-title"):
            shown.sees(place, EVIL)
        shown.page.get_by_role("button", name="Remove").click()
        shown.sees("#confirm-title", EVIL)
        shown.page.keyboard.press("Escape")
        shown.page.locator("#letter-streams").get_by_role("button", name=EVIL).click()
        shown.page.locator("#letters summary").click()
        for place in ("#letters-of", "#letters tbody th ~ td", "#letters dt", "#letters dd", "#letters pre"):
            shown.sees(place, EVIL)
        shown.page.get_by_role("button", name="Discard the dead letter").click()
        shown.sees("#confirm-title", EVIL)
        shown.page.keyboard.press("Escape")
        update = dict.fromkeys(("revision", "writer", "update", "fields"), EVIL)
        state = {"name": EVIL, "known": "1", "type": EVIL, "fields": {EVIL: EVIL}, "updates": [update]}
        state |= {"is_unchanged": False, "entries_since": 1, "earlier": 1}
        shown.page.route("**/states?*", lambda route: route.fulfill(json=state))
        shown.page.locator("#states").get_by_role("button", name=EVIL).press("Enter")
        for place in ("#state-of", "#state-fields dt", "#state-fields dd", "#state-updates th", "#state-updates td"):
            shown.sees(place, EVIL)
        assert shown.page.locator("img").count() == 0
        assert shown.errors == []


def hostile(found: Any) -> Any:
    """The same with markup in place of every text."""
    match found:
        case str():
            return f"{EVIL}/1"
        case list():
            return [hostile(each) for each in found]
        case dict():
            return {key: EVIL if key == "group" else hostile(each) for key, each in found.items()}
    return found


def test_the_page_makes_the_next_document_of_the_changes(url: str, browser: Any) -> None:
    rng, steps = random.Random(7), []
    documents = [document_of(rng, 0)]
    for number in range(1, 200):
        documents.append(document_of(rng, number, documents[-1]))
        steps.append(changes(documents[-2], documents[-1]))
    with served(url) as (address, _), Page(browser) as shown:
        shown.page.goto(f"{address}#group={GROUP}")
        made = shown.page.evaluate(
            "([known, steps]) => steps.map((step) => known = changed(known, step))", [documents[0], steps]
        )
        assert made == documents[1:]
        assert sum(len(json.dumps(step)) for step in steps) < sum(len(json.dumps(each)) for each in documents) / 2
        assert shown.errors == []


def document_of(rng: random.Random, number: int, before: dict[str, Any] | None = None) -> dict[str, Any]:
    """A document of a group, or the next one, in which some rows have changed, come or gone."""
    points = before["points"] + rng.choice((0, 1, 1, 1, 2, 130, -3)) if before else 0
    document: dict[str, Any] = {
        "group": GROUP,
        "at": float(number),
        "points": points,
        "error": rng.choice((None, "no")),
    }
    for name, key in (("segments", "segment"), ("readers", "reader"), ("checkpoints", "number"), ("spans", "span")):
        rows = {row[key]: row for row in before[name]} if before else {}
        kept = {each: row for each, row in rows.items() if rng.random() < 0.95}
        added = {each: {key: each, "is": rng.random()} for each in rng.choices(range(1000), k=rng.choice((0, 0, 3)))}
        order = sorted(kept | added) if rng.random() < 0.95 else rng.sample([*(kept | added)], len(kept | added))
        document[name] = [dict((kept | added)[each]) for each in order]
        for row in document[name]:
            if rng.random() < 0.2:
                row["is"] = rng.random()
            if name == "segments":
                last = row["is"] if rng.random() < 0.3 else row.get("curve", [0])[-1:]
                row["curve"] = curve_of(rng, row.get("curve", [0] * 5), points - (before or document)["points"], last)
    return document


def curve_of(rng: random.Random, before: list[Any], added: int, last: Any) -> list[Any]:
    if rng.random() < 0.05:
        return []
    new = [last] * added if isinstance(last, float) else [*last] * added
    return [*before, *new][-120:]


def test_logging_in_and_confirming_a_change_work_with_the_keyboard(url: str, browser: Any) -> None:
    with served(url, "--allow-writes", token=TOKEN) as (address, _), Page(browser) as shown:
        page = shown.page
        page.goto(f"{address}#group={GROUP}")
        page.locator("#token").wait_for()
        page.keyboard.type("wrong")
        page.keyboard.press("Enter")
        shown.sees("#login-error", "the token is wrong")
        page.locator("#token").fill(TOKEN)
        page.keyboard.press("Enter")
        shown.sees("#segments tbody th", f"{STREAM}/0")

        reset = page.get_by_role("button", name="Reset to tail")
        reset.focus()
        page.keyboard.press("Enter")
        page.get_by_role("dialog", name=f"Reset {GROUP} to tail?").wait_for()
        page.keyboard.press("Escape")
        page.locator("#confirm").wait_for(state="hidden")
        assert reset.evaluate("element => element === document.activeElement")
        page.keyboard.press("Enter")
        page.get_by_role("button", name="Reset", exact=True).press("Enter")
        shown.sees("#notices", "changed here: reset to tail")
        shown.sees("#summary", "0 events behind")

        page.get_by_role("button", name="Take a checkpoint").click()
        page.get_by_label("Name").fill("from-the-page")
        page.get_by_role("button", name="Take it").click()
        shown.sees("#checkpoints tbody th", "from-the-page")
        page.get_by_role("button", name="Split").first.click()
        page.locator("#confirm-do").click()
        shown.sees("#segments tbody th", f"{STREAM}/4")
        page.get_by_role("button", name="Log out").click()
        page.locator("#token").wait_for()
        assert [error for error in shown.errors if "401" not in error] == []


def test_dead_letters_are_listed_replayed_and_discarded_with_the_keyboard(url: str, browser: Any) -> None:
    with rg.connect(url) as client:
        set_aside(client, DEAD, 28)
    with served(url, "--allow-writes") as (address, _), Page(browser) as shown:
        page, rows = shown.page, shown.page.locator("#letters tbody tr")
        page.goto(address)
        opened = page.get_by_role("button", name=DEAD)
        opened.focus()
        page.keyboard.press("Enter")
        assert page.locator("#letters-of").evaluate("element => element === document.activeElement")
        until(lambda: rows.count() == 25)
        assert page.locator("#letters-newest").is_disabled()
        assert page.locator("#letters").evaluate(
            "table => table.offsetWidth <= table.closest('.scroll').clientWidth"
        ), "the buttons can be seen without scrolling"
        page.get_by_role("button", name="Older").press("Enter")
        until(lambda: rows.count() == 3)
        page.get_by_role("button", name="Newest").press("Enter")
        until(lambda: rows.count() == 25)
        page.locator("#letters summary").first.press("Enter")
        shown.sees("#letters pre", "order")

        page.get_by_role("button", name="Discard the dead letter").first.press("Enter")
        page.get_by_role("dialog", name="Discard the dead letter").wait_for()
        page.keyboard.press("Escape")
        with rg.connect(url) as client:
            assert len(list(client.dead_letters(DEAD).list())) == 28
        page.get_by_role("button", name="Replay the dead letter").first.press("Enter")
        page.locator("#confirm-do").press("Enter")
        shown.sees("#letters-said", "replayed 1 dead letter")
        page.get_by_label("Text in the error").fill("odd")
        page.keyboard.press("Enter")
        until(lambda: 0 < rows.count() < 25)
        page.get_by_role("button", name="Discard these").press("Enter")
        shown.sees("#confirm-text", "with “odd” in their error")
        page.locator("#confirm-do").press("Enter")
        shown.sees("#letters-said", "discarded 1")
        with rg.connect(url) as client:
            left = list(client.dead_letters(DEAD).list())
        assert {each.letter.error for each in left} == {"KeyError: 'even'"}
        shown.sees("#letter-streams tbody td", str(len(left)))
        page.get_by_label("Text in the error").fill("no such error")
        page.get_by_role("button", name="Show", exact=True).press("Enter")
        shown.sees("#letters-said", "No dead letter is like this.")
        assert page.get_by_role("button", name="Replay these").is_disabled()
        assert shown.errors == []


def test_without_the_right_to_write_dead_letters_have_no_buttons(url: str, browser: Any) -> None:
    with rg.connect(url) as client:
        set_aside(client, DEAD, 2)
    with served(url) as (address, _), Page(browser) as shown:
        shown.page.goto(address)
        shown.page.get_by_role("button", name=DEAD).click()
        shown.sees("#letters tbody td", "shop/orders")
        assert shown.page.get_by_role("button", name="Replay").count() == 0
        assert shown.page.get_by_role("button", name="Discard").count() == 0
        assert shown.errors == []


@pytest.mark.parametrize("width", [360, 390, 1280])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_fits_phones_and_desks_in_both_colours(url: str, browser: Any, scheme: str, width: int) -> None:
    """The rows of tables are cards on a phone. They stay rows and cells for screen readers, with all columns."""
    name, error = "readergroup-readers-7c9d6b5f4-x2kqz", "ValueError: " + "a long reason " * 10
    with rg.connect(url) as client:
        client.groups.get(GROUP).configure(balance="load")
        client.groups.get(GROUP).checkpoint("before-the-release-of-the-north-region", timeout=PATIENCE_SECONDS)
        set_aside(client, DEAD, 2, error=error)
    options = {"viewport": {"width": width, "height": 844}, "color_scheme": scheme}
    with (
        program(READS, url, name) as reader,
        served(url, "--allow-writes") as (address, _),
        Page(browser, **options) as shown,
    ):
        assert reader.stdout.readline() == "joined\n"
        page = shown.page
        page.goto(f"{address}#group={GROUP}")
        shown.sees("#segments tbody td", name)
        page.get_by_role("button", name=DEAD).press("Enter")
        shown.sees("#letters tbody td", error.strip())
        assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
        wide = page.evaluate(
            "[...document.querySelectorAll('.scroll')].filter(each => each.scrollWidth > each.clientWidth)"
            ".map(each => each.querySelector('table').id)"
        )
        assert {*wide} <= (set() if width < 1000 else {"checkpoints", "letters"})
        dark = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (dark == "rgb(255, 255, 255)") == (scheme == "light")

        segments = page.get_by_role("region", name="Segments").get_by_role("table")
        rows = segments.get_by_role("row")
        assert rows.count() == 1 + 4
        assert rows.nth(1).get_by_role("rowheader", name=f"{STREAM}/0").count() == 1
        titles = segments.get_by_role("columnheader").all_inner_texts()
        assert titles == ["segment", "reader", "is", "events behind", "size", "seconds", "load"] + [
            "trend" for _ in range(width > 1000)
        ] + ["change"]
        assert rows.nth(1).get_by_role("cell").count() == len(titles) - 1
        segments.get_by_role("button", name="Split").first.press("Enter")
        page.get_by_role("dialog", name=f"Split {STREAM}/0?").wait_for()
        assert shown.errors == []
