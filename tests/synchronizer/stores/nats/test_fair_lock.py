"""Interrupts while a fair lock is taken, held or released: the ticket goes at once, and does not have to expire.

The tickets of these tests last for an hour.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest

from synchronizer.clock import ManualClock
from synchronizer.errors import ClosedError
from synchronizer.log.contention import MAX_CONTENTION
from synchronizer.stores.nats import connection, fair_lock
from synchronizer.stores.nats.connection import NatsConnection
from synchronizer.stores.nats.fair_lock import TicketLock, _Ticket
from synchronizer.stores.nats.frames import Outgoing
from synchronizer.stores.nats.rights import Api, queue_stream_of
from synchronizer.stores.nats.store import NatsStore
from tests.interrupts import FEW_OR_MORE, interrupts
from tests.synchronizer.accounts import Account, Add, opened
from tests.synchronizer.stores.nats.test_store import _proxied
from tests.waiting import PATIENCE_SECONDS, CallInThread, until


@pytest.fixture(autouse=True)
def _tickets_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fair_lock, "_TICKET_SECONDS", 3600)


@FEW_OR_MORE
@pytest.mark.parametrize("is_free", [True, False], ids=["free", "held"])
def test_an_interrupted_block_leaves_no_ticket(nats_url: str, is_free: bool, sparsely: int) -> None:
    with NatsStore(nats_url) as store, NatsStore(nats_url) as other, ExitStack() as held:
        assert held.enter_context(other.fair_lock("s", PATIENCE_SECONDS))
        if is_free:
            held.close()

        def block() -> None:
            with store.fair_lock("s", 0.001) as is_held:
                assert is_held is is_free

        count = 0
        for run in interrupts(block, one_in=sparsely, seed=is_free):
            place, error, run = run.place, run.error, None  # the frames hold the lock
            assert isinstance(error, KeyboardInterrupt), f"{error!r} after an interrupt at {place}"
            del error
            until(lambda: tickets(other) == (not is_free), f"no ticket, interrupted at {place}")
            assert not store._fair_lock._tickets, place
            count += 1
        assert count > 30 // sparsely


@FEW_OR_MORE
def test_an_interrupted_block_that_knows_who_is_next_leaves_no_ticket(nats_url: str, sparsely: int) -> None:
    with NatsStore(nats_url) as store, NatsStore(nats_url) as other:
        following = _Ticket(12345, other._fair_lock._grant_subject)
        with other.fair_lock("s", PATIENCE_SECONDS):
            pass  # makes the stream of the tickets

        def block() -> None:
            lock: Any = store._fair_lock.acquire("s", PATIENCE_SECONDS, store=store)
            with lock as is_held:
                assert is_held
                lock._position.following = following

        count = 0
        for run in interrupts(block, one_in=sparsely):
            place, error, run = run.place, run.error, None  # the frames hold the lock
            assert isinstance(error, KeyboardInterrupt), f"{error!r} after an interrupt at {place}"
            del error
            until(lambda: not tickets(other), f"no ticket, interrupted at {place}")
            assert not store._fair_lock._tickets, place
            count += 1
        assert count > 30 // sparsely


def test_a_release_to_a_ticket_that_is_known_waits_for_no_answer(
    nats_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fair_lock, "_LOOK_SECONDS", 3600.0)  # nobody polls: the next one hears of it, or times out
    with ExitStack() as stores:
        holder, second, third = (stores.enter_context(NatsStore(nats_url)) for _ in range(3))
        held = holder.fair_lock("s", PATIENCE_SECONDS)
        assert held.__enter__()
        taken, taking = _queue(second, 2)
        taken_next, taking_next = _queue(third, 3)
        held.__exit__(None, None, None)
        assert taking.ended() is True
        until(lambda: taken._position.following is not None, "the holder knows the next ticket")
        sent: list[Outgoing] = []
        exchange = second._connection.exchange
        monkeypatch.setattr(
            second._connection, "exchange", lambda each, **options: [sent.extend(each), exchange(each, **options)][1]
        )
        taken.__exit__(None, None, None)
        assert taking_next.ended() is True
        assert [each.has_answer for each in sent] == [False, False]  # the grant, and the deletion of the ticket
        until(lambda: tickets(holder) == 1, "the ticket of the second is gone")
        taken_next.__exit__(None, None, None)
        assert tickets(holder) == 0


def test_who_waits_behind_one_that_left_gets_the_lock(nats_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fair_lock, "_LOOK_SECONDS", 3600.0)  # nobody polls: the next one hears of it, or times out
    with ExitStack() as stores:
        holder, second, last = (stores.enter_context(NatsStore(nats_url)) for _ in range(3))
        leaving = stores.enter_context(NatsStore(nats_url, clock=(clock := ManualClock())))
        held = holder.fair_lock("s", PATIENCE_SECONDS)
        assert held.__enter__()
        taken, taking = _queue(second, 2)
        left, waiting = _queue(leaving, 3, patience=2.0)
        taken_last, taking_last = _queue(last, 4)
        held.__exit__(None, None, None)
        assert taking.ended() is True
        until(lambda: taken._position.following is not None, "the holder knows the next ticket")
        clock.advance(2.0)
        assert waiting.ended() is False
        left.__exit__(None, None, None)
        until(lambda: tickets(holder) == 2, "the second's and the last one's are left")
        taken.__exit__(None, None, None)
        assert taking_last.ended() is True
        taken_last.__exit__(None, None, None)
        assert not leaving._fair_lock._left


def test_a_store_that_is_closed_takes_the_tickets_of_its_threads_back(nats_url: str) -> None:
    with NatsStore(nats_url) as holder, holder.fair_lock("s", PATIENCE_SECONDS):
        with NatsStore(nats_url) as store:
            _, waiting = _queue(store, 2)
        assert isinstance(waiting.ended(), ClosedError)
        until(lambda: tickets(holder) == 1, "only the holder's is left")


def test_a_store_that_is_closed_takes_back_the_ticket_of_a_lock_that_is_held(nats_url: str) -> None:
    with NatsStore(nats_url) as other:
        with NatsStore(nats_url) as store:
            held: Any = store.fair_lock("s", PATIENCE_SECONDS)
            assert held.__enter__()
            assert tickets(other) == 1
        until(lambda: tickets(other) == 0, "the ticket is taken back")


def test_a_ticket_that_is_drawn_while_its_store_is_being_closed_is_taken_back(nats_url: str) -> None:
    with NatsStore(nats_url) as holder, NatsStore(nats_url) as store, holder.fair_lock("s", PATIENCE_SECONDS):
        store._fair_lock.close()
        lock: Any = store._fair_lock.acquire("s", PATIENCE_SECONDS, store=store)
        waiting = CallInThread(lock.__enter__)
        until(lambda: lock._position.ticket is not None and tickets(holder) == 1, "only the holder's is left")
        store.close()
        assert isinstance(waiting.ended(), ClosedError)


def test_a_ticket_whose_answer_comes_while_its_store_is_being_closed_is_taken_back(
    nats_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "_LAST_ANSWERS_SECONDS", PATIENCE_SECONDS)
    with NatsStore(nats_url) as other, other.fair_lock("s", PATIENCE_SECONDS):
        assert tickets(other) == 1
    with _proxied(nats_url) as (proxy, url), NatsStore(nats_url) as other, NatsStore(url) as store:
        proxy.cut_downstream()
        taking = CallInThread(lambda: store.fair_lock("s", PATIENCE_SECONDS).__enter__())
        until(lambda: tickets(other) == 1, "its ticket is drawn")
        closing = CallInThread(store.close)
        until(lambda: store._connection._is_closed)
        proxy.heal()
        closing.join(PATIENCE_SECONDS)
        taking.ended()
        until(lambda: tickets(other) == 0, "the ticket is taken back")


def test_a_store_remembers_the_last_tickets_that_left(nats_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fair_lock, "_MOST_LEFT", 2)
    clock = ManualClock()
    with (
        NatsStore(nats_url, clock=clock) as store,
        NatsStore(nats_url) as other,
        other.fair_lock("s", PATIENCE_SECONDS),
    ):
        drawn: list[int] = []
        for _ in range(3):
            lock, waiting = _queue(store, 2, patience=1.0)
            clock.advance(1.0)
            assert waiting.ended() is False
            drawn.append(lock._position.number)
            lock.__exit__(None, None, None)
        assert list(store._fair_lock._left) == drawn[1:]


def _queue(store: NatsStore, place: int, *, patience: float = PATIENCE_SECONDS) -> tuple[Any, CallInThread[bool]]:
    """Return a lock that waits at this place in the queue, and the thread in which it does."""
    lock = store._fair_lock.acquire("s", patience, store=store)
    waiting = CallInThread(lock.__enter__)
    until(lambda: lock._position.ticket is not None, "its ticket is drawn")
    assert tickets(store) == place
    return lock, waiting


def tickets(store: NatsStore) -> int:
    stream = queue_stream_of(store._subjects.stream)
    return int(store._connection.ask(Api(stream).info, b"").document["state"]["messages"])


def test_who_found_others_in_the_queue_does_not_ask_first_whether_it_is_empty(
    nats_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked_first: list[bool] = []
    draw = TicketLock._draw

    def note(self: TicketLock, position: Any, *, only_first: bool) -> bool:
        asked_first.append(only_first)
        return draw(self, position, only_first=only_first)

    monkeypatch.setattr(TicketLock, "_draw", note)

    clock = ManualClock()

    def attempts(patience: float, *, gets_it: bool) -> list[bool]:
        asked_first.clear()
        lock: Any = store._fair_lock.acquire("s", patience, store=store)
        waiting = CallInThread(lock.__enter__)
        if patience and not gets_it:
            until(lambda: tickets(other) == 2, "its ticket is drawn")
            clock.advance(patience)
        assert waiting.ended() is gets_it
        lock.__exit__(None, None, None)
        return [*asked_first]

    with NatsStore(nats_url, clock=clock) as store, NatsStore(nats_url) as other:
        with other.fair_lock("s", PATIENCE_SECONDS):
            assert attempts(1.0, gets_it=False) == [True, False]
            assert attempts(1.0, gets_it=False) == [False]
            assert attempts(0, gets_it=False) == [True]  # it must not wait
        assert attempts(PATIENCE_SECONDS, gets_it=True) == [False]
        assert attempts(PATIENCE_SECONDS, gets_it=True) == [True]
        assert not store._fair_lock._tickets


def test_a_release_that_is_interrupted_while_nothing_answers_takes_the_ticket_back(nats_url: str) -> None:
    with _proxied(nats_url) as (proxy, url), NatsStore(url + "&timeout_seconds=60") as store:
        with NatsStore(nats_url) as other:
            lock = store.fair_lock("s", PATIENCE_SECONDS)
            assert lock.__enter__()
            proxy.silence()
            with _interrupted_at_each_exchange(store._connection) as exchanges, pytest.raises(KeyboardInterrupt):
                try:
                    lock.__exit__(None, None, None)
                finally:
                    lock.__exit__(None, None, None)
            assert len(exchanges) == 1  # the second call does not wait for an answer
            proxy.heal()
            with other.fair_lock("s", PATIENCE_SECONDS) as is_held:
                assert is_held


def test_an_update_that_is_interrupted_whenever_it_waits_for_an_answer_holds_up_no_later_one(nats_url: str) -> None:
    with _proxied(nats_url) as (proxy, url), NatsStore(url + "&timeout_seconds=60") as store:
        replica = opened(store)
        replica._writer._queue._contention = MAX_CONTENTION

        def add(state: Account) -> list[Add]:
            proxy.silence()  # this call has the lock, and sends its update next
            return [Add()]

        with _interrupted_at_each_exchange(store._connection), pytest.raises(KeyboardInterrupt):
            replica.update_state(add, timeout=PATIENCE_SECONDS)
        proxy.heal()
        adding = CallInThread(lambda: replica.update_state_unconditionally(Add(), timeout=PATIENCE_SECONDS))
        ended = adding.ended()
        assert isinstance(ended, Account), ended
        assert ended.value in (1, 2)
        with NatsStore(nats_url) as other, other.fair_lock(replica.segment, PATIENCE_SECONDS) as is_held:
            assert is_held


@contextmanager
def _interrupted_at_each_exchange(connection: NatsConnection) -> Iterator[list[object]]:
    """Ctrl-C for the main thread, which runs the block, at each exchange once it waits for the answer.

    Yields the list of these exchanges.
    """
    main, stop = threading.main_thread(), threading.Event()
    if threading.current_thread() is not main:
        pytest.skip("only the main thread is interrupted")
    before, met = set(connection._pending), []

    def interrupt() -> None:
        while not stop.wait(0.01):
            for exchange in list(connection._pending):
                if exchange.is_sent and exchange not in before and exchange not in met:
                    met.append(exchange)
                    signal.pthread_kill(main.ident or 0, signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    try:
        yield met
    finally:
        stop.set()
        thread.join()
