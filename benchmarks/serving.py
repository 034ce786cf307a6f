"""What ``readergroup serve`` costs: a scrape of many segments, and the calls of the store while nothing changes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from statistics import median
from urllib.request import urlopen

import readergroup as rg
from readergroup.serve import app
from readergroup.serve.application import WebView
from synchronizer import open_store
from synchronizer.testing import FailingStore
from tests.readergroup.serve.serving import GROUP, filled, served
from tests.readergroup.serve.test_live import Viewer

from .figure import Figure, Result
from .measuring import wait_for
from .stores import Store

SEGMENTS = 10_000
SCRAPES = 20
#: An idle group is looked at with these numbers of segments: what it costs should not grow with them.
FEW, MANY = 4, 1_000
_SETTLE_SECONDS = 3.0
_WATCHED_SECONDS = 20.0


def serve(store: Store) -> Iterator[Result]:
    """Scrapes of a large group by another process, and the calls of the store for one page, and for scrapes."""
    with store.fresh() as url, filled(url, segments=SEGMENTS, events=2 * SEGMENTS), served(url) as (address, _):
        size, seconds = _scrapes(address)
    yield Figure(
        what=f"a scrape of {SEGMENTS:,} segments",
        value=median(seconds) * 1000,
        unit="ms",
        target=200,
        better="less",
        beside=f"{size / 1e6:.1f} MB; the slowest of {SCRAPES} {max(seconds) * 1000:.0f} ms",
        note="With series for each segment, while samples are taken. The first scrape waits for the first sample.",
    )
    for what, look in (("one open page", _view), ("scrapes", _scrape)):
        few, many = (_calls(store, segments, look) for segments in (FEW, MANY))
        yield Figure(
            what=f"{what} of an idle store: calls of the store for a group of {MANY:,} segments",
            value=many,
            unit="/min",
            better="less",
            beside=f"of {FEW} segments {few:.0f}/min",
        )


def _scrapes(address: str) -> tuple[int, list[float]]:
    wait_for(lambda: _scraped(address).count(b"readergroup_segment_lag_events{") == SEGMENTS, "all segments")
    seconds, size = [], 0
    for _ in range(SCRAPES):
        begin = time.perf_counter()
        size = len(_scraped(address))
        seconds.append(time.perf_counter() - begin)
        time.sleep(1)  # as if scrapes were spread over samples
    return size, seconds


def _scraped(address: str) -> bytes:
    with urlopen(f"{address}metrics", timeout=60) as answer:
        found = answer.read()
    assert isinstance(found, bytes)
    return found


def _calls(store: Store, segments: int, look: Callable[[WebView], Awaitable[None]]) -> float:
    """Return the calls of the store in a minute while someone looks."""
    with store.fresh() as url, filled(url, segments=segments), open_store(url) as opened:
        counted = FailingStore(opened)
        with rg.Client(counted) as client:
            view = app(client)
            calls: list[int] = []

            async def count() -> None:
                looking = asyncio.ensure_future(look(view))
                for seconds in (_SETTLE_SECONDS, _WATCHED_SECONDS):
                    await asyncio.sleep(seconds)
                    calls.append(len(counted.operations))
                looking.cancel()

            asyncio.run(count())
            view.end_streams()
    return (calls[1] - calls[0]) * 60 / _WATCHED_SECONDS


async def _view(view: WebView) -> None:
    viewer = Viewer(view, GROUP)
    await viewer.until(partial(bool, False))


async def _scrape(view: WebView) -> None:
    while True:
        await view._sampler.recent()
        await asyncio.sleep(1)
