"""Retention policies on real stores: what is deleted, what is kept for groups, and which process does it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from contextlib import closing
from datetime import timedelta

import pytest

import readergroup as rg
from readergroup.streams.retention import applying
from readergroup.streams.retention.applying import REGISTRY
from readergroup.streams.routing import key_position
from synchronizer import AttributeChange, Deadline, ManualClock, SegmentInfo, open_store
from synchronizer.testing import FailingStore, Operation
from tests.waiting import until

STREAM = "shop/orders"
DAY = timedelta(days=1)


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def client(store_url: str, clock: ManualClock) -> Iterator[rg.Client]:
    with rg.connect(store_url, clock=clock) as client:
        yield client


def write(client: rg.Client, first: int, end: int, *, size: int = 1000) -> None:
    """Write numbered events, each with its key, in small blocks."""
    with client.writer(STREAM) as writer:
        for number in range(first, end):
            writer.write(f"{number:06}".encode().ljust(size), routing_key=f"key-{number % 10}")
            if number % 10 == 9:
                writer.flush()


def left(client: rg.Client) -> list[int]:
    """The numbers of the events that are readable, whole blocks, in order."""
    return sorted(
        int(event.data)
        for segment_range in client.batch.segment_ranges(STREAM)
        for event in client.batch.read(segment_range)
    )


def stored_bytes(client: rg.Client) -> int:
    report = client.streams.retain(STREAM, dry_run=True)
    return report.kept_bytes + report.deleted_bytes


@pytest.mark.stores
def test_events_are_deleted_when_they_are_old(client: rg.Client, clock: ManualClock) -> None:
    policy = rg.RetentionPolicy(max_age=7 * DAY)
    client.streams.create(STREAM, scaling=rg.ScalingPolicy.fixed(2), retention=policy)
    for day in range(10):
        write(client, day * 20, day * 20 + 20)
        client.streams.retain(STREAM)
        clock.advance(86_400)
    assert left(client) == list(range(60, 200))
    clock.advance(86_400 * 4.5)
    report = client.streams.retain(STREAM)
    assert report.reason == "max_age" and report.policy == policy
    assert left(client) == list(range(160, 200))
    clock.advance(86_400 * 30)
    client.streams.retain(STREAM)
    assert left(client) == []
    write(client, 200, 220)
    assert left(client) == list(range(200, 220))


@pytest.mark.stores(round_robin=True)
def test_a_new_policy_finds_the_age_of_events_that_are_there(client: rg.Client, clock: ManualClock) -> None:
    client.streams.create(STREAM, scaling=rg.ScalingPolicy.fixed(2))
    for day in range(10):
        if day == 5:
            client.streams.scale(STREAM, split=[0])
        write(client, day * 20, day * 20 + 20)
        clock.advance(86_400)
    client.streams.configure(STREAM, retention=rg.RetentionPolicy(max_age=3 * DAY))
    before = client.streams.retain(STREAM, dry_run=True)
    assert before.reason == "max_age" and left(client) == list(range(200))
    assert client.streams.retain(STREAM) == before
    assert left(client) == list(range(140, 200))
    assert client.streams.retain(STREAM).reason is None


@pytest.mark.stores
def test_the_oldest_events_are_deleted_when_there_are_too_many(client: rg.Client) -> None:
    client.streams.create(STREAM, scaling=rg.ScalingPolicy.fixed(2), retention=rg.RetentionPolicy(max_bytes=50_000))
    for first in range(0, 200, 10):
        write(client, first, first + 10)
        client.streams.retain(STREAM)
        assert stored_bytes(client) <= 50_000
    numbers = left(client)
    assert numbers == list(range(numbers[0], 200)) and 30 <= len(numbers) <= 60


def test_a_policy_asks_for_the_length_of_each_segment_once(client: rg.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when it looks for a cut inside a gap of the history, and deletes the data before it."""
    client.streams.create(STREAM, scaling=rg.ScalingPolicy.fixed(4))
    write(client, 0, 300)
    client.streams.configure(STREAM, retention=rg.RetentionPolicy(max_bytes=50_000))
    asked, ask = Counter[str](), client.store.infos

    def count(segments: Collection[str]) -> Mapping[str, SegmentInfo]:
        asked.update(segments)
        return ask(segments)

    monkeypatch.setattr(client.store, "infos", count)
    deadline = Deadline(client.clock, 30.0)
    client.streams.retention.apply(client.streams.metadata.existing(STREAM, deadline).state, deadline)
    monkeypatch.undo()
    assert 0 < len(left(client)) < 100
    assert len(asked) == 4 and set(asked.values()) == {1}, asked


