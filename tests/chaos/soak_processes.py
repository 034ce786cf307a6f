"""The processes of the soak: a writer, readers that stay and come and go, and one that is killed again and again.

What they are handed, and what they have stored, they tell the process that started them through one socket. It keeps
the order in which they spoke, and what was said is not lost when who said it is killed.
"""

from __future__ import annotations

import gc
import json
import socket
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Final, NamedTuple

import readergroup as rg
from readergroup.streams.writing.event_numbers import WRITER_RETENTION_SECONDS
from synchronizer import Revision, SystemClock

STREAM: Final = "soak/events"
GROUP: Final = "soak"
STATE: Final = "counters"
KEYS: Final = 16
TICK_SECONDS: Final = 0.1
VICTIM_SECONDS: Final = 0.5
VICTIM_EVENTS: Final = 5
SPEAK_SECONDS: Final = 60.0
ANSWER_SECONDS: Final = 60.0
#: Instead of half a megabyte: so that the logs are compacted many times in half an hour.
COMPACTION_BYTES: Final = 8 * 1024
BLOCKS: Final = "memory blocks of Python"

MAX_BATCH: Final = 200
_PADDING: Final = b"." * 80


class Pace(NamedTuple):
    """How fast everything goes: events per second, and the seconds between two of the others."""

    events_per_second: float = 200.0
    reader_timeout_seconds: float = 5.0
    #: For how long the real 24 hours of `WRITER_RETENTION_SECONDS` last here.
    retention_seconds: float = 120.0
    sample: float = 5.0
    truncate: float = 5.0
    scale: float = 6.0
    lag: float = 5.0
    listen: float = 6.0
    count: float = 0.5
    kill: float = 45.0
    guest: float = 6.0
    short_writer: float = 3.0
    #: Between two faults of the servers or the network, where the store has such.
    mishap: float = 20.0
    #: The policy of the stream, which then nobody truncates by hand. 0: none.
    max_bytes: int = 0


class Setting(NamedTuple):
    """What every process of a soak is told."""

    folder: Path
    pace: Pace
    #: The time of day runs faster from here on.
    began_at: float
    url: str
    #: The same store, for those processes that have the network between them and it that faults befall.
    proxied_url: str

    @property
    def ear(self) -> str:
        """The address of the socket that all processes speak to."""
        return str(self.folder / "ear")

    @property
    def haste(self) -> float:
        return WRITER_RETENTION_SECONDS / self.pace.retention_seconds


class HastyClock(SystemClock):
    """A clock whose time of day runs ``haste`` times as fast, the same in all processes. Timeouts are real ones."""

    def __init__(self, began_at: float, haste: float) -> None:
        self._began_at = began_at
        self._haste = haste

    def time(self) -> float:
        return self._began_at + (super().time() - self._began_at) * self._haste


@contextmanager
def connect(setting: Setting, *, is_proxied: bool = False) -> Iterator[rg.Client]:
    """A client whose clock hastens, and whose logs are compacted often."""
    defaults = rg.StateSynchronizer.__init__.__kwdefaults__
    before, defaults["compaction_bytes"] = defaults["compaction_bytes"], COMPACTION_BYTES
    try:
        with _answering(setting.proxied_url if is_proxied else setting.url, setting) as client:
            yield client
    finally:
        defaults["compaction_bytes"] = before


def _answering(url: str, setting: Setting) -> rg.Client:
    """The client, as soon as the store answers."""
    deadline = time.monotonic() + ANSWER_SECONDS
    while True:
        try:
            return rg.connect(url, clock=HastyClock(setting.began_at, setting.haste))
        except rg.StoreUnavailableError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)


# ---------------------------------------------------------------------- the shared state


class Counters(rg.State):
    """How often each process counted."""

    counts: rg.Map[str, int] = rg.Map()


class Count(rg.Update[Counters], tag="count"):
    who: str

    def apply_to(self, state: Counters, revision: Revision) -> Counters:
        return state.replace(counts=state.counts.set(self.who, state.counts.get(self.who, 0) + 1))


class Counting:
    """One process's share in the counters."""

    def __init__(self, client: rg.Client, who: str) -> None:
        self.synchronizer = client.synchronizer(STATE, initial=Counters(), updates=[Count])
        self._who = who
        self._counted = 0
        self._in_doubt = 0

    def count(self) -> None:
        try:
            self.synchronizer.update_state_unconditionally(Count(who=self._who))
        except rg.OutcomeUnknownError:
            self._in_doubt += 1
        except rg.DeadlineExceededError:
            pass  # nothing was written
        else:
            self._counted += 1

    def check(self) -> None:
        stored = self.synchronizer.fetch_updates().counts.get(self._who, 0)
        most = self._counted + self._in_doubt
        assert self._counted <= stored <= most, (
            f"{self._who} counted {self._counted} times, {self._in_doubt} times in doubt, and the state says {stored}"
        )


# ---------------------------------------------------------------------- saying what happened


