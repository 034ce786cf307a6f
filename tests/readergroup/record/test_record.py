"""Reading a record: from a revision on, as it comes, as Arrow, and on the command line."""

from __future__ import annotations

import itertools
import pickle
import random
import re
import sys
import threading

import pyarrow
import pytest

import readergroup as rg
from readergroup.record.analyses import (
    BACKLOG_TREND,
    REACTION_TIMES,
    SCALING_FREQUENCY,
    backlog_trend,
    reaction_times,
    scaling_frequency,
)
from readergroup.record.arrow import SCHEMA, table
from readergroup.record.entries import LagSample, RecordRange, encode_notification
from readergroup.record.record import NotificationRecord, entries
from synchronizer import (
    AttributeChange,
    StorePermissionError,
    StoreUnavailableError,
    SystemClock,
    TruncatedError,
    UnsupportedError,
    open_store,
)
from synchronizer.testing import FailingStore
from synchronizer.testing.failing_store import Operation
from tests.readergroup.processes_in_one import STREAM, World

pytestmark = pytest.mark.stores(round_robin=True)


@pytest.fixture
def recorded(world: World) -> rg.ReaderGroup:
    """A group of which two scales, a reader that joined and died, its lag and the end of its data are recorded."""
    process = world.process()
    log = process.group.synchronizer
    with process.group.record_notifications(lag_interval_seconds=60) as handle:
        handle.poll()
        world.admin.streams.scale(STREAM, split=[0])
        handle.poll()  # with a sample of the lag
        log.update_state_unconditionally(rg.AddReader(reader="r1"))
        world.admin.streams.scale(STREAM, merge=[2, 3])
        handle.poll()
        log.update_state_unconditionally(rg.RemoveReader(reader="r1", cause="dead"))
        world.write(5)
        world.clock.advance(60)
        handle.poll()
        world.admin.streams.seal(STREAM)
        reader = process.group.reader("r2")
        while True:
            try:
                reader.read(timeout=0)
            except rg.EndOfDataError:
                break
    return process.group


def test_what_is_read_is_what_was_told_as_typed_notifications(recorded: rg.ReaderGroup) -> None:
    found = list(recorded.notification_record.read())
    assert [type(each).__name__ for each in found[:8]] == [
        "SegmentNotification",
        "ReaderNotification",
        "SegmentNotification",
        "LagSample",
        "ReaderNotification",
        "SegmentNotification",
        "ReaderNotification",
        "LagSample",
    ]
    assert found[6].model_dump(exclude={"change"}) == {"readers": (), "joined": (), "left": ("r1",), "dead": ("r1",)}
    assert isinstance(found[7], LagSample) and found[7].events == 5 and found[7].seconds >= 0
    assert isinstance(found[-1], rg.EndOfDataNotification)
    assert {each.source for each in found} == {"billing"}


def test_it_is_read_from_any_revision_on(recorded: rg.ReaderGroup) -> None:
    record = recorded.notification_record
    found = list(record.read())
    for each in found:
        assert list(record.read(each.revision)) == [other for other in found if other.revision >= each.revision]
    beyond = rg.Revision(found[-1].revision.offset + 1, 0)
    assert list(record.read(beyond)) == []


def test_a_range_pickles_and_is_read_by_whoever_has_the_store(world: World, recorded: rg.ReaderGroup) -> None:
    found = recorded.notification_record.range()
    assert found is not None
    again = pickle.loads(pickle.dumps(found))
    assert RecordRange.model_validate_json(found.model_dump_json()) == again == found
    with_offsets = list(entries(world.admin.store, again))
    assert [each for _, each in with_offsets] == list(recorded.notification_record.read())
    offsets = [offset for offset, _ in with_offsets]
    assert offsets == sorted(set(offsets))
    # Any of these offsets divides it.
    for cut in offsets:
        parts = [again.model_copy(update={"end": cut}), again.model_copy(update={"start": cut})]
        assert [each for part in parts for each in entries(world.admin.store, part)] == with_offsets


def test_what_was_given_up_is_an_error_to_whoever_asks_for_it(world: World, recorded: rg.ReaderGroup) -> None:
    found = recorded.notification_record.range()
    assert found is not None
    world.admin.store.truncate(found.segment, found.end)
    with pytest.raises(TruncatedError):
        list(entries(world.admin.store, found))
    assert list(recorded.notification_record.read()) == []