@pytest.mark.stores(round_robin=True)
def test_a_new_policy_deletes_no_more_than_its_size_requires(client: rg.Client) -> None:
    client.streams.create(STREAM)
    write(client, 0, 100)
    client.streams.scale(STREAM, split=[0])
    write(client, 100, 200)
    client.streams.configure(STREAM, retention=rg.RetentionPolicy(max_bytes=50_000))
    report = client.streams.retain(STREAM)
    assert report.reason == "max_bytes"
    assert 40_000 <= report.kept_bytes <= 50_000
    assert len([number for number in left(client) if number >= 100]) >= 40


@pytest.mark.stores
def test_a_limit_among_events_older_than_those_of_a_replaced_segment_deletes_no_more_than_it_requires(
    client: rg.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client.streams.retention, "step", lambda: float("inf"))  # only this thread applies the policy
    policy = rg.RetentionPolicy(max_bytes=40_000)
    client.streams.create(STREAM, scaling=rg.ScalingPolicy.fixed(2), retention=policy)
    keys = [f"key-{number}" for number in range(20)]
    low, high = ([key for key in keys if (key_position(key) < 0.5) is is_low] for is_low in (True, False))
    with client.writer(STREAM) as writer:
        for number in range(45):
            writer.write(b"x" * 1000, routing_key=high[0] if number < 30 else low[0])
            writer.flush()
            if number == 29:
                client.streams.retain(STREAM)
    client.streams.scale(STREAM, split=[0])
    assert client.streams.retain(STREAM).reason == "max_bytes"
    assert 37_000 < stored_bytes(client) <= 40_000


def test_without_a_policy_nothing_is_deleted(client: rg.Client, clock: ManualClock) -> None:
    client.streams.create(STREAM, retention=rg.RetentionPolicy(max_age=DAY))
    write(client, 0, 20)
    client.streams.configure(STREAM, retention="none")
    clock.advance(86_400 * 3)
    with pytest.raises(rg.InvalidArgumentError, match="no retention policy"):
        client.streams.retain(STREAM)
    client.streams.retention.due = 0.0
    client.streams.retention.step()
    assert left(client) == list(range(20))
    assert client.streams.retention.streams() == [], "a stream without a policy is looked at for ever"


def test_a_change_of_the_segments_keeps_the_policy(client: rg.Client) -> None:
    policy = rg.RetentionPolicy(max_age=DAY)
    client.streams.create(STREAM, retention=policy)
    info = client.streams.configure(STREAM, scaling=rg.ScalingPolicy.fixed(3))
    assert (info.config.scaling.segments, info.config.retention) == (3, policy)
    info = client.streams.configure(STREAM, retention=rg.RetentionPolicy(max_bytes=5))
    assert (info.config.scaling.segments, info.config.retention) == (3, rg.RetentionPolicy(max_bytes=5))
    for wrong in (7, "nothing", {"max_bytes": 5}):
        with pytest.raises(rg.InvalidArgumentError, match="retention"):
            client.streams.configure(STREAM, retention=wrong)  # type: ignore[arg-type]
        with pytest.raises(rg.InvalidArgumentError, match="retention"):
            client.streams.create("shop/other", retention=wrong)  # type: ignore[arg-type]
    with pytest.raises(rg.InvalidArgumentError, match="pass scaling, retention or tags"):
        client.streams.configure(STREAM)


