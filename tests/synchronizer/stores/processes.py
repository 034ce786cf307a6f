"""What the other processes of these tests do. They share nothing with those of the tests but the file."""

from __future__ import annotations

import os
import secrets
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext, SpawnContext
from multiprocessing.process import BaseProcess
from pathlib import Path

from synchronizer.errors import ReaderGroupError, StoreFullError, StoreUnavailableError
from synchronizer.store import Appended, AttributeChange, Conflict, SegmentCopy, UnknownOutcome
from synchronizer.stores import open_store
from synchronizer.stores.sqlite.file_lock import Gate
from synchronizer.stores.sqlite.store import SqliteStore
from tests.clean_processes import CLEAN
from tests.synchronizer.stores.sqlite.gates import held
from tests.waiting import PATIENCE_SECONDS

RECORD = 12
LONG = PATIENCE_SECONDS


@contextmanager
def running(
    work: Callable[..., None], *arguments: object, context: ForkServerContext | SpawnContext = CLEAN
) -> Iterator[tuple[BaseProcess, Connection]]:
    """A process that runs ``work(connection, *arguments)`` and is killed at the end of the block if it still does."""
    here, there = context.Pipe()
    process = context.Process(target=work, args=(there, *arguments), daemon=True)
    process.start()
    there.close()
    try:
        yield process, here
    finally:
        process.kill()
        process.join(LONG)


def receive(connection: Connection) -> object:
    assert connection.poll(LONG), "the other process does not answer"
    return connection.recv()


def contend(connection: Connection, url: str, number: int, everybody: int, segment: str = "s") -> None:
    """Append at the expected offset, reading what others wrote after each conflict, until so many are stored."""
    with open_store(url) as store:
        connection.send("ready")
        connection.recv()
        length = successes = conflicts = 0
        while length < everybody * RECORD:
            try:
                result = store.append(segment, b"%03d:%07d;" % (number, successes), expected_offset=length)
            except StoreUnavailableError:  # nothing was stored: on a busy machine one flush may take seconds
                continue
            match result:
                case Appended():
                    successes += 1
                    length += RECORD
                case Conflict() as conflict:
                    conflicts += 1
                    assert len(conflict.delta) == min(conflict.length - length, 65536)
                    length = conflict.length
        connection.send((successes, conflicts))


def append_until_killed(connection: Connection, path: Path, number: int) -> None:
    """Append for ever, and tell each append after it was acknowledged."""
    with SqliteStore(str(path), write_timeout=PATIENCE_SECONDS) as store:
        count = 0
        while True:
            assert isinstance(store.append("s", b"%03d:%07d;" % (number, count)), Appended)
            connection.send(count)
            count += 1


def append_until_refused(connection: Connection, path: Path, number: int) -> None:
    """Append until the store refuses, tell each append after it was acknowledged, and at last why it was refused."""
    with open_store(f"sqlite:///{path}") as store:
        count = 0
        while True:
            try:
                answer = store.append("s", b"%03d:%07d;" % (number, count))
            except ReaderGroupError as error:
                return connection.send(str(error))
            if isinstance(answer, UnknownOutcome):
                return connection.send(str(answer.cause))
            connection.send(count)
            count += 1


def fill_up(connection: Connection, url: str, segment: str, block_bytes: int) -> None:
    """Append for ever, and renew a lease meanwhile, whether the store is full or not; tell when it first is."""
    with open_store(url) as store:
        count = renewals = 0
        was_full = False
        while True:
            lease = AttributeChange(b"%d" % renewals if renewals else None, b"%d" % (renewals + 1))
            assert isinstance(store.append(segment, b"", attributes={"lease": lease}), Appended)
            renewals += 1
            data = b"%08d" % count * (block_bytes // 8)
            try:
                assert store.append(segment, data) == Appended(count * len(data), (count + 1) * len(data))
                count += 1
            except StoreFullError:
                if not was_full:
                    connection.send("full")
                was_full = True


def copy_until_killed(connection: Connection, path: Path, number: int) -> None:
    """Stage, concatenate, copy, truncate and delete for ever; tell each turn after it was acknowledged."""
    with SqliteStore(str(path), write_timeout=PATIENCE_SECONDS) as store:
        turn = 0
        while True:
            staged, copied, unique = f"staged-{number}-{turn}", f"copied-{number}-{turn}", secrets.token_bytes(8)
            store.create(staged)
            store.append(staged, unique * 25_000)
            store.seal(staged)
            store.concat("s", staged)
            store.copy_segments([SegmentCopy(staged, copied, 100, 190_000)])
            store.forget(staged)
            store.truncate(
                "s", max(store.info("s").start_offset, store.info("s").length - 1_000_000) // 200_000 * 200_000
            )
            assert store.read(copied, 100, 1 << 20) == (unique * 25_000)[100:190_000]
            store.delete(copied)
            connection.send(turn)
            turn += 1


def append_when_told(connection: Connection, path: Path) -> None:
    """One append per message; answers with the time at which it was acknowledged."""
    with open_store(f"sqlite:///{path}") as store:
        connection.send("ready")
        while connection.recv():
            store.append("s", b"x" * RECORD)
            connection.send(time.monotonic())


def hold_the_gate(connection: Connection, path: Path) -> None:
    """Stop in the middle of a write, as a debugger or a laptop lid does to a process."""
    with held(Gate(f"{path}.lock"), LONG):
        connection.send("holding")
        os.kill(os.getpid(), signal.SIGSTOP)
    connection.send("released")


def fork_while_holding_the_gate(connection: Connection, path: Path) -> None:
    """Answers with the child, which lives on."""
    with SqliteStore(str(path)) as store, held(store._gate, LONG):
        child = os.fork()
        if child:
            connection.send(child)
        signal.pause()


def wait_for_changes(connection: Connection, path: Path, seconds: float) -> None:
    """Wait for a segment that does not change; answers with the processor time that this took."""
    with open_store(f"sqlite:///{path}") as store:
        store.wait({"s": 0}, 0.01)  # start what waiting needs
        connection.send("ready")
        before = time.process_time()
        assert store.wait({"s": 0}, seconds) == frozenset()
        connection.send(time.process_time() - before)