class Speaker:
    """Says what happened to the process that started the soak. Threads may share it."""

    def __init__(self, setting: Setting) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.settimeout(SPEAK_SECONDS)
        self._socket.connect(setting.ear)

    def say(self, kind: str, *facts: object) -> None:
        self._socket.send(json.dumps((kind, *facts)).encode())


@contextmanager
def broken_threads_told(speaker: Speaker, who: str) -> Iterator[None]:
    """Inside, a thread that ends by an exception, whoever's it is, is a fault of the soak."""
    before = threading.excepthook

    def tell(broken: threading.ExceptHookArgs) -> None:
        speaker.say("broken", f"{who}: {broken.thread.name if broken.thread else ''} ended by {broken.exc_value!r}")
        threading.__excepthook__(broken)

    threading.excepthook = tell
    try:
        yield
    finally:
        threading.excepthook = before


def runs(raw: Iterable[bytes]) -> list[tuple[str, int, int]]:
    """The events as (key, first number, last number), one for each stretch of a key without a hole."""
    found: list[tuple[str, int, int]] = []
    open_run: dict[str, int] = {}
    for event in raw:
        key, number_text, _ = event.decode().split(":")
        number = int(number_text)
        index = open_run.get(key)
        if index is not None and found[index][2] + 1 == number:
            found[index] = (key, found[index][1], number)
        else:
            open_run[key] = len(found)
            found.append((key, number, number))
    return found


def memory_blocks() -> int:
    """The blocks of memory that Python objects take here, without garbage."""
    gc.collect()
    return sys.getallocatedblocks()


class Duties:
    """What one thread does at intervals, each as often as it says."""

    def __init__(self) -> None:
        self._duties: list[tuple[float, Callable[[], object]]] = []
        self._due: list[float] = []
        self._never = threading.Event()

    def every(self, seconds: float, duty: Callable[[], object]) -> None:
        self._duties.append((seconds, duty))
        self._due.append(time.monotonic() + seconds)

    def run_while(self, condition: Callable[[], bool]) -> None:
        while condition():
            self._never.wait(max(0.0, min(self._due) - time.monotonic()))
            for index, (seconds, duty) in enumerate(self._duties):
                if time.monotonic() >= self._due[index]:
                    duty()
                    # Not a burst of those that a slow machine has missed.
                    self._due[index] = max(self._due[index] + seconds, time.monotonic())


# ---------------------------------------------------------------------- writing


class NumberedEvents:
    """The events of some keys, numbered from 0 in each; how many were written, of those that a writer has stored."""

    def __init__(self, keys: Iterable[str]) -> None:
        self.written: dict[str, int] = dict.fromkeys(keys, 0)
        self._role = 0
        self._keys = list(self.written)

    def next(self) -> tuple[str, bytes]:
        """The key and the bytes of the next one."""
        key = self._keys[self._role % len(self._keys)]
        self._role += 1
        event = b"%s:%d:%s" % (key.encode(), self.written[key], _PADDING)
        self.written[key] += 1
        return key, event

    def write(self, writer: rg.EventWriter[bytes], count: int) -> None:
        for _ in range(count):
            key, event = self.next()
            writer.write(event, routing_key=key)


def write(connection: Connection, setting: Setting) -> None:
    """One writer at a steady rate, and another one every few seconds that writes a little and closes."""
    speaker, pace = Speaker(setting), setting.pace
    with broken_threads_told(speaker, "writer"), connect(setting) as client:
        counting = Counting(client, "writer")
        steady, short = NumberedEvents(f"k{number}" for number in range(KEYS)), NumberedEvents(["s0", "s1"])

        def write_and_close() -> None:
            with client.writer(STREAM) as writer:
                short.write(writer, 20)

        with client.writer(STREAM) as writer:
            duties = Duties()
            duties.every(TICK_SECONDS, lambda: steady.write(writer, round(pace.events_per_second * TICK_SECONDS)))
            duties.every(pace.short_writer, write_and_close)
            duties.every(pace.count, counting.count)
            duties.every(pace.sample, lambda: speaker.say("measured", f"writer: {BLOCKS}", memory_blocks()))
            duties.run_while(lambda: not connection.poll())
        speaker.say("stored", {**steady.written, **short.written})
        counting.check()


# ---------------------------------------------------------------------- reading


def _read(reader: rg.Reader[bytes], source: str, speaker: Speaker, goes_on: Callable[[], bool]) -> bool:
    """Read while it is to go on; whether the end of the data came first."""
    while goes_on():
        try:
            batch = reader.read_batch(MAX_BATCH, timeout=0.5)
        except rg.EndOfDataError:
            return True
        if batch:
            speaker.say("read", source, batch.segment, batch.fencing_token, runs(batch.raw))
    return False


