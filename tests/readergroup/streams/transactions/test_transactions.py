"""Transactions: all or nothing, once, in order, whoever dies where, and whatever happens to the stream meanwhile."""

from __future__ import annotations

import itertools
import pickle
import random
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import msgpack
import pyarrow
import pytest

import readergroup as rg
from readergroup.streams.config import ScalingPolicy, StreamCut
from readergroup.streams.data.block import Block
from readergroup.streams.data.segment_reader import SegmentReader
from readergroup.streams.manager import StreamManager
from readergroup.streams.serializers import BytesSerializer
from readergroup.streams.state import CommitTransaction
from readergroup.streams.transactions import merging, staging, transaction
from readergroup.streams.transactions.committed import CommittedPart
from readergroup.streams.transactions.staging import StagedPart
from readergroup.streams.transactions.transaction import KEY_RETENTION_SECONDS, STAGING_RETENTION_SECONDS, Transactions
from readergroup.streams.writing.event_numbers import WRITER_RETENTION_SECONDS
from readergroup.streams.writing.writer import EventWriter
from synchronizer import (
    AlreadyExistsError,
    ClosedError,
    InvalidArgumentError,
    ManualClock,
    NotFoundError,
    SealedError,
    SegmentStore,
    StateTooLargeError,
    StoreUnavailableError,
    open_store,
)
from synchronizer.testing import FailingStore, Operation
from tests.clean_processes import CLEAN
from tests.dying import Died
from tests.seeds import seeds
from tests.waiting import PATIENCE_SECONDS

pytestmark = pytest.mark.stores(round_robin=True)
NAME = "shop/orders"
JOB = "job"
#: Keys that lie in the first, second, third and fourth quarter of the key range.
QUARTERS = ("Foo", "2", "key-3", "0")
APPENDS = frozenset({"append", "append_together", "concat"})
WRITES = APPENDS | {"create", "forget", "seal"}

Events = Sequence[tuple[str | None, bytes]]


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def streams(store: SegmentStore, clock: ManualClock) -> StreamManager:
    streams = StreamManager(store, clock=clock)
    streams.create(NAME, scaling=ScalingPolicy.fixed(2))
    return streams


