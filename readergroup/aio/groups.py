"""Reader groups on the event loop."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeVar, overload

from ..group.lag import STALLED_SECONDS
from ..group.lag_notifier import LagNotification
from ..group.manager import ReaderGroupManager as SyncReaderGroupManager
from ..group.model.checkpoint import Checkpoint
from ..group.model.config import ReaderGroupConfig
from ..group.model.state import ReaderGroupState
from ..group.notifiers import (
    CheckpointNotification,
    EndOfDataNotification,
    ReaderNotification,
    RetentionNotification,
    SegmentNotification,
)
from ..group.reader_group import ReaderGroup as SyncReaderGroup
from ..scaling.handlers import (
    HandleArrow,
    HandleArrowWith,
    HandleBatch,
    HandleBatchWith,
    HandleEvent,
    HandleEventWith,
    Order,
)
from ..streams.config import SegmentId
from ..streams.serializers import Serializer
from .calls import Calls
from .facade import AwaitedProperty, Facade, Opening, Plain, awaited, iterated
from .notifiers import Notifier
from .pool import ReaderPool, open_pool
from .reader import Reader, open_reader
from .state import StateSynchronizer

if TYPE_CHECKING:
    from ..scaling.policy import ReaderScalingPolicy
    from ..scaling.retry import RetryPolicy
    from ..sinks.sql_sink import SqlSink

T = TypeVar("T")

SegmentCallback = Callable[[SegmentId], object]
CheckpointCallback = Callable[[str], object]


class ReaderGroup(Facade[SyncReaderGroup]):
    """A reader group. Tasks may share it."""

    def __init__(self, wrapped: SyncReaderGroup, calls: Calls) -> None:
        super().__init__(wrapped, calls)
        self.synchronizer: StateSynchronizer[ReaderGroupState] = StateSynchronizer(wrapped.synchronizer, calls)
        self.segment_notifier: Notifier[SegmentNotification] = Notifier(wrapped.segment_notifier, calls)
        self.end_of_data_notifier: Notifier[EndOfDataNotification] = Notifier(wrapped.end_of_data_notifier, calls)
        self.reader_notifier: Notifier[ReaderNotification] = Notifier(wrapped.reader_notifier, calls)
        self.checkpoint_notifier: Notifier[CheckpointNotification] = Notifier(wrapped.checkpoint_notifier, calls)
        self.retention_notifier: Notifier[RetentionNotification] = Notifier(wrapped.retention_notifier, calls)

    def lag_notifier(
        self,
        *,
        threshold_seconds: float | None = 60.0,
        threshold_events: int | None = None,
        stalled_seconds: float | None = STALLED_SECONDS,
    ) -> Notifier[LagNotification]:
        """Return the notifier of a lag that crosses a threshold, and of segments that stall.

        Args:
            threshold_seconds: As of `ReaderGroup.lag_notifier`, and so are the others.
            threshold_events: The events behind.
            stalled_seconds: For how long a position stays where it is.
        """
        return Notifier(
            self._wrapped.lag_notifier(
                threshold_seconds=threshold_seconds, threshold_events=threshold_events, stalled_seconds=stalled_seconds
            ),
            self._calls,
        )

    name = Plain(lambda group: str(group.name))
    online_readers = awaited(SyncReaderGroup.online_readers)
    distribution = awaited(SyncReaderGroup.distribution)
    lag = awaited(SyncReaderGroup.lag)
    stream_cuts = awaited(SyncReaderGroup.stream_cuts)
    remove_reader = awaited(SyncReaderGroup.remove_reader)
    scaling_decision = awaited(SyncReaderGroup.scaling_decision)
    checkpoint = awaited(SyncReaderGroup.checkpoint, waits=True)
    cancel_checkpoint = awaited(SyncReaderGroup.cancel_checkpoint)
    generate_stream_cuts = awaited(SyncReaderGroup.generate_stream_cuts, waits=True)
    reset = awaited(SyncReaderGroup.reset)
    update_retention_cuts = awaited(SyncReaderGroup.update_retention_cuts)
    checkpoints: AwaitedProperty[Mapping[str, Checkpoint]] = AwaitedProperty(lambda group: group.checkpoints)

    @property
    def state(self) -> ReaderGroupState:
        """The replicated state as far as this process has applied its log. Immutable."""
        return self._wrapped.state

    @property
    def config(self) -> ReaderGroupConfig:
        return self._wrapped.config

    async def configure(self, **changes: Any) -> ReaderGroupConfig:
        """Change fields of the config while the group runs, and return the new config.

        Args:
            **changes: Fields of `ReaderGroupConfig`. ``start`` is for added streams only. ``end`` replaces all ends.
        """
        return await self._calls.run(partial(self._wrapped.configure, **changes))

    @overload
    def reader(
        self,
        reader_id: str | None = None,
        *,
        auto_commit: bool = True,
        on_assign: SegmentCallback | None = None,
        on_release: SegmentCallback | None = None,
        on_checkpoint: CheckpointCallback | None = None,
        sink: SqlSink | None = None,
    ) -> Opening[Reader[bytes]]: ...
    @overload
    def reader(
        self,
        reader_id: str | None = None,
        *,
        serializer: Serializer[T],
        auto_commit: bool = True,
        on_assign: SegmentCallback | None = None,
        on_release: SegmentCallback | None = None,
        on_checkpoint: CheckpointCallback | None = None,
        sink: SqlSink | None = None,
    ) -> Opening[Reader[T]]: ...
    def reader(
        self,
        reader_id: str | None = None,
        *,
        serializer: Serializer[Any] | None = None,
        auto_commit: bool = True,
        on_assign: SegmentCallback | None = None,
        on_release: SegmentCallback | None = None,
        on_checkpoint: CheckpointCallback | None = None,
        sink: SqlSink | None = None,
    ) -> Opening[Reader[Any]]:
        """Open a reader, which joins the group: ``async with group.reader() as reader``, or await it.

        The callbacks, plain functions or ``async def``, run on this event loop, between two events and only while a
        task awaits a read. No event is handed out until they return. What they raise leaves the read, as with
        `readergroup.ReaderGroup.reader`.

        Args:
            reader_id: Replaces a reader of the same id. Default: host, process and a random part.
            serializer: Decodes the events. Default: bytes.
            auto_commit: False: only `Reader.commit` counts events as processed.
            on_assign: Called with a segment before its first event is handed out.
            on_release: Called with a segment before the reader releases or completes it.
            on_checkpoint: Called with the name of a checkpoint.
            sink: A `SqlSink` with an asynchronous database. The reader takes each segment over in its database, and
                continues behind what is stored there. Use `SqlSink.transaction` for what it reads.

        Raises:
            ReaderGroupError: As `ReaderGroup.reader`.
        """
        return Opening(
            partial(
                open_reader,
                self._wrapped,
                self._calls,
                reader_id,
                serializer=serializer,
                auto_commit=auto_commit,
                on_assign=on_assign,
                on_release=on_release,
                on_checkpoint=on_checkpoint,
                sink=sink,
            )
        )

    @overload
    def pool(
        self,
        handle: HandleEvent[bytes] | None = None,
        *,
        readers: int | ReaderScalingPolicy = 1,
        workers: Literal["thread", "process"] = "thread",
        retry: RetryPolicy | None = None,
        handle_batch: HandleBatch[bytes] | None = None,
        handle_arrow: HandleArrow | None = None,
        columns: Sequence[str] | None = None,
        concurrency: int = 1,
        order: Order | None = None,
        handler_timeout_seconds: float | None = None,
        sink: None = None,
    ) -> Opening[ReaderPool[bytes]]: ...
    @overload
    def pool(
        self,
        handle: HandleEvent[T] | None = None,
        *,
        serializer: Serializer[T],
        readers: int | ReaderScalingPolicy = 1,
        workers: Literal["thread", "process"] = "thread",
        retry: RetryPolicy | None = None,
        handle_batch: HandleBatch[T] | None = None,
        concurrency: int = 1,
        order: Order | None = None,
        handler_timeout_seconds: float | None = None,
        sink: None = None,
    ) -> Opening[ReaderPool[T]]: ...
    @overload
    def pool(
        self,
        handle: HandleEventWith[bytes] | None = None,
        *,
        sink: SqlSink,
        readers: int | ReaderScalingPolicy = 1,
        workers: Literal["thread", "process"] = "thread",
        retry: RetryPolicy | None = None,
        handle_batch: HandleBatchWith[bytes] | None = None,
        handle_arrow: HandleArrowWith | None = None,
        columns: Sequence[str] | None = None,
        concurrency: int = 1,
        order: Order | None = None,
        handler_timeout_seconds: float | None = None,
    ) -> Opening[ReaderPool[bytes]]: ...
    @overload
    def pool(
        self,
        handle: HandleEventWith[T] | None = None,
        *,
        sink: SqlSink,
        serializer: Serializer[T],
        readers: int | ReaderScalingPolicy = 1,
        workers: Literal["thread", "process"] = "thread",
        retry: RetryPolicy | None = None,
        handle_batch: HandleBatchWith[T] | None = None,
        concurrency: int = 1,
        order: Order | None = None,
        handler_timeout_seconds: float | None = None,
    ) -> Opening[ReaderPool[T]]: ...
    def pool(
        self,
        handle: HandleEvent[Any] | HandleEventWith[Any] | None = None,
        *,
        serializer: Serializer[Any] | None = None,
        readers: int | ReaderScalingPolicy = 1,
        workers: Literal["thread", "process"] = "thread",
        retry: RetryPolicy | None = None,
        handle_batch: HandleBatch[Any] | HandleBatchWith[Any] | None = None,
        handle_arrow: HandleArrow | HandleArrowWith | None = None,
        columns: Sequence[str] | None = None,
        concurrency: int = 1,
        order: Order | None = None,
        handler_timeout_seconds: float | None = None,
        sink: SqlSink | None = None,
    ) -> Opening[ReaderPool[Any]]:
        """Open a pool, which works during its ``async with`` block. Awaited without a block, it works in its `run`.

        Args:
            handle: An ``async def`` runs on this event loop, so it can use this client. A plain function runs in
                threads. With worker processes, each process runs it, an ``async def`` on a loop of the process.
            serializer: Decodes the events. Default: bytes.
            readers: The number of workers, or a policy that sets it.
            workers: "thread" or "process".
            retry: Default: one attempt; a failure ends the pool. With a `DelayedRetry` an event is retried later.
            handle_batch: Like ``handle``, for batches of up to 1,000 events; give one handler.
            handle_arrow: Like ``handle``, for Arrow record batches. Takes no ``serializer``.
            columns: Of the batches of ``handle_arrow``, as of `EventBatch.to_arrow`.
            concurrency: How many events, or batches, each worker handles at once, from 1 to 10,000.
            order: "key", "segment" or "none", as of `ReaderGroup.pool`.
            handler_timeout_seconds: Cancel an ``async def`` after this time, which counts as a failed attempt.
            sink: A `SqlSink`, whose connection the handler gets as its second argument. Its database is asynchronous
                for an ``async def``.

        Raises:
            ReaderGroupError: As `ReaderGroup.pool`.
        """
        return Opening(
            partial(
                open_pool,
                self._wrapped,
                self._calls,
                handle=handle,
                serializer=serializer,
                readers=readers,
                workers=workers,
                retry=retry,
                handle_batch=handle_batch,
                handle_arrow=handle_arrow,
                columns=columns,
                concurrency=concurrency,
                order=order,
                handler_timeout_seconds=handler_timeout_seconds,
                sink=sink,
            )
        )


class ReaderGroupManager(Facade[SyncReaderGroupManager]):
    """Creates, finds and deletes the reader groups of a store."""

    list = iterated(SyncReaderGroupManager.list)
    states = iterated(SyncReaderGroupManager.states)
    delete = awaited(SyncReaderGroupManager.delete)

    async def create(
        self, name: str, *, streams: Sequence[str] | None = None, config: ReaderGroupConfig | None = None, **fields: Any
    ) -> ReaderGroup:
        """Create the group and return it. If it exists with the same config, return it.

        Args:
            name: Letters, digits, ".", "-" and "_".
            streams: The streams to read, each "scope/name".
            config: The whole config, instead of ``streams`` and ``fields``.
            **fields: Other fields of `ReaderGroupConfig`.

        Raises:
            ReaderGroupExistsError: A group of this name exists with another config.
            NotFoundError: One of the streams does not exist.
        """
        create = partial(self._wrapped.create, name, streams=streams, config=config, **fields)
        return ReaderGroup(await self._calls.run(create), self._calls)

    async def get(self, name: str) -> ReaderGroup:
        """Return the group. Raise `NotFoundError` if there is none of this name."""
        return ReaderGroup(await self._calls.run(partial(self._wrapped.get, name)), self._calls)