def test_the_events_of_a_sealed_stream_are_deleted_too(client: rg.Client, clock: ManualClock) -> None:
    client.streams.create(STREAM, retention=rg.RetentionPolicy(max_age=DAY))
    write(client, 0, 20)
    client.streams.seal(STREAM)
    client.streams.configure(STREAM, retention=rg.RetentionPolicy(max_age=2 * DAY))
    client.streams.retain(STREAM)
    clock.advance(3 * 86_400)
    client.streams.retain(STREAM)
    assert left(client) == []
    group = client.groups.create("late", streams=[STREAM])
    with group.reader() as reader:
        assert list(reader) == []


def test_a_copy_keeps_all_events(client: rg.Client) -> None:
    client.streams.create(STREAM, retention=rg.RetentionPolicy(max_age=DAY))
    write(client, 0, 20)
    info = client.streams.copy(STREAM, "shop/archive")
    assert info.config.retention is None


def test_a_stream_that_is_created_again_begins_anew(client: rg.Client, clock: ManualClock) -> None:
    for _ in range(2):
        client.streams.create(STREAM, retention=rg.RetentionPolicy(max_bytes=50_000))
        write(client, 0, 100)
        client.streams.retain(STREAM)
        assert 40 <= len(left(client)) <= 50
        client.streams.delete(STREAM)
    clock.advance(120)
    client.streams.retention.step()
    assert client.streams.retention.streams() == []
    assert client.store.attributes(REGISTRY) == {}


def test_a_truncation_by_hand_goes_together_with_a_policy(client: rg.Client, clock: ManualClock) -> None:
    client.streams.create(STREAM, retention=rg.RetentionPolicy(max_bytes=50_000))
    write(client, 0, 40)
    client.streams.retain(STREAM)
    client.streams.truncate(STREAM, client.streams.info(STREAM).tail)
    clock.advance(3 * 86_400)  # the history names segments that the metadata has forgotten
    client.streams.scale(STREAM, split=[0])
    client.streams.truncate(STREAM, client.streams.info(STREAM).tail)
    clock.advance(3 * 86_400)
    client.streams.truncate(STREAM, client.streams.info(STREAM).tail)
    write(client, 40, 140)
    client.streams.retain(STREAM)
    assert 40 <= len(left(client)) <= 50


def test_a_history_that_begins_with_forgotten_segments_is_used_from_the_head_on(
    client: rg.Client, clock: ManualClock
) -> None:
    client.streams.create(STREAM, retention=rg.RetentionPolicy(max_bytes=50_000))
    write(client, 0, 10)
    client.streams.scale(STREAM, split=[0])
    head = client.streams.info(STREAM).tail
    write(client, 10, 20)
    client.streams.retain(STREAM)
    client.streams.truncate(STREAM, head)
    clock.advance(3 * 86_400)
    client.streams.truncate(STREAM, head)
    assert 0 not in client.streams.fetch_state(STREAM).segments
    assert client.streams.retain(STREAM).reason is None
    write(client, 20, 120)
    client.streams.retain(STREAM)
    assert 40 <= len(left(client)) <= 50


def test_a_stream_that_falls_idle_forgets_its_old_segments(client: rg.Client, clock: ManualClock) -> None:
    client.streams.create(STREAM, retention=rg.RetentionPolicy(max_age=DAY))
    for number in range(3):
        write(client, number * 20, number * 20 + 20)
        client.streams.scale(STREAM, split=[client.streams.fetch_state(STREAM).current[0]])
    clock.advance(1.2 * 86_400)
    client.streams.retain(STREAM)
    idle = client.streams.fetch_state(STREAM)
    assert left(client) == [] and set(idle.segments) > set(idle.current)
    clock.advance(23 * 3600)
    assert client.streams.retain(STREAM).reason is None
    assert client.streams.fetch_state(STREAM) == idle
    clock.advance(2 * 3600)
    assert client.streams.retain(STREAM, dry_run=True).reason is None
    assert client.streams.fetch_state(STREAM) == idle
    assert client.streams.retain(STREAM).reason is None
    assert set(client.streams.fetch_state(STREAM).segments) == set(idle.current)
    write(client, 60, 80)
    assert client.streams.retain(STREAM).reason is None and left(client) == list(range(60, 80))


