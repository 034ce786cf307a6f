"""What a deletion that somebody died in has left is deleted by whoever deletes next."""

from __future__ import annotations

import os
import signal
import threading
from itertools import count

import pytest

from readergroup.streams.config import ScalingPolicy
from readergroup.streams.deletions import KEPT_LOG_BYTES, LOOK_EVERY, PATIENCE_SECONDS, QUEUE, Deletion
from readergroup.streams.manager import StreamManager
from synchronizer import EventQueue, NotFoundError, SegmentStore, open_store
from synchronizer.testing import FailingStore, InstantClock, Operation
from tests.clean_processes import CLEAN
from tests.dying import Died
from tests.golden import golden
from tests.synchronizer.accounts import LONG
from tests.waiting import until

NAME, OTHER = "shop/orders", "shop/others"


@pytest.fixture
def clock() -> InstantClock:
    return InstantClock()


def streams(store: SegmentStore, clock: InstantClock) -> StreamManager:
    """A client that does nothing in the background."""
    return StreamManager(store, clock=clock)


def create(manager: StreamManager, name: str = NAME) -> None:
    manager.create(name, scaling=ScalingPolicy.fixed(3))


def delete_another(store: SegmentStore, clock: InstantClock) -> None:
    """What a client does that comes later."""
    later = streams(store, clock)
    create(later, OTHER)
    later.delete(OTHER)


def data(store: SegmentStore, name: str = NAME) -> list[str]:
    return list(store.list(f"data/{name}/"))


def dying(store: SegmentStore, clock: InstantClock, verb: str, prefix: str) -> StreamManager:
    def die(operation: Operation) -> None:
        if operation.verb == verb and operation.segment.startswith(prefix):
            raise Died

    failing = FailingStore(store)
    failing.before = die
    return streams(failing, clock)


@pytest.mark.stores(round_robin=True)
def test_segments_that_a_dead_client_has_left_are_deleted_with_the_next_stream(
    store: SegmentStore, clock: InstantClock
) -> None:
    create(streams(store, clock))
    with pytest.raises(Died):
        dying(store, clock, "delete", "data/").delete(NAME)
    assert len(data(store)) == 3
    delete_another(store, clock)
    assert data(store) == data(store, OTHER) == []
    assert EventQueue(store, QUEUE).outstanding_bytes == 0


@pytest.mark.stores(round_robin=True)
@pytest.mark.parametrize("died", [False, True])
@pytest.mark.parametrize("compacted", [False, True])
def test_a_deleted_stream_keeps_a_short_log(
    store: SegmentStore, clock: InstantClock, died: bool, compacted: bool
) -> None:
    manager = streams(store, clock)
    create(manager)
    for number in range(1, 50):
        manager.configure(NAME, scaling=ScalingPolicy.by_event_rate(number))
    if compacted:
        manager.synchronizer(NAME).compact()
    if died:
        with pytest.raises(Died):
            dying(store, clock, "delete", "data/").delete(NAME)
        delete_another(store, clock)
    else:
        manager.delete(NAME)
    log = store.info(f"stream/{NAME}")
    (snapshot,) = store.list(f"snapshot/stream/{NAME}@")
    assert log.length - log.start_offset + store.info(snapshot).length <= KEPT_LOG_BYTES
    create(streams(store, clock))
    assert streams(store, clock).exists(NAME)


def test_the_history_of_a_stream_that_is_created_again_meanwhile_stays(
    store: SegmentStore, clock: InstantClock
) -> None:
    """Processes that follow the log would have to read a snapshot instead, and miss what changed in between."""
    manager = streams(store, clock)
    create(manager)
    manager.synchronizer(NAME).compact()
    slow = FailingStore(store)
    starts = []

    def create_again(operation: Operation) -> None:
        if operation.verb == "delete" and operation.segment.startswith("data/"):
            slow.before = None
            create(manager)
            starts.append(store.info(f"stream/{NAME}").start_offset)

    slow.before = create_again
    streams(slow, clock).delete(NAME)
    assert manager.exists(NAME)
    assert [store.info(f"stream/{NAME}").start_offset] == starts


def test_wherever_it_died_the_stream_is_there_or_nothing_of_it(clock: InstantClock) -> None:
    for at in count():
        store = open_store("memory://")
        create(streams(store, clock))
        left = at

        def die(operation: Operation) -> None:
            nonlocal left
            left -= 1
            if left < 0:
                raise Died

        failing = FailingStore(store)
        mortal = streams(failing, clock)
        failing.before = die
        try:
            mortal.delete(NAME)
        except Died:
            pass
        else:
            break
        delete_another(store, clock)
        later = streams(store, clock)
        assert len(data(store)) == (3 if later.exists(NAME) else 0)
    assert at > 10


