"""One listening connection per process and schema, which wakes all waiters of the process.

A NOTIFY costs its transaction a lock of the whole server and wakes every listener of the database. So an append sends
a NOTIFY only if a process waits. The name of a segment hashes to a slot with an advisory lock. A waiting process holds
that lock in shared mode, and an append briefly tries to take it in exclusive mode. The locks end with the connection
that holds them, and cost neither a row nor a write.

No append is missed: after the slot's lock, the listener takes the segment's own lock once in exclusive mode, which
waits for the appends that had tried the slot before. Later appends are announced, earlier ones can be read.
"""

from __future__ import annotations

import contextlib
import os
import select
import threading
from collections.abc import Collection
from typing import Final

import psycopg

from synchronizer.call_limits import LEAST_SECONDS
from synchronizer.clock import Deadline, SystemClock, growing_pause
from synchronizer.errors import ReaderGroupError
from synchronizer.loggers import get_logger
from synchronizer.threads.background import BackgroundThread, survive
from synchronizer.threads.flag import Bell, Flag

from ..wake_pipe import WakePipe
from .connections import Address, Connection, Connections
from .schema import Names

_logger = get_logger(__name__)
_CLOCK: Final = SystemClock()

#: A segment's appends are announced for this time after its last wait, so that the next wait need not register.
_LINGER_SECONDS: Final = 5.0
#: How long a waiter waits for its registration on a slow server before it polls.
_PATIENCE_SECONDS: Final = 2.0
#: The limit for a registration that waits for a long append, because new appends queue behind it.
_LOCK_MILLISECONDS: Final = 500
_POLL_SECONDS: Final = 0.02
#: How long `Listener.close` waits for the thread, which may wait for a server that does not answer.
_CLOSE_SECONDS: Final = 1.0


class StoreWatch:
    """The watch of one store: collects the announcements since the last `wait`."""

    def __init__(self, listener: Listener) -> None:
        self._listener = listener
        self._lock = threading.Lock()
        self._has_news = Flag()
        self._announced: set[str] = set()
        self._is_anything = False
        self._is_woken = False

    def wait(self) -> frozenset[str] | None:
        self._has_news.wait()
        with self._lock:
            announced = None if self._is_anything else frozenset(self._announced)
            self._announced.clear()
            self._is_anything = False
            if not self._is_woken:
                self._has_news.clear()
        return announced

    def wake(self) -> None:
        with self._lock:
            self._is_woken = True
            self._has_news.set()

    def close(self) -> None:
        self._listener.unsubscribe(self)

    def deliver(self, names: Collection[str] | None) -> None:
        with self._lock:
            self._is_anything |= names is None
            self._announced.update(names or ())
            self._has_news.set()


class PollingWatch:
    """Polls fifty times a second, for connections that are no sessions and so cannot listen."""

    def __init__(self) -> None:
        self._woken = Flag()

    def wait(self) -> None:
        _CLOCK.wait(self._woken, _POLL_SECONDS)

    def wake(self) -> None:
        self._woken.set()

    def close(self) -> None:
        pass


