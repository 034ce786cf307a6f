"""A process that uses a store and a group while something is used up, and for which all is as before when it is not.

A process of its own, because what is used up is the process's own. It answers ``None``, or what went wrong.
"""

from __future__ import annotations

import itertools
import os
import resource
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection

import readergroup as rg
from synchronizer import UnknownOutcome, open_store
from tests.waiting import PATIENCE_SECONDS, STARTS_A_THREAD, until

#: The least number of rounds of calls that are made while something is used up.
ROUNDS = 5
LARGE = bytes(16 << 20)


@contextmanager
def without_descriptors() -> Iterator[Callable[[], None]]:
    taken: list[int] = []

    def take() -> None:
        with suppress(OSError):
            while True:
                taken.append(os.dup(0))

    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 20, before[1]))
    try:
        take()
        yield take
    finally:
        for file in taken:
            os.close(file)
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


@contextmanager
def without_memory() -> Iterator[Callable[[], None]]:
    """Not even for a thread's stack, nor for the 16 MB of a large append."""
    with open("/proc/self/statm") as file:
        pages = int(file.read().split()[0])
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + (4 << 20), before[1]))
    try:
        yield lambda: None
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


@contextmanager
def without_threads() -> Iterator[Callable[[], None]]:
    def refuse(*arguments: object, **named: object) -> None:
        raise RuntimeError("can't start new thread")

    start = getattr(threading, STARTS_A_THREAD)
    setattr(threading, STARTS_A_THREAD, refuse)
    try:
        yield lambda: None
    finally:
        setattr(threading, STARTS_A_THREAD, start)


@contextmanager
def until_told(connection: Connection) -> Iterator[Callable[[], None]]:
    """What the parent uses up, and says when."""
    connection.send("begin")
    connection.recv()
    try:
        yield lambda: None
    except BaseException:
        connection.send(traceback.format_exc())  # before the writer waits for the store
        raise
    connection.send("end")
    connection.recv()


WAYS = {"descriptors": without_descriptors, "memory": without_memory, "threads": without_threads}


def live(connection: Connection, url: str, way: str, seconds: float = 0.0) -> None:
    """Use something up for ``seconds``, and for `ROUNDS` rounds of calls at least."""
    try:
        _live(url, lambda: WAYS[way]() if way in WAYS else until_told(connection), seconds)
        # The boundary of a store counts what it does not know, such as that the interpreter has no memory.
        assert way == "memory" or not rg.background_errors(), rg.background_errors()
        connection.send(None)
    except BaseException:
        connection.send(traceback.format_exc())


def _live(url: str, used_up: Callable[[], object], seconds: float) -> None:
    with open_store(url) as store:  # what a process has for good when it has used a store
        store.create("warm")
    files, threads = _files(), threading.active_count()
    with rg.connect(url) as client:
        client.streams.create("shop/orders", scaling=rg.ScalingPolicy.fixed(2))
        client.groups.create("billing", streams=["shop/orders"], reader_timeout_seconds=5.0)
        for name in ("probe", "large"):
            client.store.create(name)
        running = Running(client)
        until(lambda: len(running.read) > 20, "the first events are read")
        with used_up() as again:
            assert _failures(client, _impatient(url), again, seconds), "nothing was used up"
        last = running.written
        until(lambda: {*range(last), last + 20} <= running.read, "what is written, also afterwards, is read")
        for call in _calls(client, url):
            call()
        running.stop()
        assert {*range(last)} <= running.read
        if running.unexpected:
            raise running.unexpected[0]
    until(lambda: threading.active_count() <= threads, f"no thread is left: {threading.enumerate()}")
    until(lambda: _files() <= files, "no descriptor is left")


def _impatient(url: str) -> str:
    """To open a store of NATS takes its whole timeout where it cannot connect."""
    return f"{url}&timeout_seconds=0.5" if url.startswith("nats") else url


def _failures(client: rg.Client, url: str, again: Callable[[], None], seconds: float) -> int:
    failures, begun = 0, time.monotonic()
    for number in itertools.count():
        if number >= ROUNDS and time.monotonic() - begun >= seconds:
            return failures
        again()
        failures += sum(_fails(call) for call in _calls(client, url))
    raise AssertionError


