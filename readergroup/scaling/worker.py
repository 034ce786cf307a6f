"""One worker of a pool: a reader that hands its events to the handler.

It runs in its caller's thread, so that worker threads, worker processes and tests run the same code.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

from synchronizer import (
    HandlerError,
    NotFoundError,
    ReaderGroupError,
    SealedError,
    StoreUnavailableError,
    TruncatedError,
)
from synchronizer.callables import NotHandledError, check_returned, is_async
from synchronizer.clock import growing_pause
from synchronizer.loggers import get_logger
from synchronizer.recipes.queue.retries import text_of
from synchronizer.threads.flag import Flag
from synchronizer.threads.loading import loading

from ..errors import EventTooLargeError
from ..group.reader import Reader
from ..streams.data.block import Headers
from ..streams.event import Event, EventBatch, as_read
from ..streams.serializers import PydanticSerializer, Serializer, keeps_bytes
from ..streams.writing.writer import EventWriter
from ..telemetry.hooks import hooks
from ..telemetry.logs import LogAbout
from .handlers import ArrowHandler, Order, WorkerStoppedError, contained, loop_of, pause_of_sink
from .in_hand import Hand, InHand
from .retry import DeadLetter, DelayedRetry, RetryPolicy
from .scaled_group import PoolClient, ScaledGroup

if TYPE_CHECKING:
    from ..retries.diverting import DelayedEvents
    from ..sinks.calls import SinkCalls
    from ..sinks.sql_sink import SqlSink
    from .awaiting import Awaiting

Handle = Callable[[Any], object]

T = TypeVar("T")
R = TypeVar("R")

MAX_BATCH_EVENTS: Final = 1000
#: The most events that ``handle_arrow`` gets at a time.
MAX_ARROW_EVENTS: Final = 32_768
#: How many workers must die over an event before it is set aside: a process may die for other reasons.
LEAST_DEATHS: Final = 3
#: How long one try to set an event aside waits for the store. `Worker.stop` takes effect after it.
_ATTEMPT_SECONDS: Final = 5.0
#: The longest pause between two tries to set an event aside. Most of the time a try waits for the store itself.
_MAX_PAUSE_SECONDS: Final = 0.5
_BYTES_NOTE: Final = "The pool has no serializer, so the data of an event is bytes. Pass serializer=... to group.pool."

_logger = get_logger(__name__)


@dataclass(frozen=True)
class Task(Generic[T]):
    """The work of all workers of a pool. Pickles if its parts do; the client and the group then reconnect."""

    client: PoolClient
    group: ScaledGroup
    handle: Callable[..., object] | None
    handle_batch: Callable[..., object] | None
    serializer: Serializer[T]
    retry: RetryPolicy
    concurrency: int = 1
    order: Order = "key"
    handler_timeout_seconds: float | None = None
    sink: SqlSink | None = None

    @property
    def handler(self) -> Callable[..., object]:
        """The one of the two handlers that there is."""
        found = self.handle_batch if self.handle is None else self.handle
        assert found is not None
        return found

    @property
    def max_events(self) -> int:
        """The most events that one call of the handler gets."""
        if isinstance(self.handle_batch, ArrowHandler):
            return MAX_ARROW_EVENTS
        return 1 if self.handle_batch is None else MAX_BATCH_EVENTS

    @property
    def is_out_of_order(self) -> bool:
        """Whether a worker handles events of a segment at once."""
        return self.concurrency > 1 and self.order != "segment"


class Worker(Generic[T]):
    """Reads and handles until the end of the data or `stop`. While an event is retried, its reader reads nothing."""

    def __init__(self, task: Task[T], reader_id: str, hand: Hand | None = None) -> None:
        self.reader_id = reader_id
        self._task = task
        self._logger = LogAbout(_logger, group=task.group.name, reader=reader_id)
        self._hand = hand
        self._deaths: dict[InHand, int] = {}
        #: Returns when `note_deaths` was called for all deaths so far. None: there is no parent process.
        self.receive_deaths: Callable[[], None] | None = None
        self._clock = task.client.clock
        self._counters = task.client.streams.counters.groups[task.group.name]
        self._stopping = Flag()
        self._reader: Reader[T] | None = None
        self._dead_letters: EventWriter[DeadLetter] | None = None
        self._handle_what: Handle = self._with_sink(task.handler)
        if hooks.around is not None:
            self._handle_what = hooks.around(self._handle_what, task.group.name, reader_id)
        self._delayed: DelayedEvents | None = None
        if isinstance(task.retry, DelayedRetry):
            with loading():
                from ..retries.diverting import DelayedEvents
            self._delayed = DelayedEvents(task.client.streams, task.group.name, task.retry, self._clock, self._stopping)
        self._awaiting: Awaiting | None = None
        if not is_async(task.handler):
            self._handle_what = contained(self._handle_what)
        elif loop_of(task.handler) is None:  # otherwise it may end the loop of the application
            with loading():
                from . import awaiting
            self._handle_what = awaiting.contained(self._handle_what)
            if task.concurrency == 1:
                self._handle_what = self._awaiting = awaiting.Awaiting(self._handle_what, self._timeout_seconds)
        self._handler = None if task.handle is None else self._handle_what
        self._batch_handler = None if task.handle_batch is None else self._handle_what
        self._sink: SinkCalls | None = None if task.sink is None else self._new_sink_calls(task.sink)

    def run(self, on_ready: Callable[[], object]) -> None:
        """Join the group, call ``on_ready``, and work. Leave the group at the end, however that comes.

        Raises `HandlerError` for an event that failed for the last time and could not be set aside, and the errors of
        the reader.
        """
        try:
            self._run(on_ready)
        except NotHandledError as error:
            if not isinstance(error.error, WorkerStoppedError):
                raise error.error from error.error.__cause__
            self._logger.info("worker %s was stopped before its database answered", self.reader_id)
        except WorkerStoppedError:
            self._logger.info("worker %s was stopped before another attempt", self.reader_id)
        finally:
            self.close()

    def _run(self, on_ready: Callable[[], object]) -> None:
        with self._new_reader() as reader:
            self._reader = reader
            on_ready()
            while not self._stopping.is_set() and not self._work(reader):
                pass

    def _new_reader(self) -> Reader[T]:
        task = self._task
        return task.group.open_reader(Reader[T], self.reader_id, serializer=task.serializer, claims=self._sink)

    def _with_sink(self, handle: Callable[..., object]) -> Handle:
        """Return the handler that the worker calls with events."""
        sink = self._task.sink
        if sink is None:
            return handle
        with loading():
            from .sink_handler import AsyncSinkHandler, SinkHandler
        kind = AsyncSinkHandler if sink.is_async else SinkHandler
        return kind(
            handle,
            sink,
            self._clock,
            self._stopping,
            self._go_on,
            shared=self._task.is_out_of_order,
            timeout_seconds=self._task.handler_timeout_seconds,
        )

    @property
    def _timeout_seconds(self) -> float | None:
        """How long a call may take. With a sink, the sink's handler keeps to the timeout."""
        return None if self._task.sink is not None else self._task.handler_timeout_seconds

    def _new_sink_calls(self, sink: SqlSink) -> SinkCalls:
        with loading():
            from ..sinks.calls import SinkCalls
        run = self._run_on_loop if sink.is_async else None
        return SinkCalls(sink, self._counters, run, knows_all=True, shared=self._task.is_out_of_order)

    def _run_on_loop(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """Run the coroutine on the loop that runs the handlers."""
        assert self._awaiting is not None
        return self._awaiting.run(coroutine)

    def close(self) -> None:
        """Close what `handle` has opened. `run` does it at its end."""
        try:
            if self._awaiting is not None:
                self._awaiting.close()
        finally:
            if self._dead_letters is not None:
                self._dead_letters.close()

    def stop(self) -> None:
        """Let `run` return after the event, or batch, in hand. Any thread may call it."""
        self._stopping.set()
        if self._reader is not None:
            self._reader.stop()

    def leave(self) -> None:
        """Leave the group now, even in the middle of `run`. The events in hand are not processed."""
        if self._awaiting is not None:
            self._awaiting.cancel()
        if self._reader is not None:
            self._reader.close()

    def note_deaths(self, what: InHand, deaths: int) -> None:
        """Record how many workers have died over these events. Any thread may call it."""
        self._deaths[what] = deaths

    def _work(self, reader: Reader[T]) -> bool:
        """Handle events until the end; False if data was truncated before it was read, and reading can continue."""
        try:
            if self._batch_handler is not None:
                for batch in reader.batches(self._task.max_events):
                    if self._hand is None:
                        self._handle_batch(self._batch_handler, batch)
                    else:
                        self._handle_batch_in_sight(self._hand, self._batch_handler, batch)
            elif self._handler is not None:
                if self._hand is None:
                    for event in reader:
                        self._handle_event(self._handler, event)
                else:
                    self._handle_events_in_sight(self._hand, self._handler, reader)
        except TruncatedError as error:
            self._logger.warning("worker %s continues after truncated data: %s", self.reader_id, error)
            return False
        return True

    def handle(self, batch: EventBatch[T]) -> None:
        """Handle these events as the task says, together or one by one."""
        if self._batch_handler is not None:
            self._handle_batch(self._batch_handler, batch)
        elif self._handler is not None:
            for event in batch:
                self._handle_event(self._handler, event)

    # ------------------------------------------------------------------ visible to the parent process

    def _handle_events_in_sight(self, hand: Hand, handle: Handle, events: Iterable[Event[T]]) -> None:
        batch: EventBatch[T] | None = None
        is_suspect = False
        for event in events:
            if event._batch is not batch:
                batch = event._batch
                is_suspect = self._begin(hand, batch)
            if not is_suspect:
                self._handle_event(handle, event)
                continue
            hand.take_one(event)
            if not self._set_aside_if_deadly(event):
                self._handle_event(handle, event)
            hand.put_down()

    def _handle_batch_in_sight(self, hand: Hand, handle: Handle, batch: EventBatch[T]) -> None:
        """Handle the batch; one by one if a worker died over its events, with a commit after each to repeat none."""
        if not self._begin(hand, batch):
            self._handle_batch(handle, batch)
            return
        for index, event in enumerate(batch):
            self._go_on()
            hand.take_one(event)
            if not self._set_aside_if_deadly(event):
                self._handle_batch(handle, batch.only(index))
            if self._reader is not None:
                self._until_stored(event, partial(self._reader.commit, event, timeout=self._attempt_seconds), "commit")
            hand.put_down()

    def _begin(self, hand: Hand, batch: EventBatch[T]) -> bool:
        """Record that the batch begins; return whether a worker died over its events."""
        hand.take(batch)
        return self._is_suspect(batch)

    def _is_suspect(self, batch: EventBatch[T]) -> bool:
        """Whether a worker died over events of the batch."""
        if self.receive_deaths is not None:
            self.receive_deaths()
        return bool(self._deaths) and any(each.overlaps(batch) for each in tuple(self._deaths))

    def _deaths_over(self, event: Event[T]) -> int:
        """Return how many workers died over the event.

        A death over several events counts for one of them: the first over which another worker died alone.
        """
        found = InHand.of(event) if self._deaths else None
        if found is None or found not in self._deaths:
            return 0
        known = tuple(self._deaths)
        alone = [each for each in known if not each.end]
        firsts = [min((one for one in alone if one.is_among(several)), default=None) for several in known]
        return self._deaths[found] + (found in firsts)

    def _is_deadly(self, event: Event[T]) -> bool:
        return self._deaths_over(event) >= max(self._task.retry.attempts, LEAST_DEATHS)

    def _set_aside_if_deadly(self, event: Event[T]) -> bool:
        """Set the event aside if too many workers have died over it; return whether it was."""
        if not self._is_deadly(event):
            return False
        deaths = self._deaths_over(event)
        error = ChildProcessError(f"{deaths} worker processes died while they handled the event")
        self._set_aside(event, error, attempts=deaths)
        return True

    # ------------------------------------------------------------------ when the handler fails

    # Each attempt starts behind the "except" of the one before: inside, Python would chain their errors.

    def _handle_event(self, handle: Handle, event: Event[T]) -> None:
        try:
            returned = handle(event)
        except Exception as error:
            failed = error
        else:
            if returned is not None:
                check_handled(returned, event)
            return
        self._retry(lambda: handle(as_read(event)), event, failed)

    def _handle_batch(self, handle: Handle, batch: EventBatch[T]) -> None:
        try:
            returned = handle(batch)
        except Exception as error:
            failed = error
        else:
            check_handled(returned, batch[0])
            return
        last = self._try_again(lambda: handle(as_read(batch)), batch[0], failed)
        if last is None:
            return
        if self._task.retry.dead_letters is None:
            raise self._failed(batch[0], last, self._task.retry.attempts) from last
        # Once more, one by one: only events that fail on their own are set aside.
        for index, event in enumerate(batch):
            self._go_on()
            try:
                returned = handle(batch.only(index))
            except Exception as alone:
                self._set_aside(event, alone)
            else:
                check_handled(returned, event)

    def _retry(self, call: Callable[[], object], event: Event[T], error: Exception) -> None:
        last = self._try_again(call, event, error)
        if last is not None:
            self._set_aside(event, last)

    def _try_again(self, call: Callable[[], object], event: Event[T], error: Exception) -> Exception | None:
        """Retry after a first attempt that raised ``error``; return the error of the last attempt, None on success."""
        retry = self._task.retry
        for attempt in range(1 + self._deaths_over(event), retry.attempts):
            delay = self._delay_after(attempt, event, error)
            if self._clock.wait(self._stopping, delay):
                raise WorkerStoppedError
            self._go_on()
            try:
                returned = call()
            except Exception as raised:
                error = raised
            else:
                check_handled(returned, event)
                return None
        return error

    def _delay_after(self, attempt: int, event: Event[T], error: Exception) -> float:
        """Log the failed attempt, and return the seconds until the next."""
        self._counters.retries += 1
        delay = self._task.retry.delay_after(attempt)
        self._logger.warning(
            "attempt %d of %d at %s failed; the next is in %.3g s: %s: %s",
            attempt,
            self._task.retry.attempts,
            event.pointer,
            delay,
            type(error).__name__,
            error,
            extra={"segment": event.segment},
        )
        return delay

    def _go_on(self) -> None:
        """Restart the time that the group gives a reader to handle events, so that each attempt has all of it."""
        if self._reader is not None:
            self._reader.go_on()

    def _set_aside(self, event: Event[T], error: Exception, *, attempts: int | None = None) -> None:
        """Store the event durably, until its retry is due or in the dead letters. Then it counts as processed."""
        retry = self._task.retry
        attempts = retry.attempts if attempts is None else attempts
        if retry.dead_letters is None:
            raise self._failed(event, error, attempts) from error
        self._note_bytes(error)
        text = text_of(error)
        letter = DeadLetter(data=event.raw, pointer=event.pointer, error=text, attempts=attempts)
        headers = event.headers
        if self._delayed is not None:
            if self._wait_for_retry(self._delayed, event, error, attempts):
                return
            earlier = self._delayed.failed(event)
            headers = earlier.headers
            letter = DeadLetter(
                data=event.raw,
                pointer=earlier.pointer,
                error=text,
                attempts=earlier.attempts + attempts,
                earlier_errors=earlier.errors,
            )
        try:
            self._store_letter(event, letter, headers, retry.dead_letters)
        except (EventTooLargeError, NotFoundError, SealedError) as reason:
            error.add_note(f"The event could not be moved to the dead letters: {reason}")
            raise self._failed(event, error, attempts) from error
        self._counters.dead_letters += 1
        self._skip_in_sink(event)
        self._logger.error(
            "%s was moved to the dead letters in %s",
            event.pointer,
            retry.dead_letters,
            exc_info=error,
            extra={"segment": event.segment},
        )

    def _store_letter(self, event: Event[T], letter: DeadLetter, headers: Headers, stream: str) -> None:
        """Store the letter durably. A stream that was created again since the last letter is opened again."""
        while True:
            is_new = self._dead_letters is None
            if self._dead_letters is None:
                self._dead_letters = self._until_stored(event, partial(self._new_letter_writer, stream))
            writer = self._dead_letters
            write = partial(writer.write, letter, event.routing_key, headers=headers, event_time=event.event_time)
            try:
                self._until_stored(event, write)
                return self._until_stored(event, writer.flush)
            except NotFoundError:
                self._dead_letters = None
                with suppress(ReaderGroupError):  # it has told why it stores nothing more
                    writer.close()
                if is_new:
                    raise

    def _wait_for_retry(self, delayed: DelayedEvents, event: Event[T], error: Exception, attempts: int) -> bool:
        """Store the event until its retry is due. Return False if it has had all of its retries, or is too large."""
        try:
            delay = self._until_stored(event, partial(delayed.divert, event, text_of(error), attempts))
        except EventTooLargeError as too_large:
            error.add_note(f"The event could not be retried later: {too_large}")
            return False
        if delay is None:
            return False
        self._counters.retries += 1
        self._logger.warning(
            "%s failed and is retried in %.3g s: %s: %s",
            event.pointer,
            delay,
            type(error).__name__,
            error,
            extra={"segment": event.segment},
        )
        return True

    def _new_letter_writer(self, stream: str) -> EventWriter[DeadLetter]:
        serializer = PydanticSerializer(DeadLetter)
        return EventWriter(self._task.client.streams, stream, serializer=serializer, timeout=self._attempt_seconds)

    @property
    def _attempt_seconds(self) -> float:
        return min(_ATTEMPT_SECONDS, self._task.client.streams.timeout)

    def _until_stored(self, event: Event[T], call: Callable[[], R], to: str = "set aside") -> R:
        """Return the result of a call that stores what becomes of the event. Repeat it while the store is away or full.

        A reader waits for the store in the same way. If the worker ended instead, its segments would wait for another.
        """
        failures = 0
        while True:
            try:
                return call()
            except ReaderGroupError as error:
                if not error.retryable:
                    raise
                failures += 1
                pause = growing_pause(failures, first=0.05, most=_MAX_PAUSE_SECONDS)
                if not self._waited(pause, event, f"{to} {event.pointer}", error):
                    raise WorkerStoppedError from error

    def _skip_in_sink(self, event: Event[T]) -> None:
        """Let the sink's position pass the event."""
        failures = 0
        while self._sink is not None:
            try:
                return self._sink.skip(event)
            except StoreUnavailableError as error:
                failures += 1
                what = f"store the position behind {event.pointer}"
                if not self._waited(pause_of_sink(failures), event, what, error):
                    raise NotHandledError(WorkerStoppedError()) from error
            except ReaderGroupError as error:
                raise NotHandledError(error) from error

    def _waited(self, pause: float, event: Event[T], what: str, error: ReaderGroupError) -> bool:
        """Wait for the next try to do ``what``, which has failed. Return False if the worker was stopped meanwhile."""
        self._logger.warning(
            "the next try to %s is in %.3g s: %s", what, pause, error, extra={"segment": event.segment}
        )
        if self._clock.wait(self._stopping, pause):
            return False
        self._go_on()
        return True

    def _failed(self, event: Event[T], error: Exception, attempts: int) -> HandlerError:
        self._note_bytes(error)
        notes = getattr(error, "__notes__", ())
        advice = "fix the handler or the serializer"
        if self._task.retry.dead_letters is None:
            advice += ", or move such events to a stream with RetryPolicy(dead_letters=...)"
        return HandlerError(
            f"the handler failed on its last attempt and the event stays unprocessed; {advice}",
            pointer=str(event.pointer),
            attempts=attempts,
            error=text_of(error),
            **({"notes": " ".join(map(str, notes))} if notes else {}),
        )

    def _note_bytes(self, error: Exception) -> None:
        """Add to the error of a handler that took bytes for another value why it got bytes."""
        task = self._task
        if not keeps_bytes(task.serializer) or isinstance(task.handle_batch, ArrowHandler):
            return
        is_of_bytes = isinstance(error, TypeError | AttributeError) and "byte" in text_of(error)
        if is_of_bytes and _BYTES_NOTE not in getattr(error, "__notes__", ()):
            error.add_note(_BYTES_NOTE)


def check_handled(returned: object, event: Event[T]) -> None:
    """Stop the pool if the handler returned an awaitable, which has not run yet.

    The event has not failed. A retry would end with setting every event aside.
    """
    check_returned(returned, "a handler", pointer=str(event.pointer))
