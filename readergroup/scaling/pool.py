"""`ReaderPool`: as many workers as a policy asks for, each a reader that hands its events to the application.

One thread, that of `run`, starts, watches and stops the workers. Whatever it is to react to (a notification, a worker
that ended, `stop`, a signal) sets a flag that it looks at.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Final, Generic, Literal, Protocol, TypeVar

from synchronizer import (
    ClosedError,
    Deadline,
    Flag,
    HandlerError,
    InvalidArgumentError,
    NotFoundError,
    ReaderGroupError,
    StoreUnavailableError,
    check_callable,
    growing_pause,
)
from synchronizer.arguments import check_count, check_duration, check_type

from ..errors import ReaderNotInGroupError
from ..group.model.config import new_reader_id
from ..group.state_manager import ReaderGroupStateManager
from ..streams.serializers import Serializer, check_serializer
from .in_hand import InHand
from .policy import ReaderScalingPolicy
from .retry import RetryPolicy
from .scaled_group import GroupClient, ScaledGroup
from .scaler import LOOK_SECONDS, Scaler
from .worker import HandleBatch, HandleEvent, Task
from .worker_process import Deaths, ProcessWorker, pickled
from .worker_thread import ThreadWorker

T = TypeVar("T")

DRAIN_SECONDS: Final = 25.0
#: How often the pool looks after its workers where nothing wakes it.
TICK_SECONDS: Final = 0.1
#: The pause before a worker that died is replaced: this, doubled with every other death in the last minute.
FIRST_PAUSE_SECONDS: Final = 0.1
MAX_PAUSE_SECONDS: Final = 10.0
_DEATHS_SECONDS: Final = 60.0
#: How many events that killed a worker the pool remembers.
_MOST_REMEMBERED: Final = 1000
#: How long a store is asked to take out a worker that died; if it does not answer, the worker's lease runs out.
_TAKE_OUT_SECONDS: Final = 2.0

_logger = logging.getLogger(__name__)


class PoolWorker(Protocol):
    """One worker as the pool sees it. ``failure`` is set once it is not alive any more."""

    reader_id: str
    stopping: bool

    @property
    def pid(self) -> int: ...
    @property
    def alive(self) -> bool: ...
    @property
    def failure(self) -> BaseException | None: ...
    @property
    def left_in_hand(self) -> InHand | None: ...

    def stop(self) -> None: ...
    def end(self) -> None: ...


class ReaderPool(Generic[T]):
    """Runs once, in the thread that calls `run`. Threads may share it."""

    def __init__(
        self,
        client: GroupClient,
        group: ScaledGroup,
        manager: ReaderGroupStateManager,
        *,
        handle: HandleEvent[T] | None,
        handle_batch: HandleBatch[T] | None,
        readers: int | ReaderScalingPolicy,
        workers: Literal["thread", "process"],
        retry: RetryPolicy | None,
        serializer: Serializer[T],
    ) -> None:
        if (handle is None) == (handle_batch is None):
            raise InvalidArgumentError("a pool takes either handle or handle_batch", group=group.name)
        check_callable(handle_batch if handle is None else handle, "a handler", group=group.name)
        check_type(retry, RetryPolicy, "retry", or_none=True)
        check_serializer(serializer)
        if workers not in ("thread", "process"):
            raise InvalidArgumentError("the workers of a pool are 'thread' or 'process'", workers=workers)
        if not isinstance(readers, ReaderScalingPolicy):
            check_count(readers, "readers")
            readers = ReaderScalingPolicy(min_readers=readers, max_readers=readers)
        self._client = client
        self._group = group
        self._manager = manager
        self._clock = client.clock
        self._policy = readers
        self._scaler = Scaler(group, readers)
        self._retry = retry or RetryPolicy(attempts=1)
        self._check_dead_letters()
        self.task = Task(client, group, handle, handle_batch, serializer, self._retry)
        self._pickled_task = pickled(self.task) if workers == "process" else None

        self._process_id = os.getpid()
        self._lock = threading.Lock()
        self._began = False
        self._returned = Flag()
        self._thread: threading.Thread | None = None
        self._wake = Flag()
        self._stopping = False
        self._ended = False  # the end of the data was reached
        self._failure: BaseException | None = None

        # All of this is the running thread's; others look at copies.
        self._workers: list[PoolWorker] = []
        self._desired = readers.min_readers
        self._look_at = float("-inf")
        self._deaths: deque[float] = deque()
        self._died_over: dict[InHand, int] = {}  # how many workers died over each, the last one at the end
        self._start_at = float("-inf")

    # ------------------------------------------------------------------ for the application

    def run(self, drain_timeout: float = DRAIN_SECONDS) -> None:
        """Work until the group has read everything, or SIGTERM, SIGINT or `stop`; then drain, and return.

        Draining: every worker finishes what it has in hand and leaves the group. Workers that have not after
        ``drain_timeout`` seconds are ended, and what they had in hand is handled again by others. A worker that dies
        is replaced. Raises `HandlerError`, after draining, for an event that could not be handled nor set aside.

        Signals are heard if this is the main thread; their handlers are put back at the end. A second SIGINT
        interrupts the draining.
        """
        check_duration(drain_timeout, "drain_timeout")
        with self._lock:
            if self._began:
                raise InvalidArgumentError("a pool runs once; make another with group.pool", group=self._group.name)
            self._began = True
            self._thread = threading.current_thread()
        try:
            with self._signals(), self._notifications():
                try:
                    self._supervise()
                finally:
                    self._drain(drain_timeout)
        finally:
            self._returned.set()
        if self._failure is not None:
            raise self._failure

    def stop(self) -> None:
        """Let `run` drain and return, or return at once if it was not called yet. From any thread or signal handler."""
        # Nothing but a flag: the thread that a signal interrupts may be inside of a lock.
        self._stopping = True

    @property
    def workers(self) -> Sequence[PoolWorker]:
        """The present workers: each has ``reader_id``, ``pid`` and ``alive``, which stays live."""
        return tuple(self._workers)

    @property
    def desired_readers(self) -> int:
        """How many workers there should be."""
        return self._desired

    def close(self) -> None:
        """`stop`, and wait for `run` to return, unless this is called within it. Twice is no error."""
        if os.getpid() != self._process_id:
            return  # a forked child: what was opened is the parent's
        self.stop()
        with self._lock:
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            self._returned.wait(2 * DRAIN_SECONDS)

    # ------------------------------------------------------------------ what it reacts to

    def _check_dead_letters(self) -> None:
        stream = self._retry.dead_letters
        if stream is None:
            return
        if stream in self._group.config.streams:
            raise InvalidArgumentError("the group would read its own dead letters; use another stream", stream=stream)
        if not self._client.streams.exists(stream):
            raise NotFoundError("the stream for dead letters does not exist; create it first", stream=stream)

    @contextmanager
    def _signals(self) -> Iterator[None]:
        """SIGTERM and SIGINT stop the pool inside, the first time."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}

        def put_back(number: int) -> None:
            handler = before[signal.Signals(number)]
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

        def on_signal(number: int, frame: object) -> None:
            self.stop()
            if number == signal.SIGINT:
                put_back(number)

        for number in before:
            signal.signal(number, on_signal)
        try:
            yield
        finally:
            for number in before:
                put_back(number)

    @contextmanager
    def _notifications(self) -> Iterator[None]:
        """Inside, the group's notifications wake the pool."""
        with ExitStack() as unregistering:
            segments = self._group.segment_notifier.register_listener(lambda _: self._on_segments())
            unregistering.callback(segments)
            end_of_data = self._group.end_of_data_notifier.register_listener(lambda _: self._on_end_of_data())
            unregistering.callback(end_of_data)
            yield

    def _on_segments(self) -> None:
        self._look_at = float("-inf")
        self._wake.set()

    def _on_end_of_data(self) -> None:
        self._ended = True
        self._wake.set()

    # ------------------------------------------------------------------ running

    def _supervise(self) -> None:
        while not self._over:
            self._decide()
            self._start_and_stop()
            self._clock.wait(self._wake, TICK_SECONDS)
            self._wake.clear()
            self._reap()

    @property
    def _over(self) -> bool:
        return self._stopping or self._ended or self._failure is not None

    def _decide(self) -> None:
        now = self._clock.monotonic()
        if self._policy.min_readers == self._policy.max_readers or now < self._look_at:
            return
        self._look_at = now + LOOK_SECONDS
        try:
            decision = self._scaler.decide(readers=len(self._working))
        except ReaderGroupError as error:
            if not error.retryable:
                raise
            _logger.warning("the lag of %s cannot be seen now: %s", self._group.name, error)
            return
        if decision.desired_readers != self._desired:
            _logger.info("%s: %d readers: %s", self._group.name, decision.desired_readers, decision.reason)
        self._desired = decision.desired_readers

    @property
    def _working(self) -> list[PoolWorker]:
        return [worker for worker in self._workers if not worker.stopping]

    def _start_and_stop(self) -> None:
        """Have as many workers as desired. The newest are stopped first: they have the least to hand over."""
        working = self._working
        for worker in working[self._desired :]:
            worker.stop()
        if self._clock.monotonic() < self._start_at:
            return
        for _ in range(self._desired - len(working)):
            if self._over:
                return
            try:
                self._workers.append(self._start())
            except StoreUnavailableError as error:  # there is no thread or process for it now
                return self._start_later(f"a worker cannot be started: {error}")

    def _start(self) -> PoolWorker:
        reader_id = new_reader_id()
        if self._pickled_task is not None:
            deaths = [Deaths(*each) for each in self._died_over.items()]
            return ProcessWorker(self._pickled_task, reader_id, deaths)
        return ThreadWorker(self.task, reader_id, self._wake.set)

    def _reap(self) -> None:
        """Take out the workers that have ended, and see why."""
        for worker in [worker for worker in self._workers if not worker.alive]:
            self._workers.remove(worker)
            self._judge(worker)

    def _judge(self, worker: PoolWorker) -> None:
        failure = worker.failure
        if failure is None:
            if not worker.stopping and not self._over:
                self._ended = self._group.synchronizer.fetch_updates().end_of_data
            return
        if isinstance(failure, ClosedError) and self._stopping:
            return  # the client is being closed
        if not _may_pass(failure):
            _logger.error("worker %s failed, and the pool drains: %s", worker.reader_id, failure)
            self._failure = self._failure or failure
            return
        if isinstance(failure, ChildProcessError) or not isinstance(failure, Exception):
            self._count_death(worker)
        if isinstance(worker, ProcessWorker):
            self._take_out(worker)
        self._start_later(f"worker {worker.reader_id} died: {failure}")

    def _start_later(self, why: str) -> None:
        now = self._clock.monotonic()
        self._deaths.append(now)
        while now - self._deaths[0] > _DEATHS_SECONDS:
            self._deaths.popleft()
        pause = growing_pause(len(self._deaths), first=FIRST_PAUSE_SECONDS, most=MAX_PAUSE_SECONDS)
        self._start_at = now + pause
        _logger.warning("the next worker is started in %.3g s: %s", pause, why)

    def _count_death(self, worker: PoolWorker) -> None:
        """Let all workers know what this one died over, before one of them gets it."""
        what = worker.left_in_hand
        if what is None:
            return
        deaths = self._died_over.pop(what, 0) + 1
        self._died_over[what] = deaths
        if len(self._died_over) > _MOST_REMEMBERED:
            del self._died_over[next(iter(self._died_over))]
        _logger.warning("worker %s died over %s, which %d did so far", worker.reader_id, what.pointer, deaths)
        for other in self._workers:
            if isinstance(other, ProcessWorker):
                other.tell(Deaths(what, deaths))

    def _take_out(self, worker: ProcessWorker) -> None:
        """Give what a dead process had to others at once: nothing else can go on as this reader."""
        try:
            self._manager.remove_reader(
                worker.reader_id, reached=worker.reached, cause="dead", timeout=_TAKE_OUT_SECONDS
            )
        except ReaderGroupError as error:
            _logger.info("worker %s is taken out when its lease has run out: %s", worker.reader_id, error)

    # ------------------------------------------------------------------ the end

    def _drain(self, timeout: float) -> None:
        """Let the workers finish and leave, for ``timeout`` seconds; then end those that are left."""
        deadline = Deadline(self._clock, timeout)
        try:
            for worker in self._workers:
                worker.stop()
            while self._workers and not deadline.passed:
                self._clock.wait(self._wake, deadline.remaining(TICK_SECONDS))
                self._wake.clear()
                self._reap()
        finally:
            with ExitStack() as ending:  # of every one, also if it is interrupted at another
                for worker in self._workers:
                    _logger.warning(
                        "worker %s did not finish within %.3g s and is ended; others take over its segments",
                        worker.reader_id,
                        timeout,
                    )
                    if isinstance(worker, ProcessWorker):
                        ending.callback(self._take_out, worker)  # afterwards
                    ending.callback(worker.end)
                self._workers = []


def _may_pass(failure: BaseException) -> bool:
    """Whether another worker may fare better: a process that was killed, a store that is away, a reader taken out."""
    if isinstance(failure, HandlerError | ClosedError):
        return False
    if isinstance(failure, ReaderGroupError):
        return failure.retryable or isinstance(failure, ReaderNotInGroupError)
    return isinstance(failure, ChildProcessError) or not isinstance(failure, Exception)
