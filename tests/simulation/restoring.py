"""A state whose log goes back in a simulation, as when a backup is restored: who has seen what is lost has to stop.

The log has a name that the auditor takes no notice of, and everything else in the store stays, so that a run in which
this goes back is judged as any other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Final

from synchronizer import Appended, CorruptStateError, StateSynchronizer
from synchronizer.log.entries import decode_entries
from synchronizer.log.replica import Replica
from synchronizer.state import StateCodec

from .ledger import LEDGER_UPDATES, Ledger
from .world import Done, Process

if TYPE_CHECKING:
    from .auditor import Auditor

ARCHIVE_LOG: Final = "plain/archive"

_CODEC: Final = StateCodec(Ledger, LEDGER_UPDATES)


class Archive:
    """The log, all that it ever held, and those who have it open."""

    def __init__(self, auditor: Auditor) -> None:
        self._auditor = auditor
        self._world = auditor.world
        self._held: list[Replica[Ledger]] = [Replica()]  # after each entry that is there
        self._lost: dict[tuple[int, int], Replica[Ledger]] = {}  # by their places
        self._lengths: list[tuple[float, int]] = [(0.0, 0)]  # of the log, each with its time
        self._went_back_at = float("-inf")
        #: Somebody who had not noticed yet has written behind what is there in place of what he had seen.
        self.is_split = False
        #: Told when somebody who has seen what is lost asks again, or writes: which of the schedules that is.
        self.on_meeting: Callable[[str], None] = lambda schedule: None
        on_done = self._world.on_done

        def done(done: Done) -> None:
            on_done(done)
            if done.segment == ARCHIVE_LOG and done.data and isinstance(done.result, Appended):
                self._stored(done, done.result)

        self._world.on_done = done

    def open(self, process: Process) -> StateSynchronizer[Ledger]:
        """Begin with what is there, which raises `CorruptStateError` if that is of two histories."""
        began, clock = self._world.simulation.now, process.clock
        try:
            return StateSynchronizer(
                process.store, ARCHIVE_LOG, initial=Ledger(), updates=LEDGER_UPDATES, clock=clock, timeout=5.0
            )
        except CorruptStateError as error:
            if not self.is_split and self._went_back_at < began:
                self._auditor.broken("S4", f"{process.name} has seen nothing, and cannot begin: {error}")
            raise

    # ------------------------------------------------------------------ what befalls it

    def go_back(self, entries: int) -> None:
        """The log is as it was so many entries ago."""
        self.go_back_to(self._held[max(0, len(self._held) - 1 - entries)].next_offset)

    def go_back_to(self, length: int) -> None:
        if length >= self._length or self.is_split:
            return
        self._world.say("the store", f"has lost what came after {length} of {ARCHIVE_LOG}")
        del self._world.memory._memory.segment(ARCHIVE_LOG).data[length:]
        self._lost.update((each.place, each) for each in self._held if each.next_offset > length)
        self._held = [each for each in self._held if each.next_offset <= length]
        self._went_back_at = self._world.simulation.now
        self._grown(length)
        self._world.grown(ARCHIVE_LOG)

    # ------------------------------------------------------------------ what is stored

    @property
    def _length(self) -> int:
        return self._lengths[-1][1]

    def _grown(self, length: int) -> None:
        self._lengths.append((self._world.simulation.now, length))

    def _stored(self, done: Done, appended: Appended) -> None:
        self._grown(appended.length)
        before = self._held[-1]
        if before.next_offset == appended.offset and (after := _followed(before, done.data)):
            self._held += after
            for each in after:
                self._lost.pop(each.place, None)  # what was on its way when it was lost, and arrives again
            return
        for before in list(self._lost.values()):
            if before.next_offset == appended.offset and (after := _followed(before, done.data)):
                self._lost.update((each.place, each) for each in after)
                self.is_split = True
                self.on_meeting("F23.3")
                return
        self._auditor.broken("S4", f"{done.process.name} writes to {ARCHIVE_LOG} behind what it has not applied")

    # ------------------------------------------------------------------ what has to hold

    def call(self, process: Process, archive: StateSynchronizer[Ledger], call: Callable[[], object]) -> None:
        """Make a call of ``archive``. It raises `CorruptStateError` to who has applied what is lost, and to him alone.

        Where the log is exactly as long as what he has applied nobody can tell: the next entry tells.
        """
        began, place = self._world.simulation.now, archive._follower.replica.place
        if place in self._lost and self._length != place[0]:
            self.on_meeting("F23.2" if self._length > place[0] else "F23.1")
        try:
            call()
        except CorruptStateError as error:
            place = archive._follower.replica.place
            if place not in self._lost and not self.is_split and self._went_back_at < began:
                self._auditor.broken("S4", f"{process.name} stops at {place}, and nothing of that is lost: {error}")
            raise
        self._check(process, archive)
        place = archive._follower.replica.place
        if place in self._lost and self._went_back_at < began and place[0] not in self._lengths_since(began):
            self._auditor.broken("S4", f"{process.name} goes on at {place}, which the store has lost")

    def _check(self, process: Process, archive: StateSynchronizer[Ledger]) -> None:
        """What a process holds is what the log came to, as it is or as it was."""
        replica = archive._follower.replica
        found = self._lost.get(replica.place) or next((h for h in self._held if h.place == replica.place), None)
        if found is None or found.state != replica.state:
            self._auditor.broken("S4", f"{process.name} holds at {replica.place} what {ARCHIVE_LOG} never came to")

    def _lengths_since(self, began: float) -> Iterator[int]:
        for at, length in reversed(self._lengths):
            yield length
            if at <= began:
                return


def _followed(replica: Replica[Ledger], data: bytes) -> list[Replica[Ledger]]:
    """The replicas after each of the entries, if they follow it."""
    after: list[Replica[Ledger]] = []
    try:
        for entry in decode_entries(ARCHIVE_LOG, data, replica.next_offset, replica.checksum):
            replica, _ = replica.follow(entry, _CODEC, ARCHIVE_LOG)
            after.append(replica)
    except CorruptStateError:
        return []
    return after