# ---------------------------------------------------------------------- groups


def read(group: rg.ReaderGroup, events: int) -> list[int]:
    """Read and commit so many events."""
    numbers: list[int] = []
    with group.reader() as reader:
        for _ in range(2 * events + 10):  # a call that completes a segment may return nothing
            if len(numbers) < events and (event := reader.read(timeout=0)) is not None:
                numbers.append(int(event.data))
    return numbers


@pytest.mark.stores
def test_events_are_kept_until_all_subscribers_have_committed_them(client: rg.Client) -> None:
    client.streams.create(STREAM, retention=rg.RetentionPolicy(consumed_by="subscribers"))
    billing = client.groups.create("billing", streams=[STREAM], retention="AT_LAST_COMMIT")
    audit = client.groups.create("audit", streams=[STREAM], retention="AT_LAST_COMMIT")
    client.groups.create("onlooker", streams=[STREAM])
    write(client, 0, 100)
    read(billing, 100)
    assert client.streams.retain(STREAM).reason is None
    assert read(audit, 50) == list(range(50))
    report = client.streams.retain(STREAM)
    assert (report.reason, report.skipped) == ("consumed", ())
    assert report.unconsumed_bytes["billing"] == 0 < report.unconsumed_bytes["audit"] == report.kept_bytes
    assert left(client) == list(range(50, 100))
    assert read(audit, 50) == list(range(50, 100))
    client.streams.retain(STREAM)
    assert left(client) == []


@pytest.mark.stores(round_robin=True)
def test_groups_in_different_epochs_hold_what_they_need(client: rg.Client) -> None:
    client.streams.create(STREAM, retention=rg.RetentionPolicy(consumed_by="subscribers"))
    groups = [client.groups.create(name, streams=[STREAM], retention="AT_LAST_COMMIT") for name in ("a", "b")]
    write(client, 0, 50)
    client.streams.scale(STREAM, split=[0])
    write(client, 50, 100)
    assert len(read(groups[0], 80)) == 80
    first = read(groups[1], 20)
    client.streams.retain(STREAM)
    assert left(client) == list(range(20, 100)), first
    assert sorted(read(groups[1], 80)) == list(range(20, 100))
    client.streams.retain(STREAM)
    assert len(left(client)) == 20
    assert len(read(groups[0], 20)) == 20


def test_a_deleted_group_holds_nothing(client: rg.Client) -> None:
    client.streams.create(STREAM, retention=rg.RetentionPolicy(consumed_by="subscribers"))
    billing = client.groups.create("billing", streams=[STREAM], retention="AT_LAST_COMMIT")
    client.groups.create("gone", streams=[STREAM], retention="AT_LAST_COMMIT")
    write(client, 0, 50)
    read(billing, 50)
    assert client.streams.retain(STREAM).reason is None
    client.groups.delete("gone")
    assert client.streams.retain(STREAM).reason == "consumed"
    assert left(client) == []


def test_a_group_of_a_stream_that_was_deleted_holds_nothing_of_the_next_one(client: rg.Client) -> None:
    policy = rg.RetentionPolicy(consumed_by="subscribers")
    client.streams.create(STREAM, retention=policy)
    client.groups.create("former", streams=[STREAM], retention="MANUAL")
    client.streams.delete(STREAM)
    client.streams.create(STREAM, retention=policy)
    billing = client.groups.create("billing", streams=[STREAM], retention="AT_LAST_COMMIT")
    write(client, 0, 20)
    read(billing, 20)
    client.streams.retain(STREAM)
    assert left(client) == []


def test_a_group_of_a_bounded_range_holds_nothing_when_it_is_done(client: rg.Client) -> None:
    client.streams.create(STREAM, retention=rg.RetentionPolicy(consumed_by="subscribers"))
    write(client, 0, 20)
    end = client.streams.info(STREAM).tail
    batch = client.groups.create("batch", streams=[STREAM], end={STREAM: end}, retention="AT_LAST_COMMIT")
    steady = client.groups.create("steady", streams=[STREAM], retention="AT_LAST_COMMIT")
    write(client, 20, 60)
    with batch.reader() as reader:
        assert len(list(reader)) == 20
    read(steady, 60)
    client.streams.retain(STREAM)
    assert left(client) == []


