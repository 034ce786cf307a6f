"""What the processes of a simulation do: ordinary applications of the product, each in a process of its own."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeVar

import readergroup as rg
from synchronizer import OutcomeUnknownError, StateSynchronizer

from .auditor import Hearing
from .ledger import LEDGER_UPDATES, Enter, Ledger
from .scenario import Actor
from .world import Process

if TYPE_CHECKING:
    from .run import Run

R = TypeVar("R")

GROUP: Final = "billing"
MAX_SEGMENTS: Final = 5
#: Why an application that failed is not started again.
_FINAL: Final = ("took over", "was removed")


class Application:
    """One actor at work. Whatever it meets that can be tried again, it tries again, as a supervisor would."""

    def __init__(self, run: Run, actor: Actor, process: Process) -> None:
        self.run = run
        self.actor = actor
        self.process = process
        self.auditor = run.auditor
        self.rng = process.rng
        self.client = process.client(timeout=5.0)
        self.group: rg.ReaderGroup | None = None
        self.finished = False

    def main(self) -> None:
        work: Callable[[], None] = getattr(self, self.actor.kind)
        if self.actor.kind in ("reader", "listener", "remover", "keeper", "compactor"):
            self.group = self.insist(lambda: self.client.groups.get(GROUP))
        if self.group is not None:
            self.run.groups[self.process] = self.group
        work()
        self.finished = True

    def insist(self, call: Callable[[], R]) -> R:
        """Call until the store has answered."""
        while True:
            try:
                return call()
            except rg.ReaderGroupError as error:
                if not error.retryable:
                    raise
                self.process.sleep(0.1)

    def timed(self, what: str, timeout: float, call: Callable[[], R]) -> R:
        began = self.process.world.simulation.now
        try:
            return call()
        finally:
            if self.process.runs:
                self.auditor.called(self.process, what, began, timeout)

    # ------------------------------------------------------------------ readers

    def reader(self) -> None:
        assert self.group is not None
        if self.actor.listens:
            self.listen()
        while not self.run.over:
            try:
                with self.group.reader(self.actor.subject, auto_commit=self.actor.style != "commit") as reader:
                    self.process.world.say(self.process.name, f"joins as {self.actor.subject}")
                    if getattr(self, f"_{self.actor.style}")(reader):
                        return
            except rg.ReaderNotInGroupError as error:
                if any(reason in str(error) for reason in _FINAL):
                    self.process.world.say(self.process.name, f"stays out: {error}")
                    return
            except rg.TruncatedError:
                continue
            except _ApplicationError:
                self.process.world.say(self.process.name, "fails over an event and begins again")
            except rg.ReaderGroupError as error:
                if not error.retryable and not isinstance(error, OutcomeUnknownError):
                    raise
                self.process.sleep(0.1)

    def _handle(self, event: rg.Event[bytes]) -> None:
        self.auditor.delivered(self.process, event)
        if self.process.world.on_line is not None:
            self.process.world.say(self.process.name, f"handles {event.raw.decode()} at {event.pointer}")
        pause = self.actor.pause
        if self.rng.random() < 0.02:
            pause = self.run.scenario.timeout * self.rng.choice((0.5, 1.2))
        self.process.sleep(self.rng.random() * pause)
        if self.rng.random() < 0.005:
            raise _ApplicationError
        self.auditor.processed(self.process, event)

    def _iterate(self, reader: rg.Reader[bytes]) -> bool:
        leave_after = self.rng.choice((10, 50, 10_000))
        for count, event in enumerate(reader):
            self._handle(event)
            if count >= leave_after and not self.run.calm:
                return False  # leaves, and comes back
        return True

    def _read(self, reader: rg.Reader[bytes]) -> bool:
        while not self.run.over:
            timeout = self.rng.choice((0.0, 0.2, 1.0))
            try:
                event = self.timed("read", timeout, partial(reader.read, timeout=timeout))
            except rg.EndOfDataError:
                return True
            except rg.TruncatedError:
                continue
            if event is not None:
                self._handle(event)
            elif timeout == 0.0:
                self.process.sleep(0.05)
        return True

    def _batch(self, reader: rg.Reader[bytes]) -> bool:
        while not self.run.over:
            size = self.rng.choice((1, 3, 100))
            try:
                batch = self.timed("read_batch", 0.5, partial(reader.read_batch, size, timeout=0.5))
            except rg.EndOfDataError:
                return True
            except rg.TruncatedError:
                continue
            for event in batch:
                self.auditor.delivered(self.process, event)
            if batch:
                self.process.world.say(self.process.name, f"handles {len(batch)} events of {batch.segment}")
            self.process.sleep(self.rng.random() * self.actor.pause)
            for event in batch:
                self.auditor.processed(self.process, event)
        return True

    def _commit(self, reader: rg.Reader[bytes]) -> bool:
        while not self.run.over:
            try:
                event = self.timed("read", 0.3, partial(reader.read, timeout=0.3))
            except rg.EndOfDataError:
                return True
            except rg.TruncatedError:
                continue
            if event is not None:
                self._handle(event)
            if event is None or self.rng.random() < 0.3:
                # The last one alone when it is known; it stands for those before it in its segment.
                alone = event if event is not None and self.rng.random() < 0.3 else None
                try:
                    self.timed("commit", 2.0, partial(reader.commit, alone, timeout=2.0))
                except rg.ReaderNotInGroupError as error:
                    if any(reason in str(error) for reason in _FINAL):
                        raise
        return True

    # ------------------------------------------------------------------ writers

    def writer(self) -> None:
        left, life = self.run.scenario.events, 0
        while left > 0 and not self.run.calm:
            life += 1
            try:
                with self.client.writer(self.actor.subject, timeout=4.0) as writer:
                    left = self._write(writer, left, life)
            except rg.ReaderGroupError as error:
                self.process.world.say(self.process.name, f"fails to write, and begins anew: {error}")
                self.process.sleep(0.1)

    def _write(self, writer: rg.EventWriter[bytes], left: int, life: int) -> int:
        numbers: dict[str, int] = defaultdict(int)
        pending: list[tuple[str, int]] = []
        while left > 0 and not self.run.calm:
            for _ in range(self.rng.choice((1, 2, 5, 10))):
                key = f"{self.actor.name}.{life}.{self.rng.randrange(5)}"
                writer.write(f"{key}:{numbers[key]}".encode(), routing_key=key)
                pending.append((key, numbers[key]))
                numbers[key] += 1
                left -= 1
            if self.rng.random() < 0.4:
                self.timed("flush", 4.0, writer.flush)
                self.auditor.acknowledged(self.process, pending)
                pending.clear()
            self.process.sleep(self.rng.random() * 0.4)
        writer.flush()
        self.auditor.acknowledged(self.process, pending)
        return left

    # ------------------------------------------------------------------ others

    def scaler(self) -> None:
        """Split or merge, a few times."""
        streams, name = self.client.streams, self.actor.subject
        for _ in range(self.rng.choice((1, 1, 2))):
            try:
                current = list(streams.fetch_state(name).current)
                if len(current) > 1 and (len(current) >= MAX_SEGMENTS or self.rng.random() < 0.5):
                    at = self.rng.randrange(len(current) - 1)
                    self.timed("scale", 5.0, partial(streams.scale, name, merge=current[at : at + 2]))
                else:
                    self.timed("scale", 5.0, partial(streams.scale, name, split=[self.rng.choice(current)]))
            except rg.ReaderGroupError as error:
                self.process.world.say(self.process.name, f"did not scale: {error}")
            self.process.sleep(self.rng.random() * 2)

    def compactor(self) -> None:
        assert self.group is not None
        for _ in range(self.rng.choice((1, 2, 4))):
            logs: list[StateSynchronizer[Any]] = [self.group.synchronizer, self.group.synchronizer]
            try:
                logs.append(self.client.streams.synchronizer(self.run.scenario.streams[0]))
                logs.append(self._ledger())
                log = self.rng.choice(logs)
                self.timed("compact", 5.0, log.compact)
            except rg.ReaderGroupError as error:
                self.process.world.say(self.process.name, f"did not compact: {error}")
            self.process.sleep(self.rng.random() * 1.5)

    def keeper(self) -> None:
        """Give up what the group has read."""
        assert self.group is not None
        for _ in range(3):
            try:
                self.group.lag()
                cuts = self.group.stream_cuts()
                self.client.streams.truncate(self.actor.subject, cuts[self.actor.subject])
            except rg.ReaderGroupError as error:
                self.process.world.say(self.process.name, f"did not truncate: {error}")
            self.process.sleep(self.rng.random() * 2)

    def remover(self) -> None:
        """Take out a reader that may well be there."""
        assert self.group is not None
        readers = self.insist(self.group.online_readers)
        if readers:
            try:
                self.group.remove_reader(self.rng.choice(list(readers)))
            except rg.ReaderGroupError as error:
                self.process.world.say(self.process.name, f"did not remove: {error}")

    def _ledger(self) -> StateSynchronizer[Ledger]:
        return self.client.synchronizer("ledger", initial=Ledger(), updates=LEDGER_UPDATES)

    def clerk(self) -> None:
        """Enter a few lines into the ledger, each once."""
        ledger = self.insist(self._ledger)
        self.run.ledgers[self.process] = ledger
        for number in range(self.rng.choice((3, 6))):
            entry = f"{self.actor.name}/{number}"
            try:
                after = self.timed("update_state", 3.0, partial(ledger.update_state, _entering(entry), timeout=3.0))
                self.run.entered[entry] = True
                if entry not in after.entries:
                    self.auditor.broken("S4", f"{self.process.name}: {entry} is not in the state after its update")
            except OutcomeUnknownError:
                self.run.entered[entry] = None
            except rg.ReaderGroupError:
                self.run.entered[entry] = False
            self._fetch(ledger)
            self.process.sleep(self.rng.random() * self.rng.choice((0.01, 1.0)))

    def _fetch(self, ledger: StateSynchronizer[Ledger]) -> None:
        """What is fetched is as new as the call."""
        before = self.auditor.fold("state/ledger").replica.next_offset
        try:
            ledger.fetch_updates(timeout=2.0)
        except rg.ReaderGroupError:
            return
        if ledger.applied_length < before:
            self.auditor.broken("S4", f"{self.process.name} fetched less than the log held when it asked")

    # ------------------------------------------------------------------ listeners

    def listener(self) -> None:
        self.listen()
        while not self.run.over:
            self.process.sleep(0.5)

    def listen(self) -> None:
        assert self.group is not None
        group = self.group

        def register(kind: str, notifier: Any, value: Callable[[Any], Any]) -> None:
            slow = self.rng.random() < 0.2
            hearing = Hearing(self.process, kind, slow=slow)
            self.run.auditor.hearings.append(hearing)

            def hear(notification: Any) -> None:
                self.auditor.heard(hearing, notification.revision, value(notification), notification.gap)
                if slow:
                    self.process.sleep(self.rng.random() * 2)
                if self.actor.raises and self.rng.random() < 0.3:
                    raise _ApplicationError

            self.insist(lambda: notifier.register_listener(hear))

        register("segments", group.segment_notifier, lambda n: frozenset(n.segments))
        register("readers", group.reader_notifier, lambda n: frozenset(n.readers))
        register("end of data", group.end_of_data_notifier, lambda n: True)


def _entering(entry: str) -> Callable[[Ledger], list[Enter]]:
    return lambda state: [Enter(entry=entry, seen=len(state.entries))]


class _ApplicationError(Exception):
    """An application's own bug."""
