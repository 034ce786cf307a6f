"""Ctrl-C anywhere in the calls of writers and readers: other threads and processes go on, and so does the caller."""

from __future__ import annotations

import itertools
import os
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, suppress
from datetime import UTC, datetime, timedelta

import pytest

import readergroup as rg
from readergroup.group.model.state import ReaderGroupState
from readergroup.group.model.updates import UPDATES
from synchronizer.state import StateCodec
from tests.interrupts import FEW_OR_MORE, interrupts
from tests.waiting import CallInThread, until

DEADLINE = 30.0
START = datetime(2026, 1, 1, tzinfo=UTC)
Writer = rg.EventWriter[object]


@pytest.fixture
def clients() -> Iterator[list[rg.Client]]:
    """One that is interrupted, and one as of another process."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as folder:
        url = f"sqlite:///{folder}/store.db"
        with rg.connect(url) as one, rg.connect(url) as other:
            one.streams.create("shop/orders", scaling=rg.ScalingPolicy.fixed(2))
            yield [one, other]


def write(writer: Writer, event: object) -> None:
    writer.write(event, "key")
    writer.flush(timeout=DEADLINE)


def commit(writer: Writer, event: object) -> None:
    with writer.transaction() as transaction:
        transaction.write(event, "key")


@FEW_OR_MORE
@pytest.mark.parametrize(("store", "one_in"), [(write, 1), (commit, 20)], ids=["flush", "transaction"])
def test_an_interrupted_writer_holds_up_nobody(
    clients: list[rg.Client], store: Callable[[Writer, object], None], one_in: int, sparsely: int
) -> None:
    one, other = (client.writer("shop/orders", serializer=rg.JsonSerializer()) for client in clients)
    numbers = itertools.count()
    added: list[str] = []
    for run in interrupts(lambda: store(one, next(numbers)), one_in=one_in * sparsely):
        assert isinstance(run.error, KeyboardInterrupt), f"{run.error!r} after an interrupt at {run.place}"
        for writer in (other, one):
            added.append(f"event {len(added)}")
            storing = CallInThread(lambda writer=writer, event=added[-1]: (store(writer, event),))
            assert storing.ended() == (None,), run.place
    stored = read_all(clients[1])
    assert len(stored) == len(set(stored))
    assert [event for event in stored if isinstance(event, str)] == added


@FEW_OR_MORE
def test_a_writer_that_was_interrupted_while_it_was_opened_or_closed_ends_with_the_client(
    clients: list[rg.Client], sparsely: int
) -> None:
    one, _ = clients
    before = {*threading.enumerate()}

    def write_one() -> None:
        with one.writer("shop/orders") as writer:
            writer.write(b"event", "key")

    for run in interrupts(write_one, one_in=sparsely):
        assert isinstance(run.error, KeyboardInterrupt), f"{run.error!r} after an interrupt at {run.place}"
    one.close()
    # Python lists a thread for ever that an interrupt within its `Thread.start` kept from beginning: it is not alive.
    until(lambda: not any(thread.is_alive() for thread in {*threading.enumerate()} - before), "threads end", seconds=30)


@FEW_OR_MORE
def test_a_time_is_noted_after_an_interrupt(clients: list[rg.Client], sparsely: int) -> None:
    one, other = clients
    seconds = itertools.count()
    writers: list[Writer] = []

    def renew() -> None:
        for writer in writers:
            writer.close()
        writers[:] = [one.writer("shop/orders", serializer=rg.JsonSerializer())]

    def note() -> None:
        (writer,) = writers
        time = START + timedelta(seconds=next(seconds))
        writer.write("event", "key", event_time=time)
        writer.note_time(time)

    for run in interrupts(note, one_in=sparsely, before=renew):
        assert isinstance(run.error, KeyboardInterrupt), f"{run.error!r} after an interrupt at {run.place}"
        (writer,) = writers
        time = START + timedelta(seconds=next(seconds))
        noting = CallInThread(lambda writer=writer, time=time: (writer.note_time(time),))
        assert noting.ended() == (None,), run.place
        renew()
        assert other.streams.info("shop/orders").watermark == time, run.place
    renew()


def test_a_transaction_whose_beginning_was_interrupted_keeps_no_time(clients: list[rg.Client]) -> None:
    begun: list[rg.Transaction[bytes]] = []
    with clients[0].writer("shop/orders") as writer:
        for run in interrupts(lambda: begun.append(writer.transaction())):
            if not begun and "EventWriter._transaction" in run.place:
                assert not writer._notes._holds, run.place
            while begun:
                begun.pop().abort()
            writer._notes._holds.clear()


@pytest.mark.parametrize("end", [rg.Transaction.commit, rg.Transaction.abort])
def test_a_transaction_whose_end_was_interrupted_keeps_no_time_once_it_is_over(
    clients: list[rg.Client], end: Callable[[rg.Transaction[bytes]], None]
) -> None:
    begun: list[rg.Transaction[bytes]] = []
    with clients[0].writer("shop/orders") as writer:
        for run in interrupts(lambda: end(begun[-1]), before=lambda: begun.append(writer.transaction())):
            with suppress(rg.ClosedError):
                end(begun[-1])
            assert not writer._notes._holds, run.place


def test_pydantic_hides_no_interrupt_of_the_writing_of_a_groups_state() -> None:
    codec = StateCodec(ReaderGroupState, UPDATES)
    state = ReaderGroupState(config=rg.ReaderGroupConfig(streams=["shop/orders"], start="tail"))
    for run in interrupts(lambda: codec.encode_initial(state)):
        assert isinstance(run.error, KeyboardInterrupt), f"{run.error!r} after an interrupt at {run.place}"


@FEW_OR_MORE
def test_an_interrupted_commit_can_be_repeated_until_the_events_are_stored_or_never_will_be(
    clients: list[rg.Client], sparsely: int
) -> None:
    one, other = clients
    numbers = itertools.count()
    begun: list[tuple[int, rg.Transaction[object]]] = []
    stored: list[object] = []
    given_up: list[object] = []
    with one.writer("shop/orders", serializer=rg.JsonSerializer()) as writer:

        def begin() -> None:
            begun.append((next(numbers), writer.transaction()))
            begun[-1][1].write(begun[-1][0], "key")

        for run in interrupts(lambda: begun[-1][1].commit(), one_in=20 * sparsely, before=begin):
            assert isinstance(run.error, KeyboardInterrupt), f"{run.error!r} after an interrupt at {run.place}"
            number, transaction = begun[-1]
            try:
                transaction.commit()
                stored.append(number)
            except rg.ClosedError as error:
                assert "aborted, and none of its events is in the stream" in str(error), run.place
                given_up.append(number)
        assert not writer._notes._holds
    found = read_all(other)
    assert {*stored} <= {*found} and given_up and not {*given_up} & {*found}
    assert len(found) == len({*found})


def read_all(client: rg.Client) -> list[object]:
    client.streams.seal("shop/orders")
    group = client.groups.create("all", streams=["shop/orders"])
    with group.reader("reader", serializer=rg.JsonSerializer()) as reader:
        return [event.data for event in reader]


@FEW_OR_MORE
def test_an_interrupted_reader_goes_on(clients: list[rg.Client], sparsely: int) -> None:
    one, other = clients
    with other.writer("shop/orders", serializer=rg.JsonSerializer()) as writer:
        writer.write_many(range(5000), "key")
    group, same = one.groups.create("group", streams=["shop/orders"]), other.groups.get("group")
    with group.reader("reader", serializer=rg.JsonSerializer()) as reader:

        def read() -> None:
            assert reader.read(timeout=DEADLINE) is not None, "more events are needed"
            reader.commit(timeout=DEADLINE)

        for run in interrupts(read, one_in=sparsely):
            assert isinstance(run.error, KeyboardInterrupt), f"{run.error!r} after an interrupt at {run.place}"
            looking = CallInThread(lambda: same.synchronizer.fetch_updates(timeout=DEADLINE))
            assert not isinstance(looking.ended(), Exception), run.place
            read()


@FEW_OR_MORE
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_interrupted_reader_can_be_opened_and_closed_again(clients: list[rg.Client], sparsely: int) -> None:
    one, other = clients
    group, same = one.groups.create("group", streams=["shop/orders"]), other.groups.get("group")
    numbers = itertools.count()

    def open_and_close() -> None:
        reader = group.reader(f"reader-{next(numbers)}")
        try:
            reader.close()
        except BaseException:
            reader.close()
            raise

    for run in interrupts(open_and_close, one_in=6 * sparsely):
        assert isinstance(run.error, KeyboardInterrupt), f"{run.error!r} after an interrupt at {run.place}"
        assert same.online_readers() == [], run.place
        for each in (same, group):
            opening = CallInThread(lambda each=each: (each.reader(f"reader-{next(numbers)}").close(),))
            assert opening.ended() == (None,), run.place


@FEW_OR_MORE
def test_a_client_whose_block_is_interrupted_at_its_end_has_left_everything(
    clients: list[rg.Client], sparsely: int
) -> None:
    url, other = clients[0].store.url, clients[1]
    group = other.groups.create("group", streams=["shop/orders"])
    opened: list[tuple[rg.Client, rg.Reader[bytes], rg.Membership]] = []

    def open() -> None:
        client = rg.connect(url)
        opened[:] = [(client, client.groups.get("group").reader("reader"), client.membership("nodes", "node"))]
        opened[0][2].join()

    for run in interrupts(lambda: opened[0][0].__exit__(None, None, None), one_in=10 * sparsely, before=open):
        assert isinstance(run.error, KeyboardInterrupt), f"{run.error!r} after an interrupt at {run.place}"
        if "Client.close" not in run.place:  # before it begins, or after it
            opened[0][0].close()
        assert group.online_readers() == [], run.place
        assert other.membership("nodes", "another").members() == [], run.place


@FEW_OR_MORE
def test_an_interrupted_checkpoint_holds_up_no_other(clients: list[rg.Client], sparsely: int) -> None:
    one, other = clients
    group, same = one.groups.create("group", streams=["shop/orders"]), other.groups.get("group")
    numbers = itertools.count()
    with same.reader("idle"):  # it reads nothing, so it passes no checkpoint

        def take() -> None:
            with suppress(rg.CheckpointTimeoutError, rg.DeadlineExceededError):
                group.checkpoint(f"checkpoint-{next(numbers)}", timeout=0.2)

        for run in interrupts(take, one_in=15 * sparsely):
            assert isinstance(run.error, KeyboardInterrupt), f"{run.error!r} after an interrupt at {run.place}"
            if "GroupUpdater.begin_checkpoint" not in run.place:  # there its outcome is in doubt
                assert not same.synchronizer.fetch_updates().outstanding_checkpoints, run.place
            for each in same.synchronizer.fetch_updates().outstanding_checkpoints:
                same.cancel_checkpoint(each.name)
    group.checkpoint("last", timeout=DEADLINE)


def test_a_lock_is_held_by_nobody_when_the_interrupt_of_its_release_is_over(clients: list[rg.Client]) -> None:
    one, other = clients
    held: list[AbstractContextManager[rg.HeldLock]] = []

    def take() -> None:
        held.append(one.lock("door", member_timeout_seconds=60))
        held[-1].__enter__()

    for run in interrupts(lambda: held.pop().__exit__(None, None, None), one_in=2, before=take):
        place = run.place
        del run  # and the traceback with it, which holds what it was thrown through
        with other.lock("door", timeout=DEADLINE / 2) as found:
            assert found.fencing_token, place