def test_whoever_follows_gets_what_is_there_and_what_comes(world: World) -> None:
    process = world.process()
    stop = threading.Event()
    handle = process.group.record_notifications(lag_interval_seconds=None)
    handle.poll()
    follow = world.admin.groups.get("billing").notification_record.follow(stop=stop)
    assert [next(follow).cause for _ in range(2)] == ["present value"] * 2
    world.admin.streams.scale(STREAM, split=[0])
    handle.poll()
    scaled = next(follow)
    assert isinstance(scaled, rg.SegmentNotification) and scaled.number_of_segments == 3
    stop.set()
    assert list(follow) == []


def test_who_follows_goes_over_to_the_group_that_is_created_again(world: World) -> None:
    handle = world.process().group.record_notifications(lag_interval_seconds=None)
    handle.poll()
    stop = threading.Event()
    follow = world.admin.groups.get("billing").notification_record.follow(stop=stop)
    first, _ = next(follow), next(follow)
    world.admin.groups.delete("billing")
    world.admin.groups.create("billing", streams=[STREAM])
    handle.poll()
    second, _ = next(follow), next(follow)
    assert second.cause == "present value" and second.revision > first.revision
    stop.set()
    assert list(follow) == []


# ---------------------------------------------------------------------- while the store is away


def record_of(world: World, store: FailingStore) -> NotificationRecord:
    """A record whose other calls have no time to wait for the store."""
    log = world.group.synchronizer.segment
    return NotificationRecord(store, group="billing", log=log, clock=SystemClock(), timeout=0.0)


@pytest.mark.parametrize("verb", ["attributes", "info", "read", "wait"])
def test_whoever_follows_goes_on_where_it_was_after_the_store_was_away(
    world: World, caplog: pytest.LogCaptureFixture, verb: str
) -> None:
    handle = world.process().group.record_notifications(lag_interval_seconds=None)
    handle.poll()
    failures: list[Operation] = []

    def fail(operation: Operation) -> None:
        if verb == operation.verb and len(failures) < 3:
            failures.append(operation)
            raise StoreUnavailableError("no answer")

    with FailingStore(open_store(world.url)) as store:
        stop = threading.Event()
        follow = record_of(world, store).follow(stop=stop)
        found = [next(follow), next(follow)]
        store.before = fail
        for number in range(2):
            world.admin.streams.scale(STREAM, split=[number])
            handle.poll()
            found.append(next(follow))
        stop.set()
        found += follow
    assert len(failures) == 3
    assert found == list(world.group.notification_record.read())
    (told,) = [each.getMessage() for each in caplog.records if "tries again" in each.getMessage()]
    assert told == "the record of billing waits for the store, and tries again: no answer"


def test_faults_at_any_moment_repeat_nothing_and_leave_nothing_out(world: World) -> None:
    process = world.process()
    log = process.group.synchronizer
    with process.group.record_notifications(lag_interval_seconds=None) as handle:
        for number in range(10):
            log.update_state_unconditionally(rg.AddReader(reader=f"r{number}"))
            handle.poll()
    recorded = list(world.group.notification_record.read())
    assert len(recorded) > 10
    with FailingStore(open_store(world.url), rng=random.Random(1), fault_rate=0.2) as store:
        store.cut_reads(1000)  # so that faults come between two notifications
        stop = threading.Event()
        follow = record_of(world, store).follow(stop=stop)
        found = list(itertools.islice(follow, len(recorded)))
        waits = store.count("wait")

        def stop_after_another_look(operation: Operation) -> None:
            if operation.verb == "wait" and store.count("wait") > waits + 1:
                stop.set()

        store.before = stop_after_another_look
        found += follow
    assert found == recorded


def test_whoever_follows_ends_when_asked_while_the_store_is_away(world: World) -> None:
    with FailingStore(open_store(world.url)) as store:
        stop = threading.Event()
        store.unavailable = True
        store.before = lambda _: stop.set() if len(store.operations) > 2 else None
        assert list(record_of(world, store).follow(stop=stop)) == []
        assert len(store.operations) == 3


def test_a_missing_right_and_a_closed_client_end_whoever_follows(world: World) -> None:
    with FailingStore(open_store(world.url)) as store:

        def refuse(operation: Operation) -> None:
            raise StorePermissionError("no right")

        store.before = refuse
        with pytest.raises(StorePermissionError):
            next(record_of(world, store).follow())
    client = rg.connect(world.url)
    world.process().group.record_notifications(lag_interval_seconds=None).poll()
    follow = client.groups.get("billing").notification_record.follow()
    next(follow)
    client.close()
    with pytest.raises(rg.ClosedError):
        list(follow)


