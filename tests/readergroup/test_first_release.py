"""A store with one of everything that the first release stores is read, and used further, by this release.

The golden file is a copy of a SQLite file that a process had open, so its reader, members and writer did not leave.
"""

from __future__ import annotations

import re
import shutil
import sqlite3
from collections.abc import Callable
from contextlib import ExitStack, closing, suppress
from pathlib import Path

from pydantic import BaseModel

import readergroup as rg
from readergroup.streams.state import CommitTransaction
from readergroup.streams.transactions.committed import CommittedPart
from synchronizer import open_store
from tests.golden import golden_path, is_to_write
from tests.waiting import until

GOLDEN = golden_path("client-v1.db")
STREAM, COPY, PENDING, GROUP, QUEUE = "shop/orders", "shop/copied", "shop/pending", "billing", "jobs"
WRITTEN = [b"event %02d" % number for number in range(40)]
#: The golden file has leases that expire soon. In what is written today, all have to live until it is copied.
TIMEOUT, LONG_TIMEOUT = 1.0, 60.0
#: What differs from run to run: ids, and places in logs.
RANDOM = re.compile(r"[0-9a-f]{12,}|[0-9]{10,}")


class Settings(BaseModel):
    workers: int = 2


def write_everything(url: str, into: Path, timeout: float) -> None:
    """Write one of everything, and copy the file while all of it is held."""
    with ExitStack() as held:
        client = held.enter_context(rg.connect(url))
        write_streams(client, held)
        write_group(client, held, timeout)
        write_shared(client, held, timeout)
        write_queue(client, held, timeout)
        with closing(sqlite3.connect(url.removeprefix("sqlite:///"))) as connection:
            connection.execute("VACUUM INTO ?", (str(into),))


def write_streams(client: rg.Client, held: ExitStack) -> None:
    streams = client.streams
    streams.create(STREAM, scaling=rg.ScalingPolicy.fixed(2))
    writer = held.enter_context(client.writer(STREAM))
    for number, event in enumerate(WRITTEN[:20]):
        writer.write(event, routing_key=f"key-{number % 7}", headers={"number": b"%d" % number})
    writer.flush()
    streams.scale(STREAM, split=[0])
    for number, event in enumerate(WRITTEN[20:30]):
        writer.write(event, routing_key=f"key-{number % 7}")
    writer.flush()
    with writer.transaction() as transaction:
        for number, event in enumerate(WRITTEN[30:]):
            transaction.write(event, f"key-{number % 7}")
    streams.copy(STREAM, COPY)
    streams.create("shop/deleted")
    streams.delete("shop/deleted")
    # As after a kill between the commit of a transaction and its merge.
    streams.create(PENDING)
    with rg.Transactions(streams).stage(PENDING, "job") as staging:
        staging.write(b"staged")
        part = staging.finish()
    commit = CommitTransaction(
        key="job",
        number=1,
        generation=part.generation,
        parts=(CommittedPart(name=part.name, segments=part.segments),),
        size=part.size,
        at=1.0,
        unused_since=0,
        expired_before=0,
    )
    streams.synchronizer(PENDING).update_state_unconditionally(commit)


def write_group(client: rg.Client, held: ExitStack, timeout: float) -> None:
    group = client.groups.create(GROUP, streams=[STREAM], reader_timeout_seconds=timeout)
    group.checkpoint("start")
    heard: list[rg.ReaderNotification] = []
    group.reader_notifier.register_listener(heard.append, durable="sizer")
    held.callback(group.record_notifications(lag_interval_seconds=0.1).close)
    with group.reader("reader-1") as reader:
        read(reader, 10)
    group.synchronizer.compact()
    read(held.enter_context(group.reader("reader-2")), 5)
    group.autoscale(rg.ReaderScalingPolicy(min_readers=1, max_readers=4))(lambda decision: None)
    until(lambda: any("reader-2" in each.joined for each in heard), "the listener hears of the second reader")
    until(lambda: {type(each) for each in group.notification_record.read()} >= {rg.ReaderNotification, rg.LagSample})
    until(lambda: {"autoscale", "listener/ReaderNotifier/sizer"} <= client.store.attributes("group/billing").keys())


def read(reader: rg.Reader[bytes], count: int) -> list[bytes]:
    found = []
    for _ in range(count):
        event = reader.read(60)
        assert event is not None
        found.append(event.data)
    reader.commit()
    return found


def write_shared(client: rg.Client, held: ExitStack, timeout: float) -> None:
    held.enter_context(client.shared_map("prices", int))["pear"] = 5
    held.enter_context(client.shared_set("tags", str)).add("new")
    held.enter_context(client.shared_config("settings", Settings)).put("workers", 3)
    held.enter_context(client.counter("visits")).add(7)
    held.enter_context(client.membership("workers", "a", member_timeout_seconds=timeout)).join()
    held.enter_context(client.leader_election("chief", "a", member_timeout_seconds=timeout)).campaign()
    held.enter_context(client.lock("door", member_timeout_seconds=timeout))
    held.enter_context(client.semaphore("seats", permits=2, member_timeout_seconds=timeout))


