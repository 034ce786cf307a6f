"""`connect` opens a store for asyncio; its `Client` has the names of `readergroup.Client`."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from types import TracebackType, UnionType
from typing import TYPE_CHECKING, Any, Self, TypeVar, Unpack, overload
from weakref import WeakValueDictionary

from pydantic import BaseModel

import synchronizer as sync
from synchronizer import Clock, InvalidArgumentError, SegmentStore, State, Update
from synchronizer.arguments import check_type
from synchronizer.clock import is_manual
from synchronizer.threads.background import starting

from ..client import DEFAULT_TIMEOUT_SECONDS
from ..client import Client as SyncClient
from ..client import connect as connect_sync
from ..closable import noted
from ..forms import refuses_plain
from ..streams.event_time.defaults import EVENT_TIME_TIMEOUT_SECONDS
from ..streams.event_time.noting import EventTimeOf
from ..streams.serializers import Serializer, serializer_or_bytes
from .calls import Calls, retrieve
from .coordination import Barrier, HeldLock, LeaderElection, Membership, TaskLock
from .facade import Block, Opening
from .groups import ReaderGroupManager
from .listeners import LoopHandler, on_loop
from .queues import EventProcessor, EventQueue
from .state import SharedConfig, SharedCounter, SharedMap, SharedSet, StateSynchronizer
from .streams import BatchClient, DeadLetters, StreamManager
from .writer import EventWriter

if TYPE_CHECKING:
    from ..telemetry.snapshot import Telemetry

F = TypeVar("F")
M = TypeVar("M", bound=BaseModel)
S = TypeVar("S", bound=State)
T = TypeVar("T")
W = TypeVar("W")


def connect(url: str | None = None, **options: Any) -> Opening[Client]:
    """Open a client for asyncio: ``async with connect(url) as client``, or ``client = await connect(url)``.

    Args:
        url: The address of the store, as for `readergroup.connect`. Default: the environment variable READERGROUP_URL.
        **options: The other arguments of `readergroup.connect`. A ``clock`` must run by itself.

    Raises:
        ReaderGroupError: As `readergroup.connect`.

    Examples:
        >>> async with connect("memory://") as client:
        ...     await (await client.counter("visits")).add(1)
    """
    return Opening(partial(_connect, url, options))


async def _connect(url: str | None, options: dict[str, Any]) -> Client:
    calls = Calls()
    client = None
    try:
        client = await calls.run(partial(connect_sync, url, **options), undo=lambda client: client.close())
        return Client.of(client, calls)
    except BaseException:
        if client is not None:
            calls.start(client.close)
        calls.end_threads()
        raise


@refuses_plain
class Client:
    """A store with its streams (``streams``), reader groups (``groups``) and bulk reads (``batch``), for one loop.

    Tasks may share it. Closing the client closes all objects that it opened, and ends its threads; it closes the store
    only if `connect` opened it.

    Args:
        store: The store, borrowed from the caller.
        timeout: Seconds that a call may take unless it has its own ``timeout``. Default: 30.
        **options: The other arguments of `readergroup.Client`. A ``clock`` must run by itself.

    Raises:
        InvalidArgumentError: An argument has the wrong type or is out of range.
    """

    def __init__(self, store: SegmentStore, *, timeout: float = DEFAULT_TIMEOUT_SECONDS, **options: Any) -> None:
        self._begin(SyncClient(store, timeout=timeout, **options), Calls())

    @classmethod
    def of(cls, client: SyncClient, calls: Calls) -> Self:
        """Return a face of this client, which it owns."""
        made = cls.__new__(cls)
        made._begin(client, calls)
        return made

    def _begin(self, client: SyncClient, calls: Calls) -> None:
        if is_manual(client.clock):
            raise InvalidArgumentError(
                "asyncio needs a clock that runs by itself; use the synchronous client with a manual clock"
            )
        self._sync = client
        self._calls = calls
        calls.timeout = client.timeout
        # The locks that a task holds or waits for.
        self._locks: WeakValueDictionary[tuple[type[sync.Lock], str], TaskLock] = WeakValueDictionary()
        self._closing: asyncio.Future[None] | None = None
        self.streams = StreamManager(client.streams, calls)
        self.groups = ReaderGroupManager(client.groups, calls)
        self.batch = BatchClient(client.batch, calls)

    @property
    def store(self) -> SegmentStore:
        """The store. Its methods block."""
        return self._sync.store

    @property
    def timeout(self) -> float:
        """Seconds that a call may take unless it has its own ``timeout``."""
        return self._sync.timeout

    @property
    def state_limit_bytes(self) -> int:
        """The largest size of one state."""
        return self._sync.state_limit_bytes

    @property
    def clock(self) -> Clock:
        """The clock for leases, pauses and deadlines."""
        return self._sync.clock

    def telemetry(self) -> Telemetry:
        """Return what this client has done in this process so far. Never waits."""
        return self._sync.telemetry()

    def _opening(self, open: Callable[[], W], facade: Callable[[W, Calls], F]) -> Opening[F]:
        return Opening(partial(self._open, open, facade))

    async def _open(self, open: Callable[[], W], facade: Callable[[W, Calls], F]) -> F:
        opened = await self._calls.run(open, undo=_close)
        return facade(opened, self._calls)

    # ------------------------------------------------------------------ streams

    @overload
    def writer(
        self,
        stream: str,
        *,
        event_time: EventTimeOf[bytes] | None = None,
        event_time_timeout_seconds: float = ...,
        timeout: float | None = None,
        max_event_bytes: int | None = None,
    ) -> Opening[EventWriter[bytes]]: ...
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
    ) -> Opening[EventWriter[T]]: ...
    def writer(
        self,
        stream: str,
        *,
        serializer: Serializer[Any] | None = None,
        event_time: EventTimeOf[Any] | None = None,
        event_time_timeout_seconds: float = EVENT_TIME_TIMEOUT_SECONDS,
        timeout: float | None = None,
        max_event_bytes: int | None = None,
    ) -> Opening[EventWriter[Any]]:
        """Open a writer of the stream. Leaving its ``async with`` block stores all events that were written.

        Args:
            stream: The stream, ``scope/name``.
            serializer: Turns values into bytes, on the event loop. Default: events are bytes.
            event_time: As of `Client.writer`. A function runs on the event loop.
            event_time_timeout_seconds: As of `Client.writer`, up to a day. Default: a minute.
            timeout: Seconds that a ``flush`` or a ``write`` without space waits. Default: the client's.
            max_event_bytes: The largest event that ``write`` takes, as of `Client.writer`. A writer of events over
                8 MiB writes each event in a thread.

        Raises:
            InvalidArgumentError: ``event_time_timeout_seconds`` or ``max_event_bytes`` is outside its limits.
            NotFoundError: The stream does not exist.
            SealedError: The stream is sealed and takes no events.
        """
        open = partial(
            self._sync.writer,
            stream,
            serializer=serializer_or_bytes(serializer),
            event_time=event_time,
            event_time_timeout_seconds=event_time_timeout_seconds,
            timeout=timeout,
            max_event_bytes=max_event_bytes,
        )
        return self._opening(open, EventWriter)

    def dead_letters(self, stream: str | None = None, *, queue: str | None = None) -> DeadLetters:
        """Return the dead letters in the stream, which pools have written, or of a queue. See `Client.dead_letters`."""
        return DeadLetters(self._sync.dead_letters(stream, queue=queue), self._calls)

    # ------------------------------------------------------------------ shared state

    def synchronizer(
        self, name: str, *, initial: S, updates: Iterable[type[Update[S]]]
    ) -> Opening[StateSynchronizer[S]]:
        """Open the shared state ``name``; store ``initial`` if it has no value yet. See `Client.synchronizer`."""
        open = partial(self._sync.synchronizer, name, initial=initial, updates=updates)
        return self._opening(open, StateSynchronizer)

    def shared_map(self, name: str, value_type: type[T] | UnionType) -> Opening[SharedMap[T]]:
        """Open the shared mapping ``name`` from ``str`` to values of ``value_type``. See `Client.shared_map`."""
        open: Callable[[], sync.SharedMap[T]] = partial(self._sync.shared_map, name, value_type)
        return self._opening(open, SharedMap)

    def shared_set(self, name: str, item_type: type[T] | UnionType) -> Opening[SharedSet[T]]:
        """Open the shared set ``name`` of items of ``item_type``. See `Client.shared_set`."""
        open: Callable[[], sync.SharedSet[T]] = partial(self._sync.shared_set, name, item_type)
        return self._opening(open, SharedSet)

    def shared_config(self, name: str, model: type[M]) -> Opening[SharedConfig[M]]:
        """Open the shared configuration ``name``, with the fields of a pydantic model. See `Client.shared_config`."""
        open: Callable[[], sync.SharedConfig[M]] = partial(self._sync.shared_config, name, model)
        return self._opening(open, SharedConfig)

    def counter(self, name: str) -> Opening[SharedCounter]:
        """Open the shared counter ``name``: a 64-bit integer that starts at 0."""
        return self._opening(partial(self._sync.counter, name), SharedCounter)

    # ------------------------------------------------------------------ queues

    def event_queue(self, name: str, **options: Any) -> Opening[EventQueue]:
        """Open the durable queue ``name`` to add events. The options are those of `Client.event_queue`."""
        return self._opening(partial(self._sync.event_queue, name, **options), EventQueue)

    def event_processor(
        self,
        name: str,
        handler: Callable[[sync.QueuedEvent], object] | None = None,
        **options: Unpack[sync.EventProcessorOptions],
    ) -> Opening[EventProcessor]:
        """Open a processor that calls ``handler`` with each event of the durable queue ``name``, in order.

        Args:
            name: The name of the queue in the store.
            handler: Takes one event. An ``async def`` runs on this event loop, any other function in a thread.
            **options: As for `Client.event_processor`. A ``batch_handler`` may be an ``async def``, too.
        """
        return Opening(partial(self._open_processor, name, handler, options))

    async def _open_processor(self, name: str, handler: Any, options: Any) -> EventProcessor:
        handler = None if handler is None else on_loop(handler, LoopHandler)
        if options.get("batch_handler") is not None:
            options = {**options, "batch_handler": on_loop(options["batch_handler"], LoopHandler)}
        return await self._open(partial(self._sync.event_processor, name, handler, **options), EventProcessor)

    # ------------------------------------------------------------------ coordination

    def membership(self, name: str, member_id: str, *, member_timeout_seconds: float = 10.0) -> Opening[Membership]:
        """Open a member of the membership ``name``, which joins when its ``async with`` block starts.

        Awaited without a block, it joins with ``join``. The arguments are those of `Client.membership`.
        """
        open = partial(self._sync.membership, name, member_id, member_timeout_seconds=member_timeout_seconds)
        return self._opening(open, Membership)

    def leader_election(
        self, name: str, candidate_id: str, *, member_timeout_seconds: float = 10.0
    ) -> Opening[LeaderElection]:
        """Open a candidate in the election ``name``. It competes once it campaigns. See `Client.leader_election`."""
        open = partial(self._sync.leader_election, name, candidate_id, member_timeout_seconds=member_timeout_seconds)
        return self._opening(open, LeaderElection)

    def barrier(
        self, name: str, parties: int, *, party: str | None = None, member_timeout_seconds: float = 10.0
    ) -> Opening[Barrier]:
        """Open the barrier ``name``, at which ``parties`` tasks or processes wait for each other."""
        open = partial(self._sync.barrier, name, parties, party=party, member_timeout_seconds=member_timeout_seconds)
        return self._opening(open, Barrier)

    def lock(self, name: str, *, timeout: float | None = None, member_timeout_seconds: float = 10.0) -> Block[HeldLock]:
        """Hold the lock ``name`` during the block. A task that is cancelled while it waits gives up its place.

        Tasks of this client wait in order, and the first of them waits in the queue that all processes share.

        Args:
            name: The name of the lock in the store.
            timeout: Seconds to wait for the lock; ``math.inf`` waits as long as it takes. Default: the client's.
            member_timeout_seconds: The lease, as for `Client.lock`. Default: 10.

        Raises:
            DeadlineExceededError: Others held the lock until the timeout; the error names them.
            InvalidArgumentError: This task holds the lock already.
        """
        return Block(partial(self._acquire, sync.Lock, name, timeout, member_timeout_seconds=member_timeout_seconds))

    def semaphore(
        self, name: str, *, permits: int, timeout: float | None = None, member_timeout_seconds: float = 10.0
    ) -> Block[HeldLock]:
        """Hold one permit of the semaphore ``name`` during the block. Waits as `lock` does.

        Args:
            name: The name of the semaphore in the store.
            permits: How many may hold it at a time; all processes give the same number.
            timeout: Seconds to wait for a permit; ``math.inf`` waits as long as it takes. Default: the client's.
            member_timeout_seconds: The lease, as for `Client.lock`. Default: 10.

        Raises:
            DeadlineExceededError: Others held all permits until the timeout.
            InvalidArgumentError: This task holds a permit already, or the semaphore has another number of permits.
        """
        options = {"permits": permits, "member_timeout_seconds": member_timeout_seconds}
        return Block(partial(self._acquire, sync.Semaphore, name, timeout, **options))

    async def _acquire(self, kind: type[sync.Lock], name: str, timeout: float | None, **options: Any) -> HeldLock:
        check_type(name, str, "name")
        lock = self._locks.setdefault((kind, name), TaskLock(self._calls))
        return await lock.acquire(partial(self._sync._lock, kind, name, **options), timeout)

    # ------------------------------------------------------------------ the end

    async def close(self) -> None:
        """Close all objects that this client opened, and end its threads. Closing twice is no error.

        Writers first store their events, also those of a cancelled `EventWriter.write_batch`. Waits up to 5 s for calls
        that wait for the store. A cancelled call goes on in its thread.

        Raises:
            ReaderGroupError: As `EventWriter.close`, of a writer that could not store its events in time.
        """
        while True:
            if self._closing is None or self._closing.cancelled():  # as by a program that cancels all its tasks
                self._closing = asyncio.ensure_future(self._close())
                self._closing.add_done_callback(retrieve)
            closing = self._closing
            if not closing.done():  # perhaps in another loop, which has ended
                await asyncio.wait([closing])
            if not closing.cancelled():
                return closing.result()

    async def _close(self) -> None:
        try:
            await asyncio.gather(*(each.close() for each in self._calls.closed_first))
        finally:
            await self._close_rest()

    async def _close_rest(self) -> None:
        self._calls.end_waits()
        loop = asyncio.get_running_loop()
        closed: asyncio.Future[None] = loop.create_future()

        def close() -> None:
            error: BaseException | None = None
            try:
                self._sync.close()
            except BaseException as raised:
                error = raised
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(_end, closed, error)

        # A thread of its own, because the others may all wait for the store.
        with starting("readergroup.aio close"):
            run = partial(contextvars.copy_context().run, close)
            threading.Thread(target=run, name="readergroup.aio close", daemon=True).start()
        try:
            await closed
        finally:
            await self._calls.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with noted(error, "Closing the client"):
            await self.close()

    def __repr__(self) -> str:
        return f"aio.{self._sync!r}"


def _close(opened: Any) -> None:
    opened.close()


def _end(closed: asyncio.Future[None], error: BaseException | None) -> None:
    if not closed.done():
        if error is None:
            closed.set_result(None)
        else:
            closed.set_exception(error)
