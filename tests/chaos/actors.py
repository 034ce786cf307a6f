"""What the processes of a schedule do, by the public interface: read, write, scale, seal."""

from __future__ import annotations

import asyncio
import gc
import multiprocessing
import os
import random
import signal
import threading
import time
import traceback
from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path
from types import FrameType
from typing import Final

import readergroup as rg
from readergroup.scaling.starting_worker import new_worker
from readergroup.streams.config import number_of
from tests.chaos.beside import InterruptibleWork, beside
from tests.chaos.connecting import connected
from tests.chaos.diaries import DiaryFile, pulse
from tests.chaos.hosts import open_sockets
from tests.chaos.plan import Life
from tests.readergroup.reader_processes import GROUP, STREAM, Delivery

#: A process whose schedule was cut off does not stay for longer.
_LONGEST_LIFE_SECONDS: Final = 180
#: For a closed client's threads and connections to be gone. A write in one of them may wait for 5 s for the lock of a
#: suspended process.
_END_SECONDS: Final = 15.0
_KEYS: Final = 6
_MOST_SEGMENTS: Final = 10


def act(life: Life, url: str, diary: Path) -> None:
    """Be the process of this life, and write down what happens to it."""
    signal.alarm(_LONGEST_LIFE_SECONDS)
    import_module("tests.chaos.everything")  # a no-op where the process was forked with it
    gc.freeze()  # what was imported: it is collected so often here that looking through it would take most of the time
    parent = multiprocessing.parent_process()
    assert parent is not None
    assert parent.pid is not None
    os.setpgid(0, parent.pid)  # so that what is left of a schedule can be killed
    file = DiaryFile(diary)
    threading.excepthook = lambda failed: file.note("error", error=_trace(failed.exc_value))
    work = {"reader": read, "writer": write, "scaler": scale, "sealer": seal}[life.role]
    told = Told()
    signal.signal(signal.SIGTERM, told.on_signal)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with pulse(file):
        try:
            held = _held()
            try:
                with connected(url, seconds=_LONGEST_LIFE_SECONDS) as client, beside(life, url, client, file):
                    interruptible = InterruptibleWork(file)
                    why = interruptible.run(lambda: work(life, client, file, told, interruptible.times_begun))
            except rg.SealedError:  # of a writer whose close was interrupted before it could tell
                if life.role != "writer":
                    raise
                why = "sealed"
            file.note("end", why=why)
            if left := _left_over(held):
                file.note("error", error=f"after the client was closed there are still {left}")
        except BaseException:
            file.note("error", error=traceback.format_exc())
            raise


def _held() -> tuple[set[threading.Thread], int]:
    # Python goes on listing a thread that an interrupt kept from starting.
    return {thread for thread in threading.enumerate() if thread.is_alive()}, open_sockets()


def _left_over(held: tuple[set[threading.Thread], int]) -> str:
    """The threads and connections that there are beyond those; nothing, if they end within some seconds.

    What only garbage holds does not count: asyncio drops a connection that came in the moment of its cancellation.
    """
    deadline = time.monotonic() + _END_SECONDS
    while True:
        gc.collect()
        threads, sockets = _held()
        more = threads - held[0]
        if not more and sockets <= held[1]:
            return ""
        if time.monotonic() > deadline:
            return f"{sockets - held[1]} connections and the threads {sorted(thread.name for thread in more)}"
        time.sleep(0.02)


def _trace(error: BaseException | None) -> str:
    return "" if error is None else "".join(traceback.format_exception(error))


class Told:
    """Whether the process was asked to leave, and what it does then."""

    def __init__(self) -> None:
        self.leaving = False
        self.leave: Callable[[], object] = lambda: None

    def on_signal(self, _: int, __: FrameType | None) -> None:
        self.leaving = True
        self.leave()


def read(life: Life, client: rg.Client, diary: DiaryFile, told: Told, _: int) -> str:
    """Read to the end of the data, and write down each event before it counts as processed."""
    rng = random.Random(life.seed)
    group = client.groups.get(GROUP)
    never = threading.Event()
    if life.concurrency > 1:
        return ConcurrentReading(life, group, diary, told).run()

    def in_the_group(what: str) -> None:
        found = group.state.readers.get(life.id)
        diary.note(what, incarnation=None if found is None else found.incarnation)

    try:
        with _joined(group, life.id, diary, lambda _: in_the_group("assigned")) as reader:
            told.leave = reader.stop
            if told.leaving:
                reader.stop()
            in_the_group("joined")
            for event in reader:
                if life.pause_seconds:  # now and then so long that positions are committed meanwhile
                    never.wait(rng.uniform(0.1, 0.5) if rng.random() < 0.01 else life.pause_seconds)
                diary.delivered(_delivery(event))
    except rg.ReaderNotInGroupError:
        return "replaced"
    return "told" if told.leaving else "done"