def use_first(connection: Connection, url: str) -> None:
    """Use a client for the first time without descriptors: only our errors, and each call works when there are some.

    From then on it also works without. For a spawned process: a forked one may have loaded what this loads.
    """
    try:
        with rg.connect(url) as client:
            with without_descriptors():
                failed = [name for name, call in _uses(client, "first").items() if _fails(call)]
            for call in _uses(client, "second").values():
                call()
            with without_descriptors():
                failed_again = [name for name, call in _uses(client, "third").items() if _fails(call)]
        connection.send((failed, failed_again))
    except BaseException:
        connection.send(traceback.format_exc())


def _uses(client: rg.Client, name: str) -> dict[str, Callable[[], object]]:
    stream = f"shop/{name}"

    def write() -> None:
        with client.writer(stream) as writer:
            writer.write(b"x")

    def read() -> None:
        with client.groups.get(name).reader() as reader:
            reader.read(0)

    def batches() -> None:
        list(client.batch.batches(client.batch.segment_ranges(stream)[0]))

    def record_batches() -> None:
        list(client.batch.record_batches(client.batch.segment_ranges(stream)[0]))

    def listen() -> None:
        client.groups.get(name).reader_notifier.register_listener(print)

    return {
        "create a stream": lambda: client.streams.create(stream),
        "write": write,
        "create a group": lambda: client.groups.create(name, streams=[stream]),
        "read": read,
        "read in bulk": batches,
        "read columns": record_batches,
        "listen": listen,
        "record": lambda: client.groups.get(name).notification_record,
        "pool": lambda: client.groups.get(name).pool(print).close(),
        "count": lambda: client.counter(name).add(1),
        "delete a group": lambda: client.groups.delete(name),
        "delete a stream": lambda: client.streams.delete(stream),
    }


def _files() -> int:
    return len(os.listdir("/proc/self/fd"))


def _calls(client: rg.Client, url: str) -> list[Callable[[], object]]:
    store, group = client.store, client.groups.get("billing")

    def open_and_close() -> None:
        with open_store(url) as another:
            another.info("probe")

    def join_and_leave() -> None:
        with group.reader("another"):
            pass

    def write() -> None:
        with rg.Client(store) as another, another.writer("shop/orders", timeout=1.0):
            pass  # the writers of each client have a thread

    def lock_fairly() -> None:
        with store.fair_lock("probe", 0.1):
            pass

    def append_much() -> None:
        answer = store.append("large", LARGE)
        if isinstance(answer, UnknownOutcome):
            raise answer.cause or AssertionError
        store.truncate("large", store.info("large").length)

    return [
        open_and_close,
        lambda: store.append("probe", b"x"),
        lambda: store.read("probe", 0, 100),
        lambda: store.attributes("probe"),
        lambda: [*store.list()],
        lambda: store.wait({"probe": 0}, 0.01),
        lock_fairly,
        append_much,
        write,
        join_and_leave,
    ]


def _fails(call: Callable[[], object]) -> bool:
    """Whether it raised one of our errors, or the interpreter's own; any other one is raised."""
    try:
        call()
    except (rg.ReaderGroupError, MemoryError):
        return True
    return False


class Running:
    """Threads that write and read numbered events, whatever happens."""

    def __init__(self, client: rg.Client) -> None:
        self.written = 0
        self.read: set[int] = set()
        self.unexpected: list[BaseException] = []
        self._stopping = threading.Event()
        self._writer = client.writer("shop/orders", timeout=PATIENCE_SECONDS)  # longer than things are used up
        self._reader = client.groups.get("billing").reader("reader")
        self._threads = [threading.Thread(target=self._repeat, args=(step,)) for step in (self._write, self._read)]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._stopping.set()
        for thread in self._threads:
            thread.join(PATIENCE_SECONDS)
            assert not thread.is_alive()
        self._reader.close()
        self._writer.close()

    def _repeat(self, step: Callable[[], None]) -> None:
        while not self._stopping.is_set():
            try:
                step()
            except rg.ReaderGroupError as error:
                if not error.retryable and not isinstance(error, rg.OutcomeUnknownError):
                    self.unexpected.append(error)
                    return
                self._stopping.wait(0.01)
            except MemoryError:
                self._stopping.wait(0.01)
            except BaseException as error:
                self.unexpected.append(error)
                return

    def _write(self) -> None:
        self._writer.write(b"%d" % self.written, str(self.written % 7))
        self.written += 1
        if self.written % 10 == 0:
            self._writer.flush()
            self._stopping.wait(0.005)

    def _read(self) -> None:
        event = self._reader.read(0.1)
        if event is not None:
            self.read.add(int(event.raw))
