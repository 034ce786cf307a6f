"""Transactions in a simulation: who writes in them, and that each is in the stream all or not at all."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final

import readergroup as rg
from synchronizer import ClosedError, InvalidArgumentError, NotFoundError, SealedError, StateTooLargeError

from .world import Process

if TYPE_CHECKING:
    from .actors import Application
    from .auditor import Auditor

Events = list[tuple[str, int]]

COMMIT_SECONDS: Final = 4.0
#: So often a commit is made again of which the outcome is unknown.
ATTEMPTS: Final = 5


@dataclass
class Written:
    """A transaction, as the application that wrote it knows it."""

    process: Process
    stream: str
    events: Events
    #: None: not known.
    committed: bool | None = None


class Transactions:
    """What was written in transactions, and what of it is stored."""

    def __init__(self, auditor: Auditor) -> None:
        self._auditor = auditor
        self._written: list[Written] = []

    def written(self, process: Process, stream: str, events: Iterable[tuple[str, int]]) -> Written:
        transaction = Written(process, stream, list(events))
        self._written.append(transaction)
        return transaction

    def check(self, *, deleted: bool) -> None:
        """All or nothing. With a stream ``deleted``, what was being merged then is in it in part."""
        for transaction in self._written:
            stored = [self._auditor.stored[event] for event in transaction.events]
            facts = f"{transaction.process.name}: {transaction.events} are stored {stored} times"
            if transaction.committed is False and any(stored):
                self._auditor.broken("S2", f"{facts}, and were given up")
            elif transaction.committed and not all(stored):
                self._auditor.broken("S2", f"{facts}, and are committed")
            elif any(stored) and not all(stored) and not deleted:
                self._auditor.broken("S2", f"{facts}, in part")


def transact(application: Application) -> None:
    """Write in transactions, and between them; give some up."""
    left, life = application.run.scenario.events // 2, 0
    while left > 0 and not application.run.calm:
        life += 1
        try:
            with application.client.writer(application.actor.subject, timeout=COMMIT_SECONDS) as writer:
                left = _Author(application, writer, life).write(left)
        except (SealedError, NotFoundError):
            return
        except rg.ReaderGroupError as error:
            application.process.world.say(application.process.name, f"fails to write, and begins anew: {error}")
            application.process.sleep(0.1)


class _Author:
    """One writer, and keys of its own: after an unknown outcome another one begins."""

    def __init__(self, application: Application, writer: rg.EventWriter[bytes], life: int) -> None:
        self._application = application
        self._process = application.process
        self._rng = application.rng
        self._auditor = application.auditor
        self._writer = writer
        self._life = life
        self._numbers: dict[str, int] = defaultdict(int)

    def write(self, left: int) -> int:
        """Write at most so many events; how many are left for another one."""
        while left > 0 and not self._application.run.calm:
            plain = [self._next() for _ in range(self._rng.choice((0, 0, 1, 5)))]
            for key, number in plain:
                self._writer.write(f"{key}:{number}".encode(), routing_key=key)
            events = [self._next() for _ in range(self._rng.choice((1, 2, 5, 20)))]
            left -= len(plain) + len(events)
            if self._transact(events) is None:
                return left
            self._process.sleep(self._rng.random() * self._rng.choice((0.01, 0.4)))
        return left

    def _next(self) -> tuple[str, int]:
        key = f"{self._process.name}.{self._life}.{self._rng.randrange(5)}"
        self._numbers[key] += 1
        return key, self._numbers[key] - 1

    def _transact(self, events: Events) -> bool | None:
        """Whether the transaction was committed, if that is known."""
        transaction = self._writer.transaction()
        written = self._application.run.transactions.written(self._process, self._application.actor.subject, events)
        written.committed = False  # before its commit nothing is
        for key, number in events:
            transaction.write(f"{key}:{number}".encode(), routing_key=key)
        if self._rng.random() < 0.3:
            self._process.sleep(self._rng.random())  # the stream may be scaled meanwhile
        if self._rng.random() < 0.2:
            transaction.abort()
        else:
            written.committed = None
            written.committed = self._commit(transaction)
            if written.committed:
                self._auditor.acknowledged(self._process, events)
        return written.committed

    def _commit(self, transaction: rg.Transaction[bytes]) -> bool | None:
        commit = partial(transaction.commit, timeout=COMMIT_SECONDS)
        for _ in range(ATTEMPTS):
            try:
                self._application.timed("commit", 2 * COMMIT_SECONDS, commit)  # what was written before is flushed
                return True
            except ClosedError:
                return False  # it is over, and nothing of it is in the stream
            except (NotFoundError, SealedError, StateTooLargeError, InvalidArgumentError):
                continue  # over, or decided: the next try tells
            except rg.ReaderGroupError as error:
                self._process.world.say(self._process.name, f"does not know whether it has committed: {error}")
                self._process.sleep(0.1)
        return None