class ConcurrentReading:
    """A worker of a pool, under the id of the plan, which reads to the end of the data.

    It writes down when each event begins, and when it is processed.
    """

    def __init__(self, life: Life, group: rg.ReaderGroup, diary: DiaryFile, told: Told) -> None:
        self._life = life
        self._group = group
        self._diary = diary
        self._told = told
        self._rng = random.Random(life.seed)
        self._never = threading.Event()
        self._tokens: set[tuple[str, int]] = set()

    def run(self) -> str:
        handle = self._handle_awaited if self._rng.random() < 0.7 else self._handle
        while True:
            try:
                worker = new_worker(self._pool(handle).task, self._life.id)
                # As in a worker process: the thread that a signal interrupts may hold the locks that this needs.
                self._told.leave = partial(_in_a_thread, worker.stop)
                if self._told.leaving:
                    worker.stop()
                worker.run(lambda: self._note("joined"))
            except rg.ReaderNotInGroupError:
                return "replaced"
            except (rg.OutcomeUnknownError, rg.StoreUnavailableError):
                self._diary.note("joins again")
                self._never.wait(0.02)
            else:
                return "told" if self._told.leaving else "done"

    def _pool(self, handle: Callable[[rg.Event[bytes]], object]) -> rg.ReaderPool[bytes]:
        retry = rg.RetryPolicy(attempts=20, first_delay_seconds=0.01, max_delay_seconds=0.05)
        return self._group.pool(handle, concurrency=self._life.concurrency, retry=retry)

    def _handle(self, event: rg.Event[bytes]) -> None:
        self._begin(event)
        self._never.wait(self._pause())
        self._end(event)

    async def _handle_awaited(self, event: rg.Event[bytes]) -> None:
        self._begin(event)
        await asyncio.sleep(self._pause())
        self._end(event)

    def _begin(self, event: rg.Event[bytes]) -> None:
        if (event.segment, event.fencing_token) not in self._tokens:
            self._tokens.add((event.segment, event.fencing_token))
            self._note("assigned")
        self._diary.begun(_delivery(event))

    def _end(self, event: rg.Event[bytes]) -> None:
        if self._rng.random() < 0.02:
            raise RuntimeError("not this time")
        self._diary.delivered(_delivery(event))

    def _pause(self) -> float:
        """Seconds for an event: now and then so many that many behind it have ended."""
        if self._rng.random() < 0.01:
            return self._rng.uniform(0.1, 1.0)
        return self._life.pause_seconds * self._rng.random()

    def _note(self, what: str) -> None:
        found = self._group.state.readers.get(self._life.id)
        self._diary.note(what, incarnation=None if found is None else found.incarnation)


def _in_a_thread(call: Callable[[], object]) -> None:
    threading.Thread(target=call).start()


def _delivery(event: rg.Event[bytes]) -> Delivery:
    key, number = event.raw.decode().split(":")
    return Delivery(key, int(number), event.segment, event.offset, event.fencing_token, time.monotonic())


def _joined(
    group: rg.ReaderGroup, reader_id: str, diary: DiaryFile, on_assign: Callable[[object], None]
) -> rg.Reader[bytes]:
    """A reader that has joined the group; once more where it was not told whether it had, under the same id."""
    while True:
        try:
            return group.reader(reader_id, on_assign=on_assign)
        except rg.OutcomeUnknownError:
            diary.note("joins again")


def write(life: Life, client: rg.Client, diary: DiaryFile, told: Told, times_begun: int) -> str:
    """Write events of several keys until told, and write down what is to be stored before, and what is after.

    Begun again it takes other keys, because it does not know what became of the last event before.
    """
    rng = random.Random(life.seed)
    never = threading.Event()
    counts: dict[str, int] = {}
    try:
        with client.writer(STREAM) as writer:
            while not told.leaving:
                for _ in range(rng.randint(1, 25)):
                    routing_key = f"k{rng.randrange(_KEYS)}"
                    key = f"{life.name}/{times_begun}/{routing_key}"
                    number = counts.get(key, 0)
                    counts[key] = number + 1
                    diary.note("intend", key=key, count=number + 1)
                    writer.write(f"{key}:{number}".encode(), routing_key)
                if rng.random() < 0.2:
                    writer.flush()
                    diary.note("acknowledged", counts=counts)
                never.wait(rng.uniform(0.0, 0.06))
    except rg.SealedError:
        return "sealed"
    diary.note("acknowledged", counts=counts)
    return "told"


def scale(life: Life, client: rg.Client, diary: DiaryFile, told: Told, _: int) -> str:
    """Split and merge segments until told, and compact the state of the group now and then."""
    rng = random.Random(life.seed)
    never = threading.Event()
    while not told.leaving:
        never.wait(rng.uniform(0.02, 0.5))
        if rng.random() < 0.15:
            client.groups.get(GROUP).synchronizer.compact()
        segments = [number_of(segment) for segment in client.streams.info(STREAM).segments]
        at = rng.randrange(len(segments))
        try:
            if at == 0 or (len(segments) < _MOST_SEGMENTS and rng.random() < 0.55):
                client.streams.scale(STREAM, split=[segments[at]])
            else:
                client.streams.scale(STREAM, merge=segments[at - 1 : at + 1])
            diary.note("scaled")
        except rg.InvalidArgumentError:
            continue  # another scaler was faster
        except rg.SealedError:
            return "sealed"
    return "told"


def seal(_: Life, client: rg.Client, __: DiaryFile, ___: Told, ____: int) -> str:
    """End the stream."""
    client.streams.seal(STREAM)
    return "done"
