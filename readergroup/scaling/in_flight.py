"""Which of the events that a worker has read may start now, and how far each segment is done.

Pure: no I/O, no threads, no clock. The caller holds a lock and passes the time.
"""

from __future__ import annotations

import heapq
from collections import defaultdict, deque
from collections.abc import Hashable, Iterable
from itertools import count
from typing import Generic, TypeVar

from ..streams.config import SegmentId, stream_of

W = TypeVar("W")


class Lane(Generic[W]):
    """A segment under one assignment: its unfinished items in order, and finished ones behind them."""

    __slots__ = (  # fmt: skip
        "added",
        "dropped",
        "end",
        "events",
        "frozen",
        "items",
        "last_of_key",
        "line",
        "parked",
        "segment",
        "size",
        "token",
    )

    def __init__(self, segment: SegmentId, token: int, last_of_key: dict[Hashable, Item[W]]) -> None:
        self.segment = segment
        self.token = token
        self.last_of_key = last_of_key
        self.items: deque[Item[W]] = deque()  # from the first unfinished one on
        #: How many events and bytes lie from the first unfinished event to the last one added.
        self.events = 0
        self.size = 0
        #: All events before this offset are done; None until then.
        self.end: int | None = None
        self.added = 0  # items so far
        self.line = -1  # the number of the last item that was started
        self.frozen = False
        self.dropped = False
        self.parked: list[Item[W]] = []  # could start, but the lane is frozen

    @property
    def settled(self) -> bool:
        """Whether all is done up to the last item that was started."""
        return not self.items or self.items[0].number > self.line


class Item(Generic[W]):
    """An event or a batch, with which a handler is called once.

    The worker keeps its own notes on it in ``attempts``, ``slot``, ``singly`` and ``spared``.
    """

    __slots__ = (  # fmt: skip
        "alone",
        "attempts",
        "done",
        "end",
        "events",
        "held",
        "key",
        "lane",
        "next",
        "number",
        "singly",
        "size",
        "slot",
        "spared",
        "what",
    )
    lane: Lane[W]
    number: int

    def __init__(
        self, what: W, key: Hashable | None, end: int, events: int = 1, size: int = 0, alone: bool = False
    ) -> None:
        self.what = what
        #: Items of one key and stream run one after the other. None: a key of its own.
        self.key = key
        #: The offset in the segment once this is done.
        self.end = end
        #: How many events and bytes it has.
        self.events = events
        self.size = size
        #: It runs only while nothing else does.
        self.alone = alone
        self.next: Item[W] | None = None  # of its key
        self.held = False  # started, and not to be started again before `failed`
        self.done = False
        self.attempts = 0  # that failed
        self.slot = -1
        self.singly = False
        self.spared = False