@pytest.mark.parametrize("dry_runs", [0, 1])
def test_what_is_deleted_in_the_segments_where_groups_are_ahead_counts_toward_no_limit(
    client: rg.Client, clock: ManualClock, dry_runs: int
) -> None:
    policy = rg.RetentionPolicy(max_bytes=100_000, consumed_by="subscribers")
    client.streams.create(STREAM, scaling=rg.ScalingPolicy.fixed(2), retention=policy)
    group = client.groups.create("billing", streams=[STREAM], retention="AT_LAST_COMMIT")

    def fill(segment: int, kilobytes: int) -> rg.StreamCut:
        state = client.streams.fetch_state(STREAM)
        key = next(key for key in map(str, range(100)) if state.routes.segment_at(key_position(key)) == segment)
        with client.writer(STREAM) as writer:
            for _ in range(0, kilobytes, 5):
                writer.write(b"x" * 5000, routing_key=key)
                writer.flush()
        clock.advance(3600)
        client.streams.retain(STREAM)
        return client.streams.info(STREAM).tail

    early = fill(1, 5)
    fill(1, 15)
    fill(0, 10)
    late = fill(0, 60)
    slow = late.model_copy(update={"offsets": {**late.offsets, f"{STREAM}/1": early.offsets[f"{STREAM}/1"]}})
    group.reset({STREAM: slow})
    for _ in range(dry_runs):
        client.streams.retain(STREAM, dry_run=True)
    stored = client.streams.retain(STREAM).kept_bytes
    assert stored < 20_000
    fill(1, 60)
    kept = client.streams.retain(STREAM).kept_bytes
    assert kept > stored + 60_000, "a limit that is not reached has deleted unread events"
    write(client, 0, 40)
    assert 70_000 < client.streams.retain(STREAM).kept_bytes <= 100_000


def test_events_are_kept_from_the_last_checkpoint_on(client: rg.Client) -> None:
    client.streams.create(STREAM, retention=rg.RetentionPolicy(consumed_by="subscribers"))
    group = client.groups.create("billing", streams=[STREAM], retention="AT_LAST_CHECKPOINT")
    write(client, 0, 60)
    read(group, 30)
    assert client.streams.retain(STREAM).reason is None, "there is no checkpoint yet"
    checkpoint = group.checkpoint("first", timeout=5)
    read(group, 20)
    client.streams.retain(STREAM)
    assert left(client) == list(range(30, 60))
    group.checkpoint("second", timeout=5)
    group.reset(checkpoint)  # the group is behind its last checkpoint now, and needs the events again
    client.streams.retain(STREAM)
    assert left(client) == list(range(30, 60))
    assert read(group, 30) == list(range(30, 60))


def test_a_group_takes_checkpoints_by_itself_if_retention_goes_by_them(client: rg.Client, clock: ManualClock) -> None:
    client.streams.create(STREAM, retention=rg.RetentionPolicy(consumed_by="subscribers"))
    group = client.groups.create("billing", streams=[STREAM], retention="AT_LAST_CHECKPOINT")
    write(client, 0, 60)
    with group.reader() as reader:
        for _ in range(40):
            reader.read(timeout=0)
        for _ in range(80):
            clock.advance(1)
            client.step()
            reader.read(timeout=0) if clock.time() % 20 == 0 else reader.position()
            reader.read(timeout=0)
    assert left(client) != list(range(60)), "nothing was deleted, though the coordinator retains once a minute"


