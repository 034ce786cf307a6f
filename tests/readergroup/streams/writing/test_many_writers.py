"""Many writers of one client: they share a bounded number of threads, and none holds up the others."""

from __future__ import annotations

import os
import threading
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from readergroup.streams.config import ScalingPolicy
from readergroup.streams.data.segment_reader import SegmentReader
from readergroup.streams.manager import StreamManager
from readergroup.streams.serializers import BytesSerializer
from readergroup.streams.writing.writer import EventWriter
from synchronizer import DeadlineExceededError, OutcomeUnknownError, SegmentStore, open_store
from synchronizer.testing import FailingStore, Operation
from synchronizer.threads.task_threads import MAX_THREADS
from tests.waiting import PATIENCE_SECONDS, until

WRITERS = 200
EVENTS = 50
NAME, SLOW = "shop/orders", "shop/slow"
KEYS = ("Foo", "2", "key-3", "0")


@pytest.fixture
def failing(store: SegmentStore) -> FailingStore:
    return FailingStore(store)


@pytest.fixture
def streams(failing: FailingStore) -> Iterator[StreamManager]:
    streams = StreamManager(failing, timeout=PATIENCE_SECONDS)
    streams.create(NAME, scaling=ScalingPolicy.fixed(4))
    streams.create(SLOW, scaling=ScalingPolicy.fixed(64))
    yield streams
    streams.close()


def open_writer(streams: StreamManager, name: str = NAME, timeout: float | None = None) -> EventWriter[bytes]:
    return EventWriter(streams, name, serializer=BytesSerializer(), timeout=timeout)


def event(writer: int, number: int) -> bytes:
    return b"%d %s %d" % (writer, KEYS[number % len(KEYS)].encode(), number)


def write(writer: EventWriter[bytes], index: int, numbers: range) -> None:
    for number in numbers:
        writer.write(event(index, number), KEYS[number % len(KEYS)])


def stored(streams: StreamManager, name: str = NAME) -> list[bytes]:
    state = streams.fetch_state(name)
    readers = (SegmentReader(streams.store, state.data_segment(number)) for number in sorted(state.segments))
    return [event for reader in readers for block in iter(reader.next_block, None) for event in block.data]


def check_stored_once_and_in_order(streams: StreamManager, events: int) -> None:
    found = stored(streams)
    assert Counter(found) == Counter(event(index, number) for index in range(WRITERS) for number in range(events))
    of_key: dict[tuple[bytes, bytes], list[int]] = {}
    for each in found:
        writer, key, number = each.split()
        of_key.setdefault((writer, key), []).append(int(number))
    assert all(numbers == sorted(numbers) for numbers in of_key.values())


def sending_threads() -> int:
    return sum(thread.name == "writers" for thread in threading.enumerate())


class PeakOfThreads:
    """The most threads that sent at the same time, counted at each append.

    One that has nothing more to do counts no more, though the system may know it for a while.
    """

    def __init__(self, failing: FailingStore, streams: StreamManager) -> None:
        self.threads = 0
        self._threads = streams.writer_threads._threads
        self._lock = threading.Lock()
        failing.before = self._count

    def _count(self, operation: Operation) -> None:
        with self._lock:
            self.threads = max(self.threads, len(self._threads))


class Hang:
    """Appends to the data of one stream do not return until they are let go."""

    def __init__(self, failing: FailingStore, streams: StreamManager, name: str = SLOW) -> None:
        state = streams.fetch_state(name)
        self.segments = {state.data_segment(number) for number in state.current}
        self.hanging = 0
        self._lock = threading.Lock()
        self._let_go = threading.Event()
        failing.before = self._hang

    def let_go(self) -> None:
        self._let_go.set()

    def _hang(self, operation: Operation) -> None:
        if operation.verb == "append" and operation.segment in self.segments:
            with self._lock:
                self.hanging += 1
            assert self._let_go.wait(PATIENCE_SECONDS)


@pytest.mark.stores(round_robin=True)
def test_200_writers_that_write_at_once_share_32_threads_and_leave_none(
    streams: StreamManager, failing: FailingStore
) -> None:
    before = threading.active_count()
    peak = PeakOfThreads(failing, streams)
    with ExitStack() as closing:
        writers = [closing.enter_context(open_writer(streams)) for _ in range(WRITERS)]
        until(lambda: sending_threads() == 1, "idle writers need no more")
        for number in range(EVENTS):
            for index, writer in enumerate(writers):
                write(writer, index, range(number, number + 1))
        for writer in writers:
            writer.flush()
        check_stored_once_and_in_order(streams, EVENTS)
        assert 1 < peak.threads <= MAX_THREADS == 32
        until(lambda: sending_threads() == 1, "the threads that are not needed end")
    assert sending_threads() == 0
    until(lambda: threading.active_count() <= before, f"no thread is left: {threading.enumerate()}")


