"""What handlers do that run at once, against what a pool with ``concurrency`` promises.

Events of a segment may begin and end in any order; those of a key one after the other. What began lies close to the
first event that has not ended, and a segment that is given up has nothing behind the place where its next owner begins.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import readergroup as rg
from readergroup.group.model.state import ReaderGroupState
from readergroup.group.model.updates import ReleaseSegment
from readergroup.streams.config import data_segment, stream_of

from .world import MIN_WINDOW_EVENTS, Process

if TYPE_CHECKING:
    from .auditor import Assignment, Auditor, StoredEvent

WINDOW_EVENTS_PER_SLOT: Final = 10


@dataclass
class _Begun:
    """What began of an assignment: the offsets of events."""

    running: set[int] = field(default_factory=set)
    processed: set[int] = field(default_factory=set)


class Together:
    """The handlers of all pools of a run that handle many events at once."""

    def __init__(self, auditor: Auditor) -> None:
        self._auditor = auditor
        self._begun: defaultdict[Assignment, _Begun] = defaultdict(_Begun)
        self._keys: dict[tuple[str, str, str], rg.EventPointer] = {}  # by reader, stream and key: what runs
        self._since: defaultdict[Process, dict[tuple[Assignment, int], float]] = defaultdict(dict)

    def began(self, process: Process, event: rg.Event[bytes], concurrency: int) -> None:
        """A handler begins an event, or tries it again."""
        auditor = self._auditor
        found = auditor.handed(process, event)
        if found is None:
            return
        data, stored, assignment = found
        begun, start = self._begun[assignment], auditor.began[assignment]
        if event.offset in begun.running | begun.processed:
            auditor.broken("S3", f"{process.name} begins {event!r} once more under one token")
        before = [each for each in data.events if max(start, data.given_up) <= each.offset <= event.offset]
        self._check_key(process, event, stored, before, begun)
        self._check_spread(process, event, before, begun, max(MIN_WINDOW_EVENTS, WINDOW_EVENTS_PER_SLOT * concurrency))
        begun.running.add(event.offset)
        self._keys[auditor.owners[assignment], stream_of(event.segment), stored.key] = event.pointer
        self._since[process][assignment, event.offset] = auditor.world.simulation.now
        auditor.delivered_in_order(process, event, stored)

    def _check_key(
        self,
        process: Process,
        event: rg.Event[bytes],
        stored: StoredEvent,
        before: list[StoredEvent],
        begun: _Begun,
    ) -> None:
        auditor = self._auditor
        assignment = auditor.assignment(event)
        other = self._keys.get((auditor.owners[assignment], stream_of(event.segment), stored.key))
        if other is not None:
            auditor.broken("S3", f"{process.name} begins {event!r} while {other} of its key runs")
        for each in before:
            if each.key == stored.key and each.offset != event.offset and each.offset not in begun.processed:
                auditor.broken("S3", f"{process.name} begins {event!r} before {each} is processed")

    def _check_spread(
        self, process: Process, event: rg.Event[bytes], before: list[StoredEvent], begun: _Begun, window: int
    ) -> None:
        """A crash repeats no more than this."""
        left = next((at for at, each in enumerate(before) if each.offset not in begun.processed), len(before))
        if len(before) - left > window:
            self._auditor.broken(
                "S2", f"{process.name} begins {event!r}, {len(before) - left} events behind the first unfinished one"
            )

    def ended(self, process: Process, event: rg.Event[bytes], *, processed: bool) -> None:
        """A handler returns, or fails."""
        auditor = self._auditor
        assignment = auditor.assignment(event)
        begun = self._begun[assignment]
        begun.running.discard(event.offset)
        key = event.raw.decode().partition(":")[0]
        self._keys.pop((auditor.owners[assignment], stream_of(event.segment), key), None)
        if processed:
            begun.processed.add(event.offset)
            auditor.processed(process, event)
        since = self._since[process]
        began = since.pop((assignment, event.offset), None)
        if began is not None:
            auditor.handled[process].append((began, auditor.world.simulation.now))
        auditor.in_hand_since.pop(process, None)
        if since:
            auditor.in_hand_since[process] = min(since.values())
        else:
            auditor.on_phase("handling", process.name, False)

    def released(self, state: ReaderGroupState, update: ReleaseSegment) -> None:
        """A segment is given up: what began of it was processed, and is not repeated."""
        token = state.segments[update.segment].token
        name = data_segment(update.segment, state.streams[stream_of(update.segment)].incarnation)
        for assignment, begun in self._begun.items():
            if assignment == (name, token):
                behind = sorted(each for each in begun.running | begun.processed if each >= update.offset)
                if begun.running or behind:
                    self._auditor.broken(
                        "S3",
                        f"{update.reader} gave {update.segment} up at {update.offset}, while {sorted(begun.running)} "
                        f"ran and {behind} had begun",
                    )
