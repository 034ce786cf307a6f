"""The live view: server-sent events, and those who look at them."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import urlencode

import pytest

import readergroup as rg
from readergroup.serve import streaming, watching
from readergroup.serve.application import WebView, app
from readergroup.serve.measuring import GroupMeter
from readergroup.serve.sampler import LINGER_SECONDS
from synchronizer import SystemClock, background_errors, open_store
from synchronizer.testing import FailingStore
from tests.readergroup.serve.serving import GROUP, STREAM, filled
from tests.waiting import PATIENCE_SECONDS, until

Found = dict[str, Any]
KEYS = {"segments": "segment", "readers": "reader", "checkpoints": "number", "spans": "span"}


class Viewer:
    """One connection to ``/events``, without a server in between. It reads as fast as it is let."""

    def __init__(self, view: WebView, group: str | None = GROUP) -> None:
        self.status = 0
        self.events: list[tuple[str, Found]] = []
        #: The names of the events as they came.
        self.kinds: list[str] = []
        self.reads = asyncio.Event()
        self.reads.set()
        self._leaves = asyncio.Event()
        self._arrived = asyncio.Event()
        query = urlencode({"group": group}) if group else ""
        scope = {
            "type": "http",
            "method": "GET",
            "path": "/events",
            "query_string": query.encode(),
            "headers": [(b"host", b"localhost")],
            "scheme": "http",
        }
        self.task = asyncio.ensure_future(view(scope, self._receive, self._send))

    async def _receive(self) -> Found:
        await self._leaves.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Found) -> None:
        await self.reads.wait()
        if message["type"] == "http.response.start":
            self.status = message["status"]
        for part in message.get("body", b"").decode().split("\n\n"):
            if part.startswith("event: "):
                name, _, data = part.removeprefix("event: ").partition("\ndata: ")
                found = json.loads(data)
                self.kinds.append(name)
                if name == "changes":
                    name, found = "group", applied(self.newest(), found)
                self.events.append((name, found))
        self._arrived.set()

    async def until(self, condition: Callable[[], object]) -> None:
        async with asyncio.timeout(PATIENCE_SECONDS):
            while not condition():
                self._arrived.clear()
                await self._arrived.wait()

    def newest(self) -> Found:
        return next((data for name, data in reversed(self.events) if name == "group"), {})

    def notices(self) -> list[str]:
        return [data["text"] for name, data in self.events if name == "notice"]

    async def leave(self) -> None:
        self._leaves.set()
        await self.task


def applied(document: Found, changes: Found) -> Found:
    """The document after the changes, as the page makes it."""
    after = document | changes
    for name, key in KEYS.items():
        if isinstance(after[name], dict):
            fields = {row[key]: row for row in after[name]["changed"]}
            rows = [row | fields.get(row[key], {}) for row in document[name] if row[key] not in after[name]["gone"]]
            for index, row in after[name]["added"]:
                rows.insert(index, row)
            after[name] = rows
    points = after["points"] - document["points"]
    curves = {row["segment"]: row["curve"] for row in document["segments"]}
    for number, row in enumerate(after["segments"]):
        if row["curve"] and row["curve"] is curves.get(row["segment"]):
            curve = [*row["curve"], *row.pop("added", [row["curve"][-1]] * points)][-120:]
            after["segments"][number] = row | {"curve": curve}
    return after


def run(client: rg.Client, test: Callable[[WebView], Awaitable[None]], **options: Any) -> WebView:
    view = app(client, **options)
    asyncio.run(test(view))  # type: ignore[arg-type]
    view.end_streams()
    return view


@pytest.mark.stores
def test_a_split_by_another_client_shows_with_its_segments_and_owners(shared_store_url: str) -> None:
    async def test(view: WebView) -> None:
        viewer = Viewer(view)
        await viewer.until(lambda: viewer.newest())
        assert viewer.newest()["number_of_segments"] == 4
        with rg.connect(shared_store_url) as other:
            await asyncio.to_thread(other.streams.scale, STREAM, split=[0])
            await viewer.until(lambda: viewer.newest()["number_of_segments"] == 5)
            await viewer.until(lambda: "segments: 5 to read" in viewer.notices())
            reader = await asyncio.to_thread(other.groups.get(GROUP).reader, "r1")
            await viewer.until(lambda: any(span["owner"] == "r1" for span in viewer.newest()["spans"]))
            await viewer.until(lambda: any("r1 joined" in text for text in viewer.notices()))
            (row,) = viewer.newest()["readers"]
            assert row["reader"] == "r1" and not row["expired"]
            await asyncio.to_thread(reader.close)
            await viewer.until(lambda: any("r1 left" in text for text in viewer.notices()))
        await viewer.leave()

    with filled(shared_store_url) as client:
        run(client, test)


def test_a_silent_reader_shows_an_old_lease(store_url: str) -> None:
    async def test(view: WebView) -> None:
        viewer = Viewer(view)
        await viewer.until(lambda: viewer.newest().get("readers"))
        assert viewer.newest()["readers"][0]["lease_seconds"] is not None
        await viewer.until(lambda: viewer.newest()["readers"][0]["expired"])
        await viewer.leave()

    with filled(store_url) as client:
        group = client.groups.get(GROUP)
        group.configure(reader_timeout_seconds=0.3)
        group.coordinator._threaded = False  # nothing renews it, and nobody removes it
        reader = group.reader("r1")
        run(client, test)
        assert reader.reader_id == "r1"


def test_the_lag_moves_without_a_change_of_the_group(store_url: str) -> None:
    async def test(view: WebView) -> None:
        viewer = Viewer(view)
        await viewer.until(lambda: viewer.newest())
        with client.writer(STREAM) as writer:
            writer.write(b"one more")
        await viewer.until(lambda: viewer.newest()["lag"]["events"] == 101)
        assert sum(each["curve"][-1] for each in viewer.newest()["segments"]) == 101
        await viewer.leave()

    with filled(store_url) as client:
        run(client, test)


def test_viewers_get_what_has_changed_and_make_the_same_of_it(store_url: str) -> None:
    async def test(view: WebView) -> None:
        viewer = Viewer(view)
        await viewer.until(viewer.newest)
        (watch,) = view._watches._watches.values()

        def is_same() -> bool:
            return watch.newest is not None and viewer.newest() == json.loads(watch.newest.whole)

        with client.writer(STREAM) as writer, group.reader("r1") as reader:
            for number in range(3):
                client.streams.scale(STREAM, split=[number])
                writer.write(b"one more", routing_key=str(number))
                writer.flush()
                reader.read_batch(10)
                await viewer.until(lambda: viewer.newest()["points"] > number)  # noqa: B023
                await viewer.until(is_same)
        await viewer.until(lambda: viewer.kinds.count("changes") > 1)  # on a busy machine it may have missed many
        await viewer.until(is_same)
        wholes, parts = viewer.kinds.count("group"), viewer.kinds.count("changes")
        assert watch.newest is not None
        missed = watch.newest.version - wholes - parts
        assert wholes - 1 <= missed  # only after a version that the viewer missed is the next one whole
        await viewer.leave()

    with filled(store_url) as client:
        group = client.groups.get(GROUP)
        run(client, test)


@pytest.mark.parametrize("group", [None, GROUP])
def test_the_first_overview_after_a_break_is_of_a_new_sample(store_url: str, group: str | None) -> None:
    class MovedClock(SystemClock):
        moved = 0.0

        def monotonic(self) -> float:
            return super().monotonic() + self.moved

    async def test(view: WebView) -> None:
        view._sampler.take()
        view._sampler.prepare = lambda _: time.sleep(0.2)  # a sample takes longer than a viewer to arrive
        clock.moved = LINGER_SECONDS + 100
        with client.writer(STREAM) as writer:
            writer.write(b"one more")
        viewer = Viewer(view, group)
        await viewer.until(lambda: "overview" in viewer.kinds)
        overview = next(data for name, data in viewer.events if name == "overview")
        assert [each["lag"]["events"] for each in overview["groups"]] == [101]
        await viewer.leave()

    clock = MovedClock()
    with filled(store_url, clock=clock) as client:
        run(client, test)


def test_decisions_about_scaling_are_shown(store_url: str) -> None:
    async def test(view: WebView) -> None:
        viewer = Viewer(view)
        await viewer.until(lambda: viewer.newest())
        autoscaling = group.autoscale(rg.ReaderScalingPolicy(min_readers=3, max_readers=9))(lambda decision: None)
        await viewer.until(lambda: "autoscaling: 3 readers are wanted" in viewer.notices())
        await viewer.until(lambda: viewer.newest()["wanted_readers"] == 3)
        await asyncio.to_thread(autoscaling.close)
        await viewer.leave()

    with filled(store_url) as client:
        group = client.groups.get(GROUP)
        run(client, test)


def test_a_deleted_group_ends_its_view(store_url: str) -> None:
    async def test(view: WebView) -> None:
        viewer = Viewer(view)
        await viewer.until(lambda: viewer.newest())
        await asyncio.to_thread(client.groups.delete, GROUP)
        await viewer.until(lambda: ("gone", {}) in viewer.events)
        async with asyncio.timeout(PATIENCE_SECONDS):
            await viewer.task
        again = Viewer(view)
        await again.until(lambda: again.status)
        assert again.status == 404

    with filled(store_url) as client:
        run(client, test)


def test_a_group_whose_stream_was_created_again_shows_an_error(store_url: str) -> None:
    async def test(view: WebView) -> None:
        viewer = Viewer(view)
        await viewer.until(lambda: viewer.newest())
        await asyncio.to_thread(client.streams.delete, STREAM)
        await asyncio.to_thread(client.streams.create, STREAM)
        await viewer.until(lambda: "created again" in (viewer.newest()["error"] or ""))
        assert ("gone", {}) not in viewer.events
        await viewer.leave()

    with filled(store_url) as client:
        run(client, test)


def test_a_store_that_is_away_shows_as_an_error_and_then_goes_on() -> None:
    async def test(view: WebView) -> None:
        viewer = Viewer(view)
        await viewer.until(lambda: viewer.newest())
        store.unavailable = True
        await viewer.until(lambda: viewer.newest()["error"])
        await viewer.until(lambda: any(data["error"] for name, data in viewer.events if name == "overview"))
        assert viewer.newest()["lag"]["events"] == 0
        store.unavailable = False
        await viewer.until(lambda: viewer.newest()["error"] is None)
        await viewer.leave()

    store = FailingStore(open_store("memory://"))
    with rg.Client(store, timeout=0.1) as client:
        client.streams.create(STREAM)
        client.groups.create(GROUP, streams=[STREAM])
        run(client, test, sample_interval_seconds=0.05)


def test_viewers_share_one_thread_and_it_ends_after_the_last(store_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(view: WebView) -> None:
        viewers = [Viewer(view) for _ in range(20)]
        for viewer in viewers:
            await viewer.until(viewer.newest)
        assert view._watches.viewers == 20
        (watch,) = view._watches._watches.values()
        assert watch.viewers == 20
        monkeypatch.setattr(watching, "LINGER_SECONDS", 0.0)
        for viewer in viewers:
            await viewer.leave()
        assert (view._watches.viewers, watch.viewers) == (0, 0)
        await asyncio.to_thread(until, lambda: watch.ended)

    with filled(store_url) as client:
        run(client, test)


def test_a_viewer_that_leaves_before_it_looks_keeps_no_group(store_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watching, "LINGER_SECONDS", 0.0)

    async def test(view: WebView) -> None:
        watch = await asyncio.to_thread(view._watches.open, GROUP)
        await asyncio.to_thread(until, lambda: watch.ended)

    with filled(store_url) as client:
        run(client, test)


@pytest.mark.unexpected_errors
def test_an_unexpected_error_ends_neither_samples_nor_live_views(
    store_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed: set[str] = set()

    def fail(meter: GroupMeter) -> None:
        failed.add(threading.current_thread().name)
        raise ZeroDivisionError

    def survived() -> int:
        return sum(background_errors().values())

    async def test(view: WebView) -> None:
        viewer = Viewer(view)
        await viewer.until(viewer.newest)
        before = survived()
        with monkeypatch.context() as broken:
            broken.setattr(GroupMeter, "measure", fail)
            await asyncio.to_thread(until, lambda: len(failed) == 2 and survived() >= before + 2)
        client.streams.scale(STREAM, split=[0])
        await viewer.until(lambda: viewer.newest()["number_of_segments"] == 5)
        samples = view._sampler.samples
        await asyncio.to_thread(until, lambda: view._sampler.samples > samples)
        await viewer.leave()

    with filled(store_url) as client:
        run(client, test, sample_interval_seconds=0.05)


def test_a_viewer_that_does_not_read_holds_up_no_one_and_is_let_go(
    store_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streaming, "SEND_SECONDS", 0.5)

    async def test(view: WebView) -> None:
        stuck, other = Viewer(view), Viewer(view)
        await stuck.until(stuck.newest)
        stuck.reads.clear()
        await other.until(other.newest)
        client.streams.scale(STREAM, split=[0])
        await other.until(lambda: other.newest()["number_of_segments"] == 5)
        async with asyncio.timeout(PATIENCE_SECONDS):
            await stuck.task
        assert view._watches.viewers == 1
        await other.leave()

    with filled(store_url) as client:
        run(client, test)


def test_a_viewer_that_falls_behind_keeps_a_bounded_number_of_notices(store_url: str) -> None:
    async def test(view: WebView) -> None:
        viewer = Viewer(view)
        await viewer.until(viewer.newest)
        viewer.reads.clear()
        (watch,) = view._watches._watches.values()
        for number in range(10_000):
            watch.note(str(number))
        viewer.reads.set()
        await viewer.until(lambda: "9999" in viewer.notices())
        assert len(viewer.notices()) <= watching.KEPT_NOTICES + 10
        await viewer.leave()

    with filled(store_url) as client:
        run(client, test)


def test_beyond_the_limits_viewers_and_groups_are_refused(store_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watching, "MAX_VIEWERS", 3)
    monkeypatch.setattr(watching, "MAX_WATCHED", 1)

    async def test(view: WebView) -> None:
        first = Viewer(view)
        await first.until(first.newest)
        another_group = Viewer(view, "other")
        await another_group.until(lambda: another_group.status)
        assert another_group.status == 503
        viewers = [Viewer(view), Viewer(view, None)]
        for viewer in viewers:
            await viewer.until(lambda: viewer.status)  # noqa: B023
        refused = Viewer(view)
        await refused.until(lambda: refused.status)
        assert refused.status == 503
        await viewers[0].leave()
        admitted = Viewer(view)
        await admitted.until(admitted.newest)
        for viewer in (first, viewers[1], admitted):
            await viewer.leave()

    with filled(store_url) as client:
        client.groups.create("other", streams=[STREAM])
        run(client, test)


def test_the_end_of_the_view_ends_all_streams(store_url: str) -> None:
    async def test(view: WebView) -> None:
        viewers = [Viewer(view), Viewer(view, None)]
        for viewer in viewers:
            await viewer.until(lambda: viewer.events)  # noqa: B023
        view.end_streams()
        async with asyncio.timeout(PATIENCE_SECONDS):
            await asyncio.gather(*(viewer.task for viewer in viewers))

    with filled(store_url) as client:
        run(client, test)
        view = app(client)
    view.end_streams()


def test_a_closed_client_ends_its_views(store_url: str) -> None:
    async def test(view: WebView) -> None:
        viewer = Viewer(view)
        await viewer.until(viewer.newest)
        await asyncio.to_thread(client.close)
        async with asyncio.timeout(PATIENCE_SECONDS):
            await viewer.task

    with filled(store_url) as client:
        run(client, test)
