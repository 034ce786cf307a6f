"""`connect`: one store, and everything that is done on it."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from types import UnionType
from typing import Any, Final, Self, TypeVar, Unpack, overload
from weakref import WeakKeyDictionary, WeakValueDictionary

from pydantic import BaseModel

from synchronizer import (
    DEFAULT_STATE_LIMIT_BYTES,
    MAX_OUTSTANDING_BYTES,
    Barrier,
    Clock,
    EventProcessor,
    EventProcessorOptions,
    EventQueue,
    HeldLock,
    InvalidArgumentError,
    LeaderElection,
    Lock,
    Membership,
    QueuedEvent,
    SegmentStore,
    Semaphore,
    SharedConfig,
    SharedCounter,
    SharedMap,
    SharedSet,
    State,
    StateSynchronizer,
    SynchronizerOptions,
    Update,
    open_store,
)
from synchronizer.arguments import check_count, check_duration, check_type
from synchronizer.clock import clock_or_system, is_manual
from synchronizer.liveness.timing import observe_interval
from synchronizer.threads.stepping import Stepped, step_each

from .batch.client import BatchClient
from .group.reader_group import ReaderGroupManager
from .streams.manager import Closable, StreamManager
from .streams.serializers import Serializer, serializer_or_bytes
from .streams.writing.writer import EventWriter

M = TypeVar("M", bound=BaseModel)
S = TypeVar("S", bound=State)
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
    """The client of the store at ``url``, or at the address in the environment variable READERGROUP_URL.

    ``timeout`` is the default of all calls, in seconds. ``sqlite:///shop.db`` is a file in the present folder,
    ``sqlite:////var/shop.db`` one with its whole path, ``memory://`` a store of this client's own;
    ``postgresql://user@host/db`` and ``nats://host:4222`` are for many machines, and take options: docs/operations.md.

    A store that is not there is made: the log says so at INFO. With ``must_exist`` it is not made, and `NotFoundError`
    is raised, so that an address that is misspelt does not look like an empty store.

    ``state_limit_bytes`` is how large the state of a group, the metadata of a stream, or a shared state may become;
    all processes should say the same. What would exceed it raises `StateTooLargeError`.
    """
    check_duration(timeout, "timeout")
    check_count(state_limit_bytes, "state_limit_bytes")
    if url is None:
        url = os.environ.get("READERGROUP_URL")
        if not url:
            raise InvalidArgumentError("give connect a URL such as 'sqlite:///shop.db', or set READERGROUP_URL")
    clock = clock_or_system(clock)
    store = open_store(url, clock=clock, must_exist=must_exist)
    client = Client(store, timeout=timeout, state_limit_bytes=state_limit_bytes, clock=clock)
    client._address = url
    return client


class Client:
    """A store with its streams and reader groups. Threads may share it; it pickles as its address, and reconnects."""

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
        # As for groups: on a clock that is moved by hand nothing runs in the background.
        self._in_background = not is_manual(self.clock)
        self.streams = StreamManager(store, clock=self.clock, timeout=timeout, state_limit_bytes=state_limit_bytes)
        self.groups = ReaderGroupManager(self)
        self.batch = BatchClient(self.streams)
        self._address: str | None = None  # of a store that this client opened, and closes
        # Held weakly: a writer that is closed is to be forgotten. One that is open is held by its thread.
        self._opened: WeakValueDictionary[int, Closable] = WeakValueDictionary()
        # How often each of those that were opened renews its turn.
        self._renewal_seconds: WeakKeyDictionary[EventProcessor, float] = WeakKeyDictionary()
        # Those that are held or waited for.
        self._locks: WeakValueDictionary[tuple[type[Lock], str], Lock] = WeakValueDictionary()
        self._guard = threading.Lock()
        self._process_id = os.getpid()

    @overload
    def writer(self, stream: str, *, timeout: float | None = None) -> EventWriter[bytes]: ...
    @overload
    def writer(self, stream: str, *, serializer: Serializer[T], timeout: float | None = None) -> EventWriter[T]: ...
    def writer(
        self, stream: str, *, serializer: Serializer[Any] | None = None, timeout: float | None = None
    ) -> EventWriter[Any]:
        """A writer of the stream, a context manager: leaving it in any way stores everything that was written."""
        return EventWriter(self.streams, stream, serializer=serializer_or_bytes(serializer), timeout=timeout)

    def synchronizer(self, name: str, *, initial: S, updates: Iterable[type[Update[S]]]) -> StateSynchronizer[S]:
        """The shared state of this name, begun with ``initial`` if nothing is stored."""
        check_type(name, str, "name")
        return self._keep(
            StateSynchronizer(self.store, f"state/{name}", initial=initial, updates=updates, **self._state_options)
        )

    def shared_map(self, name: str, value_type: type[T] | UnionType) -> SharedMap[T]:
        """The mapping of this name from ``str`` to values of this type."""
        return self._keep(SharedMap(self.store, name, value_type, **self._state_options))

    def shared_set(self, name: str, item_type: type[T] | UnionType) -> SharedSet[T]:
        """The set of this name, of items of this type."""
        return self._keep(SharedSet(self.store, name, item_type, **self._state_options))

    def shared_config(self, name: str, model: type[M]) -> SharedConfig[M]:
        """The configuration of this name, whose fields are those of the pydantic model."""
        return self._keep(SharedConfig(self.store, name, model, **self._state_options))

    def counter(self, name: str) -> SharedCounter:
        """The whole number of this name, 0 to begin with."""
        return self._keep(SharedCounter(self.store, name, **self._state_options))

    def event_queue(self, name: str, *, max_outstanding_bytes: int = MAX_OUTSTANDING_BYTES) -> EventQueue:
        """The durable queue of this name, to add events to. An `event_processor` handles them, here or elsewhere."""
        return self._keep(
            EventQueue(
                self.store, name, max_outstanding_bytes=max_outstanding_bytes, clock=self.clock, timeout=self.timeout
            )
        )

    def event_processor(
        self,
        name: str,
        handler: Callable[[QueuedEvent], object] | None = None,
        **options: Unpack[EventProcessorOptions],
    ) -> EventProcessor:
        """The durable queue of this name, whose events ``handler`` is called with. `EventProcessor` tells the options.

        Of all processes that have one of a name, one at a time handles the events.
        """
        timeout_seconds = options.setdefault("consumer_timeout_seconds", 10.0)
        processor = EventProcessor(
            self.store,
            name,
            handler,
            **options,
            clock=self.clock,
            timeout=self.timeout,
            threads=self._in_background,
        )
        self._renewal_seconds[processor] = observe_interval(timeout_seconds)
        return self._keep(processor)

    def membership(self, name: str, member_id: str, *, member_timeout_seconds: float = 10.0) -> Membership:
        """A member of this name, from its ``join``, or the beginning of its block, on. It ends with the client."""
        return self._keep(
            Membership(
                self.store,
                name,
                member_id,
                member_timeout_seconds=member_timeout_seconds,
                threads=self._in_background,
                **self._state_options,
            )
        )

    def leader_election(self, name: str, candidate_id: str, *, member_timeout_seconds: float = 10.0) -> LeaderElection:
        """A candidate to be the leader of this name. It is one from its campaign on, and ends with the client."""
        return self._keep(
            LeaderElection(
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
    ) -> Iterator[HeldLock]:
        """Hold the lock of this name in the block; `DeadlineExceededError` if it could not be had in time."""
        yield from _hold(self._lock(Lock, name, member_timeout_seconds=member_timeout_seconds), timeout)

    @contextmanager
    def semaphore(
        self, name: str, *, permits: int, timeout: float | None = None, member_timeout_seconds: float = 10.0
    ) -> Iterator[HeldLock]:
        """Hold one of so many permits in the block; `DeadlineExceededError` if none could be had in time."""
        check_count(permits, "permits")
        semaphore = self._lock(Semaphore, name, permits=permits, member_timeout_seconds=member_timeout_seconds)
        yield from _hold(semaphore, timeout)

    def barrier(
        self, name: str, parties: int, *, party: str | None = None, member_timeout_seconds: float = 10.0
    ) -> Barrier:
        """The barrier of this name, at which so many wait for each other. ``party`` names one of them."""
        return self._keep(
            Barrier(
                self.store,
                name,
                parties,
                party=party,
                member_timeout_seconds=member_timeout_seconds,
                threads=self._in_background,
                **self._state_options,
            )
        )

    def _lock(self, kind: type[Lock], name: str, **options: Any) -> Lock:
        check_type(name, str, "name")
        check_duration(options["member_timeout_seconds"], "member_timeout_seconds", above_zero=True, finite=True)
        with self._guard:  # one for all threads, so that it knows which of them hold it
            lock = self._locks.get((kind, name))
            if lock is None:
                lock = kind(self.store, name, threads=self._in_background, **self._state_options, **options)
                self._locks[kind, name] = self._keep(lock)
            elif lock.permits != options.get("permits", 1):
                raise InvalidArgumentError(
                    "it is in use here with another number of permits; use that",
                    name=name,
                    permits=lock.permits,
                    given=options["permits"],
                )
            return lock

    @property
    def _state_options(self) -> SynchronizerOptions:
        return {"clock": self.clock, "timeout": self.timeout, "state_limit_bytes": self.state_limit_bytes}

    def _keep(self, opened: C) -> C:
        """``opened``, to be closed with the client."""
        self._opened[id(opened)] = opened
        return opened

    def step(self) -> float:
        """On a clock that ``is_manual``: one round of what the threads of all that was opened here would do.

        That is to renew leases, to assign segments, to handle what is in queues, and to call listeners, all in the
        thread that calls this. Returns when, on the clock, the next round is due. What the store did not answer is
        logged, and repeated with the next round. The fixtures of `readergroup.testing` call it as the clock moves. On
        any other clock the threads do all of this themselves.
        """
        opened = list(self._opened.values())
        return step_each([self.groups.step, *(self._step_of(each) for each in opened if isinstance(each, Stepped))])

    def _step_of(self, opened: Stepped) -> Callable[[], float]:
        return partial(self._handle_queued, opened) if isinstance(opened, EventProcessor) else opened.step

    def _handle_queued(self, processor: EventProcessor) -> float:
        """Its step is one batch, of which it returns the size."""
        while processor.step():
            pass
        return self.clock.monotonic() + self._renewal_seconds[processor]

    def close(self) -> None:
        """Close everything that was opened with this client. Twice is no error. In a forked child it does nothing."""
        if os.getpid() != self._process_id:
            return  # a forked child: what was opened is the parent's
        with ExitStack() as closing:  # each of them, whatever the others raise; the last one first
            if self._address is not None:
                closing.callback(self.store.close)
            closing.callback(self.streams.close)
            closing.callback(self.groups.close)
            for opened in list(self._opened.values()):
                closing.callback(opened.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Client({self.store.url!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        if self._address is None or not self.store.guarantees.many_processes:
            raise InvalidArgumentError(
                "only the client of an address that other processes reach can go to another process",
                url=self.store.url,
            )
        return _reconnect, (self._address, self.timeout, self.state_limit_bytes)


def _hold(lock: Lock, timeout: float | None) -> Iterator[HeldLock]:
    """Hold the lock while the generator stands still, and let go of it whenever it ends.

    A ``with`` could be interrupted where it calls `HeldLock.__exit__`.
    """
    held = lock.acquire(timeout=timeout)
    try:
        yield held
    finally:
        try:
            held.release()
        except BaseException:  # interrupted: others would wait for the lease
            held.release()
            raise


def _reconnect(url: str, timeout: float, state_limit_bytes: int) -> Client:
    return connect(url, timeout=timeout, state_limit_bytes=state_limit_bytes)
