"""What the processes of a simulation do: ordinary applications of the product, each in a process of its own."""

from __future__ import annotations

import asyncio
from collections import defaultdict, deque
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeVar

import readergroup as rg
from readergroup.group.model.updates import RecordWeights
from readergroup.streams.config import number_of
from synchronizer import (
    CorruptStateError,
    NotFoundError,
    OutcomeUnknownError,
    SealedError,
    StateSynchronizer,
    StateTooLargeError,
    UnknownUpdateError,
    Update,
)

from .auditor import Hearing
from .ledger import LEDGER_UPDATES, Enter, Ledger, Strike, open_ledger
from .retrying import retry_later
from .scenario import KEEPERS_OF_CHECKPOINTS, Actor
from .second_clients import come_and_go
from .transacting import transact
from .world import Process

if TYPE_CHECKING:
    from .run import Run

R = TypeVar("R")

GROUP: Final = "billing"
MAX_SEGMENTS: Final = 5
#: The reader that comes when all is calm, and stays.
LAST: Final = "last"
_OF_A_GROUP: Final = ("reader", "listener", "remover", "keeper", "compactor", "weigher", "pool", "concurrent") + (
    "configurer",
    "autoscaler",
    "durable",
    "recorder",
    *KEEPERS_OF_CHECKPOINTS,
)
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
        self.attempts: set[tuple[rg.EventPointer, int]] = set()  # at events, in pools

    def main(self) -> None:
        work: Callable[[], None] = getattr(self, self.actor.kind)
        if self.actor.kind in _OF_A_GROUP:
            self.group = self.find_group()
        if self.group is not None:
            self.run.groups[self.process] = self.group
        if self.actor.comes_and_goes:
            self.process.spawn(partial(come_and_go, self, GROUP), "second client")
        work()
        self.finished = True

    def find_group(self) -> rg.ReaderGroup:
        """The group, which may be deleted and created again just now."""
        while True:
            try:
                return self.insist(lambda: self.client.groups.get(GROUP))
            except NotFoundError:
                self.process.sleep(0.1)

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
        reader_id = self.actor.subject
        while not self.run.over:
            try:
                with self._reader(reader_id) as reader:
                    self.process.world.say(self.process.name, f"joins as {reader_id}")
                    if getattr(self, f"_{self.actor.style}")(reader):
                        return
            except rg.ReaderNotInGroupError as error:
                if any(reason in str(error) for reason in _FINAL):
                    self.process.world.say(self.process.name, f"stays out: {error}")
                    self.process.sleep(self.rng.random() * 2)
                    if self.run.calm or self.rng.random() < 0.3:
                        return
                    reader_id = f"r{self.rng.randrange(4)}"  # its supervisor gives it another id, or the same
            except rg.TruncatedError:
                continue
            except (NotFoundError, StateTooLargeError) as error:
                self.process.world.say(self.process.name, f"waits for a group to join: {error}")
                self.process.sleep(0.1)
            except _ApplicationError:
                self.process.world.say(self.process.name, "fails over an event and begins again")
            except rg.ReaderGroupError as error:
                if not error.retryable and not isinstance(error, OutcomeUnknownError):
                    raise
                self.process.sleep(0.1)

    def _reader(self, reader_id: str) -> rg.Reader[bytes]:
        assert self.group is not None
        commits = self.actor.style == "commit"

        def keep(name: str) -> None:
            """Keep at a checkpoint what was processed, which may take a while or fail."""
            if commits:
                self.timed("commit", 2.0, partial(reader.commit, timeout=2.0))
            self.process.sleep(self.rng.random() * self.rng.choice((0.0, 0.01, 0.5)))
            if self.rng.random() < 0.03:
                raise _ApplicationError
            self.auditor.keeping.kept(self.process, reader_id, name)
            self.process.world.say(self.process.name, f"keeps what it has at {name}")

        keeps = keep if self.run.scenario.keeps_checkpoints else None
        reader = self.group.reader(reader_id, auto_commit=not commits, on_checkpoint=keeps)
        return reader

    def _handle(self, event: rg.Event[bytes]) -> None:
        self.auditor.delivered(self.process, event)
        if self.process.world.on_line is not None:
            self.process.world.say(self.process.name, f"handles {event.raw.decode()} at {event.pointer}")
        pause = self.actor.pause
        if self._is_accident(0.02):
            pause = self.run.longest_pause * self.rng.choice((0.4, 1.0))
        if self.run.sealed:  # to come to the end of what is left
            pause = min(pause, 0.02)
        self.process.sleep(self.rng.random() * pause)
        if self._is_accident(0.005):
            raise _ApplicationError
        self.auditor.processed(self.process, event)

    def _is_accident(self, probability: float) -> bool:
        return self.rng.random() < probability and self.run.scenario.accidents

    def _iterate(self, reader: rg.Reader[bytes]) -> bool:
        leave_after = self.rng.choice((2, 10, 50, 10_000))
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
        recent: deque[rg.Event[bytes]] = deque(maxlen=4)
        while not self.run.over:
            try:
                event = self.timed("read", 0.3, partial(reader.read, timeout=0.3))
            except rg.EndOfDataError:
                return True
            except rg.TruncatedError:
                continue
            if event is not None:
                self._handle(event)
                recent.append(event)
            if event is None or self.rng.random() < 0.3:
                # One of the last alone, as workers do that end out of order; it stands for those before it.
                alone = self.rng.choice(recent) if recent and self.rng.random() < 0.5 else None
                try:
                    self.timed("commit", 2.0, partial(reader.commit, alone, timeout=2.0))
                except rg.ReaderNotInGroupError as error:
                    if any(reason in str(error) for reason in _FINAL):
                        raise
        return True

    def pool(self) -> None:
        """A pool of threads, started again when an event has made it fail."""
        assert self.group is not None
        policy = rg.ReaderScalingPolicy(max_readers=3, target_lag_seconds=1.0, cooldown_seconds=2.0)
        while not self.run.over:
            pool = self.group.pool(
                self._handle_in_pool,
                readers=self.rng.choice((1, 2, policy)),
                retry=rg.RetryPolicy(attempts=2, first_delay_seconds=0.05),
            )
            try:
                pool.run(drain_timeout=5.0)
                return
            except rg.HandlerError:
                self.process.world.say(self.process.name, "fails over an event and begins again")
            except rg.ReaderGroupError as error:
                self.process.world.say(self.process.name, f"begins again after {error}")
                self.process.sleep(0.1)

    def _handle_in_pool(self, event: rg.Event[bytes]) -> None:
        """An event, or the same again after it failed."""
        attempt = (event.pointer, event.fencing_token)
        if attempt not in self.attempts:
            self.attempts.add(attempt)
            self.auditor.delivered(self.process, event)
        self.process.sleep(self.rng.random() * (0.02 if self.run.sealed else self.actor.pause))
        if self.rng.random() < 0.02:
            raise _ApplicationError
        self.auditor.processed(self.process, event)

    def concurrent(self) -> None:
        """A pool that handles many events at once, started again when an event has made it fail."""
        assert self.group is not None
        while not self.run.over:
            concurrency, is_async = self.rng.choice((2, 4, 16)), self.actor.style == "async"
            pool = self.group.pool(
                partial(self._handle_awaited if is_async else self._handle_together, concurrency),
                readers=self.rng.choice((1, 1, 2)),
                concurrency=concurrency,
                order=self.rng.choice(("key", "key", "key", "segment")),
                handler_timeout_seconds=self.rng.choice((None, 0.3)) if is_async else None,
                retry=rg.RetryPolicy(attempts=self.rng.choice((2, 4)), first_delay_seconds=0.05),
            )
            try:
                pool.run(drain_timeout=self.rng.choice((0.1, 5.0)))
                return
            except rg.HandlerError:
                self.process.world.say(self.process.name, "fails over an event and begins again")
            except rg.ReaderGroupError as error:
                self.process.world.say(self.process.name, f"begins again after {error}")
                self.process.sleep(0.1)

    def _pause_together(self) -> float:
        """Seconds for an event: now and then so many that those behind it have long ended."""
        pause = self.rng.random() * (0.02 if self.run.sealed else self.actor.pause)
        if self._is_accident(0.01) and not self.run.calm:
            return self.run.longest_pause * self.rng.choice((0.4, 1.0))
        return pause * (20 if self.rng.random() < 0.05 else 1)

    def _handle_together(self, concurrency: int, event: rg.Event[bytes]) -> None:
        together = self.auditor.together
        together.began(self.process, event, concurrency)
        self.process.sleep(self._pause_together())
        fails = self.rng.random() < 0.05
        together.ended(self.process, event, processed=not fails)
        if fails:
            raise _ApplicationError

    async def _handle_awaited(self, concurrency: int, event: rg.Event[bytes]) -> None:
        together = self.auditor.together
        together.began(self.process, event, concurrency)
        fails = self.rng.random() < 0.05
        try:
            await asyncio.sleep(self._pause_together())
        except asyncio.CancelledError:
            fails = True
            if self.rng.random() < 0.5:  # it has something to put in order, and returns as if nothing had been
                await asyncio.sleep(self.rng.random() * 0.1)
                return
            raise
        finally:
            together.ended(self.process, event, processed=not fails)
        if fails:
            raise _ApplicationError

    def autoscaler(self) -> None:
        """Be called when another number of readers would be better."""
        assert self.group is not None

        def scale(decision: rg.ScalingDecision) -> None:
            self.auditor.scaling_began(self.process)
            self.process.world.say(self.process.name, f"is told of {decision.desired_readers} readers")
            self.process.sleep(self.rng.random() * self.rng.choice((0.1, 4.0)))
            self.auditor.scaling_ended(self.process)
            if self.actor.raises:
                raise _ApplicationError

        policy = rg.ReaderScalingPolicy(max_readers=4, target_lag_seconds=0.5, cooldown_seconds=1.0)
        autoscaling = self.group.autoscale(policy)(scale)
        while not self.run.over:
            self.process.sleep(0.5)
        self.timed("close", 10.0, autoscaling.close)

    # ------------------------------------------------------------------ writers

    def writer(self) -> None:
        left, life = self.run.scenario.events, 0
        while left > 0 and not self.run.calm:
            life += 1
            try:
                with self.client.writer(self.actor.subject, timeout=4.0) as writer:
                    left = self._write(writer, left, life)
            except SealedError:
                return
            except rg.ReaderGroupError as error:
                self.process.world.say(self.process.name, f"fails to write, and begins anew: {error}")
                self.process.sleep(0.1)

    def _write(self, writer: rg.EventWriter[bytes], left: int, life: int) -> int:
        numbers: dict[str, int] = defaultdict(int)
        pending: list[tuple[str, int]] = []
        while left > 0 and not self.run.calm:
            for _ in range(self.rng.choice((1, 2, 5, 20))):
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

    def transactor(self) -> None:
        transact(self)

    def retrier(self) -> None:
        retry_later(self)

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
        """Compact one state or another, perhaps in two threads."""
        threads = [self.process.spawn(self._compact_some, f"compactor {n}") for n in range(self.rng.choice((1, 2)))]
        while not all(thread.done for thread in threads):
            self.process.sleep(0.1)

    def _compact_some(self) -> None:
        assert self.group is not None
        for _ in range(self.rng.choice((1, 2, 4, 8))):
            logs: list[StateSynchronizer[Any]] = [self.group.synchronizer, self.group.synchronizer]
            try:
                logs.append(self.client.streams.synchronizer(self.run.scenario.streams[0]))
                logs.append(open_ledger(self.client))
                log = self.rng.choice(logs)
                self.timed("compact", 5.0, log.compact)
            except rg.ReaderGroupError as error:
                self.process.world.say(self.process.name, f"did not compact: {error}")
            self.process.sleep(self.rng.random() * self.rng.choice((0.1, 1.5)))

    def keeper(self) -> None:
        """Give up what the group has read, or everything, read or not."""
        assert self.group is not None
        for _ in range(3):
            try:
                self.group.lag()
                cut = self.group.stream_cuts().get(self.actor.subject)
                if cut is None or self.rng.random() < 0.2:  # it may just not read the stream
                    cut = self.client.streams.info(self.actor.subject).tail
                self.client.streams.truncate(self.actor.subject, cut)
            except rg.ReaderGroupError as error:
                self.process.world.say(self.process.name, f"did not truncate: {error}")
            self.process.sleep(self.rng.random() * 2)

    def remover(self) -> None:
        """Take out a reader that may well be there."""
        assert self.group is not None
        for _ in range(self.rng.choice((1, 1, 3))):
            try:
                readers = [reader for reader in self.group.online_readers() if reader != LAST]
                if readers:
                    self.group.remove_reader(self.rng.choice(readers))
            except rg.ReaderGroupError as error:
                self.process.world.say(self.process.name, f"did not remove: {error}")
            self.process.sleep(self.rng.random() * 2)

    def checkpointer(self) -> None:
        """Take checkpoints, and wait for them more or less long."""
        assert self.group is not None
        for number in range(self.rng.choice((2, 4, 8))):
            if self.run.calm:
                return
            timeout = self.rng.choice((0.3, 1.0, 3.0))
            name = f"{self.actor.name}-{number}"
            try:
                checkpoint = self.timed("checkpoint", timeout, partial(self.group.checkpoint, name, timeout=timeout))
                self.process.world.say(
                    self.process.name, f"has {name}: {', '.join(map(str, checkpoint.cuts.values()))}"
                )
            except rg.ReaderGroupError as error:
                self.process.world.say(self.process.name, f"has no {name}: {error}")
            self.process.sleep(self.rng.random() * self.actor.pause)

    def resetter(self) -> None:
        """Reset the group to one of its checkpoints."""
        assert self.group is not None
        for _ in range(self.rng.choice((1, 2, 4))):
            self.process.sleep(self.rng.random() * self.actor.pause * 5)
            if self.run.calm:
                return
            try:
                found = list(self.group.checkpoints.values())
                if found:
                    to = self.rng.choice(found)
                    self.process.world.say(self.process.name, f"resets the group to {to.name}")
                    self.timed("reset", 3.0, partial(self.group.reset, to, timeout=3.0))
            except rg.ReaderGroupError as error:
                self.process.world.say(self.process.name, f"did not reset: {error}")

    def configurer(self) -> None:
        """Take a stream out of the group while it is read, and add it again."""
        assert self.group is not None
        streams = self.run.scenario.streams
        for _ in range(self.rng.choice((2, 4, 8))):
            if self.run.calm:
                return
            kept = self.rng.choice(streams)
            for wanted in ((kept,), streams):
                try:
                    self.timed("configure", 5.0, partial(self.group.configure, streams=wanted))
                    self.process.world.say(self.process.name, f"lets the group read {', '.join(wanted)}")
                except rg.ReaderGroupError as error:
                    self.process.world.say(self.process.name, f"did not configure: {error}")
                self.process.sleep(self.rng.random() * self.actor.pause)

    def founder(self) -> None:
        """Delete the group, and perhaps what it reads, and create it again."""
        for _ in range(self.rng.choice((1, 1, 2))):
            if self.run.calm:
                return
            try:
                deletions = [partial(self.client.groups.delete, GROUP)]
                if self.rng.random() < 0.6:
                    deletions.append(partial(self.client.streams.delete, self.actor.subject))
                self.rng.shuffle(deletions)
                for delete in deletions:
                    delete()
                self.process.sleep(self.rng.random() * 0.5)
                self.run.found(self.client)
            except rg.ReaderGroupError as error:
                self.process.world.say(self.process.name, f"did not found anew: {error}")
            self.process.sleep(self.rng.random() * 2)

    def ender(self) -> None:
        """Seal the stream while the others are at work."""
        self.process.sleep(self.rng.random())
        try:
            self.client.streams.seal(self.actor.subject)
        except rg.ReaderGroupError as error:
            self.process.world.say(self.process.name, f"did not seal: {error}")

    def weigher(self) -> None:
        """Record how much work the segments are, as it looks from here."""
        assert self.group is not None
        for _ in range(self.rng.choice((2, 4, 10))):
            if self.run.calm:
                return
            try:
                self.timed("weigh", 3.0, partial(self.group.synchronizer.update_state, self._weights(), timeout=3.0))
            except rg.ReaderGroupError as error:
                self.process.world.say(self.process.name, f"did not weigh: {error}")
            self.process.sleep(self.rng.random() * self.rng.choice((0.1, 1.5)))

    def _weights(self) -> Callable[[rg.ReaderGroupState], list[RecordWeights]]:
        weights = {number: self.rng.randrange(4) for number in range(20)}

        def record(state: rg.ReaderGroupState) -> list[RecordWeights]:
            return [RecordWeights(weights={each: weights[number_of(each) % 20] for each in sorted(state.segments)})]

        return record

    def clerk(self) -> None:
        """Enter a few lines into the ledger, each once, perhaps from several threads."""
        ledger = self.insist(partial(open_ledger, self.client))
        self.run.ledgers[self.process] = ledger
        pause = self.rng.choice((0.01, 0.01, 1.0))
        threads = [
            self.process.spawn(partial(self._enter_some, ledger, number, pause), f"clerk {number}")
            for number in range(self.rng.choice((1, 1, 2, 3)))
        ]
        while not all(thread.done for thread in threads):
            self.process.sleep(0.1)

    def _enter_some(self, ledger: StateSynchronizer[Ledger], thread: int, pause: float) -> None:
        for number in range(self.rng.choice((3, 6, 10))):
            self.enter(ledger, f"{self.actor.name}/{thread}/{number}")
            if self.rng.random() < 0.3:
                self._fetch(ledger)
            self.process.sleep(self.rng.random() * pause)
            if self.rng.random() < 0.2:
                self._find_nothing_to_do(ledger)

    def enter(self, ledger: StateSynchronizer[Ledger], entry: str) -> None:
        """Enter a line, and note what the call says of it."""
        try:
            after = self.timed("update_state", 3.0, partial(ledger.update_state, _entering(entry), timeout=3.0))
            self.run.entered[entry] = True
            if entry not in after.entries:
                self.auditor.broken("S4", f"{self.process.name}: {entry} is not in the state after its update")
        except OutcomeUnknownError:
            self.run.entered[entry] = None
        except rg.ReaderGroupError:
            self.run.entered[entry] = False

    def _find_nothing_to_do(self, ledger: StateSynchronizer[Ledger]) -> None:
        """What a call does not change, it has seen as it was when the call began, or later."""
        before = self.auditor.fold("state/ledger").replica.next_offset
        self.auditor.on_phase("nothing to do", self.process.name, True)
        try:
            seen = self.timed("update_state", 2.0, partial(ledger.update_state, lambda state: (), timeout=2.0))
        except rg.ReaderGroupError:
            return
        self.auditor.on_phase("nothing to do", self.process.name, False)
        if len(seen.entries) < len(self.auditor.fold("state/ledger").states[before][1].entries):
            self.auditor.broken("S4", f"{self.process.name} found nothing to do in a state older than its call")

    def _fetch(self, ledger: StateSynchronizer[Ledger]) -> None:
        """What is fetched is as new as the call."""
        before = self.auditor.fold("state/ledger").replica.next_offset
        try:
            ledger.fetch_updates(timeout=2.0)
        except rg.ReaderGroupError:
            return
        if ledger.applied_length < before:
            self.auditor.broken("S4", f"{self.process.name} fetched less than the log held when it asked")

    def archivist(self) -> None:
        """Enter lines into the archive, whose log may go back. Who is told of that begins again, or gives up."""
        archive, number = self.run.archive, 0
        held: StateSynchronizer[Ledger] | None = None
        while not self.run.over:
            number += 1
            # Often as long as those of others, so that they end where what they stand in for did.
            line = f"{self.actor.name}/{number:03}{'!' if self.rng.random() < 0.1 else ''}"
            enters = self.rng.random() < 0.6 and not self.run.calm
            try:
                held = held or archive.open(self.process)
                call = partial(held.update_state, _entering(line), timeout=2.0) if enters else held.fetch_updates
                archive.call(self.process, held, call)
            except CorruptStateError as error:
                self.process.world.say(self.process.name, f"stops: {error}")
                if archive.is_split or self.rng.random() < 0.3:
                    return
                held = None
            except rg.ReaderGroupError as error:
                self.process.world.say(self.process.name, f"did not enter {line}: {error}")
            self.process.sleep(0.5 if self.run.calm else self.rng.random() * self.actor.pause)

    def upgrader(self) -> None:
        """Two releases at work on one log, while the newer one is rolled out: the older stops where it would differ."""
        log = f"mixed/{self.actor.name}"

        def opened(updates: tuple[type[Update[Any]], ...]) -> StateSynchronizer[Ledger]:
            options: dict[str, Any] = {"initial": Ledger(), "clock": self.process.clock, "timeout": 5.0}
            return self.insist(lambda: StateSynchronizer(self.process.store, log, updates=updates, **options))

        old, new = opened(LEDGER_UPDATES), opened((*LEDGER_UPDATES, Strike))
        try:
            old.update_state(_entering("old"))
            new.update_state(_entering("new"))
            new.update_state(lambda state: [Strike(entry="old")])
        except (rg.ReaderGroupError, ValueError) as error:
            self.process.world.say(self.process.name, f"was not rolled out: {error}")
            return
        self.auditor.on_phase("mixed releases", log, True)
        for call in (old.fetch_updates, old.compact, partial(old.update_state, _entering("late"))):
            self._refuses(call)
        self.auditor.on_phase("mixed releases", log, False)
        if list(self.insist(new.fetch_updates).entries) != ["new"]:
            self.auditor.broken("S4", f"{self.process.name}: an old release wrote what it had decided on another state")

    def _refuses(self, call: Callable[[], object]) -> None:
        try:
            call()
        except UnknownUpdateError:
            return
        except rg.ReaderGroupError as error:
            if error.retryable:
                return
        self.auditor.broken("S4", f"{self.process.name}: an old release goes on behind what it does not know")

    # ------------------------------------------------------------------ listeners

    def listener(self) -> None:
        self.listen()
        while not self.run.over:
            self.process.sleep(0.5)

    def durable(self) -> None:
        """Listen under the name under which others may listen as well."""
        assert self.group is not None
        seconds = self.rng.choice((0.01, 0.3, 2 * self.run.scenario.timeout))

        def during() -> None:
            self.process.sleep(self.rng.random() * (0.01 if self.run.calm else seconds))
            # One that goes on raising is called more and more rarely.
            if self.actor.raises and self.rng.random() < 0.3 and not self.run.calm:
                raise _ApplicationError

        self.run.durable.listen(self.process, self.group, during)
        while not self.run.over:
            self.process.sleep(0.5)

    def recorder(self) -> None:
        """Write down what the notifiers tell, beside others who do."""
        assert self.group is not None
        self.run.recordings.record(self.process, self.group, lag_interval_seconds=self.rng.choice((None, 1.0)))
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