@pytest.fixture(params=["together", "one after the other", "in small portions", "without copies"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How staged events come into the stream: which way is taken depends on their size and on the store."""
    if request.param != "together":
        monkeypatch.setattr(merging, "TOGETHER_BYTES", 0)
    if request.param == "in small portions":
        monkeypatch.setattr(merging, "_APPEND_BYTES", 200)
    way: str = request.param
    return way


def as_store_of(way: str, store: SegmentStore) -> FailingStore:
    """The store, which does not copy inside itself unless this way needs it."""
    failing = FailingStore(store)
    copies = store.guarantees.server_side_copy and way in ("together", "one after the other")
    failing.guarantees = replace(store.guarantees, server_side_copy=copies)
    return failing


def events(prefix: str, count: int = 8, keys: Sequence[str | None] = QUARTERS) -> Events:
    return [(keys[number % len(keys)], f"{prefix}{number}".encode()) for number in range(count)]


def stage(streams: StreamManager, events: Events, key: str = JOB, name: str = NAME) -> StagedPart:
    with Transactions(streams).stage(name, key) as part_of:
        for routing_key, event in events:
            part_of.write(event, routing_key)
        return part_of.finish()


def commit(streams: StreamManager, number: int, *parts: StagedPart, key: str = JOB, name: str = NAME) -> bool:
    return Transactions(streams).commit(name, key, number, parts)


def open_writer(streams: StreamManager) -> EventWriter[bytes]:
    return EventWriter(streams, NAME, serializer=BytesSerializer())


def blocks(streams: StreamManager, name: str = NAME) -> list[Block]:
    state = streams.fetch_state(name)
    names = [state.data_segment(number) for number in sorted(state.segments)]
    return [block for name in names for block in iter(SegmentReader(streams.store, name).next_block, None)]


def stored(streams: StreamManager, name: str = NAME) -> list[tuple[str | None, bytes]]:
    """Every event of the stream with its key, segments after their predecessors."""
    return [pair for block in blocks(streams, name) for pair in zip(block.keys, block.data, strict=True)]


def by_key(events: Events) -> dict[str | None, list[bytes]]:
    return {key: [event for other, event in events if other == key] for key in {key for key, _ in events}}


def staged(store: SegmentStore) -> list[str]:
    return [name for name in store.list("data/") if "/staging/" in name]


def contents(store: SegmentStore) -> dict[str, int]:
    return {name: store.info(name).length for name in store.list()}


# ---------------------------------------------------------------------- with a writer


def test_leaving_the_block_commits_and_before_that_nobody_sees_an_event(streams: StreamManager) -> None:
    with open_writer(streams) as writer:
        with writer.transaction() as txn:
            for key, event in events("a"):
                txn.write(event, key)
            assert stored(streams) == []
        assert by_key(stored(streams)) == by_key(events("a"))
    assert staged(streams.store) == []
    assert streams.fetch_state(NAME).transactions.committers == {}


def test_events_keep_their_headers_and_the_time_at_which_they_were_written(
    streams: StreamManager, clock: ManualClock, way: str
) -> None:
    manager = StreamManager(as_store_of(way, streams.store), clock=clock)
    with Transactions(manager).stage(NAME, JOB) as part_of:
        part_of.write(b"1", "Foo", headers={"trace": b"\x01"})
        part_of.write(b"2", "0")
        part = part_of.finish()
    written_at = int(clock.time() * 1_000_000)
    clock.advance(5.0)
    streams.scale(NAME, split=[0])
    assert Transactions(manager).commit(NAME, JOB, 0, [part])
    assert {(block.data[0], *block.headers[0].items()) for block in blocks(streams)} == {
        (b"1", ("trace", b"\x01")),
        (b"2",),
    }
    assert {block.written_at for block in blocks(streams)} == {written_at}


def test_an_exception_aborts_and_leaves_nothing_behind(streams: StreamManager) -> None:
    before = contents(streams.store)
    with open_writer(streams) as writer:
        with pytest.raises(RuntimeError, match="no"):
            with writer.transaction() as txn:
                txn.write(b"event")
                txn.write(bytes(2 * 1024 * 1024))
                assert staged(streams.store)
                raise RuntimeError("no")
        with pytest.raises(ClosedError, match=r"begin another with writer\.transaction"):
            txn.write(b"event")
    assert contents(streams.store) == before


def test_a_transaction_comes_after_what_the_writer_wrote_before_and_before_what_it_writes_after(
    streams: StreamManager,
) -> None:
    with open_writer(streams) as writer:
        for round_number in range(3):
            writer.write(b"%d: before" % round_number, "Foo")
            with writer.transaction() as txn:
                txn.write(b"%d: inside" % round_number, "Foo")
    assert [event for _, event in stored(streams)] == [
        b"%d: %s" % (number, place) for number in range(3) for place in (b"before", b"inside")
    ]


def test_a_transaction_without_events_writes_nothing(streams: StreamManager) -> None:
    failing = FailingStore(streams.store)
    with open_writer(StreamManager(failing)) as writer:
        with writer.transaction():
            pass
        writer.transaction().commit()
        writer.transaction().abort()
    assert not [operation for operation in failing.operations if operation.verb in WRITES]


def test_committing_and_aborting_by_hand_may_be_repeated_but_not_mixed(streams: StreamManager) -> None:
    with open_writer(streams) as writer:
        txn = writer.transaction()
        txn.write(b"event")
        txn.commit()
        txn.commit()
        with pytest.raises(InvalidArgumentError, match="is committed and cannot be aborted"):
            txn.abort()
        with pytest.raises(ClosedError, match="is committed; begin another"):
            txn.write(b"another")
        txn = writer.transaction()
        txn.write(b"given up")
        txn.abort()
        txn.abort()
        with pytest.raises(ClosedError, match="aborted, and none of its events is in the stream; begin another"):
            txn.commit()
    assert stored(streams) == [(None, b"event")]
    assert staged(streams.store) == []


def test_a_second_thread_is_refused(streams: StreamManager) -> None:
    with open_writer(streams) as writer, writer.transaction() as txn, ThreadPoolExecutor(1) as other:
        for call in (lambda: txn.write(b"event"), txn.commit, txn.abort):
            with pytest.raises(InvalidArgumentError, match="belongs to the thread"):
                other.submit(call).result()


def test_a_closed_writer_begins_and_commits_no_transaction(streams: StreamManager) -> None:
    writer = open_writer(streams)
    txn = writer.transaction()
    txn.write(b"event")
    writer.close()
    with pytest.raises(ClosedError):
        writer.transaction()
    with pytest.raises(ClosedError), txn:
        pass
    assert (stored(streams), staged(streams.store)) == ([], [])


def test_what_no_writer_takes_no_transaction_takes(streams: StreamManager) -> None:
    with open_writer(streams) as writer, writer.transaction() as txn:
        with pytest.raises(rg.EventTooLargeError):
            txn.write(bytes(8 * 1024 * 1024 + 1))
        with pytest.raises(InvalidArgumentError, match="routing key"):
            txn.write(b"event", "k" * 5000)
        with pytest.raises(InvalidArgumentError, match="headers"):
            txn.write(b"event", headers={"h": "text"})  # type: ignore[dict-item]
        txn.write(b"event")
    assert stored(streams) == [(None, b"event")]


def test_many_transactions_leave_nothing_in_the_metadata(streams: StreamManager) -> None:
    with open_writer(streams) as writer:
        for number in range(20):
            with writer.transaction() as txn:
                txn.write(b"%d" % number, "Foo")
    transactions = streams.fetch_state(NAME).transactions
    assert (transactions.sequence, transactions.open, dict(transactions.committers)) == (20, None, {})


def committers(streams: StreamManager) -> set[str]:
    return set(streams.fetch_state(NAME).transactions.committers)


def test_transactions_that_others_merge_leave_at_most_the_last_key_and_none_when_the_writer_closes(
    streams: StreamManager,
) -> None:
    other = StreamManager(streams.store)
    failing = FailingStore(streams.store)
    with open_writer(StreamManager(failing)) as writer:
        for number in range(20):
            failing.before = merging_first = Nth(1, begins_to_merge(other), lambda: other.finish_pending(NAME))
            with writer.transaction() as txn:
                txn.write(b"%d" % number, "Foo")
            assert merging_first.acted
            assert len(committers(streams)) == 1
    assert committers(streams) == set()
    assert [event for _, event in stored(streams)] == [b"%d" % number for number in range(20)]


def test_a_commit_of_unknown_outcome_is_recognised_although_others_merged_it_and_then_forgotten(
    streams: StreamManager,
) -> None:
    failing = FailingStore(streams.store)
    with open_writer(StreamManager(failing, timeout=0.3)) as writer:
        txn = writer.transaction()
        txn.write(b"event", "Foo")

        def lose_contact() -> None:
            failing.unavailable = True
            raise StoreUnavailableError("the answer is lost")

        failing.after = Nth(1, is_entry, lose_contact)
        with pytest.raises(rg.ReaderGroupError):
            txn.commit()
        streams.finish_pending(NAME)
        assert commit(streams, 1, key="another")
        failing.after, failing.unavailable = None, False
        txn.commit()
        assert len(committers(streams)) == 2
    assert stored(streams) == [("Foo", b"event")]
    assert committers(streams) == {"another"}


def test_an_aborted_commit_is_forgotten_when_the_writer_closes(streams: StreamManager) -> None:
    failing = FailingStore(streams.store)
    with open_writer(StreamManager(failing, timeout=0.3)) as writer:
        txn = writer.transaction()
        txn.write(b"event", "Foo")
        failing.before = Nth(1, is_entry, partial(setattr, failing, "unavailable", True))
        with pytest.raises(rg.ReaderGroupError):
            txn.commit()
        failing.before, failing.unavailable = None, False
        txn.abort()
    assert (stored(streams), committers(streams)) == ([], set())


def test_a_single_transaction_of_several_processes_is_forgotten_although_another_merged_it(
    streams: StreamManager,
) -> None:
    failing = FailingStore(streams.store)
    failing.before = Nth(1, begins_to_merge(streams), lambda: streams.finish_pending(NAME))
    part = stage(streams, events("a"))
    assert Transactions(StreamManager(failing)).commit(NAME, JOB, 1, [part], is_only_one=True)
    assert committers(streams) == set()


def test_a_process_that_dies_before_it_forgets_leaves_a_key_for_a_week(
    streams: StreamManager, clock: ManualClock
) -> None:
    failing = FailingStore(streams.store)
    failing.before = Nth(1, begins_to_merge(streams), lambda: streams.finish_pending(NAME))
    writer = open_writer(StreamManager(failing, clock=clock))
    with writer.transaction() as txn:
        txn.write(b"event")
    assert len(committers(streams)) == 1  # the writer is closed by nobody
    clock.advance(KEY_RETENTION_SECONDS + 3600.0)
    assert commit(streams, 1, key="another")
    assert committers(streams) == {"another"}
    writer.close()


def commit_many(url: str, number: int, count: int) -> None:
    with open_store(url) as store, open_writer(StreamManager(store, state_limit_bytes=1500, timeout=60)) as writer:
        for each in range(count):
            with writer.transaction() as txn:
                txn.write(b"%d/%d" % (number, each), QUARTERS[number])


@pytest.mark.stores("sqlite")
def test_processes_that_commit_at_once_need_no_room_for_the_past(shared_store_url: str) -> None:
    count = 20
    with open_store(shared_store_url) as store:
        streams = StreamManager(store)
        streams.create(NAME, scaling=ScalingPolicy.fixed(2))
        processes = [CLEAN.Process(target=commit_many, args=(shared_store_url, each, count)) for each in range(4)]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        assert [process.exitcode for process in processes] == [0, 0, 0, 0]
        assert len(stored(streams)) == 4 * count
        assert committers(streams) == set()


# ---------------------------------------------------------------------- parts


def test_parts_are_merged_in_the_order_in_which_they_are_named_and_others_do_not_count(
    streams: StreamManager, way: str
) -> None:
    manager = StreamManager(as_store_of(way, streams.store))
    first, second, repeated = (stage(manager, events(prefix, 40)) for prefix in "abc")
    assert commit(manager, 7, second, first)
    assert by_key(stored(streams)) == by_key([*events("b", 40), *events("a", 40)])
    assert (repeated.events, repeated.size > 0, repeated.segments) == (40, True, (0, 1))
    assert staged(streams.store) == []


class Committing:
    """A serializer, a source of event times and a table that commits its own transaction when it gets ``outer``."""

    txn: rg.Transaction[bytes]

    def dumps(self, event: bytes) -> bytes:
        if event == b"outer":
            self.txn.commit()
        return event

    def loads(self, data: bytes) -> bytes:
        return data

    def event_time(self, event: bytes) -> None:
        self.dumps(event)

    def __arrow_c_stream__(self, requested_schema: object = None) -> object:
        self.dumps(b"outer")
        return pyarrow.table({"payload": [b"outer"]}).__arrow_c_stream__(requested_schema)


@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize("how", ["serializer", "event time", "batch", "table"])
def test_an_event_that_ends_its_own_transaction_is_refused(streams: StreamManager, how: str, is_first: bool) -> None:
    committing = Committing()
    serializer: Any = committing if how in ("serializer", "batch") else BytesSerializer()
    event_time = committing.event_time if how == "event time" else None
    with (
        rg.Client(streams.store, clock=streams.clock) as client,
        client.writer(NAME, serializer=serializer, event_time=event_time) as writer,
    ):
        txn = committing.txn = writer.transaction()
        if not is_first:
            txn.write(b"first")
        with pytest.raises(ClosedError):
            if how == "batch":
                txn.write_batch([b"outer"])
            elif how == "table":
                txn.write_arrow(committing, data="payload")
            else:
                txn.write(b"outer")
    assert [event for _, event in stored(streams)] == ([] if is_first else [b"first"])
    assert staged(streams.store) == []


@pytest.mark.parametrize("name", ["", "zzz", "0000000a/b", "0000000a\n", "-000000a", 5])
def test_a_part_with_a_damaged_name_is_refused(streams: StreamManager, name: object) -> None:
    part = stage(streams, events("a"))
    with pytest.raises(
        InvalidArgumentError, match=r"^the part has a damaged name; pass the results of Staging\.finish"
    ):
        commit(streams, 0, part.model_copy(update={"name": name}))
    assert commit(streams, 0, part)
    assert by_key(stored(streams)) == by_key(events("a"))


def test_a_part_travels_as_a_pickle_or_as_json(streams: StreamManager) -> None:
    part = stage(streams, events("a"))
    assert pickle.loads(pickle.dumps(part)) == StagedPart.model_validate_json(part.model_dump_json()) == part
    assert commit(streams, 0, StagedPart.model_validate_json(part.model_dump_json()))
    assert by_key(stored(streams)) == by_key(events("a"))


def test_parts_are_staged_by_other_processes(shared_store_url: str) -> None:
    with open_store(shared_store_url) as store:
        streams = StreamManager(store)
        streams.create(NAME, scaling=ScalingPolicy.fixed(2))
        with CLEAN.Pool(2) as pool:
            parts = pool.starmap(stage_in_another_process, [(shared_store_url, prefix) for prefix in "abcd"])
        assert commit(streams, 0, *parts)
        assert by_key(stored(streams)) == by_key([pair for prefix in "abcd" for pair in events(prefix)])


def stage_in_another_process(url: str, prefix: str) -> StagedPart:
    with open_store(url) as store:
        return stage(StreamManager(store), events(prefix))


def test_a_number_is_committed_once_and_what_was_staged_again_is_dropped(streams: StreamManager) -> None:
    assert commit(streams, 3, stage(streams, events("a")))
    for number in (3, 0):
        assert not commit(streams, number, stage(streams, events("again")))
    assert staged(streams.store) == []
    assert commit(streams, 4, stage(streams, events("b")))
    assert by_key(stored(streams)) == by_key([*events("a"), *events("b")])


@pytest.mark.stores
def test_other_events_under_a_committed_number_are_refused_by_their_digest(streams: StreamManager) -> None:
    transactions = Transactions(streams)

    def commit_day(prefix: str, digest: str | None) -> bool:
        return transactions.commit(NAME, JOB, 0, [stage(streams, events(prefix))], digest=digest)

    assert commit_day("a", "8-aa")
    assert not commit_day("a", "8-aa") and not commit_day("a", None)
    for _ in range(2):
        with pytest.raises(AlreadyExistsError, match="other events.*committed='8-aa' given='8-bb'"):
            commit_day("b", "8-bb")
        transactions.abort(NAME, JOB)  # as Spark does after a failed commit
    assert staged(streams.store) == []
    assert by_key(stored(streams)) == by_key(events("a"))
    assert transactions.commit(NAME, JOB, 1, [stage(streams, events("b"))], digest="8-bb")  # the next number
    assert not transactions.commit(NAME, JOB, 0, [stage(streams, events("c"))], digest="8-cc")  # a former one


def test_keys_count_on_their_own(streams: StreamManager) -> None:
    one, other = stage(streams, events("a"), "one"), stage(streams, events("b"), "other")
    assert commit(streams, 5, one, key="one")
    assert commit(streams, 0, other, key="other")
    assert by_key(stored(streams)) == by_key([*events("a"), *events("b")])


def test_a_number_without_events_is_remembered_too(streams: StreamManager) -> None:
    assert commit(streams, 0)
    assert commit(streams, 1, stage(streams, []))
    assert not commit(streams, 1, stage(streams, events("a")))
    assert stored(streams) == []


def test_large_events_and_many_of_them_are_merged(streams: StreamManager, way: str) -> None:
    manager = StreamManager(as_store_of(way, streams.store))
    large = [(QUARTERS[number % 4], bytes([number]) * size) for number, size in enumerate([1, 3_000_000, 70_000, 9, 8])]
    part = stage(manager, large)
    streams.scale(NAME, split=[1])
    assert commit(manager, 0, part)
    assert by_key(stored(streams)) == by_key(large)


def test_events_without_a_key_stay_together_in_a_small_part_and_are_spread_in_a_large_one(
    streams: StreamManager,
) -> None:
    assert len(stage(streams, [(None, b"x")] * 100).segments) == 1
    assert len(stage(streams, [(None, bytes(400_000))] * 8).segments) == 2


def test_a_long_part_has_several_staged_segments_and_keeps_its_order(
    streams: StreamManager, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that what is merged in one step, for which others wait, has a bound."""
    monkeypatch.setattr(staging, "STAGED_BYTES", 3_000_000)
    manager = StreamManager(as_store_of(way, streams.store))
    large = [(QUARTERS[number % 3], b"%03d" % number + bytes(200_000)) for number in range(60)]
    part = stage(manager, large)
    assert part.segments.count(0) >= 2 and len(set(part.staged_segments)) == len(part.segments)
    assert max(streams.store.info(name).length for name in part.staged_segments) < 5_000_000
    streams.scale(NAME, split=[1])
    assert commit(manager, 0, part)
    assert by_key(stored(streams)) == by_key(large)
    assert staged(streams.store) == []


@pytest.mark.parametrize("fault", [None, "lose_answers", "lose_requests", "fail_appends"])
def test_a_small_transaction_comes_in_one_step(streams: StreamManager, fault: str | None) -> None:
    failing = FailingStore(streams.store)
    part = stage(streams, events("a"))
    seen: list[int] = []

    def look(operation: Operation) -> None:
        seen.append(len(stored(streams)))
        if operation.verb == "append_together" and fault is not None and failing.count("append_together") == 1:
            getattr(failing, fault)()

    failing.before = failing.after = look
    assert commit(StreamManager(failing), 0, part)
    assert set(seen) == {0, len(events("a"))}


# ---------------------------------------------------------------------- across scales


@pytest.mark.parametrize("between", [["split"], ["merge"], ["split", "split again"], ["split", "merge back"]])
def test_events_that_were_staged_for_segments_that_were_scaled_go_to_their_successors(
    streams: StreamManager, way: str, between: list[str]
) -> None:
    scales: dict[str, Callable[[], object]] = {
        "split": lambda: streams.scale(NAME, split=[0]),
        "split again": lambda: streams.scale(NAME, split=[2, 1]),
        "merge": lambda: streams.scale(NAME, merge=[0, 1]),
        "merge back": lambda: streams.scale(NAME, merge=[2, 3, 1]),
    }
    manager = StreamManager(as_store_of(way, streams.store))
    keys = (*QUARTERS, None)
    parts = [stage(manager, events("a", 50, keys))]
    for number, scale in enumerate(between):
        scales[scale]()
        parts.append(stage(manager, events(f"b{number}-", 50, keys)))
    with open_writer(streams) as writer:
        writer.write(b"before", "Foo")
    assert commit(manager, 0, *parts)
    found = stored(streams)
    prefixes = ["a", *(f"b{number}-" for number in range(len(between)))]
    expected = [("Foo", b"before"), *(pair for prefix in prefixes for pair in events(prefix, 50, keys))]
    keyless = [event for key, event in found if key is None]
    assert sorted(keyless) == sorted(event for key, event in expected if key is None)
    assert by_key([pair for pair in found if pair[0] is not None]) == by_key([pair for pair in expected if pair[0]])
    state = streams.fetch_state(NAME)
    for block in blocks(streams):
        assert {state.data_segment(state.routes.segment_of(key)) for key in block.keys if key} <= {block.segment}


def test_events_that_were_staged_for_a_segment_that_is_forgotten_go_to_its_successors(
    streams: StreamManager, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transaction, "STAGING_RETENTION_SECONDS", 10 * WRITER_RETENTION_SECONDS)
    part = stage(streams, events("a", 20, (*QUARTERS, None)))
    streams.scale(NAME, split=[0, 1])
    for _ in range(2):
        tail = streams.tail_cut(streams.fetch_state(NAME))
        streams.truncate(NAME, StreamCut(stream=NAME, offsets=tail.offsets))
        clock.advance(WRITER_RETENTION_SECONDS + 1)
    assert set(streams.fetch_state(NAME).segments) == {2, 3, 4, 5}
    assert commit(streams, 0, part)
    assert sorted(stored(streams), key=str) == sorted(events("a", 20, (*QUARTERS, None)), key=str)


def test_a_commit_completes_a_scale_that_somebody_began(streams: StreamManager) -> None:
    part = stage(streams, events("a"))
    with pytest.raises(Died):
        client_that_dies(FailingStore(streams.store), 1, lambda operation: operation.verb == "seal").scale(
            NAME, split=[0]
        )
    assert streams.fetch_state(NAME).scale is not None
    assert commit(streams, 0, part)
    assert streams.fetch_state(NAME).epoch == 1
    assert by_key(stored(streams)) == by_key(events("a"))


@pytest.mark.parametrize("next_thing", ["scale", "seal", "commit", "finish_pending", "writer", "scale under a writer"])
def test_whoever_comes_next_merges_what_a_dead_client_committed(
    streams: StreamManager, way: str, next_thing: str
) -> None:
    part = stage(StreamManager(as_store_of(way, streams.store)), events("a"))
    dying = client_that_dies(as_store_of(way, streams.store), 1, is_merge)
    with pytest.raises(Died):
        commit(dying, 0, part)
    assert stored(streams) == []
    assert streams.fetch_state(NAME).is_pending
    later: Events = []
    manager = StreamManager(as_store_of(way, streams.store))
    if next_thing == "scale":
        assert manager.scale(NAME, split=[0]).epoch == 1
    elif next_thing == "seal":
        assert manager.seal(NAME).sealed
    elif next_thing == "commit":
        later = events("b")
        assert commit(manager, 0, stage(manager, later, "other"), key="other")
    elif next_thing == "finish_pending":
        manager.finish_pending(NAME)
    else:
        with open_writer(manager) as writer:
            if next_thing == "scale under a writer":
                streams.scale(NAME, split=[0])
            later = events("b")
            for key, event in later:
                writer.write(event, key)
    assert by_key(stored(streams)) == by_key([*events("a"), *later])
    assert staged(streams.store) == []
    assert not commit(streams, 0)


# ---------------------------------------------------------------------- dying, and two at once


@dataclass
class Nth:
    """Does something before the so many-th operation that counts: another process that comes at this very point."""

    at: int
    counts: Callable[[Operation], bool]
    action: Callable[[], object]
    seen: list[Operation] = field(default_factory=list)

    def __call__(self, operation: Operation) -> None:
        if self.counts(operation):
            self.seen.append(operation)
            if len(self.seen) == self.at:
                self.action()

    @property
    def acted(self) -> bool:
        return len(self.seen) >= self.at


def client_that_dies(
    failing: FailingStore, at: int, counts: Callable[[Operation], bool], *, after: bool = False
) -> StreamManager:
    """A client whose process is killed before (or after) its so many-th operation that counts."""
    seen: list[Operation] = []

    def die(operation: Operation) -> None:
        if counts(operation):
            seen.append(operation)
            if len(seen) >= at:
                raise Died

    setattr(failing, "after" if after else "before", die)
    return StreamManager(failing)


def is_merge(operation: Operation) -> bool:
    """Which begins with a look at how far a segment has got."""
    return operation.verb == "attributes" and operation.segment.startswith("data/")


def begins_to_merge(streams: StreamManager) -> Callable[[Operation], bool]:
    """Looks at event numbers of writers, which look like it, come before there is something to merge."""
    return lambda operation: is_merge(operation) and streams.fetch_state(NAME).transactions.open is not None


def is_entry(operation: Operation) -> bool:
    return operation == ("append", f"stream/{NAME}")


def is_write(operation: Operation) -> bool:
    return operation.verb in WRITES


@pytest.mark.stores("memory")
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_dying_at_each_write_loses_nothing_and_stores_nothing_twice(store: SegmentStore, way: str, after: bool) -> None:
    """The number is committed again by whoever comes next, as by a job that is started again."""

    def run(streams: StreamManager, name: str) -> None:
        parts = [stage(streams, events(prefix, 12), name=name) for prefix in "ab"]
        streams.scale(name, split=[0])
        commit(streams, 0, *parts, name=name)

    def create(name: str) -> str:
        StreamManager(store).create(name, scaling=ScalingPolicy.fixed(2))
        return name

    measured = as_store_of(way, store)
    run(StreamManager(measured), create("shop/measured"))
    total = sum(map(is_write, measured.operations))
    assert total > 10
    for at in range(1, total + 1):
        name = create(f"shop/at-{at}")
        with pytest.raises(Died):
            run(client_that_dies(as_store_of(way, store), at, is_write, after=after), name)
        next_one = StreamManager(as_store_of(way, store))
        commit(
            next_one,
            0,
            stage(next_one, events("a", 12), name=name),
            stage(next_one, events("b", 12), name=name),
            name=name,
        )
        expected = by_key([*events("a", 12), *events("b", 12)])
        assert by_key(stored(next_one, name)) == expected, f"died at write {at} of {total}"
        assert not next_one.fetch_state(name).is_pending


@pytest.mark.stores("memory")
def test_of_two_who_merge_at_once_neither_does_anything_twice(store: SegmentStore, way: str) -> None:
    """Another client comes at each operation of the first, and finishes what that is at."""
    for at in itertools.count(1):
        name = f"shop/at-{at}"
        first = as_store_of(way, store)
        streams = StreamManager(first)
        streams.create(name, scaling=ScalingPolicy.fixed(2))
        part = stage(streams, events("a", 24), name=name)
        streams.scale(name, split=[0])
        other = partial(StreamManager(as_store_of(way, store)).finish_pending, name)
        coming = Nth(at, lambda _: True, other)
        first.before = coming
        assert commit(streams, 0, part, name=name)
        assert by_key(stored(streams, name)) == by_key(events("a", 24)), f"met at {coming.seen[at - 1 : at]}"
        if not coming.acted:
            assert at > 8
            return


@pytest.mark.stores("memory")
def test_a_merger_whose_staged_events_another_one_is_deleting_has_nothing_to_do(store: SegmentStore, way: str) -> None:
    """A store may truncate a large segment before it deletes it."""

    def truncate_first(operation: Operation) -> None:
        if operation.verb == "forget" and "/staging/" in operation.segment:
            store.truncate(operation.segment, store.info(operation.segment).length)
            raise ClosedError("no")

    failing = FailingStore(store)
    failing.before = truncate_first
    others = StreamManager(failing)

    def merge(name: str) -> None:
        with suppress(ClosedError):
            others.finish_pending(name)

    for at in itertools.count(1):
        name = f"shop/at-{at}"
        others.create(name, scaling=ScalingPolicy.fixed(2))
        part = stage(others, events("a", 24), name=name)
        others.scale(name, split=[0])
        with pytest.raises(Died):
            commit(client_that_dies(as_store_of(way, store), 1, is_merge), 0, part, name=name)
        late = as_store_of(way, store)
        late.before = coming = Nth(at, lambda operation: "data/" in operation.segment, partial(merge, name))
        StreamManager(late).finish_pending(name)
        assert by_key(stored(others, name)) == by_key(events("a", 24)), f"met at {coming.seen[at - 1 : at]}"
        if not coming.acted:
            assert at > 3
            return


@pytest.mark.stores("memory")
def test_a_merger_that_slept_while_the_stream_went_on_does_nothing(store: SegmentStore, way: str) -> None:
    """At each operation of its merge it sleeps: others merge, commit another transaction, and scale.

    They die before they delete what was staged, so all that the sleeper is about to append is there.
    """

    def refuse(operation: Operation) -> None:
        if operation.verb == "forget":
            raise ClosedError("no")

    failing = FailingStore(store)
    failing.before = refuse
    others = StreamManager(failing)

    def go_on(name: str, turn: int) -> None:
        others.finish_pending(name)
        commit(others, 1, stage(others, events("b", 24), name=name), name=name)
        if turn % 2:
            others.scale(name, split=[0])
        commit(others, 2, stage(others, events("c", 24), name=name), name=name)

    for at in itertools.count(1):
        name = f"shop/at-{at}"
        others.create(name, scaling=ScalingPolicy.fixed(2))
        part = stage(others, events("a", 24), name=name)
        with pytest.raises(Died):
            commit(client_that_dies(as_store_of(way, store), 1, is_merge), 0, part, name=name)
        sleeper = as_store_of(way, store)
        sleeper.before = sleeping = Nth(at, lambda operation: "data/" in operation.segment, partial(go_on, name, at))
        StreamManager(sleeper).finish_pending(name)
        if not sleeping.acted:
            assert at > 3
            return
        assert by_key(stored(others, name)) == by_key([*events("a", 24), *events("b", 24), *events("c", 24)])


@pytest.mark.stores("memory")
@pytest.mark.parametrize("fault", ["lose_answers", "lose_requests", "fail_appends"])
def test_an_answer_that_is_lost_stores_nothing_twice(store: SegmentStore, way: str, fault: str) -> None:
    for at in itertools.count(1):
        name = f"shop/at-{at}"
        failing = as_store_of(way, store)
        streams = StreamManager(failing)
        streams.create(name, scaling=ScalingPolicy.fixed(2))
        failing.before = losing = Nth(at, lambda operation: operation.verb in APPENDS, getattr(failing, fault))
        commit(streams, 0, *(stage(streams, events(prefix), name=name) for prefix in "ab"), name=name)
        assert by_key(stored(streams, name)) == by_key([*events("a"), *events("b")]), f"lost: {losing.seen[at - 1 :]}"
        if not losing.acted:
            assert at > 6
            return


def test_a_store_that_goes_away_after_the_decision_is_told_and_the_commit_can_be_made_again(
    streams: StreamManager,
) -> None:
    failing = FailingStore(streams.store)
    with open_writer(StreamManager(failing, timeout=0.05)) as writer:
        txn = writer.transaction()
        for key, event in events("a"):
            txn.write(event, key)
        failing.before = Nth(1, is_merge, lambda: setattr(failing, "unavailable", True))
        with pytest.raises(StoreUnavailableError) as raised:
            txn.commit()
        assert "The transaction is committed" in raised.value.__notes__[0]
        with pytest.raises(InvalidArgumentError, match="is committed and cannot be aborted"):
            txn.abort()
        failing.before, failing.unavailable = None, False
        txn.commit()
    assert by_key(stored(streams)) == by_key(events("a"))


@pytest.mark.parametrize("arrived", [True, False])
def test_a_key_that_nobody_asks_for_again_is_forgotten_and_what_is_unclear_about_that_fails_no_commit(
    streams: StreamManager, arrived: bool
) -> None:
    failing = FailingStore(streams.store)
    part = stage(streams, events("a"))

    def lose_contact() -> None:
        failing.unavailable = True
        raise StoreUnavailableError("the answer is lost")

    setattr(failing, "after" if arrived else "before", Nth(2, is_entry, lose_contact))  # the first one commits
    manager = StreamManager(failing, timeout=0.3)
    assert Transactions(manager).commit(NAME, JOB, 0, [part], is_only_one=True)
    streams.finish_pending(NAME)
    assert by_key(stored(streams)) == by_key(events("a"))
    assert set(streams.fetch_state(NAME).transactions.committers) == (set() if arrived else {JOB})


@pytest.mark.parametrize("arrived", [True, False])
def test_an_abort_after_a_commit_of_unknown_outcome_settles_it(streams: StreamManager, arrived: bool) -> None:
    failing = FailingStore(streams.store)
    with open_writer(StreamManager(failing, timeout=0.3)) as writer:
        txn = writer.transaction()
        txn.write(b"event", "Foo")

        def lose_contact() -> None:
            failing.unavailable = True
            raise StoreUnavailableError("the answer is lost")

        if arrived:
            failing.after = Nth(1, is_entry, lose_contact)
        else:
            failing.before = Nth(1, is_entry, partial(setattr, failing, "unavailable", True))
        with pytest.raises(rg.ReaderGroupError):
            txn.commit()
        failing.before = failing.after = None
        failing.unavailable = False
        if arrived:
            with pytest.raises(InvalidArgumentError, match="is committed and cannot be aborted"):
                txn.abort()
            txn.commit()
        else:
            txn.abort()
    assert stored(streams) == ([("Foo", b"event")] if arrived else [])
    assert staged(streams.store) == []


# ---------------------------------------------------------------------- what is given up


def test_an_abort_gives_up_what_was_staged_and_not_what_is_committed(streams: StreamManager) -> None:
    assert commit(streams, 0, stage(streams, events("a")))
    part = stage(streams, events("given up"))
    Transactions(streams).abort(NAME, JOB)
    assert staged(streams.store) == []
    with pytest.raises(NotFoundError, match="were discarded"):
        commit(streams, 1, part)
    assert commit(streams, 1, stage(streams, events("b")))
    assert by_key(stored(streams)) == by_key([*events("a"), *events("b")])


def test_an_abort_while_somebody_merges_takes_nothing_away(streams: StreamManager, way: str) -> None:
    part = stage(streams, events("a"))
    failing = as_store_of(way, streams.store)
    failing.before = abort = Nth(1, is_merge, lambda: Transactions(streams).abort(NAME, JOB))
    assert commit(StreamManager(failing), 0, part)
    assert abort.acted and by_key(stored(streams)) == by_key(events("a"))


def test_an_abort_that_comes_before_the_entry_of_a_commit_wins(streams: StreamManager) -> None:
    part = stage(streams, events("a"))
    failing = FailingStore(streams.store)
    failing.before = abort = Nth(1, is_entry, lambda: Transactions(streams).abort(NAME, JOB))
    with pytest.raises(NotFoundError, match="were discarded"):
        commit(StreamManager(failing), 0, part)
    assert abort.acted and stored(streams) == [] and not streams.fetch_state(NAME).is_pending


def test_repeated_attempts_go_with_the_commit_and_orphans_when_they_are_old(
    streams: StreamManager, clock: ManualClock
) -> None:
    repeated, named = stage(streams, events("x")), stage(streams, events("a"))
    orphan = stage(streams, events("orphan"), "dead")
    assert commit(streams, 0, named)
    assert staged(streams.store) == [*orphan.staged_segments]
    assert repeated.name not in str(staged(streams.store))
    clock.advance(STAGING_RETENTION_SECONDS)
    young = stage(streams, events("young"), "alive")
    assert commit(streams, 1)
    assert set(staged(streams.store)) == {*orphan.staged_segments, *young.staged_segments}
    clock.advance(3600.0)
    assert commit(streams, 2)
    assert staged(streams.store) == [*young.staged_segments]
    with pytest.raises(NotFoundError, match="so long ago"):
        commit(streams, 0, orphan, key="dead")
    assert commit(streams, 0, young, key="alive")


def test_what_is_too_old_is_refused_before_it_is_deleted(streams: StreamManager, clock: ManualClock) -> None:
    """Whoever has read the state before others gave the part up cannot get his commit through."""
    part = stage(streams, events("a"))
    clock.advance(STAGING_RETENTION_SECONDS + 3600.0)
    failing = FailingStore(streams.store)
    failing.before = another = Nth(1, is_entry, lambda: commit(streams, 0, key="other"))
    with pytest.raises(NotFoundError, match="so long ago"):
        commit(StreamManager(failing, clock=clock), 0, part)
    assert another.acted and staged(streams.store) == []
    assert not streams.fetch_state(NAME).is_pending


def test_a_commit_by_a_clock_that_was_days_ahead_ends_no_later_transaction(
    streams: StreamManager, clock: ManualClock
) -> None:
    ahead = StreamManager(streams.store, clock=ManualClock(clock.monotonic() + 3 * STAGING_RETENTION_SECONDS))
    assert commit(ahead, 0, stage(ahead, events("a"), "ahead"), key="ahead")
    part = stage(streams, events("b"))
    assert commit(streams, 0, part)
    assert sorted(stored(streams)) == sorted([*events("a"), *events("b")])
    orphan = stage(streams, events("orphan"), "dead")
    clock.advance(4 * STAGING_RETENTION_SECONDS + 3600.0)
    assert commit(streams, 1)
    assert not {*orphan.staged_segments} & {*staged(streams.store)}  # it is deleted, although later


def test_a_key_is_forgotten_when_it_was_not_used_for_long(streams: StreamManager, clock: ManualClock) -> None:
    assert commit(streams, 5, key="old")
    clock.advance(KEY_RETENTION_SECONDS - 1)
    assert commit(streams, 5)
    assert set(streams.fetch_state(NAME).transactions.committers) == {"old", JOB}
    clock.advance(3601.0)  # it is looked for every hour
    assert commit(streams, 6)
    assert set(streams.fetch_state(NAME).transactions.committers) == {JOB}


def test_a_deleted_stream_leaves_nothing_that_was_staged(streams: StreamManager) -> None:
    part = stage(streams, events("a"))
    streams.delete(NAME)
    assert staged(streams.store) == []
    with pytest.raises(NotFoundError, match="no stream of this name"):
        commit(streams, 0, part)
    streams.create(NAME, scaling=ScalingPolicy.fixed(2))
    with pytest.raises(NotFoundError, match="belong to a deleted stream"):
        commit(streams, 0, part)
    assert stored(streams) == []


@pytest.mark.parametrize("again", [False, True], ids=["deleted", "created again"])
def test_a_commit_fails_when_the_stream_is_deleted_before_it_is_merged(streams: StreamManager, again: bool) -> None:
    def delete() -> None:
        streams.delete(NAME)
        if again:
            streams.create(NAME)

    part = stage(streams, events("a"))
    late = FailingStore(streams.store)
    late.before = Nth(1, is_merge, delete)
    with pytest.raises(NotFoundError, match="deleted stream" if again else "no stream of this name") as raised:
        commit(StreamManager(late), 0, part)
    assert not hasattr(raised.value, "__notes__"), "there is nothing to wait for"
    assert staged(streams.store) == []


def test_staging_for_a_stream_that_is_deleted_meanwhile_fails_and_leaves_nothing(streams: StreamManager) -> None:
    for again in (False, True):
        with pytest.raises(NotFoundError):
            with Transactions(streams).stage(NAME, JOB) as part_of:
                part_of.write(b"event")
                streams.delete(NAME)
                if again:
                    streams.create(NAME)
                part_of.finish()
        assert staged(streams.store) == []
        if not again:
            streams.create(NAME)


def test_staging_that_is_left_without_a_part_leaves_nothing(streams: StreamManager) -> None:
    with Transactions(streams).stage(NAME, JOB) as part_of:
        part_of.write(bytes(2 * 1024 * 1024))
        assert staged(streams.store)
    assert staged(streams.store) == []
    for call in (lambda: part_of.write(b"event"), part_of.finish):
        with pytest.raises(ClosedError, match="stage another"):
            call()


def test_staging_goes_on_after_an_outage_and_gives_the_part_up_after_a_long_one(streams: StreamManager) -> None:
    failing = FailingStore(streams.store)
    failing.fail_appends(2)
    part = stage(StreamManager(failing), events("a"))
    manager = StreamManager(failing, timeout=0.05)
    with pytest.raises(StoreUnavailableError):
        with Transactions(manager).stage(NAME, JOB) as part_of:
            part_of.write(b"event")
            failing.unavailable = True
            part_of.finish()
    with pytest.raises(ClosedError):
        part_of.finish()
    failing.unavailable = False
    assert commit(manager, 0, part)
    assert by_key(stored(streams)) == by_key(events("a"))


# ---------------------------------------------------------------------- bad input


def test_what_cannot_be_committed_is_refused_and_nothing_is_done(streams: StreamManager) -> None:
    streams.create("shop/other")
    merged = stage(streams, events("merged"))
    assert commit(streams, 0, merged)
    good = stage(streams, events("a"))
    foreign = stage(streams, events("b"), name="shop/other")
    lost = stage(streams, events("c"))
    for name in lost.staged_segments:
        streams.store.delete(name)
    before = contents(streams.store)
    bad: list[tuple[type[rg.ReaderGroupError], str, Callable[[], object]]] = [
        (InvalidArgumentError, "name each part once", lambda: commit(streams, 1, good, good)),
        (InvalidArgumentError, "another transaction", lambda: commit(streams, 1, good, foreign)),
        (InvalidArgumentError, "another transaction", lambda: commit(streams, 1, good, key="else")),
        (InvalidArgumentError, "number must be an integer >= 0", lambda: commit(streams, -1, good)),
        (InvalidArgumentError, "transaction key", lambda: commit(streams, 1, key="a/b")),
        (InvalidArgumentError, "transaction key", lambda: stage(streams, [], key="")),
        (InvalidArgumentError, "transaction key", lambda: Transactions(streams).abort(NAME, "x" * 251)),
        (NotFoundError, "were discarded", lambda: commit(streams, 1, merged)),
        (NotFoundError, "were discarded", lambda: commit(streams, 1, good, merged)),
        (NotFoundError, "discarded or deleted", lambda: commit(streams, 1, good, lost)),
        (NotFoundError, "no stream", lambda: stage(streams, [], name="shop/none")),
        (NotFoundError, "no stream", lambda: commit(streams, 1, name="shop/none")),
        (NotFoundError, "no stream", lambda: Transactions(streams).abort("shop/none", JOB)),
    ]
    for kind, words, call in bad:
        with pytest.raises(kind, match=words):
            call()
    assert contents(streams.store) == before
    assert commit(streams, 1, good)
    assert by_key(stored(streams)) == by_key([*events("merged"), *events("a")])


def test_a_sealed_stream_takes_no_transaction(streams: StreamManager) -> None:
    part = stage(streams, events("a"))
    with open_writer(streams) as writer:
        txn = writer.transaction()
        txn.write(b"event")
        streams.seal(NAME)
        with pytest.raises(SealedError):
            txn.commit()
    with pytest.raises(SealedError, match="takes no more events"):
        commit(streams, 0, part)
    with pytest.raises(SealedError):
        stage(streams, events("b"))
    assert stored(streams) == []
    assert staged(streams.store) == [*part.staged_segments]  # until the stream is deleted


def test_too_many_parts_are_refused_with_words_and_fewer_are_committed(streams: StreamManager) -> None:
    manager = StreamManager(streams.store, state_limit_bytes=2500)
    parts = [stage(manager, events("a", 1)) for _ in range(80)]
    with pytest.raises(StateTooLargeError, match="stage fewer and larger ones"):
        commit(manager, 0, *parts)
    assert stored(streams) == []
    assert commit(manager, 0, *parts[:5])
    assert len(stored(streams)) == 5


def test_a_transaction_of_a_thousand_parts_is_a_small_entry(streams: StreamManager) -> None:
    part = stage(streams, events("a"))
    parts = [part.model_copy(update={"name": f"{part.name[:-4]}{number:04x}"}) for number in range(1000)]
    committed = CommitTransaction(
        key=JOB,
        number=0,
        generation=0,
        parts=tuple(CommittedPart(name=each.name, segments=tuple(range(16))) for each in parts),
        size=1,
        at=0.0,
        unused_since=0.0,
        expired_before=0,
    )
    assert len(msgpack.packb(committed.model_dump())) < 80_000


# ---------------------------------------------------------------------- everything at once


def test_what_has_no_transactions_costs_what_it_did(streams: StreamManager) -> None:
    failing = FailingStore(streams.store)
    manager = StreamManager(failing)
    manager.fetch_state(NAME)
    failing.operations.clear()
    manager.finish_pending(NAME)
    assert [operation.verb for operation in failing.operations] == ["read"]
    manager.create("shop/other")
    manager.delete("shop/other")  # the first deletion of a process looks for what others have left
    for thread in threading.enumerate():
        if thread.name == "deletions of streams":
            thread.join(PATIENCE_SECONDS)
    failing.operations.clear()
    manager.delete(NAME)
    assert failing.count("list") == 1


def test_several_commit_while_others_write_and_scale(store: SegmentStore) -> None:
    StreamManager(store).create(NAME, scaling=ScalingPolicy.fixed(2))

    def transact(name: str) -> None:
        streams = StreamManager(store)
        with open_writer(streams) as writer:
            for number in range(6):
                with writer.transaction() as txn:
                    for key in QUARTERS:
                        txn.write(b"%s %02d" % (name.encode(), number), f"{key}")

    def job(name: str) -> None:
        for number in range(6):
            streams = StreamManager(store)
            parts = [
                stage(streams, [(key, b"%s %02d%d" % (name.encode(), number, p)) for key in QUARTERS], name)
                for p in (0, 1)
            ]
            assert commit(streams, number, *parts, key=name)

    def write() -> None:
        with open_writer(StreamManager(store)) as writer:
            for number in range(200):
                writer.write(b"writer %03d" % number, QUARTERS[number % 4])
                if number % 20 == 0:
                    writer.flush()

    def scale() -> None:
        streams = StreamManager(store)
        rng = random.Random(1)
        for _ in range(4):
            current = streams.fetch_state(NAME).current
            if len(current) > 2:
                streams.scale(NAME, merge=current[:2])
            else:
                streams.scale(NAME, split=[rng.choice(current)])

    with ThreadPoolExecutor(6) as pool:
        running = [
            pool.submit(transact, "t1"),
            pool.submit(transact, "t2"),
            pool.submit(job, "j1"),
            pool.submit(job, "j2"),
        ]
        running += [pool.submit(write), pool.submit(scale)]
        for each in running:
            each.result(timeout=100)
    found = stored(StreamManager(store))
    assert len(found) == 2 * 6 * 4 + 2 * 6 * 8 + 200
    for key, of_key in by_key(found).items():
        for who in (b"t1", b"t2", b"j1", b"j2", b"writer"):
            mine = [event for event in of_key if event.startswith(who)]
            assert mine == sorted(set(mine)), f"{who!r} of {key}"
    assert staged(store) == []


@pytest.mark.stores("memory")
@seeds(4, 12)
def test_random_histories_are_what_was_committed(
    store: SegmentStore, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parts are staged and committed, aborted and repeated, streams are scaled, and processes die at any operation."""
    rng = random.Random(seed)
    monkeypatch.setattr(merging, "TOGETHER_BYTES", rng.choice([0, 2000]))
    monkeypatch.setattr(merging, "_APPEND_BYTES", rng.choice([150, 1000, 10**6]))
    way = rng.choice(["together", "without copies"])
    StreamManager(store).create(NAME, scaling=ScalingPolicy.fixed(2))
    numbers = dict.fromkeys(("one", "other"), 0)
    waiting: dict[str, list[StagedPart]] = {key: [] for key in numbers}
    staged_events: dict[str, Events] = {}
    expected: list[tuple[str | None, bytes]] = []
    keys = [f"key-{number}" for number in range(12)]

    def process() -> StreamManager:
        if rng.random() < 0.4:
            return client_that_dies(
                as_store_of(way, store), rng.randint(1, 30), lambda _: True, after=rng.random() < 0.5
            )
        return StreamManager(as_store_of(way, store))

    for step in range(40):
        key = rng.choice(sorted(numbers))
        act = rng.choice(["stage", "stage", "stage", "commit", "commit", "abort", "scale"])
        try:
            if act == "stage":
                made = [(rng.choice(keys), b"%d.%d" % (step, number)) for number in range(rng.randint(0, 12))]
                part = stage(process(), made, key)
                waiting[key].append(part)
                staged_events[part.name] = made
            elif act == "commit":
                rng.shuffle(waiting[key])
                parts = waiting[key][: rng.randint(0, 4)]
                with suppress(Died):
                    commit(process(), numbers[key], *parts, key=key)
                # Whoever comes next asks again, and learns whether the first has got through.
                last = StreamManager(store).finish_pending(NAME).transactions.committer(key).number
                if last < numbers[key]:
                    assert commit(StreamManager(store), numbers[key], *parts, key=key)
                else:
                    assert not commit(StreamManager(store), numbers[key], *parts, key=key)
                expected += [pair for part in parts for pair in staged_events[part.name]]
                numbers[key] += 1
                waiting[key] = []
            elif act == "abort":
                Transactions(process()).abort(NAME, key)
                waiting[key] = []
            else:
                current = StreamManager(store).fetch_state(NAME).current
                if len(current) > 3:
                    at = rng.randrange(len(current) - 1)
                    process().scale(NAME, merge=current[at : at + 2])
                else:
                    process().scale(NAME, split=[rng.choice(current)])
        except Died:
            if act == "abort":
                Transactions(StreamManager(store)).abort(NAME, key)
                waiting[key] = []
    streams = StreamManager(store)
    streams.finish_pending(NAME)
    assert by_key(stored(streams)) == by_key(expected)