def write_queue(client: rg.Client, held: ExitStack, timeout: float) -> None:
    def fail_at_the_first(event: rg.QueuedEvent) -> None:
        if event.data == b"job 0":
            raise ValueError(event.data)

    held.enter_context(client.event_queue(QUEUE)).add_many([b"job %d" % number for number in range(4)])
    processor = rg.EventProcessor(
        client.store,
        QUEUE,
        fail_at_the_first,
        max_batch=1,
        retries=rg.Retries(attempts=1),
        set_aside=True,
        consumer_timeout_seconds=timeout,
        threads=False,
    )
    held.callback(processor.close)
    while not (processor.processed_events and list(client.event_queue(QUEUE).dead_letters())):
        processor.step()


#: Names that were added since.
LATER = {"readergroup/deleted-names | "}


def names_in(path: Path) -> set[str]:
    """Return the names of segments and attributes, without what is random in them."""
    with open_store(f"sqlite:///{path}") as store:
        names = {f"{segment} | {name}" for segment in store.list() for name in ("", *store.attributes(segment))}
    return {RANDOM.sub("*", name) for name in names}


def copied(tmp_path: Path) -> Path:
    if is_to_write(GOLDEN):
        write_everything(f"sqlite:///{tmp_path}/original.db", GOLDEN, TIMEOUT)
    return Path(shutil.copy(GOLDEN, tmp_path / "golden.db"))


def test_segments_and_attributes_have_the_names_of_the_first_release(tmp_path: Path) -> None:
    today = tmp_path / "today.db"
    write_everything(f"sqlite:///{tmp_path}/written.db", today, LONG_TIMEOUT)
    assert names_in(today) == names_in(copied(tmp_path)) | LATER


def test_what_the_first_release_stored_is_read_and_used_further(tmp_path: Path) -> None:
    with rg.connect(f"sqlite:///{copied(tmp_path)}", must_exist=True) as client:
        check_streams(client)
        check_group(client)
        check_shared(client)
        check_queue(client)


def check_streams(client: rg.Client) -> None:
    assert set(client.streams.list()) == {STREAM, COPY, PENDING}
    assert not client.streams.exists("shop/deleted")
    for stream in (STREAM, COPY):
        events = [event for each in client.batch.segment_ranges(stream) for event in client.batch.read(each)]
        assert sorted(event.data for event in events) == WRITTEN
        assert {event.routing_key for event in events} == {f"key-{number}" for number in range(7)}
        assert {event.headers["number"] for event in events if event.headers} == {b"%d" % n for n in range(20)}
    client.streams.finish_pending(PENDING)
    (staged,) = client.batch.segment_ranges(PENDING)
    assert [event.data for event in client.batch.read(staged)] == [b"staged"]
    with client.writer(PENDING) as writer, writer.transaction() as transaction:
        transaction.write(b"later")
    client.streams.scale(STREAM, split=[1])
    client.streams.seal(STREAM)


def check_group(client: rg.Client) -> None:
    group = client.groups.get(GROUP)
    assert group.online_readers() == ["reader-2"] and [*group.checkpoints] == ["start"]
    recorded = list(group.notification_record.read())
    assert {type(each) for each in recorded} >= {rg.SegmentNotification, rg.ReaderNotification, rg.LagSample}
    heard: list[rg.ReaderNotification] = []
    group.reader_notifier.register_listener(heard.append, durable="sizer")
    with group.reader("reader-3") as reader:
        left = [event.data for event in reader]  # also of the segments of reader-2, whose lease expires
    assert len(left) == len({*left}) == len(WRITTEN) - 15
    until(lambda: any("reader-2" in each.dead for each in heard))
    group.reset(group.checkpoints["start"])
    with group.reader("reader-4") as reader:
        assert sorted(event.data for event in reader) == WRITTEN
    client.groups.delete(GROUP)


def check_shared(client: rg.Client) -> None:
    with client.shared_map("prices", int) as prices, client.shared_set("tags", str) as tags:
        assert (dict(prices), set(tags)) == ({"pear": 5}, {"new"})
    with client.shared_config("settings", Settings) as settings, client.counter("visits") as visits:
        assert (settings.value.workers, visits.value) == (3, 7)
    with client.membership("workers", "b", member_timeout_seconds=TIMEOUT) as workers:
        workers.join()
        until(lambda: [*workers.members()] == ["b"], "the member that did not leave is dead")
    with client.leader_election("chief", "b", member_timeout_seconds=TIMEOUT) as election:
        assert unless_lost(lambda: election.campaign(timeout=60) and election.fencing_token) > 1
    assert unless_lost(lambda: token_of_lock(client)) > 1
    with client.semaphore("seats", permits=2, timeout=60, member_timeout_seconds=TIMEOUT):
        pass


def token_of_lock(client: rg.Client) -> int:
    with client.lock("door", timeout=60, member_timeout_seconds=TIMEOUT) as lock:
        return lock.fencing_token


def unless_lost(ask: Callable[[], int]) -> int:
    """Ask again when a lease, short as it is, has expired meanwhile."""
    while True:
        with suppress(rg.LeaseLostError):
            return ask()


def check_queue(client: rg.Client) -> None:
    with client.event_queue(QUEUE) as queue:
        assert [letter.data for letter in queue.dead_letters()] == [b"job 0"]
    handled: list[bytes] = []
    with client.event_processor(QUEUE, lambda event: handled.append(event.data)) as processor:
        processor.drain(timeout=60)
    assert handled[-2:] == [b"job 2", b"job 3"]