def test_a_group_names_its_cuts_by_hand(client: rg.Client) -> None:
    client.streams.create(STREAM, retention=rg.RetentionPolicy(consumed_by="subscribers"))
    group = client.groups.create("billing", streams=[STREAM], retention="MANUAL")
    write(client, 0, 60)
    read(group, 20)
    early = group.stream_cuts()
    read(group, 20)
    assert client.streams.retain(STREAM).reason is None
    group.update_retention_cuts(early)
    client.streams.retain(STREAM)
    assert left(client) == list(range(20, 60))
    group.update_retention_cuts({STREAM: client.streams.info(STREAM).tail})
    client.streams.retain(STREAM)
    assert left(client) == list(range(40, 60)), "what the group has not committed is kept, whatever its cut says"


def test_cuts_by_hand_are_checked(client: rg.Client) -> None:
    client.streams.create(STREAM)
    client.streams.create("shop/other")
    write(client, 0, 10)
    cuts = {STREAM: client.streams.info(STREAM).tail}
    automatic = client.groups.create("automatic", streams=[STREAM], retention="AT_LAST_COMMIT")
    with pytest.raises(rg.InvalidArgumentError, match="MANUAL"):
        automatic.update_retention_cuts(cuts)
    group = client.groups.create("manual", streams=[STREAM], retention="MANUAL")
    with pytest.raises(rg.InvalidArgumentError, match="does not read"):
        group.update_retention_cuts({"shop/other": client.streams.info("shop/other").tail})
    inside = cuts[STREAM].model_copy(update={"offsets": dict.fromkeys(cuts[STREAM].offsets, 5)})
    for wrong in (None, [cuts], {STREAM: "tail"}, {STREAM: inside}):
        with pytest.raises(rg.InvalidArgumentError):
            group.update_retention_cuts(wrong)  # type: ignore[arg-type]
    with pytest.raises(rg.InvalidArgumentError):
        client.groups.create("wrong", streams=[STREAM], retention="SOMETIMES")


@pytest.mark.stores(round_robin=True)
def test_a_group_that_is_behind_the_limit_is_told_once(client: rg.Client) -> None:
    policy = rg.RetentionPolicy(consumed_by="subscribers", max_bytes=50_000)
    client.streams.create(STREAM)
    slow = client.groups.create("slow", streams=[STREAM], retention="AT_LAST_COMMIT")
    heard: list[rg.RetentionNotification] = []
    slow.retention_notifier.register_listener(heard.append)
    write(client, 0, 100)
    client.streams.configure(STREAM, retention=policy)
    assert client.streams.retain(STREAM, dry_run=True).skipped == ("slow",)
    assert client.streams.retain(STREAM).skipped == ("slow",)
    write(client, 100, 200)
    client.streams.retain(STREAM)
    slow.retention_notifier.poll()
    until(lambda: len(heard) == 1)
    (notification,) = heard
    assert set(notification.heads) == {STREAM}
    with slow.reader() as reader:
        with pytest.raises(rg.TruncatedError):
            reader.read(timeout=0)
        numbers = [int(event.data) for event in iter(lambda: reader.read(timeout=0), None)]
    assert numbers == list(range(numbers[0], 200)) and numbers[0] >= 140
    write(client, 200, 300)
    client.streams.retain(STREAM)
    slow.retention_notifier.poll()
    until(lambda: len(heard) == 2)


# ---------------------------------------------------------------------- who does it


@pytest.mark.stores(round_robin=True)
def test_a_reader_of_another_stream_applies_the_policies_that_are_due(client: rg.Client, clock: ManualClock) -> None:
    client.streams.create(STREAM, retention=rg.RetentionPolicy(max_age=DAY))
    write(client, 0, 20)
    client.streams.create("shop/other")
    group = client.groups.create("other", streams=["shop/other"])
    with group.reader():
        clock.advance(90)
        client.step()
        clock.advance(2 * 86_400)
        # A thread that has written may still be looking for policies: then a step leaves them to it.
        until(lambda: client.step() and not left(client), "the policy to be applied")


def test_a_writer_applies_the_policy_while_it_writes(store_url: str) -> None:
    with rg.connect(store_url) as client:
        client.streams.create(STREAM, retention=rg.RetentionPolicy(max_bytes=2_000_000))
        with client.writer(STREAM) as writer:
            for _ in range(200):
                for _ in range(100):
                    writer.write(b"x" * 1000)
                writer.flush()
            until(lambda: not client.streams.retention.is_due)
        report = client.streams.retain(STREAM, dry_run=True)
        assert report.kept_bytes + report.deleted_bytes < 8_000_000 < 20_000_000