def read(connection: Connection, setting: Setting) -> None:
    """A reader that stays to the end of the data, and beside it guests, who join and leave."""
    speaker, pace = Speaker(setting), setting.pace
    with broken_threads_told(speaker, "reader"), connect(setting, is_proxied=True) as client:
        group = client.groups.get(GROUP)
        counting = Counting(client, "reader")
        ended = threading.Event()

        def stay() -> None:
            try:
                with group.reader("steady") as reader:
                    _read(reader, "steady", speaker, lambda: True)
            finally:
                ended.set()

        def receive_guests() -> None:
            number = 0
            while not ended.wait(0.3 * pace.guest):
                number += 1
                leaves_at = time.monotonic() + 0.7 * pace.guest
                with group.reader(f"guest-{number}") as guest:
                    _read(guest, "guest", speaker, lambda leaves_at=leaves_at: time.monotonic() < leaves_at)

        with _threads(stay, receive_guests) as failures:
            duties = Duties()
            duties.every(pace.count, counting.count)
            duties.every(pace.sample, lambda: speaker.say("measured", f"reader: {BLOCKS}", memory_blocks()))
            duties.run_while(lambda: not ended.is_set() and not failures)
        counting.check()


def read_and_write_until_killed(connection: Connection, setting: Setting, life: int) -> None:
    """A reader, and a writer with keys of its own. Every second life has the reader id of the one before."""
    speaker = Speaker(setting)
    with broken_threads_told(speaker, "victim"), connect(setting, is_proxied=life % 2 == 0) as client:
        events, written_at = NumberedEvents([f"v{life}"]), 0.0
        with client.writer(STREAM) as writer, client.groups.get(GROUP).reader(f"victim-{life // 2}") as reader:

            def write_a_little() -> bool:
                nonlocal written_at
                if time.monotonic() - written_at > VICTIM_SECONDS:
                    written_at = time.monotonic()
                    events.write(writer, VICTIM_EVENTS)
                    writer.flush()
                    speaker.say("stored", events.written)
                return not connection.poll()

            if not _read(reader, "victim", speaker, write_a_little):
                writer.close()
                connection.send("stopped")
                _read(reader, "victim", speaker, lambda: True)


@contextmanager
def _threads(*targets: Callable[[], None]) -> Iterator[list[BaseException]]:
    """Run these in threads of their own; the block ends with them, and raises what the first of them raised."""
    failures: list[BaseException] = []

    def run(target: Callable[[], None]) -> None:
        try:
            target()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(target,), daemon=True) for target in targets]
    for thread in threads:
        thread.start()
    yield failures
    if failures:
        raise failures[0]
    for thread in threads:
        thread.join()


# ---------------------------------------------------------------------- what was said, checked


class Ledger:
    """What was stored and what was delivered, checked as it is told. Threads may share it."""

    def __init__(self) -> None:
        self.delivered = 0
        self.repeated = 0
        #: How many of them each source was handed.
        self.handed: Counter[str] = Counter()
        #: What should not have happened; the first few.
        self.faults: list[str] = []
        self._stored: dict[str, int] = {}
        self._next: dict[str, int] = defaultdict(int)  # of each key, the first number that nobody was handed yet
        self._assignments: dict[tuple[str, str], tuple[str, int, int]] = {}
        self._lock = threading.Lock()

    def stored(self, counts: Mapping[str, int]) -> None:
        with self._lock:
            self._stored.update(counts)

    def read(self, source: str, segment: str, token: int, found: Iterable[tuple[str, int, int]]) -> None:
        """``source`` was handed these runs of numbers. Whoever has a key starts where another was, or before."""
        with self._lock:
            for key, first, last in found:
                self._check_order(source, segment, token, key, first)
                if first > self._next[key]:
                    self._fault(f"{key}: {first} came and {self._next[key]} did not, in {segment} to {source}")
                self.delivered += last - first + 1
                self.handed[source] += last - first + 1
                self.repeated += max(0, min(self._next[key], last + 1) - first)
                self._next[key] = max(self._next[key], last + 1)
                self._assignments[source, key] = (segment, token, last + 1)

    def broken(self, what: str) -> None:
        with self._lock:
            self._fault(what)

    def missing(self) -> Mapping[str, tuple[int, int]]:
        """Per key that lacks events: how many were delivered, without a hole, and how many stored."""
        with self._lock:
            return {key: (self._next[key], count) for key, count in self._stored.items() if self._next[key] < count}

    @property
    def number_stored(self) -> int:
        with self._lock:
            return sum(self._stored.values())

    def _check_order(self, source: str, segment: str, token: int, key: str, first: int) -> None:
        before = self._assignments.get((source, key))
        if before is not None and before[:2] == (segment, token) and first != before[2]:
            self._fault(f"{key}: {first} came after {before[2] - 1} within one assignment of {segment} to {source}")

    def _fault(self, what: str) -> None:
        if len(self.faults) < 10:
            self.faults.append(what)


def listen(ear: socket.socket, ledger: Ledger, measured: dict[str, int]) -> None:
    """Take down what the processes say, until "end"."""
    while True:
        kind, *facts = json.loads(ear.recv(65536))
        match kind:
            case "read":
                ledger.read(*facts)
            case "stored":
                ledger.stored(*facts)
            case "broken":
                ledger.broken(*facts)
            case "measured":
                measure, number = facts
                measured[measure] = number
            case "end":
                return
