"""The page of ``readergroup serve`` in Chromium: what an update costs the browser."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection
from statistics import median
from typing import Any, Final, NamedTuple

import readergroup as rg
from tests.readergroup.serve.serving import GROUP, STREAM, served

from .figure import Figure, Result, Skipped
from .measuring import PAYLOAD, SPAWN, process, receive
from .stores import Store

#: A group of more than 200 segments has tables only, else it has a picture and curves too.
LARGE, DRAWN, READERS = 500, 200, 100
UPDATES = 100
#: Those before are not measured.
_FIRST = 10
_PROGRAMS: Final = ("chromium", "chromium-browser", "google-chrome")

#: Measures each update until its frame is drawn.
_WATCH: Final = """
    window.measured = {scripts: [], frames: []};
    const show = window.showGroup;
    window.showGroup = (found) => {
        const began = performance.now();
        show(found);
        measured.scripts.push(performance.now() - began);
        const drawn = new MessageChannel();
        drawn.port1.onmessage = () => measured.frames.push(performance.now() - began);
        requestAnimationFrame(() => drawn.port2.postMessage(null));
    };
    null;
"""


class Seen(NamedTuple):
    """What the page did for each update, in milliseconds and bytes, and what the tab has at the end."""

    frames: Sequence[float]
    scripts: Sequence[float]
    processor: float
    sizes: Sequence[int]
    first_size: int
    heap: int
    elements: int


def browse(store: Store) -> Iterator[Result]:
    """The live view in Chromium of a large group, and of one with a picture, while all segments change."""
    try:
        from playwright.sync_api import Error, sync_playwright
    except ImportError:
        yield Skipped("the page in Chromium", "no Playwright here: pip install playwright")
        return
    with sync_playwright() as running:
        program = next(filter(None, map(shutil.which, _PROGRAMS)), None)
        try:
            browser = running.chromium.launch(executable_path=program, args=["--no-sandbox"])
        except Error as error:
            yield Skipped("the page in Chromium", f"no browser here: {str(error).splitlines()[0]}")
            return
        for segments in (LARGE, DRAWN):
            with _working(store, segments) as url, served(url) as (address, _):
                yield from _figures(f"page of {segments} segments and {READERS} readers", _look(browser, address))


def _figures(what: str, seen: Seen) -> Iterator[Result]:
    yield Figure(
        what=f"{what}: an update, by processor time of the browser's main thread",
        value=seen.processor,
        unit="ms",
        target=50,
        better="less",
        beside=f"its script {median(seen.scripts):.1f} ms; until its frame is drawn {median(seen.frames):.0f} ms, "
        f"the slowest of {len(seen.frames)} {max(seen.frames):.0f} ms",
        note="The store, its writer, 100 readers, `serve` and the browser share the two cores.",
    )
    yield Figure(
        what=f"{what}: an update",
        value=median(seen.sizes) / 1000,
        unit="kB",
        better="less",
        beside=f"the first one {seen.first_size / 1000:.0f} kB",
    )
    yield Figure(
        what=f"{what}: memory of the page's objects after {UPDATES} updates",
        value=seen.heap / 1e6,
        unit="MB",
        better="less",
        beside=f"{seen.elements:,} nodes",
    )


def _look(browser: Any, address: str) -> Seen:
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    sizes: list[int] = []
    tools = page.context.new_cdp_session(page)
    tools.on(
        "Network.eventSourceMessageReceived",
        lambda event: event["eventName"] in ("group", "changes") and sizes.append(len(event["data"])),
    )
    tools.send("Network.enable")
    tools.send("Performance.enable", {"timeDomain": "threadTicks"})
    page.goto(f"{address}#group={GROUP}")
    page.locator("#segments tbody tr").first.wait_for()
    page.evaluate(_WATCH)
    before = _after(page, tools, _FIRST)
    after = _after(page, tools, _FIRST + UPDATES)
    tools.send("HeapProfiler.collectGarbage")
    end = _metrics(tools)
    measured = page.evaluate("measured")
    page.close()
    return Seen(
        frames=measured["frames"][_FIRST:],
        scripts=measured["scripts"][_FIRST:],
        processor=(after["TaskDuration"] - before["TaskDuration"]) * 1000 / UPDATES,
        sizes=sizes[-UPDATES:],
        first_size=sizes[0],
        heap=int(end["JSHeapUsedSize"]),
        elements=int(end["Nodes"]),
    )


def _after(page: Any, tools: Any, updates: int) -> dict[str, float]:
    """Wait until so many updates were drawn, and return the metrics then."""
    while page.evaluate("measured.frames.length") < updates:
        page.wait_for_timeout(200)
    return _metrics(tools)


def _metrics(tools: Any) -> dict[str, float]:
    return {each["name"]: each["value"] for each in tools.send("Performance.getMetrics")["metrics"]}


@contextmanager
def _working(store: Store, segments: int) -> Iterator[str]:
    """A store with a group that works, in another process."""
    with ExitStack() as running:
        url = running.enter_context(store.fresh())
        client = running.enter_context(rg.connect(url))
        client.streams.create(STREAM, scaling=rg.ScalingPolicy.fixed(segments))
        client.groups.create(GROUP, streams=[STREAM])
        ours, theirs = SPAWN.Pipe()
        running.enter_context(process(_work, client, theirs))
        receive(ours, "the readers")
        yield url


def _work(client: rg.Client, pipe: Connection) -> None:
    """Write to all segments, and read from some of them."""
    group = client.groups.get(GROUP)
    readers = [group.reader(f"reader-{number:03}") for number in range(READERS)]
    number = 0
    with client.writer(STREAM) as writer:
        while True:
            for _ in range(200):
                number += 1
                writer.write(PAYLOAD, routing_key=f"customer-{number}")
            writer.flush()
            for reader in readers[number // 200 % 10 :: 10]:
                reader.read_batch(20, timeout=0)
            if number == 2000:
                pipe.send(None)
            pipe.poll(0.1)
