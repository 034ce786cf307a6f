"""The hidden thread of the NATS stores, and the calls that go through it: nothing ends the one or blocks the others."""

from __future__ import annotations

import asyncio
import gc
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest

from synchronizer.errors import ClosedError, ReaderGroupError, StoreUnavailableError
from synchronizer.store import Appended, AttributeChange, UnknownOutcome
from synchronizer.stores import open_store
from synchronizer.stores.nats import connection as nats_connection
from synchronizer.stores.nats import fair_lock
from synchronizer.stores.nats import loop as nats_loop
from synchronizer.stores.nats.frames import Outgoing
from synchronizer.stores.nats.store import NatsStore
from synchronizer.threads.background import background_errors
from tests.servers.nats import NatsServer
from tests.synchronizer.stores.nats.test_store import _proxied, answer_within
from tests.waiting import PATIENCE_SECONDS, CallInThread, until


@pytest.fixture
def store(nats_url: str) -> Iterator[NatsStore]:
    with NatsStore(nats_url) as store:
        store.create("s")
        yield store


def loop_of(store: NatsStore) -> asyncio.AbstractEventLoop:
    return store._connection._hidden.loop


def succeeds(call: Callable[[], object]) -> bool:
    """False for an error of ours; any other is the test's."""
    try:
        return not isinstance(call(), UnknownOutcome)
    except ReaderGroupError:
        return False


# The thread


@pytest.mark.unexpected_errors
@pytest.mark.parametrize("error", [ValueError, SystemExit, KeyboardInterrupt, MemoryError, GeneratorExit])
def test_whatever_a_callback_raises_does_not_end_the_thread(store: NatsStore, error: type[BaseException]) -> None:
    def fail() -> None:
        raise error

    thread = store._connection._hidden._thread
    for _ in range(3):
        loop_of(store).call_soon_threadsafe(fail)
        assert store.append("s", b"x") in [Appended(n, n + 1) for n in range(3)]
    assert store._connection._hidden._thread is thread and thread.is_alive()


@pytest.mark.unexpected_errors
def test_a_listener_that_fails_is_counted_and_hears_the_next_message(store: NatsStore, nats_url: str) -> None:
    heard: list[object] = []

    def hear(headers: object) -> None:
        heard.append(headers)
        raise KeyError("a defect of the listener")

    store._connection.listen(store._subjects.news("s"), hear)
    until(lambda: store._connection._subscriptions)
    before = sum(background_errors().values())
    with open_store(nats_url) as other:
        for number in range(3):
            other.append("s", b"x")
            until(lambda number=number: len(heard) > number)
    until(lambda: sum(background_errors().values()) == before + 3)
    assert store.info("s").length == 3


def wait_again_while_away(store: NatsStore) -> frozenset[str]:
    while True:
        with suppress(StoreUnavailableError):  # of its first look
            return store.wait({"s": 0}, 60)