class InFlight(Generic[W]):
    """The items of all segments of a worker.

    An item is in exactly one place: behind another one of its key, ready, parked in a frozen lane, waiting for its
    next attempt, or held.
    """

    def __init__(self) -> None:
        self.lanes: dict[SegmentId, Lane[W]] = {}
        #: The running items, the oldest first, with the time at which each was started.
        self.running: dict[Item[W], float] = {}
        #: The last item of each key, by stream: segments of two streams that waited for each other's keys would never
        #: settle. The first of a key is not behind another one.
        self._last_of_key: defaultdict[str, dict[Hashable, Item[W]]] = defaultdict(dict)
        self._ready: deque[Item[W]] = deque()
        self._retries: list[tuple[float, int, Item[W]]] = []  # a heap
        self._retry_numbers = count()
        self._moved: dict[Lane[W], None] = {}
        self._stopping = False

    # ------------------------------------------------------------------ in and out

    def add(self, segment: SegmentId, token: int, items: Iterable[Item[W]]) -> None:
        """Add the next items of a segment. An assignment with another token is dropped."""
        lane = self.lanes.get(segment)
        if lane is None or lane.token != token:
            if lane is not None:
                self.drop(lane)
            lane = self.lanes[segment] = Lane(segment, token, self._last_of_key[stream_of(segment)])
            lane.frozen = self._stopping
        last_of_key = lane.last_of_key
        for item in items:
            item.lane = lane
            item.number = lane.added
            lane.added += 1
            lane.items.append(item)
            lane.events += item.events
            lane.size += item.size
            key = item.key
            if key is not None:
                before = last_of_key.get(key)
                last_of_key[key] = item
                if before is not None:
                    before.next = item
                    continue
            self._ready.append(item)

    def take(self, now: float) -> Item[W] | None:
        """Return an item to run now, or None. It is running until `done`, `failed` or `suspend`."""
        if self._retries and not self._stopping:
            while self._retries and self._retries[0][0] <= now:
                self._ready.append(heapq.heappop(self._retries)[2])
        if self.running and next(iter(self.running)).alone:
            return None
        ready = self._ready
        if ready and ready[0].lane.frozen:
            self._park()
        if not ready or (ready[0].alone and self.running):
            return None
        item = ready.popleft()
        item.held = True
        lane = item.lane
        if item.number > lane.line:
            lane.line = item.number
        self.running[item] = now
        return item

    def done(self, item: Item[W]) -> None:
        """Take the item for processed. The next of its key may start."""
        self.running.pop(item, None)
        item.done = True
        if item.key is not None:
            self._next_of_key(item)
        lane = item.lane
        if lane.dropped:
            return
        items = lane.items
        while items and items[0].done:
            first = items.popleft()
            lane.events -= first.events
            lane.size -= first.size
            lane.end = first.end
            self._moved[lane] = None

    def failed(self, item: Item[W], retry_at: float) -> None:
        """Run the item again at that time; until then it blocks only its key."""
        if item.lane.dropped:
            return self.done(item)
        self.suspend(item)
        item.held = False
        item.attempts += 1
        heapq.heappush(self._retries, (retry_at, next(self._retry_numbers), item))

    def suspend(self, item: Item[W]) -> None:
        """Note that the item does not run any more. It blocks its key until `done`."""
        self.running.pop(item, None)

    def drop(self, lane: Lane[W]) -> None:
        """Forget a segment that has another owner. Running items of it block their keys until they end."""
        lane.dropped = True
        if self.lanes.get(lane.segment) is lane:
            del self.lanes[lane.segment]
        self._moved.pop(lane, None)
        first = [*(item for item in self._ready if item.lane is lane), *lane.parked]
        first += [each[2] for each in self._retries if each[2].lane is lane]
        self._ready = deque(item for item in self._ready if item.lane is not lane)
        self._retries = [each for each in self._retries if each[2].lane is not lane]
        heapq.heapify(self._retries)
        lane.items.clear()
        lane.parked.clear()
        for item in first:
            if item.key is not None:
                self._next_of_key(item)

    # ------------------------------------------------------------------ pauses

    def freeze(self, lane: Lane[W]) -> None:
        """Start nothing behind the last item of the segment that was started."""
        lane.frozen = True

    def thaw(self, lane: Lane[W]) -> None:
        if not self._stopping:
            lane.frozen = False
            self._ready.extend(lane.parked)
            lane.parked.clear()

    def stop(self) -> None:
        """Freeze all segments for good, and start no further attempts."""
        self._stopping = True
        for lane in self.lanes.values():
            self.freeze(lane)

    # ------------------------------------------------------------------ questions

    @property
    def ready(self) -> int:
        """How many items could run now, apart from what is running."""
        return len(self._ready)

    @property
    def running_events(self) -> int:
        """How many events run now. Any thread may ask, without the lock."""
        return sum(item.events for item in list(self.running))

    @property
    def quiet(self) -> bool:
        """Whether nothing runs, and nothing could start before a retry is due or a segment is thawed."""
        self._park()
        return not self.running and not self._ready

    @property
    def next_due(self) -> float | None:
        """When the next retry may start."""
        return self._retries[0][0] if self._retries and not self._stopping else None

    @property
    def oldest_start(self) -> float | None:
        """When the item that has run for longest was started."""
        return next(iter(self.running.values()), None)

    def take_moved(self) -> list[tuple[SegmentId, int, int]]:
        """Return the segment, token and new position of each segment that has come further since the last call."""
        moved = [(lane.segment, lane.token, lane.end) for lane in self._moved if lane.end is not None]
        self._moved.clear()
        return moved

    # ------------------------------------------------------------------ inside

    def _park(self) -> None:
        """Move the first ready items to their lanes as long as their lanes are frozen before them."""
        ready = self._ready
        while ready and ready[0].lane.frozen and ready[0].number > ready[0].lane.line:
            item = ready.popleft()
            item.lane.parked.append(item)

    def _next_of_key(self, item: Item[W]) -> None:
        """Let the next item of the key start, apart from those of segments that were dropped."""
        following = item.next
        while following is not None and following.lane.dropped:
            following = following.next
        if following is not None:
            self._ready.append(following)
        else:
            del item.lane.last_of_key[item.key]
