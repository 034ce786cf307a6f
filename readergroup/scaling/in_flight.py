"""Which of the events that a worker has read may start now, and how far each segment is done.

Pure: no I/O, no threads, no clock. The caller holds a lock and passes the time.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Hashable, Iterable
from itertools import count
from typing import Generic, NamedTuple, TypeVar

from ..streams.config import SegmentId

W = TypeVar("W")


class Work(NamedTuple, Generic[W]):
    """What a handler is called with once: an event, or a batch."""

    what: W
    #: Work of one key runs one after the other. None: a key of its own.
    key: Hashable | None
    #: The offset in the segment once this is done.
    end: int
    #: How many events and bytes it has.
    events: int = 1
    size: int = 0
    #: It runs only while nothing else does.
    alone: bool = False


class Lane(Generic[W]):
    """A segment under one assignment: its unfinished work in order, and finished work behind that."""

    __slots__ = ("dropped", "end", "events", "frozen", "items", "line", "numbers", "parked", "segment", "size", "token")

    def __init__(self, segment: SegmentId, token: int) -> None:
        self.segment = segment
        self.token = token
        self.items: deque[Item[W]] = deque()  # from the first unfinished one on
        #: How many events and bytes lie from the first unfinished event to the last one added.
        self.events = 0
        self.size = 0
        #: All events before this offset are done; None until then.
        self.end: int | None = None
        self.numbers = count()
        self.line = -1  # the number of the last item that was started
        self.frozen = False
        self.dropped = False
        self.parked: list[Item[W]] = []  # could start, but the lane is frozen

    @property
    def settled(self) -> bool:
        """Whether all is done up to the last item that was started."""
        return not self.items or self.items[0].number > self.line


class Item(Generic[W]):
    """A work in flight. The worker keeps its own notes on it in ``attempts``, ``slot`` and ``singly``."""

    __slots__ = (  # fmt: skip
        "alone",
        "attempts",
        "done",
        "end",
        "events",
        "held",
        "key",
        "lane",
        "number",
        "singly",
        "size",
        "slot",
        "what",
    )

    def __init__(self, lane: Lane[W], work: Work[W]) -> None:
        self.what, self.key, self.end, self.events, self.size, self.alone = work
        self.lane = lane
        self.number = next(lane.numbers)
        self.held = False  # started, and not to be started again before `failed`
        self.done = False
        self.attempts = 0  # that failed
        self.slot = -1
        self.singly = False


class InFlight(Generic[W]):
    """The work of all segments of a worker.

    An item is in exactly one place: behind another one of its key, ready, parked in a frozen lane, waiting for its
    next attempt, or held.
    """

    def __init__(self) -> None:
        self.lanes: dict[SegmentId, Lane[W]] = {}
        #: The running items, the oldest first, with the time at which each was started.
        self.running: dict[Item[W], float] = {}
        self._queues: dict[Hashable, deque[Item[W]]] = {}  # the first of each is not behind another one
        self._ready: deque[Item[W]] = deque()
        self._retries: list[tuple[float, int, Item[W]]] = []  # a heap
        self._retry_numbers = count()
        self._moved: dict[Lane[W], None] = {}
        self._stopping = False

    # ------------------------------------------------------------------ in and out

    def add(self, segment: SegmentId, token: int, works: Iterable[Work[W]]) -> None:
        """Add the next events of a segment. An assignment with another token is dropped."""
        lane = self.lanes.get(segment)
        if lane is None or lane.token != token:
            if lane is not None:
                self.drop(lane)
            lane = self.lanes[segment] = Lane(segment, token)
            lane.frozen = self._stopping
        for work in works:
            item = Item(lane, work)
            lane.items.append(item)
            lane.events += item.events
            lane.size += item.size
            if item.key is None:
                self._ready.append(item)
                continue
            queue = self._queues.get(item.key)
            if queue is None:
                self._queues[item.key] = deque((item,))
                self._ready.append(item)
            else:
                queue.append(item)

    def take(self, now: float) -> Item[W] | None:
        """Return an item to run now, or None. It is running until `done`, `failed` or `suspend`."""
        if not self._stopping:
            while self._retries and self._retries[0][0] <= now:
                self._ready.append(heapq.heappop(self._retries)[2])
        oldest = next(iter(self.running), None)
        if oldest is not None and oldest.alone:
            return None
        self._park()
        if not self._ready or (self._ready[0].alone and self.running):
            return None
        item = self._ready.popleft()
        item.held = True
        item.lane.line = max(item.lane.line, item.number)
        self.running[item] = now
        return item

    def done(self, item: Item[W]) -> None:
        """Take the item for processed. The next of its key may start."""
        self.suspend(item)
        item.done = True
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
        self._ready = deque(item for item in self._ready if item.lane is not lane)
        self._retries = [each for each in self._retries if each[2].lane is not lane]
        heapq.heapify(self._retries)
        for key in {item.key: None for item in lane.items if item.key is not None and not item.done}:
            queue = self._queues[key]
            first = queue[0]
            rest = deque(item for item in queue if item.lane is not lane or item.held)
            if not rest:
                del self._queues[key]
                continue
            self._queues[key] = rest
            if rest[0] is not first:
                self._ready.append(rest[0])
        lane.items.clear()
        lane.parked.clear()

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
    def quiet(self) -> bool:
        """Whether nothing runs, and nothing could start before a retry is due or a segment is thawed."""
        self._park()
        return not self.running and not self._ready

    @property
    def empty(self) -> bool:
        """Whether all that was added is done or dropped."""
        return not self.running and not any(lane.items for lane in self.lanes.values())

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
        if item.key is None:
            return
        queue = self._queues[item.key]
        queue.popleft()
        if queue:
            self._ready.append(queue[0])
        else:
            del self._queues[item.key]
