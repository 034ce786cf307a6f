"""`connect` opens a store; its `Client` gives access to streams, reader groups, shared state and recipes."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from types import TracebackType, UnionType
from typing import TYPE_CHECKING, Any, Final, Self, TypeVar, Unpack, overload
from weakref import WeakValueDictionary

import synchronizer as sync  # shared states and recipes load their modules when they are first used
from synchronizer import Clock, InvalidArgumentError, SegmentStore, open_store
from synchronizer.arguments import check_count, check_duration, check_type
from synchronizer.clock import Deadline, clock_or_system, is_manual
from synchronizer.limits import DEFAULT_STATE_LIMIT_BYTES
from synchronizer.recipes.queue.limits import MAX_OUTSTANDING_BYTES
from synchronizer.threads.loading import loading
from synchronizer.threads.stepping import Stepped, step_each

from .closable import Closable, close_each, noted, stop_each
from .forms import refuses_async
from .streams.event_time.defaults import EVENT_TIME_TIMEOUT_SECONDS

if TYPE_CHECKING:  # each part of a client loads what it is made of
    from pydantic import BaseModel

    from synchronizer import State, StateSynchronizer, Update

    from .batch.client import BatchClient
    from .dead_letters.letters import DeadLetters
    from .group.manager import ReaderGroupManager
    from .streams.event_time.noting import EventTimeOf
    from .streams.manager import StreamManager
    from .streams.serializers import Serializer
    from .streams.writing.writer import EventWriter
    from .telemetry.snapshot import Telemetry

M = TypeVar("M", bound="BaseModel")
S = TypeVar("S", bound="State")
T = TypeVar("T")


C = TypeVar("C", bound=Closable)

DEFAULT_TIMEOUT_SECONDS: Final = 30.0


def connect(
    url: str | None = None,
    *,
    timeout: float = DEFAULT_TIMEOUT_SECONDS,
    state_limit_bytes: int = DEFAULT_STATE_LIMIT_BYTES,
    clock: Clock | None = None,
    must_exist: bool = False,
) -> Client:
    """Return a client of the store at ``url``. Close it when done, or use it as a context manager.

    ``sqlite:///shop.db`` is a file in the working directory, ``sqlite:////var/shop.db`` has an absolute path, and
    ``memory://`` is private to this client. ``postgresql://user@host/db`` and ``nats://host:4222`` serve many machines;
    docs/operations.md lists their options.

    Args:
        url: The address of the store. Default: the environment variable READERGROUP_URL.
        timeout: Seconds that a call may take unless it has its own ``timeout``. Default: 30.
        state_limit_bytes: The largest size of the state of a group, the metadata of a stream, or a shared state. Set
            the same limit in all processes. A larger state raises `StateTooLargeError`. Default: 1 MiB.
        clock: The clock for leases, pauses and deadlines. Default: the system's.
        must_exist: Raise `NotFoundError` instead of creating a missing store, so that a misspelt address does not look
            like an empty store. Default: create it and log that at INFO.

    Returns:
        A client that owns the store and closes it.

    Raises:
        InvalidArgumentError: There is no address, or it is malformed.
        UnsupportedError: The scheme is unknown, or the driver of the store is not installed.
        NotFoundError: The store does not exist and ``must_exist`` is set.

    Examples:
        >>> with connect("memory://") as client:
        ...     client.counter("visits").add(1)
        1
    """
    check_duration(timeout, "timeout")
    check_count(state_limit_bytes, "state_limit_bytes")
    if url is None:
        url = os.environ.get("READERGROUP_URL")
        if not url:
            raise InvalidArgumentError("pass a URL to connect, such as 'sqlite:///shop.db', or set READERGROUP_URL")
    clock = clock_or_system(clock)
    store = open_store(url, clock=clock, must_exist=must_exist)
    client = Client(store, timeout=timeout, state_limit_bytes=state_limit_bytes, clock=clock)
    # A relative path names another file in another directory. Other stores leave the password out of their `url`.
    client._address = store.url if url.startswith("sqlite:") else url
    return client


@refuses_async
class Client:
    """A store with its streams (``streams``), reader groups (``groups``) and bulk reads (``batch``).

    Threads may share it. A client that `connect` returned pickles as its address, and reconnects when it is unpickled:
    the store must exist. Closing the client closes all objects that it opened; it closes the store only if `connect`
    opened it.

    Args:
        store: The store, borrowed from the caller.
        timeout: Seconds that a call may take unless it has its own ``timeout``. Default: 30.
        state_limit_bytes: The largest size of one state, as for `connect`. Default: 1 MiB.
        clock: The clock for leases, pauses and deadlines. Default: the system's.

    Raises:
        InvalidArgumentError: An argument has the wrong type or is out of range.
    """

    def __init__(
        self,
        store: SegmentStore,
        *,
        timeout: float = DEFAULT_TIMEOUT_SECONDS,
        state_limit_bytes: int = DEFAULT_STATE_LIMIT_BYTES,
        clock: Clock | None = None,
    ) -> None:
        check_type(store, SegmentStore, "store")
        check_duration(timeout, "timeout")
        check_count(state_limit_bytes, "state_limit_bytes")
        self.store = store
        self.timeout = timeout
        self.state_limit_bytes = state_limit_bytes
        self.clock: Clock = clock_or_system(clock)
        # On a clock that is moved by hand nothing runs in the background, as in groups.
        self._in_background = not is_manual(self.clock)
        self._address: str | None = None  # set if `connect` opened the store: the client then closes it
        # Weak references forget closed writers. The threads of the writers keep an open one alive.
        self._opened: WeakValueDictionary[int, Closable] = WeakValueDictionary()
        # The locks that a thread of this process holds or waits for.
        self._locks: WeakValueDictionary[tuple[type[sync.Lock], str], sync.Lock] = WeakValueDictionary()
        self._guard = threading.Lock()
        self._parts: dict[str, Any] = {}  # `streams`, `groups` and `batch`, once they are used
        self._closed = False
        self._closing = threading.RLock()  # held while a thread closes
        self._process_id = os.getpid()

    @property
    def streams(self) -> StreamManager:
        """The streams of the store: create, scale, copy and delete them."""
        return self._part("streams", self._new_streams)

    @property
    def groups(self) -> ReaderGroupManager:
        """The reader groups of the store: create, find and delete them."""
        return self._part("groups", self._new_groups)

    @property
    def batch(self) -> BatchClient:
        """Reads streams in bulk, without a reader group."""
        if "batch" not in self._parts:
            with loading():
                from .batch.client import BatchClient

            self._parts.setdefault("batch", BatchClient(self.streams))
        found: BatchClient = self._parts["batch"]
        return found

    def telemetry(self) -> Telemetry:
        """Return what this client has done in this process so far. Never waits."""
        with loading():
            from .telemetry.snapshot import snapshot

        return snapshot(self.streams.counters)

    def _new_streams(self) -> StreamManager:
        with loading():
            from .streams.maintenance import maintain_in_background
            from .streams.manager import StreamManager

        streams = StreamManager(
            self.store, clock=self.clock, timeout=self.timeout, state_limit_bytes=self.state_limit_bytes
        )
        streams.retention.groups = lambda: self.groups
        if self._applies_policies:
            name = f"{self.store.url} policies"
            maintain_in_background(streams.maintenance, self.clock, streams.metadata.closing, name)
        return streams

    def _new_groups(self) -> ReaderGroupManager:
        with loading():
            from .group.manager import ReaderGroupManager

        return ReaderGroupManager(self, on_open=self._maintain_streams)

    def _maintain_streams(self) -> None:
        """Apply the policies of streams, as far as this client does, even if it never uses a stream."""
        if self._applies_policies:
            _ = self.streams

    @property
    def _applies_policies(self) -> bool:
        return self._address is not None and self._in_background and self.store.guarantees.many_processes

    def _part(self, name: str, new: Callable[[], C]) -> C:
        """Return the part of this name. The first use makes it: one, also for threads that use it at the same time."""
        if name not in self._parts:
            made = self._parts.setdefault(name, new())
            if self._closed:
                made.close()
        part: C = self._parts[name]
        return part

    @overload
    def writer(
        self,
        stream: str,
        *,
        event_time: EventTimeOf[bytes] | None = None,
        event_time_timeout_seconds: float = ...,
        timeout: float | None = None,
        max_event_bytes: int | None = None,
    ) -> EventWriter[bytes]: ...
    @overload
    def writer(
        self,
        stream: str,
        *,
        serializer: Serializer[T],
        event_time: EventTimeOf[T] | None = None,
        event_time_timeout_seconds: float = ...,
        timeout: float | None = None,
        max_event_bytes: int | None = None,
    ) -> EventWriter[T]: ...
    def writer(
        self,
        stream: str,
        *,
        serializer: Serializer[Any] | None = None,
        event_time: EventTimeOf[Any] | None = None,
        event_time_timeout_seconds: float = EVENT_TIME_TIMEOUT_SECONDS,
        timeout: float | None = None,
        max_event_bytes: int | None = None,
    ) -> EventWriter[Any]:
        """Return a writer of the stream, a context manager: leaving the block stores all events that were written.

        Args:
            stream: The stream, ``scope/name``.
            serializer: Turns values into bytes. Default: events are bytes.
            event_time: Gives an event time to each event whose ``write`` or ``write_many`` gives none: "now" is the
                time of writing, which the writer also notes by itself; a function returns the time of an event or None.
                `EventWriter.write_batch` and `EventWriter.write_arrow` then raise `UnsupportedError`. Default: events
                have the time that the call gives.
            event_time_timeout_seconds: For how long the watermark of the stream waits for a writer that notes times and
                is silent, up to a day. Default: a minute.
            timeout: Seconds that a ``flush`` or a ``write`` without space waits. Default: the client's.
            max_event_bytes: The largest event that ``write`` takes, with its headers: from 8 MiB, the default, to
                1 GiB; on NATS to 15.9 MiB. An event over 8 MiB is stored in chunks before ``write`` returns, and
                only this release and later ones read it.

        Raises:
            InvalidArgumentError: ``event_time_timeout_seconds`` or ``max_event_bytes`` is outside these limits.
            NotFoundError: The stream does not exist.
            SealedError: The stream is sealed and takes no events.
        """
        with loading():
            from .streams.serializers import serializer_or_bytes
            from .streams.writing.writer import EventWriter

        options: dict[str, Any] = {
            "serializer": serializer_or_bytes(serializer),
            "event_time_timeout_seconds": event_time_timeout_seconds,
            "timeout": timeout,
            "max_event_bytes": max_event_bytes,
        }
        if event_time is None:
            return EventWriter(self.streams, stream, **options)
        with loading():
            from .streams.event_time.timed_writer import open_writer

        return open_writer(self.streams, stream, event_time=event_time, **options)

    def dead_letters(self, stream: str | None = None, *, queue: str | None = None) -> DeadLetters:
        """Return the dead letters in the stream, which pools with ``RetryPolicy(dead_letters=stream)`` have written.

        Args:
            stream: The stream of dead letters, ``scope/name``. A missing one raises at the first use.
            queue: Instead of a stream: the event queue whose processors have ``set_aside=True``. As above.
        """
        if (stream is None) == (queue is None):
            raise InvalidArgumentError("name either a stream of dead letters or a queue", stream=stream, queue=queue)
        check_type(queue, str, "queue", or_none=True)
        if queue is not None:
            with loading():
                from .dead_letters.queues import QueueDeadLetters
            return QueueDeadLetters(queue, self.store, self.clock, self.timeout)
        assert stream is not None
        with loading():
            from .dead_letters.letters import DeadLetters
            from .dead_letters.statuses import LETTER_UPDATES, LetterStatuses

        def statuses(initial: LetterStatuses | None, timeout: float | None) -> StateSynchronizer[LetterStatuses]:
            limit = self.timeout if timeout is None else timeout
            options: sync.SynchronizerOptions = {**self._state_options, "timeout": limit}
            opened = sync.StateSynchronizer(
                self.store,
                f"dead-letter-status/{stream}",
                initial=initial,
                state_type=LetterStatuses,
                updates=LETTER_UPDATES,
                **options,
            )
            opened.timeout = self.timeout
            return self._keep(opened)

        return DeadLetters(stream, self.streams, self.batch, self.lock, statuses)

    def synchronizer(self, name: str, *, initial: S, updates: Iterable[type[Update[S]]]) -> StateSynchronizer[S]:
        """Return the shared state ``name``; store ``initial`` if it has no value yet.

        Args:
            name: The name of the state in the store.
            initial: The first value.
            updates: All update classes that the log may hold, retired ones included.

        Raises:
            DeadlineExceededError: The store did not answer within the client's timeout.
        """
        check_type(name, str, "name")
        return self._keep(
            sync.StateSynchronizer(self.store, f"state/{name}", initial=initial, updates=updates, **self._state_options)
        )

    def shared_map(self, name: str, value_type: type[T] | UnionType) -> sync.SharedMap[T]:
        """Return the shared mapping ``name`` from ``str`` to values of ``value_type``.

        Args:
            name: The name of the map in the store.
            value_type: The type of all values, such as ``int``, a pydantic model or ``str | None``.

        Raises:
            InvalidArgumentError: ``value_type`` is not a type.
        """
        return self._keep(sync.SharedMap(self.store, name, value_type, **self._state_options))

    def shared_set(self, name: str, item_type: type[T] | UnionType) -> sync.SharedSet[T]:
        """Return the shared set ``name`` of items of ``item_type``.

        Args:
            name: The name of the set in the store.
            item_type: The type of all items; items are hashable.

        Raises:
            InvalidArgumentError: ``item_type`` is not a type.
        """
        return self._keep(sync.SharedSet(self.store, name, item_type, **self._state_options))

    def shared_config(self, name: str, model: type[M]) -> sync.SharedConfig[M]:
        """Return the shared configuration ``name``, with the fields of a pydantic model.

        Args:
            name: The name of the configuration in the store.
            model: The pydantic model that validates every change.

        Raises:
            InvalidArgumentError: ``model`` is not a suitable pydantic model.
        """
        return self._keep(sync.SharedConfig(self.store, name, model, **self._state_options))

    def counter(self, name: str) -> sync.SharedCounter:
        """Return the shared counter ``name``: a 64-bit integer that starts at 0."""
        return self._keep(sync.SharedCounter(self.store, name, **self._state_options))

    def event_queue(self, name: str, *, max_outstanding_bytes: int = MAX_OUTSTANDING_BYTES) -> sync.EventQueue:
        """Return the durable queue ``name`` to add events. An `event_processor` in any process handles them.

        Args:
            name: The name of the queue in the store.
            max_outstanding_bytes: Adding waits while more bytes than this are not handled. Default: 64 MiB.

        Raises:
            InvalidArgumentError: The name or the limit is invalid.
        """
        return self._keep(
            sync.EventQueue(
                self.store, name, max_outstanding_bytes=max_outstanding_bytes, clock=self.clock, timeout=self.timeout
            )
        )

    def event_processor(
        self,
        name: str,
        handler: Callable[[sync.QueuedEvent], object] | None = None,
        **options: Unpack[sync.EventProcessorOptions],
    ) -> sync.EventProcessor:
        """Return a processor that calls ``handler`` with each event of the durable queue ``name``, in order.

        Of all processors with one name, in any process, one at a time handles events.

        Args:
            name: The name of the queue in the store.
            handler: Takes one event. Omit it if the options have a ``batch_handler``.
            **options: Further arguments of `EventProcessor`. ``consumer_timeout_seconds`` defaults to 10.

        Raises:
            InvalidArgumentError: An option is invalid, or ``handler`` and ``batch_handler`` are both given or missing.
        """
        processor = sync.EventProcessor(
            self.store,
            name,
            handler,
            **options,
            clock=self.clock,
            timeout=self.timeout,
            threads=self._in_background,
        )
        return self._keep(processor)

    def membership(self, name: str, member_id: str, *, member_timeout_seconds: float = 10.0) -> sync.Membership:
        """Return a member of the membership ``name``. It joins with ``join`` or when its ``with`` block starts.

        Closing the client ends the membership.

        Args:
            name: The name of the membership in the store.
            member_id: The id of this member. Joining with an id that is in use replaces the former member.
            member_timeout_seconds: The lease: a member that does not renew it for so long counts as dead. The first of
                all present members sets the value for all. Default: 10.
        """
        return self._keep(
            sync.Membership(
                self.store,
                name,
                member_id,
                member_timeout_seconds=member_timeout_seconds,
                threads=self._in_background,
                **self._state_options,
            )
        )

    def leader_election(
        self, name: str, candidate_id: str, *, member_timeout_seconds: float = 10.0
    ) -> sync.LeaderElection:
        """Return a candidate in the election ``name``. It competes once it campaigns.

        Closing the client ends the candidacy.

        Args:
            name: The name of the election in the store.
            candidate_id: The id of this candidate.
            member_timeout_seconds: The lease: a leader that does not renew it for so long is replaced. The first of all
                present candidates sets the value for all. Default: 10.
        """
        return self._keep(
            sync.LeaderElection(
                self.store,
                name,
                candidate_id,
                member_timeout_seconds=member_timeout_seconds,
                threads=self._in_background,
                **self._state_options,
            )
        )

    @contextmanager
    def lock(
        self, name: str, *, timeout: float | None = None, member_timeout_seconds: float = 10.0
    ) -> Iterator[sync.HeldLock]:
        """Hold the lock ``name`` during the block.

        Args:
            name: The name of the lock in the store.
            timeout: Seconds to wait for the lock; ``math.inf`` waits as long as it takes. Default: the client's.
            member_timeout_seconds: The lease: a holder that does not renew it for so long loses the lock. The first of
                all present holders and waiters sets the value for all. Default: 10.

        Raises:
            DeadlineExceededError: Others held the lock until the timeout; the error names them.
            InvalidArgumentError: This thread holds the lock already.

        Examples:
            >>> with client.lock("nightly-report", timeout=5) as held:
            ...     write_report(fencing_token=held.fencing_token)
        """
        yield from self._hold(sync.Lock, name, timeout, member_timeout_seconds=member_timeout_seconds)

    @contextmanager
    def semaphore(
        self, name: str, *, permits: int, timeout: float | None = None, member_timeout_seconds: float = 10.0
    ) -> Iterator[sync.HeldLock]:
        """Hold one permit of the semaphore ``name`` during the block.

        Args:
            name: The name of the semaphore in the store.
            permits: How many may hold it at a time; all processes give the same number.
            timeout: Seconds to wait for a permit; ``math.inf`` waits as long as it takes. Default: the client's.
            member_timeout_seconds: The lease of a holder, as for `lock`. Default: 10.

        Raises:
            DeadlineExceededError: Others held all permits until the timeout.
            InvalidArgumentError: This thread holds a permit already, or the semaphore has another number of permits.
        """
        check_count(permits, "permits")
        options = {"permits": permits, "member_timeout_seconds": member_timeout_seconds}
        yield from self._hold(sync.Semaphore, name, timeout, **options)

    def barrier(
        self, name: str, parties: int, *, party: str | None = None, member_timeout_seconds: float = 10.0
    ) -> sync.Barrier:
        """Return the barrier ``name``, at which ``parties`` processes or threads wait for each other.

        Args:
            name: The name of the barrier in the store.
            parties: How many wait for each other; all of them give the same number.
            party: The id of this party. When a party waits again after a restart, its former wait breaks the barrier.
                Default: none, so that both waits count until the former lease expires.
            member_timeout_seconds: The lease: a waiting party that does not renew it for so long counts as dead. The
                first of all present parties sets the value for all. Default: 10.

        Raises:
            InvalidArgumentError: The barrier was created with another number of parties.
        """
        return self._keep(
            sync.Barrier(
                self.store,
                name,
                parties,
                party=party,
                member_timeout_seconds=member_timeout_seconds,
                threads=self._in_background,
                **self._state_options,
            )
        )

    def _hold(self, kind: type[sync.Lock], name: str, timeout: float | None, **options: Any) -> Iterator[sync.HeldLock]:
        """Hold a lock while the generator is suspended, and release it however the generator ends.

        An interrupt could hit a ``with`` statement just before it calls `HeldLock.__exit__`.
        """
        check_duration(timeout, "timeout", or_none=True)
        deadline = Deadline(self.clock, self.timeout if timeout is None else timeout)
        lock = self._lock(kind, name, timeout=deadline.remaining(), **options)
        held = lock.acquire(timeout=deadline.remaining())
        try:
            yield held
        finally:
            try:
                held.release()
            except BaseException:  # interrupted: without a release, others would wait for the lease to expire
                held.release()
                raise

    def _lock(self, kind: type[sync.Lock], name: str, *, timeout: float, **options: Any) -> sync.Lock:
        """Return the lock of this name. All threads share one object, which knows which of them hold it."""
        check_type(name, str, "name")
        check_duration(options["member_timeout_seconds"], "member_timeout_seconds", above_zero=True, finite=True)
        lock = self._locks.get((kind, name))
        if lock is None:
            with loading():
                from synchronizer.recipes.coordination.participant import ASK_SECONDS

            limit = min(self.timeout, max(ASK_SECONDS, timeout))
            state_options: sync.SynchronizerOptions = {**self._state_options, "timeout": limit}
            # It asks the store. Nobody waits for that who needs another lock, or comes later with more time.
            opened = kind(self.store, name, threads=self._in_background, **state_options, **options)
            opened.synchronizer.timeout = self.timeout
            with self._guard:
                lock = self._locks.get((kind, name))
                if lock is None:
                    self._locks[kind, name] = lock = self._keep(opened)
            if lock is not opened:
                opened.close()
        if lock.permits != options.get("permits", 1):
            raise InvalidArgumentError(
                "this client has the semaphore open with another number of permits; use that number",
                name=name,
                permits=lock.permits,
                given=options["permits"],
            )
        return lock

    @property
    def _state_options(self) -> sync.SynchronizerOptions:
        return {"clock": self.clock, "timeout": self.timeout, "state_limit_bytes": self.state_limit_bytes}

    def _keep(self, opened: C) -> C:
        """Return ``opened``, which the client closes when it is closed."""
        self._opened[id(opened)] = opened
        return opened

    def step(self) -> float:
        """Do one round of background work in this thread, on a clock that ``is_manual``.

        A round renews leases, assigns segments, handles queued events and calls listeners. A request that the store
        did not answer is logged and repeated in the next round. The fixtures of `readergroup.testing` call this as the
        clock moves. On any other clock background threads do this work.

        Returns:
            The time on ``clock.monotonic()`` when the next round is due.
        """
        groups = [self.groups.step] if "groups" in self._parts else []
        opened = list(self._opened.values())
        return step_each([*groups, *(self._step_of(each) for each in opened if isinstance(each, Stepped))])

    def _step_of(self, opened: Stepped) -> Callable[[], float]:
        return opened.handle_queued if isinstance(opened, sync.EventProcessor) else opened.step

    def close(self) -> None:
        """Close all objects that this client opened. Does nothing in a forked child.

        Can be called twice, and by several threads at once: all return when it is closed.
        """
        if os.getpid() != self._process_id:
            return  # a forked child: the objects belong to the parent
        self._closed = True
        with self._closing:
            opened = [*reversed(list(self._opened.values()))]
            opened += [self._parts[name] for name in ("groups", "streams") if name in self._parts]
            closes: list[Callable[[], object]] = [partial(stop_each, opened), *(each.close for each in opened)]
            if self._address is not None:
                closes.append(self.store.close)
            close_each(closes)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with noted(error, "Closing the client"):
            try:
                self.close()
            except Exception:
                raise
            except BaseException:  # interrupted: the caller does not repeat it
                self.close()
                raise

    def __repr__(self) -> str:
        return f"Client({self.store.url!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        if self._address is None or not self.store.guarantees.many_processes:
            raise InvalidArgumentError(
                "a client can be pickled only if it was opened by a URL that other processes can use",
                url=self.store.url,
            )
        return _reconnect, (self._address, self.timeout, self.state_limit_bytes)


def _reconnect(url: str, timeout: float, state_limit_bytes: int) -> Client:
    return connect(url, timeout=timeout, state_limit_bytes=state_limit_bytes, must_exist=True)