def test_one_who_is_slow_between_announcing_and_deleting_may_still_die(
    store: SegmentStore, clock: InstantClock
) -> None:
    create(streams(store, clock))
    slow = FailingStore(store)
    met = 0

    def before(operation: Operation) -> None:
        nonlocal met
        if (operation.verb, operation.segment) == ("append", f"stream/{NAME}"):
            met += 1
            delete_another(store, clock)
            assert len(data(store)) == 3, "the stream is not deleted"
        elif operation.verb == "delete":
            raise Died

    slow.before = before
    with pytest.raises(Died):
        streams(slow, clock).delete(NAME)
    assert met == 1
    delete_another(store, clock)
    assert data(store) == []


def test_what_was_announced_long_ago_and_not_done_is_forgotten(store: SegmentStore, clock: InstantClock) -> None:
    create(streams(store, clock))
    with pytest.raises(Died):
        dying(store, clock, "append", "stream/").delete(NAME)
    delete_another(store, clock)
    assert EventQueue(store, QUEUE).outstanding_bytes > 0
    clock.advance(PATIENCE_SECONDS)
    delete_another(store, clock)
    assert EventQueue(store, QUEUE).outstanding_bytes == 0
    assert streams(store, clock).exists(NAME)
    assert len(data(store)) == 3


def test_the_stream_that_has_the_name_now_is_left_alone(store: SegmentStore, clock: InstantClock) -> None:
    create(streams(store, clock))
    with pytest.raises(Died):
        dying(store, clock, "delete", "data/").delete(NAME)
    create(streams(store, clock))
    present = data(store)
    delete_another(store, clock)
    assert data(store) == present
    assert len(present) == 3


def test_a_process_looks_again_after_some_deletions(store: SegmentStore, clock: InstantClock) -> None:
    busy = streams(store, clock)
    create(busy, OTHER)
    busy.delete(OTHER)
    create(busy)
    with pytest.raises(Died):
        dying(store, clock, "delete", "data/").delete(NAME)
    for _ in range(LOOK_EVERY - 1):
        assert len(data(store)) == 3
        busy.create(OTHER)
        busy.delete(OTHER)
    busy.create(OTHER)
    busy.delete(OTHER)
    assert data(store) == []


def test_a_deletion_that_meets_another_stream_of_the_name_announces_that_too(
    store: SegmentStore, clock: InstantClock
) -> None:
    create(streams(store, clock))
    slow = FailingStore(store)

    def before(operation: Operation) -> None:
        if (operation.verb, operation.segment) == ("append", f"queue/{QUEUE}"):
            slow.before = die_at_data
            other = streams(store, clock)
            other.delete(NAME)
            create(other)

    def die_at_data(operation: Operation) -> None:
        if operation.verb == "delete":
            raise Died

    slow.before = before
    with pytest.raises(Died):
        streams(slow, clock).delete(NAME)
    with pytest.raises(NotFoundError):
        streams(store, clock).info(NAME)
    assert len(data(store)) == 3
    delete_another(store, clock)
    assert data(store) == []


def test_after_a_kill_it_is_done_in_the_background_by_a_thread_that_ends(shared_store_url: str) -> None:
    with open_store(shared_store_url) as store:
        create(StreamManager(store))
        process = CLEAN.Process(target=delete_and_be_killed, args=(shared_store_url,))
        process.start()
        process.join(LONG)
        assert process.exitcode == -signal.SIGKILL
        assert len(data(store)) == 3
        later = StreamManager(store)
        create(later, OTHER)
        later.delete(OTHER)
        until(lambda: data(store) == [], "what the other process has left is deleted")
        until(lambda: "deletions of streams" not in [each.name for each in threading.enumerate()], "the thread ends")
        later.close()


def delete_and_be_killed(url: str) -> None:
    def kill(operation: Operation) -> None:
        if operation.verb == "delete":
            os.kill(os.getpid(), signal.SIGKILL)

    with open_store(url) as store:
        failing = FailingStore(store)
        failing.before = kill
        StreamManager(failing).delete(NAME)


def test_a_deletion_is_written_and_read_as_in_the_first_release() -> None:
    deletion = Deletion("shop/orders", "0123456789abcdef", 1_600_000_000.5)
    stored = golden("deletion-v1.msgpack", deletion.encode())
    assert stored == deletion.encode()
    assert Deletion.decode(stored) == deletion