def test_a_deleted_group_has_nothing_to_follow(world: World) -> None:
    follow_until = threading.Event()
    store = FailingStore(open_store(world.url))
    with store:
        record = record_of(world, store)
        world.admin.groups.delete("billing")
        store.after = lambda _: follow_until.set()
        assert list(record.follow(stop=follow_until)) == []


# ---------------------------------------------------------------------- what a newer release wrote


def test_a_kind_that_this_release_does_not_know_is_an_error(
    recorded: rg.ReaderGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules["readergroup.record.entries"].KINDS, "lag")
    with pytest.raises(rg.UnknownUpdateError, match="deploy that release here: segment='record/billing/"):
        list(recorded.notification_record.read())


# ---------------------------------------------------------------------- Arrow


def test_a_table_has_a_row_for_each_notification_in_columns_that_are_always_the_same(recorded: rg.ReaderGroup) -> None:
    record = recorded.notification_record
    table = record.table()
    assert table.schema == SCHEMA
    rows, found = table.to_pylist(), list(record.read())
    assert [(row["seen_at"], row["revision"], row["index"], row["cause"]) for row in rows] == [
        (each.seen_at, each.revision.offset, each.revision.index, each.cause) for each in found
    ]
    assert [row["kind"] for row in rows[:5]] == ["segments", "readers", "segments", "lag", "readers"]
    assert (rows[2]["number_of_segments"], rows[2]["number_of_readers"], rows[2]["joined"]) == (3, 0, None)
    assert rows[2]["segments"] == ["shop/orders/1", "shop/orders/2", "shop/orders/3"]
    assert (rows[6]["number_of_readers"], rows[6]["left"], rows[6]["dead"]) == (0, ["r1"], ["r1"])
    assert rows[7]["backlog_events"] == 5 and rows[7]["backlog_bytes"] > 0
    end = found[-1]
    assert isinstance(end, rg.EndOfDataNotification)
    assert '"stream":"shop/orders"' in rows[-1]["cuts"]
    assert (
        end.cuts
        == rg.EndOfDataNotification.model_validate_json(
            f'{{"change":{end.change.model_dump_json()},"cuts":{rows[-1]["cuts"]}}}'
        ).cuts
    )
    batches = list(record.record_batches(found[4].revision))
    assert pyarrow.Table.from_batches(batches).equals(table.slice(4))


def test_the_analyses_take_such_a_table(recorded: rg.ReaderGroup) -> None:
    table = recorded.notification_record.table()
    (frequency,) = scaling_frequency(table).to_pylist()
    assert (frequency["scales"], frequency["gaps"]) == (2, 0)
    assert reaction_times(table).num_rows >= 2
    (trend,) = backlog_trend(table).to_pylist()
    assert trend["samples"] == 2 and trend["events_per_second"] == pytest.approx(5 / 60)
    for analysis, schema in (
        (scaling_frequency, SCALING_FREQUENCY),
        (reaction_times, REACTION_TIMES),
        (backlog_trend, BACKLOG_TREND),
    ):
        assert analysis(table).schema == schema


def test_a_notification_of_the_lag_is_refused_as_one_that_no_record_has(world: World) -> None:
    notifier = world.process().group.lag_notifier(threshold_events=1)
    told: list[rg.LagNotification] = []
    notifier.register_listener(told.append)
    notifier.poll()
    for store_it in (lambda: encode_notification(told[0]), lambda: table([(0, told[0])])):
        with pytest.raises(rg.InvalidArgumentError, match=r"not recorded; a record has .*LagSample.*LagNotification"):
            store_it()


def test_a_record_without_notifications_is_an_empty_table(world: World) -> None:
    table = world.group.notification_record.table()
    assert (table.num_rows, table.schema) == (0, SCHEMA)


def test_without_pyarrow_the_error_names_what_to_install(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "readergroup.record.arrow", raising=False)
    monkeypatch.delattr("readergroup.record.arrow", raising=False)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(UnsupportedError, match=re.escape("pip install '.[arrow]'")):
        world.group.notification_record.table()


# ---------------------------------------------------------------------- what was cut off


def test_a_record_that_was_named_and_not_begun_is_empty(world: World) -> None:
    log = world.group_log()
    log.store.append(log.segment, b"", attributes={"record": AttributeChange(None, b"abc")})
    assert world.group.notification_record.range() is None
    assert list(world.group.notification_record.read()) == []
