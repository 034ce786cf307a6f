"""A worker that handles many events at once.

Its thread is the reading thread: it takes events from the reader, sets events aside, and tells the reader how far each
segment is processed. An executor runs the handlers. Between them is `InFlight`, guarded by the lock of ``condition``.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final, TypeVar

from synchronizer import ClosedError, Deadline, StoreUnavailableError, TruncatedError
from synchronizer.callables import NotHandledError, is_async
from synchronizer.threads.flag import Flag

from ..errors import EndOfDataError
from ..group.concurrent_reader import ConcurrentReader
from ..sinks.place import Place
from ..streams.config import SegmentId, stream_of
from ..streams.event import Event, EventBatch, as_read
from .awaiting import HandlerCancelledError
from .executors import Executor, FailedAloneError, LoopExecutor, ThreadExecutor
from .handlers import loop_of, pause_of_sink
from .in_flight import InFlight, Item
from .in_hand import Hand
from .worker import Task, Worker, check_handled

if TYPE_CHECKING:
    from ..sinks.calls import SinkCalls

T = TypeVar("T")

#: How many events of a segment may lie between its first unfinished one and the last one taken, at least.
MIN_WINDOW_EVENTS: Final = 1000
#: The same for each event that a worker may handle at once.
WINDOW_EVENTS_PER_SLOT: Final = 10
#: How many bytes of a segment may lie there before no more are taken.
WINDOW_BYTES: Final = 8 * 1024 * 1024
#: Events are taken until so many could start, or twice as many as run at once if that is more.
READY_EVENTS: Final = 500

#: How long the reading thread waits for events while others are in flight: short while they end, longer if none does.
_SHORT_SECONDS: Final = 0.02
_LONG_SECONDS: Final = 0.25
#: How often positions are stored in a sink.
_SETTLE_SECONDS: Final = 0.2
#: How long a worker that fails waits for the handlers that run.
_FAILURE_SECONDS: Final = 25.0


class _DeadlyError(Exception):
    """Too many workers died over the event."""


class ConcurrentWorker(Worker[T]):
    """Handles up to ``concurrency`` events, or batches, at once."""

    def __init__(self, task: Task[T], reader_id: str, hands: Sequence[Hand] = ()) -> None:
        super().__init__(task, reader_id)
        self.condition = threading.Condition()
        self._flight: InFlight[Any] = InFlight()
        self._counters.add_worker(self._flight)
        if task.handle is not None:
            self._window = max(MIN_WINDOW_EVENTS, WINDOW_EVENTS_PER_SLOT * task.concurrency)
        else:  # one more batch than can run at once
            self._window = (2 if task.order == "segment" else task.concurrency + 1) * task.max_events
        self._most_ready = max(READY_EVENTS, 2 * task.concurrency)
        self._most_taken = task.max_events if task.handle is None else self._window // 4
        self._hands = hands
        self._free_hands = list(range(len(hands)))
        self._executor: Executor | None = None
        self._concurrent_reader: ConcurrentReader[T] | None = None
        self._to_set_aside: deque[tuple[Item[Any], Exception]] = deque()
        self._failure: BaseException | None = None
        self._halted = False  # nothing starts any more
        self._left = False
        self._held: set[SegmentId] = set()
        #: Wakes the reading thread. It is set when something ended that the thread may wait for.
        self._changed = Flag()
        self._ended = 0  # how many items ended so far
        #: What is processed and not in the sink yet: tokens and positions by segment.
        self._unsettled: dict[SegmentId, tuple[int, int]] = {}
        self._places: dict[SegmentId, Place] = {}
        self._settle_at = 0.0
        self._settle_failures = 0

    # ------------------------------------------------------------------ for the pool

    def stop(self) -> None:
        with self.condition:
            self._flight.stop()
        super().stop()
        self._changed.set()

    def leave(self) -> None:
        self._left = self._halted = True
        try:
            super().leave()
        finally:
            if self._executor is not None:
                self._executor.close()
            self._changed.set()

    def _run(self, on_ready: Callable[[], object]) -> None:
        task = self._task
        with task.group.open_reader(
            ConcurrentReader[T],
            self.reader_id,
            serializer=task.serializer,
            auto_commit=False,
            in_flight=self,
            claims=self._sink,
        ) as reader:
            self._reader = self._concurrent_reader = reader
            self._executor = executor = self._new_executor()
            try:
                on_ready()
                try:
                    self._read(reader)
                    self._finish_started(reader)
                except Exception:
                    self._await_running()
                    self._apply(reader)
                    raise
            finally:
                self._halted = True
                executor.close()

    def _new_executor(self) -> Executor:
        task, name = self._task, f"worker {self.reader_id}"
        handle: Callable[[Any], Any] = self._handle_what
        if is_async(handle):
            loop = loop_of(task.handler)
            return LoopExecutor(self, handle, task.concurrency, self._timeout_seconds, name, loop)
        return ThreadExecutor(self, handle, task.concurrency, name, self._logger)

    def _run_on_loop(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        assert isinstance(self._executor, LoopExecutor)
        return self._executor.call(coroutine)

    # ------------------------------------------------------------------ the reading thread

    def _read(self, reader: ConcurrentReader[T]) -> None:
        """Take events until the end of the data or `stop`, and raise what ended the worker."""
        pause, ended = _SHORT_SECONDS, 0
        waiting: EventBatch[T] | None = None
        while not self._stopping.is_set():
            self._changed.clear()
            self._settle(reader)
            pause = _SHORT_SECONDS if self._ended != ended else min(_LONG_SECONDS, 2 * pause)
            ended = self._ended
            if self._is_overdue():
                self._changed.wait(_LONG_SECONDS)  # the next call would renew the lease
                continue
            if waiting is not None and not self._must_wait(reader, waiting):
                self._add(waiting)
                waiting = None
                continue
            if waiting is not None or self._flight.ready >= self._most_ready:
                reader.follow()
                self._changed.wait(pause)
                continue
            try:
                # A segment that is held has events for which an end makes room, and nothing new in the store.
                batch = reader.take(self._most_taken, 0.0 if self._held or reader.frozen else pause)
            except EndOfDataError:
                return
            except TruncatedError as error:
                self._logger.warning("worker %s continues after truncated data: %s", self.reader_id, error)
                continue
            if batch is not None and self._must_wait(reader, batch):
                waiting = batch
            elif batch is not None:
                self._add(batch)
            elif self._held or reader.frozen:
                self._changed.wait(pause)

    def _settle(self, reader: ConcurrentReader[T]) -> None:
        """Act on what ended, and on what the group decided."""
        self._set_failed_aside()
        if self._failure is not None:
            self._await_running()
            self._apply(reader)
            raise self._failure
        self._apply(reader, at_once=False)
        with self.condition:
            flight = self._flight
            for lane in [lane for lane in flight.lanes.values() if not reader.owns(lane.segment, lane.token)]:
                flight.drop(lane)
            frozen = frozenset(reader.frozen)
            for lane in flight.lanes.values():
                if lane.frozen and lane.segment not in frozen:
                    flight.thaw(lane)
            full = {
                lane.segment
                for lane in flight.lanes.values()
                if lane.events > self._window - self._most_taken or lane.size >= WINDOW_BYTES
            }
            ready = flight.ready
        held = full | frozen
        for segment in self._held - held:
            reader.resume(segment)
        for segment in held:
            reader.hold(segment)
        self._held = held
        if not self._can_run:
            raise ClosedError("the event loop that runs the handlers has ended; close the pool before")
        if ready and self._executor is not None:
            self._executor.wake(ready)

    @property
    def _can_run(self) -> bool:
        return self._executor is None or self._executor.can_run

    def _set_failed_aside(self) -> None:
        while self._to_set_aside:
            item, error = self._to_set_aside.popleft()
            if not item.lane.dropped:  # else its next owner decides
                if isinstance(error, _DeadlyError):
                    self._set_aside_if_deadly(_first(item.what))
                elif isinstance(error, FailedAloneError):
                    for event, alone in error.failures:
                        self._set_aside(event, alone)
                elif self._task.retry.dead_letters is None:
                    event = _first(item.what)
                    raise self._failed(event, error, self._task.retry.attempts) from error
                else:
                    self._set_aside(_first(item.what), error)
            with self.condition:
                self._flight.done(item)

    def _apply(self, reader: ConcurrentReader[T], *, at_once: bool = True) -> None:
        """Tell the reader how far each segment is processed. It commits that with the next renewal of its lease."""
        with self.condition:
            moved = self._flight.take_moved()
        if self._sink is not None and self._task.is_out_of_order:
            moved = self._store_moved(self._sink, moved, at_once=at_once)
        for segment, token, offset in moved:
            reader.advance(segment, token, offset)

    def _store_moved(
        self, sink: SinkCalls, moved: list[tuple[SegmentId, int, int]], *, at_once: bool
    ) -> list[tuple[SegmentId, int, int]]:
        """Store these positions in the sink now and then, and return what is stored: the group may not know more."""
        unsettled = self._unsettled
        unsettled.update({segment: (token, offset) for segment, token, offset in moved})
        now = self._clock.monotonic()
        if not unsettled or (now < self._settle_at and not at_once):
            return []
        self._settle_at = now + _SETTLE_SECONDS
        try:
            stored = sink.settle([(self._places[segment], *place) for segment, place in unsettled.items()])
        except StoreUnavailableError as error:
            self._settle_failures += 1
            self._settle_at = now + max(_SETTLE_SECONDS, pause_of_sink(self._settle_failures))
            if self._settle_failures.bit_count() == 1:
                self._logger.warning("worker %s stores its positions later: %s", self.reader_id, error)
            return []
        self._settle_failures = 0
        found = [(place.segment, *unsettled[place.segment]) for place in stored]
        unsettled.clear()
        return found

    def _is_overdue(self) -> bool:
        since = self.busy_since()
        limit = self._task.group.config.max_processing_seconds
        return since is not None and self._clock.monotonic() - since > limit

    def _must_wait(self, reader: ConcurrentReader[T], batch: EventBatch[T]) -> bool:
        """Return whether an event still runs that may have a key of the batch, in a segment that has another owner now.

        With an order of keys, `InFlight` knows which keys such events block. With one of segments, it does not.
        """
        if self._task.order != "segment":
            return False
        with self.condition:
            lane = self._flight.lanes.get(batch.segment)
            if lane is not None and lane.token == batch.fencing_token:
                return False
            stream, running = stream_of(batch.segment), [item.lane for item in self._flight.running]
            return any(
                stream_of(each.segment) == stream and not reader.owns(each.segment, each.token) for each in running
            )

    def _add(self, batch: EventBatch[T]) -> None:
        if self._task.sink is not None:
            self._places[batch.segment] = Place(batch.group, batch.segment, batch.incarnation)
        items = list(self._items(batch))
        with self.condition:
            self._flight.add(batch.segment, batch.fencing_token, items)
            ready = self._flight.ready
        if self._executor is not None:
            self._executor.wake(ready)

    def _items(self, batch: EventBatch[T]) -> Iterator[Item[Any]]:
        is_suspect = self._is_suspect(batch)
        order, segment = self._task.order, batch.segment
        if self._task.handle is None and not is_suspect:
            key = segment if order == "segment" else None
            yield Item(batch, key, batch.end, len(batch), batch.end - batch.start)
            return
        ends = (*batch.offsets[1:], batch.end)
        for index, (raw, routing_key, end) in enumerate(zip(batch.raw, batch.routing_keys, ends, strict=True)):
            event = Event(batch, index)
            what = event if self._task.handle is not None else batch.only(index)
            alone = is_suspect and any(each.overlaps(batch.only(index)) for each in tuple(self._deaths))
            if order == "segment":
                yield Item(what, segment, end, 1, len(raw), alone)
            else:
                yield Item(what, routing_key if order == "key" else None, end, 1, len(raw), alone)

    # ------------------------------------------------------------------ the end

    def _finish_started(self, reader: ConcurrentReader[T]) -> None:
        """Wait until all is processed up to the last event of each segment that was started."""
        with self.condition:
            self._flight.stop()
        while not self._left:
            self._changed.clear()
            self._settle(reader)
            with self.condition:
                if self._flight.quiet and not self._to_set_aside:
                    break
                if not self._flight.running and reader.is_out:
                    break
            self._changed.wait(_LONG_SECONDS)
        self._apply(reader)

    def _await_running(self) -> None:
        """Start nothing more, and wait for what runs."""
        self._halted = True
        deadline = Deadline(self._clock, _FAILURE_SECONDS)
        while self._flight.running and self._can_run and not self._left and not deadline.passed:
            self._changed.clear()
            if self._flight.running:
                self._changed.wait(deadline.remaining(_LONG_SECONDS))

    # ------------------------------------------------------------------ for the reader

    def is_settled(self, segment: SegmentId) -> bool:
        """Start no further event of the segment, and return whether those that were started are processed."""
        with self.condition:
            lane = self._flight.lanes.get(segment)
            if lane is None:
                return True
            self._flight.freeze(lane)
            settled = lane.settled
        if self._concurrent_reader is not None:
            self._apply(self._concurrent_reader)
        return settled

    def busy_since(self) -> float | None:
        """Return when the event that runs for longest was started; None if none runs."""
        with self.condition:
            return self._flight.oldest_start

    # ------------------------------------------------------------------ for the executor, which holds the lock

    def take(self, most: int) -> list[Item[Any]]:
        """Return items to run now."""
        reader, flight = self._concurrent_reader, self._flight
        if self._halted or reader is None or not flight.ready and flight.next_due is None or not reader.is_alive:
            return []
        now = self._clock.monotonic()
        taken: list[Item[Any]] = []
        while len(taken) < most and (item := flight.take(now)) is not None:
            lane = item.lane
            if not reader.owns(lane.segment, lane.token):
                flight.drop(lane)
                flight.done(item)
                continue
            if item.alone and self._is_deadly(_first(item.what)):
                flight.suspend(item)
                self._to_set_aside.append((item, _DeadlyError()))
                self._changed.set()
                continue
            if self._free_hands:
                item.slot = self._free_hands.pop()
                self._hands[item.slot].take(item.what)
            taken.append(item)
        return taken

    def finish(self, item: Item[Any], error: BaseException | None) -> None:
        """Note how the item ended."""
        self._ended += 1
        if item.slot >= 0:
            self._hands[item.slot].put_down()
            self._free_hands.append(item.slot)
            item.slot = -1
        if error is None or (item.lane.dropped and isinstance(error, Exception)):
            self._flight.done(item)
        elif isinstance(error, Exception):
            self._try_later(item, error)
        else:
            self._flight.suspend(item)
            if not self._halted:
                self._failure = self._failure or (error.error if isinstance(error, NotHandledError) else error)
                self._halted = True
        if self._changed.is_set():
            return
        lane, has_room = item.lane, self._flight.ready < self._most_ready // 2
        if has_room or self._to_set_aside or self._halted or lane.frozen or lane.dropped:
            self._changed.set()

    def check(self, returned: object, what: Any) -> None:
        try:
            check_handled(returned, _first(what))
        except Exception as error:
            raise NotHandledError(error) from error

    def seconds_until_due(self) -> float | None:
        due = self._flight.next_due
        if due is None:
            return None
        seconds = due - self._clock.monotonic()
        # One that is due and could not start, because the lease has expired or another event runs alone, waits on.
        return seconds if seconds > 0 else _SHORT_SECONDS

    def _try_later(self, item: Item[Any], error: Exception) -> None:
        """Run the item again after a pause, or have it set aside."""
        retry, event = self._task.retry, _first(item.what)
        attempt = item.attempts + 1 + self._deaths_over(event)
        if isinstance(error, FailedAloneError):
            self._flight.suspend(item)
            self._to_set_aside.append((item, error))
        elif isinstance(error, HandlerCancelledError) and not item.spared:
            # An application that is about to end may cancel all its tasks. That is no fault of the event.
            self._logger.warning("the handler runs again for %s: %s", event.pointer, error)
            item.spared = True
            item.attempts -= 1
            self._flight.failed(item, self._clock.monotonic())
        elif attempt < retry.attempts:
            delay = self._delay_after(attempt, event, error)
            item.what = as_read(item.what)
            self._flight.failed(item, self._clock.monotonic() + delay)
        elif isinstance(item.what, EventBatch) and len(item.what) > 1 and retry.dead_letters is not None:
            # Once more, one by one: only events that fail on their own are set aside.
            item.singly = True
            self._flight.failed(item, self._clock.monotonic())
        else:
            self._flight.suspend(item)
            self._to_set_aside.append((item, error))


def _first(what: Event[T] | EventBatch[T]) -> Event[T]:
    return what if isinstance(what, Event) else what[0]
