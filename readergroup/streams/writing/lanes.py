"""The events that wait to be sent, in one lane per segment of the newest epoch."""

from __future__ import annotations

import secrets
from collections.abc import Collection, Iterable
from functools import partial
from itertools import cycle

from ..data.write_batch import KNOWN_KEYS, Batch, WriteBatch, check_key
from ..state import StreamState


class Lane:
    """The batches of one segment that wait to be sent. The last one is open."""

    __slots__ = ("batch", "full", "segment")

    def __init__(self, segment: int) -> None:
        self.segment = segment
        self.full: list[Batch] = []
        self.batch = WriteBatch(segment)

    def next_batch(self) -> None:
        self.full.append(self.batch)
        self.batch = WriteBatch(self.segment)

    def mend(self, count: int | None) -> None:
        """Remove a half-written event, or the group that began at ``count``, after an interrupt."""
        if self.full and self.full[-1] is self.batch:
            self.batch = WriteBatch(self.segment)
        self.batch.mend(count)

    def add(self, batch: Batch) -> None:
        """Add a batch behind all events."""
        if self.batch.events:
            self.next_batch()
        self.full.append(batch)

    def take(self) -> list[Batch]:
        if self.batch.events:
            self.next_batch()
        batches, self.full = self.full, []
        return batches


class Lanes:
    """The lanes of a writer. Its lock guards them."""

    def __init__(self, state: StreamState) -> None:
        #: The lanes of known routing keys. Without the key None: events without a key go from lane to lane.
        self.of_key: dict[str | None, Lane] = {}
        self.follow(state)

    def follow(self, state: StreamState) -> None:
        """Begin with the segments of this epoch. The events in the lanes were taken before."""
        self._routes = state.routes
        self._stream = state.name
        self._lanes = {number: Lane(number) for number in state.current}
        # Writers start at different segments, so that events without a key spread even if each writer has few.
        first = secrets.randbelow(len(state.current))
        self._round_robin = cycle(state.current[first:] + state.current[:first])
        self.forget_keys()

    def forget_keys(self) -> None:
        """Make the next write of each key call `of_new_key`."""
        self.of_key.clear()

    def of_new_key(self, routing_key: str | None) -> Lane:
        """Return the lane of a key that is not known, and remember it."""
        if routing_key is None:
            return self._lanes[next(self._round_robin)]
        check_key(routing_key, self._stream)
        if len(self.of_key) >= KNOWN_KEYS:
            self.forget_keys()
        lane = self.of_key[routing_key] = self._lanes[self._routes.segment_of(routing_key)]
        return lane

    def next_keyless(self) -> int:
        """Return the segment for the next events without a key."""
        return next(self._round_robin)

    def add(self, batches: Iterable[Batch]) -> None:
        """Add batches behind the events of their segments."""
        for batch in batches:
            self._lanes[batch.segment].add(batch)

    def remove(self, batches: Collection[Batch]) -> None:
        """Remove batches of which some were added, after an interrupt of `add`."""
        for lane in self._lanes.values():
            lane.full = [each for each in lane.full if each not in batches]
            lane.mend(None)

    @property
    def batches(self) -> list[Batch]:
        """All batches, those of a segment in order."""
        return [batch for lane in self._lanes.values() for batch in (*lane.full, lane.batch)]

    @property
    def have_events(self) -> bool:
        return any(lane.full or lane.batch.events for lane in self._lanes.values())

    def take(self) -> list[Batch]:
        """Empty the lanes; return the batches, those of a segment in order."""
        return [batch for lane in self._lanes.values() for batch in lane.take()]

    def put_back(self, batches: Iterable[Batch]) -> None:
        """Put batches into the empty lanes of their segments."""
        for batch in batches:
            self._lanes[batch.segment].full.append(batch)

    def split(self, batches: Iterable[Batch]) -> list[Batch]:
        """Return the same events, in order, in one batch or more per old batch and segment of this epoch."""
        return [part for batch in batches for part in self._split(batch)]

    def _split(self, batch: Batch) -> Iterable[Batch]:
        if batch.segment in self._lanes:
            return [batch]
        # All events without a key stay together, because they may be of one `write_many`.
        return batch.split(partial(self._routes.segments_of, keyless=next(self._round_robin)))
