"""Writing: stored once, in the order of each key, whatever happens between the writer and the store."""

from __future__ import annotations

import dis
import functools
import itertools
import multiprocessing
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from types import CodeType, FrameType
from urllib.parse import urlsplit

import pytest

from readergroup.errors import EventTooLargeError
from readergroup.streams.config import ScalingPolicy
from readergroup.streams.data import write_batch
from readergroup.streams.data.block import MAX_EVENT_BYTES, Block
from readergroup.streams.data.segment_reader import SegmentReader
from readergroup.streams.data.write_batch import BATCH_BYTES, MAX_UNSTORED_BYTES
from readergroup.streams.manager import StreamManager
from readergroup.streams.serializers import BytesSerializer, JsonSerializer
from readergroup.streams.state import StreamState
from readergroup.streams.writing import event_numbers
from readergroup.streams.writing import writer as writer_module
from readergroup.streams.writing.event_numbers import WRITER_RETENTION_SECONDS
from readergroup.streams.writing.writer import EventWriter
from synchronizer import (
    ClosedError,
    DeadlineExceededError,
    InvalidArgumentError,
    ManualClock,
    NotFoundError,
    OutcomeUnknownError,
    SealedError,
    SegmentStore,
    open_store,
)
from synchronizer.testing import FailingStore, Operation
from tests.clean_processes import CLEAN
from tests.interrupts import handler_of
from tests.servers.proxy import TcpProxy
from tests.waiting import PATIENCE_SECONDS, STARTS_A_THREAD, until

pytestmark = pytest.mark.stores(round_robin=True)
NAME = "shop/orders"
SECONDS = PATIENCE_SECONDS
#: Another Python, on a busy machine.
TO_START_SECONDS = 60.0
#: Keys that lie in the first, second, third and fourth quarter of the key range.
QUARTERS = ("Foo", "2", "key-3", "0")


@pytest.fixture
def failing(store: SegmentStore) -> FailingStore:
    return FailingStore(store)


@pytest.fixture
def streams(store: SegmentStore) -> StreamManager:
    """The rest of the world, whose store does not fail."""
    streams = StreamManager(store)
    streams.create(NAME, scaling=ScalingPolicy.fixed(2))
    return streams


@pytest.fixture
def writer(streams: StreamManager, failing: FailingStore) -> Iterator[EventWriter[bytes]]:
    with open_writer(failing) as writer:
        yield writer


def open_writer(store: SegmentStore, timeout: float = SECONDS) -> EventWriter[bytes]:
    return EventWriter(StreamManager(store, timeout=timeout), NAME, serializer=BytesSerializer())


def blocks_of(streams: StreamManager, number: int) -> list[Block]:
    state = streams.fetch_state(NAME)
    return list(iter(SegmentReader(streams.store, state.data_segment(number)).next_block, None))


def events_of(streams: StreamManager, number: int) -> list[bytes]:
    return [event for block in blocks_of(streams, number) for event in block.data]


def all_events(streams: StreamManager) -> list[bytes]:
    """Every event of the stream, segments after their predecessors."""
    return [event for number in sorted(streams.fetch_state(NAME).segments) for event in events_of(streams, number)]


def numbered(count: int, start: int = 0) -> list[bytes]:
    return [b"%06d" % number for number in range(start, start + count)]


def once(failing: FailingStore, verb: str, action: Callable[[], object], after: int = 0) -> None:
    """Let ``action`` happen before the next such operation on data (after so many others)."""
    seen: list[Operation] = []

    def before(operation: Operation) -> None:
        if operation.verb == verb and operation.segment.startswith("data/"):
            seen.append(operation)
            if len(seen) == after + 1:
                action()

    failing.before = before


# ---------------------------------------------------------------------- what is written


def test_events_are_stored_when_flush_returns_with_key_headers_and_time(streams: StreamManager) -> None:
    clock = ManualClock()
    manager = StreamManager(streams.store, clock=clock)
    with EventWriter(manager, NAME, serializer=JsonSerializer()) as writer:
        writer.write({"id": 1}, routing_key="Foo", headers={"trace": b"\x01"})
        writer.write({"id": 2}, routing_key="Foo")
        writer.flush()
        (block,) = blocks_of(streams, 0)
    assert block.data == [b'{"id":1}', b'{"id":2}']
    assert block.keys == ["Foo", "Foo"]
    assert block.headers == [{"trace": b"\x01"}, {}]
    assert block.written_at == int(clock.time() * 1_000_000)
    assert len(block.writer_id) == 16


@pytest.mark.parametrize("leave", ["end", "break", "exception"])
def test_leaving_the_block_in_any_way_stores_what_was_written(streams: StreamManager, leave: str) -> None:
    class Left(Exception):
        pass

    try:
        for _ in range(3):
            with open_writer(streams.store) as writer:
                writer.write(b"event")
                if leave == "break":
                    break
                if leave == "exception":
                    raise Left
    except Left:
        pass
    assert all_events(streams) == [b"event"] * (3 if leave == "end" else 1)


def test_a_key_belongs_to_one_segment_and_keeps_its_order(streams: StreamManager, writer: EventWriter[bytes]) -> None:
    for event in numbered(1000):
        for key in QUARTERS:
            writer.write(key.encode() + event, key)
    writer.flush()
    for number, keys in ((0, QUARTERS[:2]), (1, QUARTERS[2:])):
        found = events_of(streams, number)
        assert len(found) == 2000
        for key in keys:
            mine = [event.removeprefix(key.encode()) for event in found if event.startswith(key.encode())]
            assert mine == numbered(1000)


def test_events_without_a_key_are_spread_over_the_segments(streams: StreamManager, writer: EventWriter[bytes]) -> None:
    for event in numbered(100):
        writer.write(event)
    writer.flush()
    assert [len(events_of(streams, number)) for number in (0, 1)] == [50, 50]
    assert sorted(all_events(streams)) == numbered(100)
    assert blocks_of(streams, 0)[0].keys[0] is None