def test_writers_that_are_used_by_one_thread_each_share_them_too(streams: StreamManager, failing: FailingStore) -> None:
    peak = PeakOfThreads(failing, streams)
    errors: list[BaseException] = []

    def run(index: int) -> None:
        try:
            with open_writer(streams) as writer:
                for number in range(5):
                    write(writer, index, range(number, number + 1))
                    writer.flush()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(index,)) for index in range(WRITERS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    check_stored_once_and_in_order(streams, 5)
    assert peak.threads <= MAX_THREADS
    until(lambda: sending_threads() == 0, "those end, too, that have just begun or have nothing more to do")


def test_a_writer_all_of_whose_appends_hang_does_not_hold_up_the_others(
    streams: StreamManager, failing: FailingStore
) -> None:
    hang = Hang(failing, streams)
    with open_writer(streams, SLOW) as slow, open_writer(streams) as one, open_writer(streams) as other:
        try:
            for number in range(1000):
                slow.write(b"%d" % number, str(number))
            until(lambda: hang.hanging == 16, "it sends to as many segments as a writer may")
            for number in range(20):
                for writer in (one, other):
                    writer.write(b"%d" % number, KEYS[number % 4])
                    writer.flush()
        finally:
            hang.let_go()
        slow.flush()
    assert len(stored(streams)) == 40
    assert len(stored(streams, SLOW)) == 1000


def test_several_writers_whose_appends_hang_leave_threads_to_the_others(
    streams: StreamManager, failing: FailingStore
) -> None:
    """As many hang as half of the threads: one append of each, and those of as many helpers."""
    hang = Hang(failing, streams)
    with ExitStack() as closing:
        slow = [closing.enter_context(open_writer(streams, SLOW)) for _ in range(MAX_THREADS // 2 - 1)]
        writer = closing.enter_context(open_writer(streams))
        closing.callback(hang.let_go)
        for each in slow:
            for number in range(100):
                each.write(b"%d" % number, str(number))
        until(lambda: hang.hanging == len(slow) + MAX_THREADS // 2)
        for number in range(20):
            writer.write(b"%d" % number, KEYS[number % 4])
            writer.flush()
        assert len(streams.writer_threads._threads) <= MAX_THREADS
    assert len(stored(streams)) == 20
    assert len(stored(streams, SLOW)) == 100 * len(slow)


def test_a_client_whose_store_hangs_does_not_hold_up_another(streams: StreamManager, failing: FailingStore) -> None:
    hang = Hang(failing, streams)
    other = StreamManager(failing.inner)
    with ExitStack() as closing:
        slow = [closing.enter_context(open_writer(streams, SLOW)) for _ in range(MAX_THREADS + 1)]
        closing.callback(hang.let_go)
        for each in slow:
            each.write(b"x", "key")
        until(lambda: hang.hanging == MAX_THREADS)
        with open_writer(other) as writer:
            writer.write(b"x", "key")
            writer.flush()
    assert len(stored(streams, SLOW)) == len(slow)


@pytest.mark.stores(round_robin=True)
def test_200_writers_go_on_by_themselves_after_an_outage(
    streams: StreamManager, failing: FailingStore, caplog: pytest.LogCaptureFixture
) -> None:
    """No thread waits for one of them, so each is tried, and each says that it is late."""
    with ExitStack() as closing:
        writers = [closing.enter_context(open_writer(streams, timeout=0.05)) for _ in range(WRITERS)]
        for index, writer in enumerate(writers):
            write(writer, index, range(5))
        for writer in writers:
            writer.flush(timeout=PATIENCE_SECONDS)
        peak = PeakOfThreads(failing, streams)
        failing.unavailable = True
        for index, writer in enumerate(writers):
            write(writer, index, range(5, 10))
        until(lambda: caplog.text.count("the writer keeps trying") == WRITERS, "each is late")
        for index, writer in enumerate(writers):
            with pytest.raises(DeadlineExceededError, match="this call wrote nothing"):
                write(writer, index, range(10, 11))
        failing.unavailable = False
        for index, writer in enumerate(writers):
            write(writer, index, range(10, 15))
        for writer in writers:
            writer.flush(timeout=PATIENCE_SECONDS)
        assert peak.threads <= MAX_THREADS
        check_stored_once_and_in_order(streams, 15)


def test_200_writers_follow_a_scale_while_answers_are_lost(streams: StreamManager, failing: FailingStore) -> None:
    with ExitStack() as closing:
        writers = [closing.enter_context(open_writer(streams)) for _ in range(WRITERS)]
        for number in range(0, 20, 5):
            for index, writer in enumerate(writers):
                write(writer, index, range(number, number + 5))
                if index % 50 == 0:
                    failing.lose_answers(3)
                if index % 70 == 0:
                    streams.scale(NAME, split=[streams.fetch_state(NAME).current[0]])
        for writer in writers:
            writer.flush()
        check_stored_once_and_in_order(streams, 20)


def test_closing_a_writer_whose_append_hangs_leaves_the_others_their_threads(
    streams: StreamManager, failing: FailingStore
) -> None:
    hang = Hang(failing, streams)
    slow, writer = open_writer(streams, SLOW), open_writer(streams)
    try:
        slow.write(b"x", "key")
        until(lambda: hang.hanging == 1)
        with pytest.raises(OutcomeUnknownError, match="events_in_doubt=1"):
            slow.close(timeout=0.05)
        writer.write(b"x", "key")
        writer.flush()
    finally:
        hang.let_go()
    writer.close()
    until(lambda: sending_threads() == 0)


def test_a_forked_child_of_a_busy_process_has_threads_of_its_own(streams: StreamManager, failing: FailingStore) -> None:
    hang = Hang(failing, streams)
    with ExitStack() as closing:
        writers = [closing.enter_context(open_writer(streams, SLOW)) for _ in range(3)]
        closing.callback(hang.let_go)
        for writer in writers:
            writer.write(b"x", "key")
        until(lambda: hang.hanging == len(writers))

        def write_in_child() -> None:
            assert sending_threads() == 0
            for writer in writers:
                writer.close()
            with open_store("memory://") as store:
                own = StreamManager(store)
                own.create(NAME)
                with open_writer(own) as writer:
                    writer.write(b"child", "key")
                assert stored(own) == [b"child"]
            until(lambda: sending_threads() == 0, "the threads of the child end")

        assert in_a_fork(write_in_child) == 0
    assert stored(streams, SLOW) == [b"x"] * 3


def in_a_fork(call: Callable[[], None]) -> int:
    child = os.fork()
    if child == 0:
        code = 1
        try:
            call()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