@pytest.mark.unexpected_errors
def test_calls_go_on_in_another_thread_when_the_loop_is_broken(nats_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As after a program has closed all descriptors, the loop's own among them."""
    with NatsStore(nats_url) as store, NatsStore(nats_url) as second:
        store.create("s")
        answer_within(store, 2.0)
        assert not store.wait({"s": 0}, 0.01)
        waiting = CallInThread(lambda: wait_again_while_away(store))
        until(lambda: store._waiters._waiting)
        broken = store._connection._hidden

        def fail(timeout: object = None) -> list[Any]:
            raise OSError(9, "Bad file descriptor")

        monkeypatch.setattr(broken.loop._selector, "select", fail)  # type: ignore[attr-defined]
        broken.loop.call_soon_threadsafe(lambda: None)
        until(lambda: broken.has_ended)
        until(lambda: succeeds(lambda: store.append("s", b"x")))
        assert store._connection._hidden is not broken
        assert waiting.ended() == {"s"}
        until(lambda: succeeds(lambda: second.info("s")))
        answer_within(store, PATIENCE_SECONDS)
        length = store.info("s").length
        heard = CallInThread(lambda: store.wait({"s": length}, 60))
        until(lambda: succeeds(lambda: second.append("s", b"y")))
        assert heard.ended() == {"s"}
        assert second._connection._hidden is store._connection._hidden
        thread = store._connection._hidden._thread
    assert not any(each._connection in loop.users for each in (store, second) for loop in nats_loop._loops)
    assert nats_loop._loops or not thread.is_alive()


def test_a_store_that_gets_no_thread_says_so_and_the_next_one_works(
    nats_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Formerly every later store of the process waited for ever for a thread that was not there."""

    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        for _ in range(2):
            with pytest.raises(StoreUnavailableError, match="thread"):
                open_store(nats_url)
    with open_store(nats_url) as store:
        assert store.create("s")


_WITHOUT_DESCRIPTORS = """
import gc, os, resource, sys
from synchronizer.errors import StoreUnavailableError
from synchronizer.stores import open_store
url = sys.argv[1]
with open_store(url) as store:  # everything is imported
    store.create("s")
resource.setrlimit(resource.RLIMIT_NOFILE, (64, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
taken = []
try:
    while True:
        taken.append(os.open("/dev/null", os.O_RDONLY))
except OSError:
    pass
for free in range(0, 8):  # none for the loop, then for parts of it, then for the loop and not for the connection
    for descriptor in taken[:free]:
        os.close(descriptor)
    try:
        with open_store(url + "&timeout_seconds=1") as store:
            assert store.info("s").length == 0
    except StoreUnavailableError as error:
        print("refused")
    gc.collect()
    taken[:free] = [os.open("/dev/null", os.O_RDONLY) for _ in range(free)]
for descriptor in taken:
    os.close(descriptor)
with open_store(url) as store:
    assert store.info("s").length == 0
print("works")
"""


def test_without_descriptors_a_store_is_not_opened_and_opens_when_there_are_some(nats_url: str) -> None:
    output = subprocess.run(
        [sys.executable, "-c", _WITHOUT_DESCRIPTORS, nats_url], capture_output=True, text=True, timeout=300
    )
    assert output.returncode == 0, output.stderr
    lines = output.stdout.split()
    assert lines[-1] == "works" and lines.count("refused") >= 3


# Calls in flight


def test_calls_in_flight_end_when_the_store_is_closed(nats_url: str) -> None:
    for _ in range(5):
        store = NatsStore(nats_url)
        store.create("s")
        stop = threading.Event()

        def call(store: NatsStore = store, stop: threading.Event = stop) -> str:
            while not stop.is_set():
                try:
                    store.append("s", b"x")
                    store.info("s")
                    store.wait({"s": 0}, 0)
                except ClosedError:
                    return "closed"
            return "stopped"

        calls = [CallInThread(call) for _ in range(4)]
        until(lambda store=store: store.info("s").length > 20)
        store.close()
        assert [each.ended() for each in calls] == ["closed"] * 4
        stop.set()
        with open_store(nats_url) as other:
            other.delete("s")
        nats_url = nats_url.replace("stream=", "stream=x")


def test_a_call_that_is_interrupted_leaves_nothing_behind(nats_url: str) -> None:
    with _proxied(nats_url) as (proxy, url), NatsStore(url + "&timeout_seconds=60") as store:
        store.create("s")
        proxy.silence()
        for call in (lambda: store.append("s", b"x"), lambda: store.info("s"), lambda: store.wait({"s": 0}, 60)):
            with _interrupted_when(lambda: bool(store._connection._pending)), pytest.raises(KeyboardInterrupt):
                call()
            until(lambda: not store._connection._pending and not store._connection._expecting)
        assert not store._waiters._waiting
        proxy.heal()
        until(lambda: succeeds(lambda: store.append("s", b"y")))
        assert store.read("s", 0, 10) in (b"xy", b"y")


def test_what_was_interrupted_before_it_was_sent_is_not_sent_later(nats_url: str) -> None:
    with NatsStore(nats_url + "&timeout_seconds=60") as store:
        store.create("s")
        connection = store._connection
        loop_of(store).call_soon_threadsafe(setattr, connection, "_is_connected", False)
        with _interrupted_when(lambda: bool(connection._pending)), pytest.raises(KeyboardInterrupt):
            store.append("s", b"gone", attributes={"a": AttributeChange(None, b"1")})
        loop_of(store).call_soon_threadsafe(connection._begin_sending)
        assert store.info("s").length == 0
        assert store.attributes("s") == {}


def test_closing_that_is_interrupted_can_be_done_again(nats_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    shut = nats_connection.NatsConnection.shut
    is_shutting = threading.Event()

    async def shut_slowly(connection: nats_connection.NatsConnection) -> None:
        is_shutting.set()
        await asyncio.sleep(0.2)
        await shut(connection)

    monkeypatch.setattr(nats_connection.NatsConnection, "shut", shut_slowly)
    store = NatsStore(nats_url)
    with _interrupted_when(is_shutting.is_set), pytest.raises(KeyboardInterrupt):
        store.close()
    store.close()
    with pytest.raises(ClosedError):
        store.info("s")
    assert not any(store._connection in loop.users for loop in nats_loop._loops)


def test_stores_that_threads_close_at_once_and_twice_are_closed_when_each_call_returns(nats_url: str) -> None:
    for _ in range(20):
        stores = [NatsStore(nats_url) for _ in range(2)]
        loop = stores[0]._connection._hidden
        together = threading.Barrier(4)

        def close(store: NatsStore, together: threading.Barrier = together, loop: Any = loop) -> bool:
            together.wait()
            store.close()
            return store._connection in loop.users

        calls = [CallInThread(lambda store=store: close(store)) for store in stores * 2]
        assert [each.ended() for each in calls] == [False] * 4
    assert loop not in nats_loop._loops or loop.users


def test_a_store_whose_server_is_frozen_and_takes_no_more_data_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nats_connection, "_PING_SECONDS", PATIENCE_SECONDS)  # so that it is not found dead before
    with NatsServer() as server, NatsServer() as other:
        with NatsStore(server.url) as store, NatsStore(other.url):  # which keeps the loop
            server.pause()
            connection: Any = store._connection
            transport = connection._client._transport._io_writer.transport
            while not transport.get_write_buffer_size():
                for _ in range(20):
                    connection.send(Outgoing("nowhere", bytes(900_000), None, has_answer=False))
                loop_has_sent = threading.Event()
                loop_of(store).call_soon_threadsafe(loop_has_sent.set)
                assert loop_has_sent.wait(PATIENCE_SECONDS)
            socket = transport.get_extra_info("socket")
            monkeypatch.setattr(nats_connection, "_PING_SECONDS", 0.3)
            store.close()
            until(lambda: socket.fileno() == -1, "the socket is closed")
            server.resume()


def test_a_lock_that_is_held_keeps_its_store_open(nats_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fair_lock, "_TICKET_SECONDS", 3600)
    with open_store(nats_url).fair_lock("s", PATIENCE_SECONDS) as is_held, open_store(nats_url) as other:
        assert is_held
        gc.collect()
        with other.fair_lock("s", 0.0) as is_other_held:
            assert not is_other_held
    with open_store(nats_url) as other, other.fair_lock("s", 0.0) as is_held:
        assert is_held


@contextmanager
def _interrupted_when(condition: Callable[[], bool]) -> Iterator[None]:
    """Ctrl-C for the main thread, which runs the block, once the condition holds."""
    main = threading.main_thread()
    if threading.current_thread() is not main:
        pytest.skip("only the main thread is interrupted")

    def interrupt() -> None:
        until(condition)
        signal.pthread_kill(main.ident or 0, signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    try:
        yield
    finally:
        thread.join()


# Deaf clients


def test_a_client_whose_tasks_have_ended_is_replaced(nats_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """nats-py stops reading at an error that it does not know, and might not notice that itself."""
    monkeypatch.setattr(nats_connection, "_DEAF_SECONDS", 0.0)
    with NatsStore(nats_url) as store:
        store.create("s")
        answer_within(store, 0.3)
        deaf: Any = store._connection._client

        def cancel() -> None:
            for task in (deaf._reading_task, deaf._ping_interval_task, deaf._flusher_task):
                task.cancel()

        loop_of(store).call_soon_threadsafe(cancel)
        until(lambda: succeeds(lambda: store.info("s")) and store._connection._client is not deaf)


def test_listeners_that_came_while_the_connection_was_gone_hear(nats_url: str) -> None:
    with _proxied(nats_url) as (proxy, url), NatsStore(url) as store, open_store(nats_url) as other:
        other.create("s")
        proxy.cut()
        until(lambda: not store._connection._is_connected)
        heard = threading.Event()
        store._connection.listen(store._subjects.news("s"), lambda headers: heard.set())
        proxy.heal()
        until(lambda: store._connection._is_connected and store._subjects.news("s") in store._connection._subscriptions)
        assert store.info("s").length == 0
        other.append("s", b"x")
        until(heard.is_set)


def test_a_lock_that_a_program_holds_at_its_end_does_not_hold_up_the_end(nats_url: str) -> None:
    output = subprocess.run([sys.executable, "-c", _ENDING, nats_url], capture_output=True, text=True, timeout=300)
    assert output.returncode == 1
    assert "of the program" in output.stderr
    assert "could not leave lock/till; its lease will expire: the program is ending" in output.stderr


_ENDING = """
import sys
from contextlib import ExitStack
import readergroup as rg
client, stack = rg.connect(sys.argv[1]), ExitStack()
stack.enter_context(client.lock("till"))
raise ValueError("of the program")
"""


def test_the_process_that_was_forked_leaves_the_connection_alone() -> None:
    """Neither its end nor its garbage collection closes or writes to what it shares with its parent."""
    with NatsServer() as server:
        output = subprocess.run(
            [sys.executable, "-c", _FORKING, server.url], capture_output=True, text=True, timeout=300
        )
        assert output.returncode == 0, output.stderr
        assert output.stdout.split()[-1] == "same"


_FORKING = """
import gc, os, sys, threading
from synchronizer.errors import ClosedError
from synchronizer.stores import open_store
from synchronizer.stores.nats import fair_lock
fair_lock._TICKET_SECONDS = 3600
store = open_store(sys.argv[1])
store.create("s")
connection = store._connection
lock = store.fair_lock("s", 300)
assert lock.__enter__()
me = connection._client.client_id
for number in range(8):
    pid = os.fork()
    if not pid:
        try:
            store.info("s")
        except ClosedError:
            if number % 2:
                lock.__exit__(None, None, None)  # the place in the line is the parent's
                store.close()
                del store, connection, lock
                gc.collect()
            if number % 4 > 1:
                with open_store(sys.argv[1]) as own:
                    own.append("s", b"c")
            if number < 4:
                sys.exit(7)  # the way of an ordinary end, with everything that is torn down
            os._exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
    assert store.append("s", b"p").length
    assert store.info("s").length
with store.fair_lock("s", 0) as is_held:
    assert not is_held
lock.__exit__(None, None, None)
print("same" if store._connection._client.client_id == me else "another")
store.close()
"""