def test_who_asks_while_another_process_applies_the_policy_sees_what_is_left(
    store_url: str, clock: ManualClock
) -> None:
    with open_store(store_url) as store, rg.Client(store, clock=clock) as other:
        other.streams.create(STREAM)
        write(other, 0, 100)
        other.streams.configure(STREAM, retention=rg.RetentionPolicy(max_bytes=50_000))
        failing = FailingStore(store)

        def before(operation: Operation) -> None:
            if operation.verb == "read" and "/data/" in f"/{operation.segment}":
                failing.before = None
                assert other.streams.retain(STREAM).deleted_bytes > 0

        failing.before = before
        with rg.Client(failing, clock=clock) as client:
            report = client.streams.retain(STREAM)
        assert failing.before is None and report.deleted_bytes == 0


def test_one_process_at_a_time_applies_a_policy(store_url: str, clock: ManualClock) -> None:
    with open_store(store_url) as store, rg.Client(store, clock=clock) as one, rg.Client(store, clock=clock) as other:
        one.streams.create(STREAM, retention=rg.RetentionPolicy(max_age=DAY))
        write(one, 0, 20)
        clock.advance(90)
        one.streams.retention.step()
        due = store.attributes(REGISTRY, "due/")
        other.streams.retention.step()
        assert store.attributes(REGISTRY, "due/") == due, "the other one did it again"
        clock.advance(90)
        other.streams.retention.step()
        assert store.attributes(REGISTRY, "due/") != due


def test_a_time_by_a_clock_that_was_ahead_delays_nothing(client: rg.Client, clock: ManualClock) -> None:
    client.streams.create(STREAM, retention=rg.RetentionPolicy(max_age=DAY))
    write(client, 0, 20)
    client.streams.retain(STREAM)
    change = {f"due/{STREAM}": AttributeChange(client.store.attributes(REGISTRY)[f"due/{STREAM}"], b"9e9 ahead")}
    client.store.append(REGISTRY, b"", attributes=change)
    clock.advance(2 * 86_400)
    client.streams.retention.step()
    assert left(client) == []


def test_a_stream_that_another_process_has_lost_is_registered_again(client: rg.Client) -> None:
    client.streams.create(STREAM, retention=rg.RetentionPolicy(max_age=DAY))
    found = client.store.attributes(REGISTRY)[f"due/{STREAM}"]
    client.store.append(REGISTRY, b"", attributes={f"due/{STREAM}": AttributeChange(found, None)})
    with closing(client.writer(STREAM)):
        pass
    client.streams.retention.step()
    assert client.streams.retention.streams() == [STREAM]


def test_a_group_that_cannot_be_read_holds_all_but_the_limits(
    client: rg.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    client.streams.create(STREAM)
    group = client.groups.create("billing", streams=[STREAM], retention="AT_LAST_COMMIT")
    write(client, 0, 100)
    read(group, 100)

    def unreadable(deadline: Deadline) -> None:
        raise rg.UnknownUpdateError("a newer release wrote this entry")

    monkeypatch.setattr(client.groups, "subscribers", unreadable)
    # Only now: the writer's process applies a policy as well, before the group has read what is over the limit.
    client.streams.configure(STREAM, retention=rg.RetentionPolicy(consumed_by="subscribers", max_bytes=50_000))
    client.streams.retain(STREAM)
    assert 40 <= len(left(client)) <= 50
    monkeypatch.undo()
    client.streams.retain(STREAM)
    assert left(client) == []


def test_short_ages_are_looked_at_more_often() -> None:
    assert applying._interval(rg.RetentionPolicy(max_age=timedelta(seconds=160))) == 10.0
    assert applying._interval(rg.RetentionPolicy(max_age=timedelta(seconds=1))) == 1.0
    assert applying._interval(rg.RetentionPolicy(max_age=7 * DAY)) == 60.0
