"""Notifications of lag: thresholds with hysteresis, segments that stall, and who hears what."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

import readergroup as rg
import readergroup.aio
from notifications import OBSERVATION, PRESENT_VALUE
from readergroup.cli.watching import words
from readergroup.group.lag import GroupLag, Movement, SegmentLag
from readergroup.group.lag_notifier import LagThresholds
from readergroup.streams.config import SegmentId
from synchronizer import ManualClock
from tests.waiting import until

STREAM = "shop/orders"
FIRST = SegmentId(f"{STREAM}/0")


def lag(seconds: float = 0.0, events: int = 0, *, offset: int = 0, unmoved: float = 0.0) -> GroupLag:
    segment = SegmentLag(
        owner="r1", offset=offset, bytes=10 * events, events=events, seconds=seconds, unmoved_seconds=unmoved
    )
    return GroupLag(segments={FIRST: segment})


# ---------------------------------------------------------------------- pure


@pytest.mark.parametrize(
    ("thresholds", "lags", "levels"),
    [
        (LagThresholds(60, None, None), [(60, 0), (61, 0), (31, 0), (30, 0), (31, 0), (61, 0)], "-++--+"),
        (LagThresholds(None, 100, None), [(999, 100), (0, 101), (0, 51), (0, 50), (0, 99)], "-++--"),
        (LagThresholds(60, 100, None), [(61, 0), (10, 60), (10, 50), (0, 101), (40, 0), (0, 0)], "++-++-"),
    ],
)
def test_a_level_rises_above_a_threshold_and_falls_at_half_of_each(
    thresholds: LagThresholds, lags: list[tuple[float, int]], levels: str
) -> None:
    behind, found = False, ""
    for seconds, events in lags:
        behind = thresholds.level(lag(seconds, events), was_behind=behind).behind
        found += "+" if behind else "-"
    assert found == levels


def test_a_segment_is_unmoved_while_events_wait_and_its_position_stays() -> None:
    movement = Movement()

    def unmoved(now: float, events: int, offset: int) -> float:
        return movement.added_to(lag(events=events, offset=offset), now).segments[FIRST].unmoved_seconds

    assert [
        unmoved(0, 5, 10),
        unmoved(40, 7, 10),
        unmoved(50, 6, 20),
        unmoved(90, 6, 20),
        unmoved(95, 0, 80),
        unmoved(200, 4, 80),
        unmoved(201, 4, 80),
    ] == [0, 40, 0, 40, 0, 0, 1]
    assert movement.added_to(lag(events=4, offset=80), 260).segments[FIRST].stalled
    assert movement.added_to(GroupLag(segments={}), 300) == GroupLag(segments={})
    assert unmoved(400, 4, 80) == 0


@pytest.mark.parametrize(
    "arguments",
    [
        {"threshold_seconds": None, "stalled_seconds": None},
        {"threshold_seconds": 0},
        {"threshold_seconds": float("nan")},
        {"threshold_seconds": True},
        {"threshold_events": 0},
        {"threshold_events": 1.5},
        {"stalled_seconds": -1},
        {"stalled_seconds": "60"},
    ],
)
def test_wrong_thresholds_are_refused(client: rg.Client, arguments: dict[str, object]) -> None:
    group = client.groups.create("g", streams=[STREAM])
    with pytest.raises(rg.InvalidArgumentError):
        group.lag_notifier(**arguments)  # type: ignore[arg-type]


# ---------------------------------------------------------------------- of a group


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def client(store_url: str, clock: ManualClock) -> Iterator[rg.Client]:
    with rg.connect(store_url, clock=clock) as client:
        client.streams.create(STREAM)
        yield client


def write(client: rg.Client, count: int) -> None:
    with client.writer(STREAM) as writer:
        for _ in range(count):
            writer.write(b"an event")


@pytest.mark.stores
def test_a_group_that_falls_behind_and_catches_up_is_told_once_each(client: rg.Client, clock: ManualClock) -> None:
    group = client.groups.create("g", streams=[STREAM])
    notifier = group.lag_notifier(threshold_seconds=30, threshold_events=None, stalled_seconds=None)
    assert notifier is group.lag_notifier(threshold_seconds=30, stalled_seconds=None)
    heard: list[rg.LagNotification] = []
    notifier.register_listener(heard.append)
    for seconds in (0, 20, 20, 20):
        clock.advance(seconds)
        write(client, 10)
        notifier.poll()
    with group.reader() as reader:
        for _ in range(40):
            reader.read(timeout=0)
        reader.commit()
        notifier.poll()
    assert [(each.behind, each.events, each.seconds) for each in heard] == [
        (False, 10, 0),
        (True, 30, 40),
        (False, 0, 0),
    ]
    assert len({each.key for each in heard}) == 3 and heard[1].cause == OBSERVATION
    late: list[rg.LagNotification] = []
    notifier.register_listener(late.append)
    assert [(each.behind, each.cause) for each in late] == [(False, PRESENT_VALUE)]


def test_a_stalled_segment_is_told_with_its_reader(client: rg.Client, clock: ManualClock) -> None:
    group = client.groups.create("g", streams=[STREAM], reader_timeout_seconds=1000)
    notifier = group.lag_notifier(threshold_seconds=None, stalled_seconds=60)
    heard: list[rg.LagNotification] = []
    notifier.register_listener(heard.append)
    write(client, 10)
    with group.reader("slow") as reader:
        assert reader.read() is not None
        for _ in range(4):
            notifier.poll()
            clock.advance(25)
        assert group.lag().segments[FIRST].stalled
        assert group.lag().stalled == {FIRST: "slow"}
        assert [dict(each.stalled) for each in heard] == [{}, {FIRST: "slow"}]
        assert words(heard[1]).endswith("shop/orders/0 stalls at slow")
        reader.read()
        reader.commit()
        notifier.poll()
    assert [dict(each.stalled) for each in heard[2:]] == [{}]
    group_of_nobody = client.groups.create("nobody", streams=[STREAM])
    other = group_of_nobody.lag_notifier(threshold_seconds=None, stalled_seconds=60)
    other.register_listener(heard.append)
    other.poll()
    clock.advance(60)
    other.poll()
    assert dict(heard[-1].stalled) == {FIRST: None}


def test_a_level_that_was_measured_long_ago_is_not_the_present_one(client: rg.Client, clock: ManualClock) -> None:
    group = client.groups.create("g", streams=[STREAM])
    notifier = group.lag_notifier(threshold_events=5)
    heard: list[rg.LagNotification] = []
    notifier.register_listener(heard.append)
    notifier.poll()
    notifier.unregister_all_listeners()
    write(client, 10)
    clock.advance(30)
    heard.clear()
    notifier.register_listener(heard.append)
    assert heard == []
    notifier.poll()
    assert [each.behind for each in heard] == [True]
    notifier.unregister_all_listeners()
    clock.advance(30)
    notifier.register_listener(heard.append)
    notifier.poll()
    assert [each.behind for each in heard] == [True, True], "a level that stays was not told anew"
    assert notifier.wait(timeout=0).behind


def test_a_lag_has_no_durable_listeners(client: rg.Client) -> None:
    group = client.groups.create("g", streams=[STREAM])
    with pytest.raises(rg.InvalidArgumentError, match="cannot be durable"):
        group.lag_notifier().register_listener(print, durable="mine")


def test_a_deleted_group_has_no_lag(client: rg.Client) -> None:
    group = client.groups.create("g", streams=[STREAM])
    write(client, 10)
    notifier = group.lag_notifier(threshold_events=5)
    heard: list[rg.LagNotification] = []
    notifier.register_listener(heard.append)
    notifier.poll()
    client.groups.delete("g")
    notifier.poll()
    assert [each.behind for each in heard] == [True]


def test_a_group_whose_stream_was_created_again_has_no_level(client: rg.Client) -> None:
    group = client.groups.create("g", streams=[STREAM])
    notifier = group.lag_notifier(threshold_events=5)
    heard: list[rg.LagNotification] = []
    notifier.register_listener(heard.append)
    client.streams.delete(STREAM)
    client.streams.create(STREAM)
    client.streams.create("shop/other")
    write(client, 10)
    with pytest.raises(rg.NotFoundError, match="created again"):
        notifier.poll()
    assert heard == []
    group.configure(streams=["shop/other"])
    group.configure(streams=[STREAM])
    notifier.poll()
    assert [each.behind for each in heard] == [True]


def test_the_step_of_a_client_measures_the_lag(client: rg.Client, clock: ManualClock) -> None:
    group = client.groups.create("g", streams=[STREAM])
    heard: list[rg.LagNotification] = []
    group.lag_notifier(threshold_events=5).register_listener(heard.append)
    write(client, 10)
    assert client.step() <= clock.monotonic() + 2
    assert [each.behind for each in heard] == [True]


def test_a_lag_is_measured_in_the_background(store_url: str) -> None:
    with rg.connect(store_url) as client:
        client.streams.create(STREAM)
        group = client.groups.create("g", streams=[STREAM])
        heard: list[bool] = []
        group.lag_notifier(threshold_events=5).register_listener(lambda each: heard.append(each.behind))
        until(lambda: heard == [False])
        write(client, 10)
        until(lambda: heard == [False, True])
    with pytest.raises(rg.ClosedError):
        group.lag_notifier()


def test_a_task_iterates_over_the_notifications_of_a_lag(store_url: str) -> None:
    async def run() -> list[bool]:
        async with readergroup.aio.connect(store_url) as client:
            await client.streams.create(STREAM)
            group = await client.groups.create("g", streams=[STREAM])
            heard = []
            async for notification in group.lag_notifier(threshold_events=5):
                heard.append(notification.behind)
                if notification.behind:
                    return heard
                async with client.writer(STREAM) as writer:
                    for _ in range(10):
                        await writer.write(b"an event")
        raise AssertionError

    assert asyncio.run(asyncio.wait_for(run(), 120)) == [False, True]