class Listener:
    """The thread that listens while stores of this process use it."""

    def __init__(self, address: Address) -> None:
        self._address = address
        self._names = Names(address.schema)
        self._lock = threading.Lock()
        self._changed = Bell()  # rings for `_registered` and `_is_failing`
        self._subscriptions: set[StoreWatch] = set()
        self._expected_until: dict[str, float] = {}
        self._registered: set[str] = set()
        self._is_failing = False
        self._is_closed = Flag()
        self._wake_pipe = WakePipe()
        self._thread = BackgroundThread(self._run, name="postgres-listener", stopping=self._is_closed)

    def start(self) -> None:
        """Start the thread. Call it once."""
        self._thread.start()

    def subscribe(self) -> StoreWatch:
        subscription = StoreWatch(self)
        with self._lock:
            self._subscriptions.add(subscription)
        return subscription

    def unsubscribe(self, subscription: StoreWatch) -> None:
        with self._lock:
            self._subscriptions.discard(subscription)

    def expect(self, names: Collection[str]) -> None:
        """Return when appends to these segments are announced, or after 2 s or a failure: then the caller polls."""
        deadline = Deadline(_CLOCK, _PATIENCE_SECONDS)
        until = _CLOCK.monotonic() + _LINGER_SECONDS
        with self._lock:
            self._expected_until.update(dict.fromkeys(names, until))
            if self._registered.issuperset(names):
                return
        self._wake_pipe.wake()
        while True:
            with self._lock:
                if self._is_failing or self._registered.issuperset(names) or deadline.passed:
                    return
                changed = self._changed.next_ring()
            changed.wait(deadline.remaining())

    @property
    def is_closed(self) -> bool:
        return self._is_closed.is_set()

    def stop(self) -> None:
        """Let the thread end. It may be called twice."""
        self._is_closed.set()
        self._wake_pipe.wake()

    def close(self) -> None:
        """Wait for the thread, after `stop`, up to a second. The thread ends even if this call is interrupted."""
        with contextlib.suppress(RuntimeError):  # the thread has not started, and will end when it does
            self._thread.join(_CLOSE_SECONDS)
        if not self._thread.is_alive():  # else it does this itself, when the server has answered or its time is over
            self._wake_pipe.close()

    def _run(self) -> None:
        failures = 0
        connections = Connections(self._address)
        while not self._is_closed.is_set():
            try:
                connection = connections.connect()
                try:
                    if self._is_closed.is_set():
                        break
                    connection.add_notify_handler(lambda notify: self._publish([notify.payload]))
                    self._start_over(is_failing=False)
                    failures = 0
                    self._publish(None)  # announcements during the outage are lost
                    self._listen(connection)
                finally:
                    connection.close()
            except Exception as error:
                if not isinstance(error, psycopg.Error | ReaderGroupError | OSError):
                    survive(error, "postgres-listener")
                failures += 1
                self._start_over(is_failing=True)
                if failures == 1:  # once for each outage
                    _logger.warning(
                        "LISTEN failed; waiting calls poll until it works again: url=%r error=%s",
                        self._address.url,
                        " ".join(str(error).split()),
                    )
                self._publish(None)
                _CLOCK.wait(self._is_closed, growing_pause(failures, first=0.05, most=2.0))
        self._wake_pipe.close()

    def _start_over(self, *, is_failing: bool) -> None:
        with self._lock:
            self._is_failing = is_failing
            self._registered.clear()
            self._changed.ring()

    def _publish(self, names: Collection[str] | None) -> None:
        with self._lock:
            subscriptions = list(self._subscriptions)
        for subscription in subscriptions:
            subscription.deliver(names)

    def _listen(self, connection: Connection) -> None:
        connection.call_timeout = min(connection.call_timeout, LEAST_SECONDS)  # all that is asked here is quick
        connection.execute(f"SET lock_timeout = {_LOCK_MILLISECONDS}")
        # Shows in pg_stat_activity what this connection is for.
        connection.execute(
            "SELECT set_config('application_name', current_setting('application_name') || ' listener', false)"
        )
        poll = select.poll()
        poll.register(connection.pgconn.socket, select.POLLIN)
        woken = self._wake_pipe.fileno()
        poll.register(woken, select.POLLIN)
        is_listening = False
        while not self._is_closed.is_set():
            is_listening = self._update_interest(connection, is_listening)
            ready = poll.poll(_LINGER_SECONDS * 1000 if is_listening else None)
            if any(file == woken for file, _ in ready):
                self._wake_pipe.clear()
            if any(file != woken for file, _ in ready):
                self._receive(connection)

    def _receive(self, connection: Connection) -> None:
        connection.pgconn.consume_input()
        names = set()
        while notify := connection.pgconn.notifies():
            names.add(notify.extra.decode())
        if names:
            self._publish(names)
        else:
            connection.execute("SELECT")  # raises if the server has closed the session

    def _update_interest(self, connection: Connection, is_listening: bool) -> bool:
        """Make the locks and the LISTEN match the expected segments; return whether there are any."""
        now = _CLOCK.monotonic()
        with self._lock:
            expired = [name for name, until in self._expected_until.items() if until < now]
            for name in expired:
                del self._expected_until[name]
            gone = [name for name in expired if name in self._registered]
            self._registered.difference_update(gone)
            added = [name for name in self._expected_until if name not in self._registered]
            is_anything_expected = bool(self._expected_until)
        if is_anything_expected and not is_listening:
            connection.execute(f'LISTEN "{self._names.channel}"')
        if added:
            self._register(connection, added)
            with self._lock:
                self._registered.update(added)
                self._changed.ring()
        if gone:
            connection.execute(self._names.fill(_FORGET), (gone,))
        if is_listening and not is_anything_expected:
            connection.execute("UNLISTEN *")
        return is_anything_expected

    def _register(self, connection: Connection, names: list[str]) -> None:
        connection.execute(self._names.fill(_EXPECT), (names,))
        try:
            connection.execute(self._names.fill(_LET_APPENDS_PASS), (names,))
        except psycopg.errors.LockNotAvailable:  # a long append; waiters poll as well
            connection.release_exclusive_locks()


_EXPECT: Final = "SELECT pg_advisory_lock_shared({interest_slot}) FROM unnest(%s::text[]) AS p_name"
_FORGET: Final = "SELECT pg_advisory_unlock_shared({interest_slot}) FROM unnest(%s::text[]) AS p_name"
_LET_APPENDS_PASS: Final = (
    "SELECT pg_advisory_lock({lock_key}), pg_advisory_unlock({lock_key}) FROM unnest(%s::text[]) AS p_name"
)


class _Shared:
    """A listener and the stores of this process that use it."""

    def __init__(self, listener: Listener) -> None:
        self.listener = listener
        self.users: set[object] = set()


_listeners: dict[tuple[object, ...], _Shared] = {}
_lock = threading.Lock()
#: The listeners that a forked child inherited. It keeps them so that it does not close them.
_inherited: list[object] = []


def _key(address: Address) -> tuple[object, ...]:
    return address.conninfo, address.schema


def acquire_listener(address: Address, user: object) -> Listener:
    """Return the listener of this process for the address. Release it, also if this call is interrupted."""
    key = _key(address)
    with _lock:
        shared = _listeners.get(key)
        if shared is not None and not shared.listener.is_closed:
            shared.users.add(user)
            return shared.listener
        shared = _listeners[key] = _Shared(Listener(address))
        shared.users.add(user)
        try:
            shared.listener.start()
        except BaseException:
            shared.listener.stop()  # the next caller starts another
            raise
        return shared.listener


def release_listener(address: Address, user: object) -> None:
    """Stop the listener if this was its last user. It may be called twice, also after an interrupt."""
    with _lock:
        shared = _listeners.get(_key(address))
        if shared is None or user not in shared.users:
            return
        if shared.users == {user}:
            shared.listener.stop()
            del _listeners[_key(address)]
        shared.users.discard(user)
        is_last = not shared.users
    if is_last:
        shared.listener.close()


def _forget_listeners_in_child() -> None:
    global _lock
    _inherited.append(dict(_listeners))
    _listeners.clear()
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_forget_listeners_in_child)