def test_an_empty_key_is_a_key(streams: StreamManager, writer: EventWriter[bytes]) -> None:
    for event in numbered(10):
        writer.write(event, "")
    writer.flush()
    keys = {key for number in (0, 1) for block in blocks_of(streams, number) for key in block.keys}
    assert keys == {""}
    assert all_events(streams) == numbered(10)


def test_an_event_that_finds_the_writer_idle_is_sent_at_once_and_those_that_come_meanwhile_gather(
    streams: StreamManager, failing: FailingStore, writer: EventWriter[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer_module, "LINGER_SECONDS", threading.TIMEOUT_MAX)
    sent, go_on = threading.Event(), threading.Event()

    def hold() -> None:
        sent.set()
        assert go_on.wait(SECONDS)

    once(failing, "append", hold)
    before = failing.count("append")
    writer.write(b"first", "key")
    assert sent.wait(SECONDS)
    for event in (b"second", b"third"):
        writer.write(event, "key")
    go_on.set()
    until(lambda: all_events(streams) == [b"first"])
    writer.flush()
    assert all_events(streams) == [b"first", b"second", b"third"]
    assert failing.count("append") == before + 2
    writer.write(b"fourth", "key")
    until(lambda: len(all_events(streams)) == 4)


def test_write_many_is_one_append_with_nothing_between(
    streams: StreamManager, failing: FailingStore, writer: EventWriter[bytes]
) -> None:
    group = [bytes([number]) * 50_000 for number in range(40)]  # more than a batch, and than any block
    stop = threading.Event()

    def disturb() -> None:
        while not stop.is_set():
            writer.write(b"other", "Foo")

    thread = threading.Thread(target=disturb)
    thread.start()
    try:
        writer.write_many(group, routing_key="Foo")
        writer.write_many(group)
        writer.flush()
    finally:
        stop.set()
        thread.join()
    writer.flush()
    found = [event for number in (0, 1) for event in events_of(streams, number)]
    starts = [index for index, event in enumerate(found) if event == group[0]]
    assert [found[start : start + len(group)] for start in starts] == [group, group]


def test_write_many_is_stored_whole_or_not_at_all(
    streams: StreamManager, failing: FailingStore, writer: EventWriter[bytes]
) -> None:
    lengths: set[int] = set()
    failing.before = lambda operation: lengths.add(len(events_of(streams, 0)))
    writer.write_many([b"x" * 50_000] * 100, routing_key="Foo")
    writer.flush()
    assert lengths == {0}
    assert len(events_of(streams, 0)) == 100


def test_nothing_to_write_is_no_error(streams: StreamManager, writer: EventWriter[bytes]) -> None:
    writer.write_many([])
    writer.flush()
    writer.flush()
    assert all_events(streams) == []


def test_threads_share_a_writer(streams: StreamManager, writer: EventWriter[bytes]) -> None:
    def write(key: str) -> None:
        for event in numbered(2000):
            writer.write(key.encode() + event, key)

    threads = [threading.Thread(target=write, args=(f"key-{number}",)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    writer.flush()
    found = all_events(streams)
    assert len(found) == 8000
    for number in range(4):
        key = f"key-{number}".encode()
        assert [event.removeprefix(key) for event in found if event.startswith(key)] == numbered(2000)


def test_numbers_of_a_writer_grow_in_every_segment_and_are_never_used_twice(
    streams: StreamManager, writer: EventWriter[bytes]
) -> None:
    for event in numbered(300):
        writer.write(event, QUARTERS[int(event) % 4])
        if int(event) % 50 == 0:
            writer.flush()
    writer.flush()
    numbers: Counter[int] = Counter()
    for segment in (0, 1):
        firsts = [block.first_number for block in blocks_of(streams, segment)]
        assert firsts == sorted(firsts)
        for block in blocks_of(streams, segment):
            numbers.update(range(block.first_number, block.first_number + len(block)))
    assert numbers == Counter(range(1, 301))


def test_two_writers_do_not_disturb_each_other(streams: StreamManager) -> None:
    with open_writer(streams.store) as one, open_writer(streams.store) as two:
        for event in numbered(200):
            one.write(event, "Foo")
            two.write(event, "Foo")
            if int(event) % 20 == 0:
                one.flush()
                two.flush()
    assert Counter(all_events(streams)) == Counter(dict.fromkeys(numbered(200), 2))


# ---------------------------------------------------------------------- bad input


def test_an_event_over_the_limit_is_refused_and_the_writer_goes_on(
    streams: StreamManager, writer: EventWriter[bytes]
) -> None:
    with pytest.raises(EventTooLargeError, match="store the data elsewhere"):
        writer.write(bytes(MAX_EVENT_BYTES + 1))
    with pytest.raises(ValueError, match="limit=8388608"):
        writer.write(b"x", headers={"h": bytes(MAX_EVENT_BYTES)})
    with pytest.raises(EventTooLargeError, match="write fewer at once"):
        writer.write_many([bytes(1024 * 1024)] * 9)
    writer.write(bytes(MAX_EVENT_BYTES), headers=None)
    writer.flush()
    assert [len(event) for event in all_events(streams)] == [MAX_EVENT_BYTES]


def test_what_cannot_be_a_key_header_or_event_is_refused(streams: StreamManager, writer: EventWriter[bytes]) -> None:
    with pytest.raises(InvalidArgumentError, match=r"routing key must be a str: .*found='int'"):
        writer.write(b"x", routing_key=7)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgumentError, match=r"routing key must have at most 4096 .*characters=5000"):
        writer.write(b"x", routing_key="k" * 5000)
    with pytest.raises(InvalidArgumentError, match="headers"):
        writer.write(b"x", headers={"trace": "text"})  # type: ignore[dict-item]
    with pytest.raises(InvalidArgumentError, match="UTF-8"):
        writer.write(b"x", headers={"tr\ud800ce": b""})
    with pytest.raises(InvalidArgumentError, match="serializer"):
        writer.write("text")  # type: ignore[arg-type]
    writer.flush()
    assert all_events(streams) == []


def test_a_writer_of_a_stream_that_does_not_exist_or_is_sealed_is_refused_at_once(
    store: SegmentStore, streams: StreamManager
) -> None:
    with pytest.raises(NotFoundError, match="create it"):
        EventWriter(StreamManager(store), "shop/none", serializer=BytesSerializer())
    streams.seal(NAME)
    with pytest.raises(SealedError):
        open_writer(store)


def test_a_closed_writer_refuses(streams: StreamManager) -> None:
    writer = open_writer(streams.store)
    writer.write(b"x", "Foo")
    writer.close()
    writer.close()
    for call in (lambda: writer.write(b"y", "Foo"), lambda: writer.write_many([b"y"]), writer.flush):
        with pytest.raises(ClosedError):
            call()
    assert all_events(streams) == [b"x"]


# ---------------------------------------------------------------------- lost answers and outages


def test_a_lost_answer_stores_the_events_once(
    streams: StreamManager, failing: FailingStore, writer: EventWriter[bytes]
) -> None:
    for order in (failing.lose_answers, failing.lose_requests, failing.fail_appends) * 3:
        order()
        writer.write(b"%d" % len(all_events(streams)), "Foo")
        writer.flush()
    assert all_events(streams) == [b"%d" % number for number in range(9)]


def test_answers_lost_again_and_again_store_the_events_once(
    streams: StreamManager, failing: FailingStore, writer: EventWriter[bytes]
) -> None:
    writer.write(b"before", "Foo")
    writer.flush()
    failing.lose_requests()
    failing.lose_answers(3)
    writer.write(b"event", "Foo")
    writer.flush()
    assert all_events(streams) == [b"before", b"event"]


def test_an_outage_is_waited_for(streams: StreamManager, failing: FailingStore, writer: EventWriter[bytes]) -> None:
    failing.unavailable = True
    writer.write(b"event")
    failing.before = lambda operation: setattr(failing, "unavailable", len(failing.operations) < 6)
    writer.flush()
    assert all_events(streams) == [b"event"]


@pytest.mark.parametrize("seconds", [5, 40, 600])
def test_after_an_outage_of_any_length_the_writer_goes_on_by_itself_and_stores_each_event_once_and_in_order(
    streams: StreamManager, failing: FailingStore, seconds: int
) -> None:
    clock = ManualClock()
    writer = EventWriter(StreamManager(failing, clock=clock), NAME, serializer=BytesSerializer())
    for event in numbered(10):
        writer.write(event, "Foo")
    writer.flush()
    failing.lose_answers()  # the last thing before the outage
    failing.after = lambda operation: setattr(failing, "unavailable", True)
    for event in numbered(10, 10):
        writer.write(event, QUARTERS[int(event) % 2])
    until(lambda: failing.unavailable, seconds=SECONDS)
    failing.after = None
    told = 0
    for _ in range(seconds * 2):
        clock.advance(0.5)
        try:
            writer.write(b"meanwhile", "2")
        except DeadlineExceededError as error:
            told += 1
            assert "wrote nothing" in str(error) and "events_not_stored=0" not in str(error)
    assert told <= 1
    failing.unavailable = False

    def is_stored_with_time() -> bool:
        clock.advance(1.0)
        return b"meanwhile" in all_events(streams)

    until(is_stored_with_time, seconds=SECONDS)
    writer.write(b"afterwards", "Foo")
    writer.flush()
    found = all_events(streams)
    assert [event for event in found if event.isdigit()] == numbered(20)
    assert found.count(b"meanwhile") == seconds * 2 - told
    assert found.count(b"afterwards") == 1
    assert writer.failure is None
    writer.close()


@pytest.mark.stores("postgresql", "nats")
@pytest.mark.parametrize("fault", ["cut", "cut_downstream"])
def test_after_an_outage_of_a_server_the_writer_goes_on_by_itself(shared_store_url: str, fault: str) -> None:
    """Longer than the writer's timeout. Without its answers the server stores what it is sent, and is asked again."""
    port = urlsplit(shared_store_url).port
    assert port is not None
    with open_store(shared_store_url) as store, TcpProxy(port) as proxy:
        streams = StreamManager(store)
        streams.create(NAME, scaling=ScalingPolicy.fixed(2))
        address = shared_store_url.replace(f":{port}", f":{proxy.port}")
        with open_store(address) as cut_off, open_writer(cut_off, timeout=0.5) as writer:
            refused = write_through_an_outage(writer, numbered(100))  # a busy machine may be late too
            writer.flush(timeout=SECONDS)
            getattr(proxy, fault)()
            refused += write_through_an_outage(writer, numbered(100, 100))
            with pytest.raises(DeadlineExceededError, match="some events are not stored yet"):
                writer.flush()
            proxy.heal()
            refused += write_through_an_outage(writer, numbered(100, 200))
            writer.flush(timeout=SECONDS)
            found = all_events(streams)
            for key in (0, 1):
                wanted = [event for event in numbered(300) if int(event) % 2 == key and event not in refused]
                assert [event for event in found if int(event) % 2 == key] == wanted
            assert len(refused) <= 3  # once in an outage, and a busy machine may have more of them


def write_through_an_outage(writer: EventWriter[bytes], events: list[bytes]) -> list[bytes]:
    """Write them; those that were refused."""
    refused = []
    for event in events:
        try:
            writer.write(event, QUARTERS[int(event) % 2])
        except DeadlineExceededError:
            refused.append(event)
        time.sleep(0.01)  # so that they come in many rounds
    return refused


def test_an_outage_beyond_the_timeout_is_told_once_and_what_was_refused_is_not_written(
    streams: StreamManager, failing: FailingStore, caplog: pytest.LogCaptureFixture
) -> None:
    writer = open_writer(failing, timeout=0.05)
    writer.write(b"before", "Foo")
    writer.flush(timeout=SECONDS)
    failing.unavailable = True
    writer.write(b"kept", "Foo")
    until(lambda: "the writer keeps trying" in caplog.text, seconds=SECONDS)
    with pytest.raises(
        DeadlineExceededError, match=r"wrote nothing.*events_not_stored=1 .*a fault injected by the test"
    ):
        writer.write(b"refused", "Foo")
    writer.write(b"kept, too", "Foo")
    with pytest.raises(DeadlineExceededError, match=r"the writer continues, flush again.*events_not_stored=2 "):
        writer.flush()
    failing.unavailable = False
    writer.flush(timeout=SECONDS)
    assert all_events(streams) == [b"before", b"kept", b"kept, too"]
    assert caplog.text.count("the writer keeps trying") == 1
    failing.unavailable = True
    writer.write(b"another outage is told again", "Foo")
    until(lambda: caplog.text.count("the writer keeps trying") == 2, seconds=SECONDS)
    with pytest.raises(DeadlineExceededError):
        writer.write(b"refused", "Foo")
    failing.unavailable = False
    writer.close(timeout=SECONDS)
    assert len(all_events(streams)) == 4


def test_an_outage_that_is_over_when_somebody_asks_is_not_told(
    streams: StreamManager, failing: FailingStore, caplog: pytest.LogCaptureFixture
) -> None:
    writer = open_writer(failing, timeout=0.05)
    failing.unavailable = True
    writer.write(b"event", "Foo")
    until(lambda: "the writer keeps trying" in caplog.text, seconds=SECONDS)
    failing.unavailable = False
    until(lambda: all_events(streams) == [b"event"], seconds=SECONDS)
    writer.flush(timeout=SECONDS)
    writer.write(b"next", "Foo")
    writer.close(timeout=SECONDS)
    assert all_events(streams) == [b"event", b"next"]


def test_an_outage_while_a_scale_is_followed_is_waited_for(streams: StreamManager, failing: FailingStore) -> None:
    writer = open_writer(failing, timeout=0.05)
    writer.write(b"0", "Foo")
    writer.flush(timeout=SECONDS)
    streams.scale(NAME, split=[0])
    looks: list[Operation] = []

    def be_away_for_the_metadata(operation: Operation) -> None:
        is_look = operation.segment.startswith("stream/")
        looks.extend([operation] * is_look)
        failing.unavailable = is_look and len(looks) < 20

    failing.before = be_away_for_the_metadata
    for event in numbered(10):
        writer.write(event, "Foo")
    until(lambda: len(looks) >= 20, seconds=SECONDS)
    writer.close(timeout=SECONDS)
    assert all_events(streams) == [b"0", *numbered(10)]


@pytest.mark.unexpected_errors
def test_an_error_that_is_none_of_ours_leaves_the_append_in_doubt_and_it_is_stored_once(
    streams: StreamManager, failing: FailingStore, writer: EventWriter[bytes]
) -> None:
    errors = [ValueError("not enough values to unpack"), KeyError("header"), OSError(24, "Too many open files")]

    def raise_one(operation: Operation) -> None:
        if operation.verb == "append" and errors:
            raise errors.pop()

    failing.after = raise_one
    for event in numbered(10):
        writer.write(event, "Foo")
    writer.flush()
    assert (all_events(streams), errors, writer.failure) == (numbered(10), [], None)


def test_closing_gives_up_what_cannot_be_stored_in_time_and_says_so_in_the_failure(
    streams: StreamManager, failing: FailingStore
) -> None:
    writer = open_writer(failing, timeout=0.05)
    failing.unavailable = True
    writer.write(b"lost")
    with pytest.raises(DeadlineExceededError, match="events_not_stored=1"):
        writer.close()
    writer.close()
    failing.unavailable = False
    assert "events_not_stored=1" in str(writer.failure)
    with pytest.raises(DeadlineExceededError):
        writer.write(b"never", "Foo")
    assert all_events(streams) == []


def test_a_closed_writer_has_no_failure(streams: StreamManager) -> None:
    writer = open_writer(streams.store)
    writer.close()
    assert writer.failure is None


def test_an_exception_in_the_block_is_not_hidden_by_a_failure(streams: StreamManager, failing: FailingStore) -> None:
    with pytest.raises(ZeroDivisionError) as caught, open_writer(failing, timeout=0.05) as writer:
        failing.unavailable = True
        writer.write(b"lost")
        raise ZeroDivisionError
    assert any("events_not_stored=1" in note for note in caught.value.__notes__)


def test_an_answer_lost_for_good_is_told_as_unknown_when_the_writer_closes(
    streams: StreamManager, failing: FailingStore
) -> None:
    writer = open_writer(failing, timeout=0.05)
    failing.lose_answers(1)
    failing.lose_requests(10_000)
    writer.write(b"event", "Foo")
    with pytest.raises(DeadlineExceededError, match="events_not_stored=0 events_in_doubt=1"):
        writer.flush()
    with pytest.raises(OutcomeUnknownError, match="events_not_stored=0 events_in_doubt=1"):
        writer.close()


def test_an_append_that_is_on_its_way_when_closing_gives_up_is_in_doubt(
    streams: StreamManager, failing: FailingStore
) -> None:
    writer = open_writer(failing)
    is_sent, may_go_on = threading.Event(), threading.Event()

    def hang() -> None:
        is_sent.set()
        may_go_on.wait(SECONDS)

    once(failing, "append", hang)
    writer.write(b"slow", "Foo")
    assert is_sent.wait(SECONDS)
    with pytest.raises(OutcomeUnknownError, match="events_not_stored=0 events_in_doubt=1"):
        writer.close(timeout=0.05)
    may_go_on.set()


def test_closing_that_is_interrupted_may_be_made_again(
    streams: StreamManager, failing: FailingStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = open_writer(failing)
    may_go_on = threading.Event()
    once(failing, "append", lambda: may_go_on.wait(SECONDS))
    writer.write(b"event", "Foo")
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(writer, "_store_until", raise_interrupt)
        writer.close()
    with pytest.raises(ClosedError):
        writer.write(b"none any more")
    may_go_on.set()
    writer.close()
    assert all_events(streams) == [b"event"]


def test_closing_ends_a_batch_that_never_ends(streams: StreamManager) -> None:
    writer = open_writer(streams.store)
    is_iterated = threading.Event()
    errors: list[ClosedError] = []

    def endless() -> Iterator[bytes]:
        while True:
            yield b"event"
            is_iterated.set()

    def write() -> None:
        try:
            writer.write_batch(endless())
        except ClosedError as error:
            errors.append(error)

    thread = threading.Thread(target=write, daemon=True)
    thread.start()
    assert is_iterated.wait(SECONDS)
    writer.close()
    thread.join(SECONDS)
    assert errors
    assert all_events(streams) == []


def test_closes_at_the_same_time_all_tell_that_the_writer_failed(streams: StreamManager) -> None:
    writer = open_writer(streams.store)
    end = writer.begin_write()
    (write,) = writer.begun_writes
    errors: list[DeadlineExceededError] = []

    def close() -> None:
        try:
            writer.close(timeout=SECONDS)
        except DeadlineExceededError as error:
            errors.append(error)

    threads = [threading.Thread(target=close) for _ in range(2)]
    for thread in threads:
        thread.start()
    until(lambda: len(write._sleeping) == len(threads))
    with pytest.raises(DeadlineExceededError, match="before an earlier write"):
        writer.close(timeout=0.0)
    for thread in threads:
        thread.join()
    assert [str(error) for error in errors] == [str(writer.failure)] * len(threads)
    writer.close()
    end()


def raise_interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def test_a_batch_of_each_segment_is_stored_where_no_further_thread_can_start(
    streams: StreamManager, failing: FailingStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = open_writer(failing)
    writer.write(b"first")
    writer.flush()  # the store may start threads of its own

    def start(*_: object, **__: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading, STARTS_A_THREAD, start)
    for number in range(100):
        writer.write(b"%d" % number, QUARTERS[number % 4])
    writer.close()
    assert len(all_events(streams)) == 101


def test_a_flush_that_comes_to_its_deadline_says_so_and_the_writer_goes_on(
    streams: StreamManager, failing: FailingStore, writer: EventWriter[bytes]
) -> None:
    may_go_on = threading.Event()
    once(failing, "append", lambda: may_go_on.wait(SECONDS))
    writer.write(b"slow")
    with pytest.raises(DeadlineExceededError, match="some events are not stored yet"):
        writer.flush(timeout=0.05)
    may_go_on.set()
    writer.flush()
    assert all_events(streams) == [b"slow"]


def test_a_writer_that_is_faster_than_the_store_waits(streams: StreamManager, failing: FailingStore) -> None:
    may_go_on = threading.Event()
    once(failing, "append", lambda: may_go_on.wait(SECONDS))
    written: list[int] = []
    event = bytes(1024 * 1024)

    def write() -> None:
        for number in range(40):
            writer.write(event)
            written.append(number)

    with open_writer(failing) as writer:
        thread = threading.Thread(target=write)
        thread.start()
        thread.join(0.3)
        assert len(written) <= MAX_UNSTORED_BYTES // len(event) + 1
        may_go_on.set()
        thread.join(SECONDS)
        assert len(written) == 40
    assert len(all_events(streams)) == 40


# ---------------------------------------------------------------------- interrupts


@functools.cache
def places(code: CodeType) -> set[int]:
    """Where Python looks for signals: behind these instructions, with the one that drops what a call returned."""
    checked = ["RESUME", "CALL", "CALL_FUNCTION_EX"]
    if sys.version_info < (3, 13):  # from then on, what is raised there leaves out the cleanup (cpython#130279)
        checked.append("JUMP_BACKWARD")
    found, read = set(), dis.Bytecode(code)
    for one, after, next_one in zip(*(itertools.islice(read, n, None) for n in range(3)), strict=False):
        if one.opname in checked:
            found |= {
                each.offset
                for each in ((after, next_one) if after.opname == "POP_TOP" else (after,))
                # Python handles it where it looks. From 3.13 on, no block covers what can raise nothing by itself.
                if handler_of(read, each.offset) == handler_of(read, one.offset)
            }
    return found


class Interrupt:
    """A Ctrl-C at the so many-th place in the writer's own functions."""

    def __init__(self, at: int) -> None:
        self.left = at

    def __call__(self, frame: FrameType, event: str, argument: object) -> Interrupt | None:
        if frame.f_code.co_filename not in (write_batch.__file__, writer_module.__file__):
            return None
        frame.f_trace_opcodes = True
        if event == "opcode" and frame.f_lasti in places(frame.f_code):
            self.left -= 1
            if self.left == 0:
                raise KeyboardInterrupt
        return self


@pytest.mark.stores("memory")
@pytest.mark.parametrize("way", ["write", "write with headers", "write many", "write what fills a batch"])
def test_a_write_that_is_interrupted_anywhere_leaves_no_half_of_an_event_and_the_writer_goes_on(
    streams: StreamManager, writer: EventWriter[bytes], way: str
) -> None:
    event = {"write what fills a batch": BATCH_BYTES * b"-"}.get(way, b"-")
    written: list[tuple[bytes, str]] = []

    def write(number: int, key: str) -> None:
        headers = {"key": key.encode()} if way == "write with headers" else None
        data = b"%d %s " % (number, key.encode()) + event
        written.append((data, key))
        if way == "write many":
            writer.write_many([data, data, data], key)
        else:
            writer.write(data, key, headers)

    certain = set()
    for at in itertools.count(1):
        write(2 * at, "2")  # which the interrupted one must leave as it is
        certain.add(written[-1])
        before, interrupt = sys.gettrace(), Interrupt(at)
        try:
            sys.settrace(interrupt)
            write(2 * at + 1, "Foo")
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(before)
        if at % 20 == 0:
            writer.flush()
        if interrupt.left > 0:
            certain.add(written[-1])
            break
    writer.flush()
    found = Counter(
        (event, str(key))
        for each in (0, 1)
        for block in blocks_of(streams, each)
        for event, key in zip(block.data, block.keys, strict=True)
    )
    assert at > 10
    assert certain <= set(found) <= set(written)
    assert set(found.values()) == {3 if way == "write many" else 1}
    assert writer._unstored == 0


# ---------------------------------------------------------------------- scales, seals and deletions


def test_a_split_under_the_writer_loses_and_repeats_nothing_and_keeps_the_order(
    streams: StreamManager, writer: EventWriter[bytes]
) -> None:
    for event in numbered(3000):
        for key in QUARTERS:
            writer.write(key.encode() + event, key)
        if event == b"001000":
            streams.scale(NAME, split=[0])
        if event == b"002000":
            streams.scale(NAME, merge=[3, 1])
    writer.flush()
    assert streams.fetch_state(NAME).epoch == 2
    _check_order(streams, 3000)


def _check_order(streams: StreamManager, count: int) -> None:
    found = all_events(streams)
    for key in QUARTERS:
        assert [event.removeprefix(key.encode()) for event in found if event.startswith(key.encode())] == numbered(
            count
        )
    assert len(found) == count * len(QUARTERS)


def test_scales_while_several_threads_write_and_answers_are_lost(
    streams: StreamManager, failing: FailingStore, writer: EventWriter[bytes]
) -> None:
    def write(key: str) -> None:
        for event in numbered(1500):
            writer.write(key.encode() + event, key)
            if int(event) % 100 == 0:
                failing.lose_answers()
                writer.flush()

    threads = [threading.Thread(target=write, args=(key,)) for key in QUARTERS]
    for thread in threads:
        thread.start()
    for _ in range(20):
        streams.scale(NAME, split=[streams.fetch_state(NAME).current[0]])
        streams.scale(NAME, merge=list(streams.fetch_state(NAME).current[:2]))
    for thread in threads:
        thread.join()
    writer.flush()
    _check_order(streams, 1500)


@pytest.mark.parametrize("stored", [True, False])
def test_an_answer_lost_before_a_seal_is_settled_by_the_mark_on_the_sealed_segment(
    streams: StreamManager, failing: FailingStore, writer: EventWriter[bytes], stored: bool
) -> None:
    """Sending it again to the successor would repeat what was stored; not sending it, lose what was not."""
    writer.write(b"before", "Foo")
    writer.flush()
    (failing.lose_answers if stored else failing.lose_requests)()
    once(failing, "append", lambda: streams.scale(NAME, split=[0]), after=1)  # between the append and its retry
    writer.write(b"event", "Foo")
    writer.flush()
    assert events_of(streams, 0) == ([b"before", b"event"] if stored else [b"before"])
    assert events_of(streams, 2) == ([] if stored else [b"event"])


def test_the_mark_is_read_after_the_seal(
    streams: StreamManager, failing: FailingStore, writer: EventWriter[bytes]
) -> None:
    failing.lose_answers()
    once(failing, "append", lambda: streams.scale(NAME, split=[0]), after=1)
    failing.operations.clear()
    writer.write(b"event", "Foo")
    writer.flush()
    data = [operation.verb for operation in failing.operations if operation.segment.endswith("/0")]
    assert data == ["append", "append", "attributes"]  # the second append found the seal


def test_an_answer_lost_before_the_segment_is_gone_is_told_as_unknown(
    store: SegmentStore, failing: FailingStore
) -> None:
    clock = ManualClock()
    streams = StreamManager(store, clock=clock)
    streams.create(NAME, scaling=ScalingPolicy.fixed(2))

    def a_long_time_passes() -> None:
        streams.scale(NAME, split=[0])
        for _ in range(2):
            streams.truncate(NAME, streams.info(NAME).tail)
            clock.advance(WRITER_RETENTION_SECONDS + 1)

    writer = open_writer(failing)
    failing.lose_answers()
    once(failing, "append", a_long_time_passes, after=1)
    writer.write(b"event", "Foo")
    with pytest.raises(OutcomeUnknownError, match="events_in_doubt=1"):
        writer.flush()
    writer.close()


def test_within_the_retention_of_writers_the_mark_of_a_truncated_segment_still_tells(
    streams: StreamManager, failing: FailingStore, writer: EventWriter[bytes]
) -> None:
    def scale_and_truncate() -> None:
        streams.scale(NAME, split=[0])
        streams.truncate(NAME, streams.info(NAME).tail)

    failing.lose_answers()
    once(failing, "append", scale_and_truncate, after=1)
    writer.write(b"stored once", "Foo")
    writer.flush()
    writer.write(b"next", "Foo")
    writer.flush()
    assert [events_of(streams, number) for number in (2, 3)] == [[b"next"], []]


def test_a_segment_that_is_long_gone_is_no_problem_for_what_was_never_sent_there(
    store: SegmentStore, failing: FailingStore
) -> None:
    clock = ManualClock()
    streams = StreamManager(store, clock=clock)
    streams.create(NAME, scaling=ScalingPolicy.fixed(2))
    with open_writer(failing) as writer:
        streams.scale(NAME, split=[0])
        for _ in range(2):
            streams.truncate(NAME, streams.info(NAME).tail)
            clock.advance(WRITER_RETENTION_SECONDS + 1)
        writer.write(b"event", "Foo")
    assert events_of(streams, 2) == [b"event"]


def test_what_is_left_over_for_two_merged_segments_is_all_stored_in_the_successor(
    streams: StreamManager, failing: FailingStore, writer: EventWriter[bytes]
) -> None:
    """Numbers given when they were written would reach the successor out of order and be taken for repetitions."""
    everything_is_written = threading.Event()
    one_at_a_time = threading.Lock()  # the second round goes to both segments at once
    merged = False

    def before(operation: Operation) -> None:
        nonlocal merged
        if operation.verb == "append" and operation.segment.startswith("data/"):
            everything_is_written.wait(SECONDS)
            with one_at_a_time:
                if failing.count("append") > 1 and not merged:
                    merged = True
                    streams.scale(NAME, merge=[0, 1])

    failing.before = before
    writer.write(b"0", "Foo")  # the first round, which takes until the others are written
    until(lambda: failing.count("append") > 0)
    for event, key in ((b"1", "Foo"), (b"2", "0"), (b"3", "0"), (b"4", "Foo")):
        writer.write(event, key)
    everything_is_written.set()
    writer.flush()
    assert events_of(streams, 0) == [b"0"]
    assert events_of(streams, 2) == [b"1", b"4", b"2", b"3"]


def test_what_waits_behind_an_append_that_finds_a_seal_follows_it_in_order(
    streams: StreamManager, failing: FailingStore, writer: EventWriter[bytes]
) -> None:
    everything_is_written = threading.Event()

    def scale() -> None:
        everything_is_written.wait(SECONDS)
        streams.scale(NAME, merge=[0, 1])

    once(failing, "append", scale)
    writer.write(b"first", "Foo")
    until(lambda: failing.count("append") > 0)
    padding = bytes(400_000)  # so that it makes several batches
    for event in numbered(10):
        for key in ("Foo", "0"):
            writer.write(key.encode() + event + padding, key)
    everything_is_written.set()
    writer.flush()
    found = [event.removesuffix(padding) for event in events_of(streams, 2)]
    for key in (b"Foo", b"0"):
        assert [event for event in found if event.startswith(key) and len(event) == len(key) + 6] == [
            key + event for event in numbered(10)
        ]


def test_a_writer_does_not_route_to_announced_segments(
    store: SegmentStore, streams: StreamManager, failing: FailingStore, writer: EventWriter[bytes]
) -> None:
    writer.write(b"1", "Foo")
    writer.flush()
    state = streams.fetch_state(NAME)
    streams.synchronizer(NAME).update_state(lambda state: [state.merge([0, 1])])  # announced by one that died
    store.create(state.data_segment(2))
    for event in (b"2", b"3"):
        writer.write(event, "Foo")
        writer.write(event, "0")
        writer.flush()
    assert store.info(state.data_segment(2)).length == 0
    assert events_of(streams, 0) == [b"1", b"2", b"3"]


def test_a_writer_completes_the_scale_of_a_dead_client(
    store: SegmentStore, streams: StreamManager, writer: EventWriter[bytes]
) -> None:
    state = streams.synchronizer(NAME).update_state(lambda state: [state.merge([0, 1])])
    store.create(state.data_segment(2))
    store.seal(state.data_segment(0))  # and here it died
    writer.write(b"event", "Foo")
    writer.flush()
    assert events_of(streams, 2) == [b"event"]
    assert store.info(state.data_segment(1)).sealed


def test_a_group_without_a_key_stays_together_across_a_scale(
    streams: StreamManager, failing: FailingStore, writer: EventWriter[bytes]
) -> None:
    once(failing, "append", lambda: streams.scale(NAME, split=[0, 1]))
    for _ in range(4):
        writer.write_many(numbered(10))
        writer.write(b"other", "Foo")
    writer.flush()
    for number in sorted(streams.fetch_state(NAME).segments):
        found = [event for event in events_of(streams, number) if event != b"other"]
        assert found == numbered(10) * (len(found) // 10)
    assert len(all_events(streams)) == 44


def test_closing_leaves_no_number_on_the_newest_segments_and_asks_for_no_others(
    streams: StreamManager, failing: FailingStore
) -> None:
    writer = open_writer(failing)
    for _ in range(5):
        writer.write_many(numbered(10))
        for key in QUARTERS:
            writer.write(b"event", key)
        writer.flush()
        streams.scale(NAME, merge=list(streams.fetch_state(NAME).current))
        streams.scale(NAME, split=list(streams.fetch_state(NAME).current))
    for key in QUARTERS:
        writer.write(b"event", key)
    writer.flush()
    failing.operations.clear()
    writer.close()
    state = streams.fetch_state(NAME)
    newest = {state.data_segment(number) for number in state.current}
    assert {operation.segment for operation in failing.operations if operation.verb == "append"} == newest
    assert all(not streams.store.attributes(segment) for segment in newest)


def test_writing_to_a_stream_that_is_sealed_fails_and_says_how_much_is_lost(
    streams: StreamManager, failing: FailingStore
) -> None:
    writer = open_writer(failing)
    writer.write(b"stored", "Foo")
    writer.flush()
    streams.seal(NAME)
    writer.write_many([b"1", b"2"], "Foo")
    with pytest.raises(SealedError, match="events_not_stored=2"):
        writer.flush()
    with pytest.raises(SealedError):
        writer.write(b"3", "Foo")
    writer.close()
    assert all_events(streams) == [b"stored"]


def test_writing_to_a_stream_that_is_deleted_fails_also_when_another_is_created(streams: StreamManager) -> None:
    for again in (False, True):
        writer = open_writer(streams.store)
        streams.delete(NAME)
        if again:
            streams.create(NAME)
        writer.write(b"lost", "Foo")
        with pytest.raises(NotFoundError, match="events_not_stored=1"):
            writer.flush()
        writer.close()
        if not again:
            streams.create(NAME)
    assert all_events(streams) == []


def _write_in_a_process(url: str, number: int) -> None:
    with open_store(url) as store, open_writer(store) as writer:
        for event in numbered(3000):
            for key in QUARTERS:
                writer.write(b"%d %s %s" % (number, key.encode(), event), key)
            if int(event) % 50 == 0:
                writer.flush()


def test_scales_while_several_processes_write(shared_store_url: str) -> None:
    with open_store(shared_store_url) as store:
        streams = StreamManager(store)
        streams.create(NAME, scaling=ScalingPolicy.fixed(2))
        processes = [CLEAN.Process(target=_write_in_a_process, args=(shared_store_url, number)) for number in range(2)]
        for process in processes:
            process.start()
        until(lambda: len(all_events(streams)) > 0, seconds=TO_START_SECONDS)
        for _ in range(5):
            streams.scale(NAME, split=[streams.fetch_state(NAME).current[0]])
            streams.scale(NAME, merge=list(streams.fetch_state(NAME).current[:2]))
        for process in processes:
            process.join(TO_START_SECONDS)
            assert process.exitcode == 0
        found = [event.split() for event in all_events(streams)]
        for number in range(2):
            for key in QUARTERS:
                mine = [event for writer, of, event in found if (writer, of) == (b"%d" % number, key.encode())]
                assert mine == numbered(3000)


# ---------------------------------------------------------------------- event numbers


def numbers_on(streams: StreamManager) -> dict[int, int]:
    state: StreamState = streams.fetch_state(NAME)
    return {n: len(streams.store.attributes(state.data_segment(n), "writer/")) for n in sorted(state.segments)}


def test_a_writer_that_closes_leaves_no_number_on_open_segments(streams: StreamManager) -> None:
    with open_writer(streams.store) as writer:
        for key in QUARTERS:
            writer.write(b"x", key)
        writer.flush()
        assert numbers_on(streams) == {0: 1, 1: 1}
    assert numbers_on(streams) == {0: 0, 1: 0}


def kill(writer: EventWriter[bytes]) -> None:
    """Leave its event numbers behind."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(writer._appender, "remove_event_numbers", lambda: None)
        writer.close()


def test_the_numbers_of_killed_writers_are_removed_when_they_are_old(
    store: SegmentStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = ManualClock()
    streams = StreamManager(store, clock=clock)
    streams.create(NAME, scaling=ScalingPolicy.fixed(2))

    def write_and_die() -> None:
        writer = EventWriter(streams, NAME, serializer=BytesSerializer())
        for key in QUARTERS:
            writer.write(b"x", key)
        writer.flush()
        kill(writer)

    for _ in range(3):
        write_and_die()
    clock.advance(WRITER_RETENTION_SECONDS / 2)
    write_and_die()
    monkeypatch.setattr(event_numbers, "SWEEP_EVERY", 1)
    EventWriter(streams, NAME, serializer=BytesSerializer()).close()
    assert numbers_on(streams) == {0: 4, 1: 4}
    clock.advance(WRITER_RETENTION_SECONDS / 2 + 1)
    EventWriter(streams, NAME, serializer=BytesSerializer()).close()
    assert numbers_on(streams) == {0: 1, 1: 1}


def sweep_much_later(streams: StreamManager) -> None:
    state = streams.fetch_state(NAME)
    segments = [state.data_segment(number) for number in state.current]
    event_numbers.sweep(streams.store, segments, time.time() + WRITER_RETENTION_SECONDS + 1)


def test_a_writer_whose_number_was_removed_while_it_was_silent_goes_on(
    streams: StreamManager, writer: EventWriter[bytes]
) -> None:
    writer.write(b"first", "Foo")
    writer.flush()
    sweep_much_later(streams)
    assert numbers_on(streams) == {0: 0, 1: 0}
    writer.write(b"second", "Foo")
    writer.flush()
    writer.write(b"third", "Foo")
    writer.close()
    assert events_of(streams, 0) == [b"first", b"second", b"third"]
    assert numbers_on(streams) == {0: 0, 1: 0}


def test_an_append_in_doubt_is_not_made_again_under_a_new_number(
    streams: StreamManager, failing: FailingStore, writer: EventWriter[bytes]
) -> None:
    """It was stored, and the number that told so is gone."""
    writer.write(b"first", "Foo")
    writer.flush()
    failing.lose_answers()
    once(failing, "append", lambda: sweep_much_later(streams), after=1)
    writer.write(b"in doubt", "Foo")
    with pytest.raises(OutcomeUnknownError, match="events_in_doubt=1"):
        writer.flush()
    assert events_of(streams, 0) == [b"first", b"in doubt"]


def test_a_number_that_keeps_a_late_append_out_stays(streams: StreamManager, failing: FailingStore) -> None:
    with open_writer(failing) as writer:
        failing.lose_answers()
        writer.write(b"x", "Foo")
    assert numbers_on(streams) == {0: 1, 1: 0}


# ---------------------------------------------------------------------- forks


def _write_in_a_fork(writer: EventWriter[bytes], answers: multiprocessing.Queue[str]) -> None:
    for call in (lambda: writer.write(b"x", "Foo"), writer.flush):
        try:
            call()
        except ClosedError as error:
            answers.put(str(error))
    writer.close()


@pytest.mark.filterwarnings("ignore:This process.*is multi-threaded:DeprecationWarning")
def test_a_writer_refuses_in_a_forked_child(streams: StreamManager, writer: EventWriter[bytes]) -> None:
    context = multiprocessing.get_context("fork")
    answers = context.Queue()
    child = context.Process(target=_write_in_a_fork, args=(writer, answers))
    child.start()
    for _ in range(2):
        assert "belongs to the parent process" in answers.get(timeout=SECONDS)
    child.join(SECONDS)
    assert child.exitcode == 0
    writer.write(b"parent", "Foo")
    writer.flush()
    assert all_events(streams) == [b"parent"]
