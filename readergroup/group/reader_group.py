"""A reader group, as one process handles it."""

from __future__ import annotations

import os
import secrets
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, Protocol, TypeVar, overload
from weakref import WeakSet

from synchronizer import (
    ClosedError,
    Deadline,
    InvalidArgumentError,
    Map,
    SegmentStore,
    StateSynchronizer,
    SystemClock,
)
from synchronizer.arguments import check_type
from synchronizer.backoff import Backoff
from synchronizer.clock import is_manual
from synchronizer.threads.flag import Flag
from synchronizer.threads.loading import loading
from synchronizer.threads.stepping import step_each

from ..closable import close_each, stop_each
from ..record import defaults
from ..scaling.scaled_group import PoolClient
from ..streams.config import SegmentId, StreamCut, check_name
from ..streams.serializers import serializer_or_bytes
from .checkpointing import take_checkpoint
from .configuring import configure
from .lag import STALLED_SECONDS, GroupLag, Movement, group_lag
from .model.checkpoint import Checkpoint
from .model.config import ReaderGroupConfig, new_reader_id
from .model.positions import positions
from .model.state import ReaderGroupState
from .model.updates import SetRetentionCuts
from .starting import ResetTarget, reset
from .updater import GroupUpdater, leases_and_state

if TYPE_CHECKING:  # each method loads what it starts
    from notifications import PollingNotifier

    from ..record.record import NotificationRecord
    from ..record.recorder import NotificationRecording
    from ..scaling.autoscale import Autoscaling, Callback
    from ..scaling.handlers import (
        HandleArrow,
        HandleArrowWith,
        HandleBatch,
        HandleBatchWith,
        HandleEvent,
        HandleEventWith,
        Order,
    )
    from ..scaling.policy import ReaderScalingPolicy, ScalingDecision
    from ..scaling.pool import ReaderPool
    from ..scaling.retry import RetryPolicy
    from ..scaling.scaler import Scaler
    from ..sinks.sql_sink import SqlSink
    from ..streams.event import Position
    from ..streams.serializers import Serializer
    from ..telemetry.counters import GroupCounters
    from .coordinator import ReaderCoordinator
    from .distribution import Distribution
    from .following import CheckpointCallback, Claims, SegmentCallback
    from .lag_notifier import LagNotifier, LagThresholds
    from .notifiers import (
        CheckpointNotifier,
        EndOfDataNotifier,
        ReaderNotifier,
        RetentionNotifier,
        SegmentNotifier,
        StateNotifiers,
    )
    from .reader import EventsInFlight, Reader

R = TypeVar("R", bound="Reader[Any]")
T = TypeVar("T")


class Groups(Protocol):
    """The groups of a client, by name."""

    def get(self, name: str) -> ReaderGroup: ...


class GroupClient(PoolClient, Protocol):
    """The parts of a client that a group uses, those of its pools included."""

    store: SegmentStore
    timeout: float
    state_limit_bytes: int

    @property
    def groups(self) -> Groups: ...


#: How long closing waits for the polls and listeners of all notifiers.
_CLOSE_SECONDS: Final = 5.0


class _Opened(NamedTuple):
    running: Sequence[ReaderPool[Any] | Autoscaling]
    readers: Sequence[Reader[Any]]
    recordings: Sequence[NotificationRecording]


class ReaderGroup:
    """A reader group. Threads may share it. It pickles as the client's address and its name, and reconnects."""

    def __init__(self, client: GroupClient, name: str, synchronizer: StateSynchronizer[ReaderGroupState]) -> None:
        self.name = name
        self.synchronizer = synchronizer
        self._client = client
        self._coordinator: ReaderCoordinator | None = None  # once it has something to do
        self._readers: WeakSet[Reader[Any]] = WeakSet()  # a reader without other references is let go
        self._running: WeakSet[ReaderPool[Any] | Autoscaling] = WeakSet()
        self._recordings: WeakSet[NotificationRecording] = WeakSet()
        self._scalers: dict[ReaderScalingPolicy, Scaler] = {}
        self._closed = False
        self._closing = Flag()  # set when the readers are closed
        self._process_id = os.getpid()
        self._lock = threading.Lock()
        self._state_notifiers: StateNotifiers | None = None  # once one of them is used
        self._lag_notifiers: dict[LagThresholds, LagNotifier] = {}
        self._movement = Movement()

    @property
    def counters(self) -> GroupCounters:
        """What this client has done in the group."""
        return self._updater.counters

    @cached_property
    def _updater(self) -> GroupUpdater:
        return GroupUpdater(self.synchronizer, self._client.streams)

    @property
    def coordinator(self) -> ReaderCoordinator:
        """Shared by the group's readers. On a manual clock it has no threads, and `step` drives it."""
        if self._coordinator is None:
            with loading():
                from .coordinator import ReaderCoordinator

            made = ReaderCoordinator(self._updater, threads=not is_manual(self.synchronizer.clock))
            with self._lock:
                self._coordinator = self._coordinator or made
        return self._coordinator

    # ------------------------------------------------------------------ reading

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
    ) -> Reader[bytes]: ...
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
    ) -> Reader[T]: ...
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
    ) -> Reader[Any]:
        """Open a reader, which joins the group at once. It is a context manager.

        The callbacks run in the reading thread, between two events. What one raises leaves the read, and the next read
        calls it again; an `EndOfDataError` or `DeadlineExceededError` of its own leaves as `HandlerError`. If the store
        did not answer it, the reader waits and calls it again.

        Args:
            reader_id: Replaces a reader of the same id. Default: host, process and a random part.
            serializer: Decodes the events. Default: bytes.
            auto_commit: False: only `Reader.commit` counts events as processed.
            on_assign: Called with a segment before its first event is handed out.
            on_release: Called with a segment before the reader releases or completes it.
            on_checkpoint: Called with the name of a checkpoint. What the application keeps in this call belongs to the
                checkpoint. With ``auto_commit=False``, commit in it.
            sink: A `SqlSink` with a database that is not asynchronous. The reader takes each segment over in its
                database, and continues behind what is stored there. Use `SqlSink.transaction` for what it reads.

        Raises:
            NotFoundError: The group was deleted.
            ClosedError: The client is closed.
            InvalidArgumentError: An exclusive reader has the group.
        """
        with loading():
            from .reader import Reader

        return self.open_reader(
            Reader,
            reader_id,
            serializer=serializer,
            auto_commit=auto_commit,
            on_assign=on_assign,
            on_release=on_release,
            on_checkpoint=on_checkpoint,
            claims=None if sink is None else _claims(sink, self.counters),
        )

    def open_reader(
        self,
        kind: type[R],
        reader_id: str | None,
        *,
        serializer: Serializer[Any] | None,
        auto_commit: bool = True,
        on_assign: SegmentCallback | None = None,
        on_release: SegmentCallback | None = None,
        on_checkpoint: CheckpointCallback | None = None,
        in_flight: EventsInFlight | None = None,
        claims: Claims | None = None,
    ) -> R:
        """`reader`, of this class. Pools use it."""
        opened: list[Reader[Any]] = []
        try:
            reader = kind(
                self._updater,
                self.coordinator,
                new_reader_id() if reader_id is None else reader_id,
                serializer_or_bytes(serializer),
                auto_commit=auto_commit,
                on_assign=on_assign,
                on_release=on_release,
                on_checkpoint=on_checkpoint,
                in_flight=in_flight,
                claims=claims,
                timeout=self._client.timeout,
                on_open=opened.append,
                on_close=self._forget,
            )
            self._close_at_end(reader)
        except Exception:
            raise
        except BaseException:  # interrupted: it may be in the group, and nobody has it
            for each in opened:
                each.close()
            raise
        return reader

    def _close_at_end(self, reader: Reader[Any]) -> None:
        with self._lock:
            if not self._closed:
                self._readers.add(reader)
                return
        reader.close()
        raise ClosedError("the group's client is closed; open another", group=self.name)

    def _forget(self, reader: Reader[Any]) -> None:
        with self._lock:
            self._readers.discard(reader)

    # ------------------------------------------------------------------ scaling readers

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
    ) -> ReaderPool[bytes]: ...
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
    ) -> ReaderPool[T]: ...
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
    ) -> ReaderPool[bytes]: ...
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
    ) -> ReaderPool[T]: ...
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
    ) -> ReaderPool[Any]:
        """Return a pool of workers that hand each event to ``handle``, or each batch to another handler.

        ``run`` runs it. With ``concurrency`` 1, all segments of a worker wait while an event or a batch is retried;
        otherwise only the events that ``order`` puts behind it. With dead letters, a batch that failed its last attempt
        is handled once more event by event, and the events that fail alone are set aside. In a thread, ``sys.exit`` is
        a failure as any other. An event that kills its worker processes is set aside after as many deaths as ``retry``
        allows attempts, at least three.

        Args:
            handle: A plain function or an ``async def``. If a plain function returns an awaitable, the pool stops with
                `InvalidArgumentError` and leaves the event unprocessed.
            serializer: Decodes the events. Default: bytes.
            readers: Their number, or a policy that sets it by segments and lag. Its bounds are those of this pool.
            workers: "thread" or "process". Processes are spawned: all arguments must pickle, and a worker may not start
                processes by ``multiprocessing``.
            retry: Default: one attempt; a failure ends the pool. With a `DelayedRetry` an event that fails is retried
                later, and the events behind it are handled meanwhile, also those of its key.
            handle_batch: Like ``handle``, for batches of up to 1,000 events; give one handler.
            handle_arrow: Like ``handle``, for Arrow record batches of up to 32,768 events of one segment, about 1 MiB,
                as `EventBatch.to_arrow` returns them. Takes no ``serializer``.
            columns: Of the batches of ``handle_arrow``, as of `EventBatch.to_arrow`.
            concurrency: How many events, or batches, each worker handles at once, from 1 to 10,000: plain functions in
                threads, an ``async def`` on one event loop per worker. Default: 1, in the order of each segment.
            order: "key" handles events of one routing key one after the other, "segment" those of a segment, "none"
                has no order. Default: "key"; for batches "segment", because a batch mixes keys. Without effect if
                ``concurrency`` is 1.
            handler_timeout_seconds: Cancel an ``async def`` after this time, which counts as a failed attempt. It is
                waited for until it ends. Default: never.
            sink: A `SqlSink`. The handler also gets its connection, ``handle(event, connection)``, in a transaction
                that also stores the position, and that commits when the handler returns. It is not called for an event
                that is stored. An ``async def`` needs an asynchronous database, a plain function one that is not.

        Raises:
            InvalidArgumentError: There are several handlers; or the handler cannot take its arguments; or a plain
                function has a timeout, because a thread cannot be cancelled; or the sink does not fit the handler; or a
                column is unknown or named twice, or there is none.
            UnsupportedError: ``handle_arrow`` was given, and pyarrow is not installed.
            ClosedError: The client is closed.
        """
        with loading():
            from ..scaling.pool import ReaderPool

        pool = ReaderPool(
            self._client,
            self,
            self._updater,
            handle=handle,
            handle_batch=handle_batch,
            handle_arrow=handle_arrow,
            columns=columns,
            readers=readers,
            workers=workers,
            retry=retry,
            serializer=serializer_or_bytes(serializer),
            concurrency=concurrency,
            order=order,
            handler_timeout_seconds=handler_timeout_seconds,
            sink=sink,
        )
        self._close_before_readers(pool)
        return pool

    def autoscale(self, policy: ReaderScalingPolicy) -> Callable[[Callback], Autoscaling]:
        """Decorate a function to be called with a `ScalingDecision` whenever the desired number of readers changes.

        The first call gives the initial number. Of all processes that register a function for the group, one at a time
        calls it, in a thread of the SDK. A call that raises is retried with backoff. If the process dies during a call,
        another process repeats the call. ``close`` of the returned object ends the calls, and so does the client's.

        Args:
            policy: Decides the desired number of readers.
        """
        with loading():
            from ..scaling.autoscale import Autoscaling
            from ..scaling.policy import ReaderScalingPolicy

        check_type(policy, ReaderScalingPolicy, "policy")

        def register(callback: Callback) -> Autoscaling:
            autoscaling = Autoscaling(self, policy, callback)
            self._close_before_readers(autoscaling)
            return autoscaling

        return register

    def scaling_decision(self, policy: ReaderScalingPolicy) -> ScalingDecision:
        """Return how many readers the group should have now. Calls with one policy share a history, in one process."""
        with loading():
            from ..scaling.policy import ReaderScalingPolicy
            from ..scaling.scaler import Scaler

        check_type(policy, ReaderScalingPolicy, "policy")
        with self._lock:
            scaler = self._scalers.setdefault(policy, Scaler(self, policy))
        return scaler.decide()

    def _close_before_readers(self, running: ReaderPool[Any] | Autoscaling) -> None:
        with self._lock:
            if not self._closed:
                self._running.add(running)
                return
        running.close()
        raise ClosedError("the group's client is closed; open another", group=self.name)

    # ------------------------------------------------------------------ notifications

    @property
    def segment_notifier(self) -> SegmentNotifier:
        """Notifies of changes of the group's segments."""
        return self._notifiers_of_state().segments

    @property
    def end_of_data_notifier(self) -> EndOfDataNotifier:
        """Notifies when the group has read its streams to their end."""
        return self._notifiers_of_state().end_of_data

    @property
    def reader_notifier(self) -> ReaderNotifier:
        """Notifies of readers that joined, left, or were declared dead."""
        return self._notifiers_of_state().readers

    @property
    def checkpoint_notifier(self) -> CheckpointNotifier:
        """Notifies of checkpoints that were completed or given up."""
        return self._notifiers_of_state().checkpoints

    @property
    def retention_notifier(self) -> RetentionNotifier:
        """Notifies of deleted events that the group had not consumed."""
        return self._notifiers_of_state().retention

    def _notifiers_of_state(self) -> StateNotifiers:
        if (found := self._state_notifiers) is not None:
            return found
        with loading():
            from .notifiers import StateNotifiers

        with self._lock:
            found = self._state_notifiers
            if found is None:
                found = self._state_notifiers = StateNotifiers.of(self._updater, source=self.name)
                for notifier in found:
                    notifier.owner = self
                    if self._closed:
                        notifier.close()
        return found

    @cached_property
    def notification_record(self) -> NotificationRecord:
        """The recorded notifications of the group. `record_notifications` records them."""
        with loading():
            from ..record.record import NotificationRecord

        return NotificationRecord(
            self.synchronizer.store,
            group=self.name,
            log=self.synchronizer.segment,
            clock=self.synchronizer.clock,
            timeout=self._client.timeout,
        )

    def record_notifications(
        self,
        *,
        lag_interval_seconds: float | None = defaults.LAG_INTERVAL_SECONDS,
        retention_seconds: float | None = defaults.RETENTION_SECONDS,
        retention_bytes: int | None = defaults.RETENTION_BYTES,
    ) -> NotificationRecording:
        """Record the group's notifications in `notification_record`, until ``close`` of the returned object.

        Each change is recorded once, however many processes record. Changes that came while no process recorded follow
        later, as far back as the group's log goes; one notification with ``gap`` stands for the older ones.

        Args:
            lag_interval_seconds: How often one of the processes records the lag. None: never.
            retention_seconds: Older notifications are deleted. None: no limit of age.
            retention_bytes: Beyond this size the oldest notifications are deleted. None: no limit of size.

        Raises:
            ClosedError: The client is closed.
        """
        with loading():
            from ..record.recorder import NotificationRecording

        recording = NotificationRecording(
            self,
            self._updater,
            lag_interval_seconds=lag_interval_seconds,
            retention_seconds=retention_seconds,
            retention_bytes=retention_bytes,
        )
        with self._lock:
            if not self._closed:
                self._recordings.add(recording)
                return recording
        recording.close()
        raise ClosedError("the group's client is closed; open another", group=self.name)

    # ------------------------------------------------------------------ looking

    @property
    def state(self) -> ReaderGroupState:
        """The replicated state as far as this process has applied its log. Immutable."""
        return self.synchronizer.state

    @property
    def config(self) -> ReaderGroupConfig:
        return self.state.config

    def online_readers(self) -> Sequence[str]:
        """Return the ids of the readers that are in the group now."""
        return sorted(self.synchronizer.fetch_updates().readers)

    def distribution(self) -> Distribution:
        """Return which reader has which segments now."""
        with loading():
            from .distribution import Distribution

        state = self.synchronizer.fetch_updates()
        return Distribution(
            readers={reader: tuple(sorted(state.segments_of(reader))) for reader in sorted(state.readers)},
            unassigned=tuple(sorted(state.unassigned)),
        )

    def lag(self) -> GroupLag:
        """Return how far the group is behind its streams now, by the committed positions of its readers.

        Raises:
            NotFoundError: The group was deleted, or one of its streams was deleted and created again.
        """
        self._updater.follow_streams(strict=True)
        metadata = self._client.streams.metadata
        deadline = metadata.deadline()
        offsets, state = self._positions(deadline)
        clock = self.synchronizer.clock
        lag = group_lag(state, offsets, self.synchronizer.store, clock.time(), retry=metadata.backoff(deadline).retry)
        return self._movement.added_to(lag, clock.monotonic())

    def lag_notifier(
        self,
        *,
        threshold_seconds: float | None = 60.0,
        threshold_events: int | None = None,
        stalled_seconds: float | None = STALLED_SECONDS,
    ) -> LagNotifier:
        """Return the notifier of a lag that crosses a threshold, and of segments that stall.

        Its listeners hear upward when the lag exceeds a threshold, and downward when it is at most half of each. Equal
        arguments return the same notifier. It measures in this process, while it has listeners.

        Args:
            threshold_seconds: How long ago the next event was written, in the segment that is furthest behind; None: no
                matter how long. Default: 60.
            threshold_events: The events behind, in total. Default: no matter how many.
            stalled_seconds: For how long a position stays where it is, although events wait, until its segment counts
                as stalled; None: never. Default: 60. Give more if one event can take longer.

        Raises:
            InvalidArgumentError: A value is out of range, or all are None.
            ClosedError: The client is closed.
        """
        with loading():
            from .lag_notifier import LagNotifier, LagThresholds

        thresholds = LagThresholds(threshold_seconds, threshold_events, stalled_seconds)
        thresholds.check()
        with self._lock:
            if self._closed:
                raise ClosedError("the client is closed; open another", group=self.name)
            found = self._lag_notifiers.get(thresholds)
            if found is None:
                found = self._lag_notifiers[thresholds] = LagNotifier(
                    self.synchronizer, source=self.name, lag=self.lag, thresholds=thresholds
                )
            return found

    def stream_cuts(self) -> Mapping[str, StreamCut]:
        """Return the group's cut of each stream, by the committed positions of its readers."""
        offsets, state = self._positions(Deadline(self.synchronizer.clock, self._client.timeout))
        return {
            stream: cut.model_copy(update={"offsets": {segment: offsets[segment] for segment in cut.offsets}})
            for stream, cut in state.cuts.items()
        }

    def _positions(self, deadline: Deadline) -> tuple[Mapping[SegmentId, int], ReaderGroupState]:
        """Return the group's offset in each segment, and its state."""
        backoff = Backoff(self.synchronizer.clock, deadline, self._closing)
        leases, state = leases_and_state(self.synchronizer, backoff, deadline)
        return positions(state, leases), state

    # ------------------------------------------------------------------ changing

    def configure(self, **changes: Any) -> ReaderGroupConfig:
        """Change fields of the config while the group runs, and return the new config.

        ``streams`` are all streams that the group reads from now on. Added ones begin at ``start``, or at their heads.
        Removed ones are released, and the group forgets its positions in them: take `stream_cuts` before, if the
        group may read them again. Readers lose their segments and the events in hand of removed streams, and of those
        whose ``end`` changes, as at a reset.

        Args:
            **changes: Fields of `ReaderGroupConfig`. ``start`` is for added streams only. ``end`` replaces the ends of
                all streams.

        Raises:
            InvalidArgumentError: A field is unknown or out of range, a stream that the group reads gets a start, the
                group has read beyond an end, or an exclusive reader has the group.
            NotFoundError: An added stream does not exist.
        """
        return configure(self._updater, changes)

    def remove_reader(self, reader: str, *, position: Position | None = None) -> bool:
        """Remove a reader for good, and return whether it was in the group.

        Args:
            reader: The reader's id.
            position: Where its segments continue. It may skip or repeat events; use it only if you know better than the
                last commit. Default: the last commit.
        """
        check_type(reader, str, "reader")
        return self._updater.remove_reader(reader, position=position, cause="removed")

    # ------------------------------------------------------------------ checkpoints

    def checkpoint(self, name: str, *, timeout: float | None = None) -> Checkpoint:
        """Start a checkpoint, and return it when all readers have passed it.

        Each reader calls its ``on_checkpoint`` between two events, and continues. A group without readers passes at
        once. The group keeps the last ``max_outstanding_checkpoints`` (see `checkpoints`).

        Args:
            name: Replaces a completed checkpoint of the same name.
            timeout: Seconds to wait. Default: the client's.

        Raises:
            CheckpointTimeoutError: It names the readers that did not pass in time. The checkpoint is given up.
            CheckpointFailedError: The group was reset meanwhile, the end of a stream changed, or the group's state had
                no room.
            CheckpointCancelledError: `cancel_checkpoint` was called for it.
        """
        timeout = self._client.timeout if timeout is None else timeout
        found = take_checkpoint(self._updater, check_name(name, "checkpoint"), timeout=timeout)
        return self.state.as_checkpoint(found, group=self.name)

    def cancel_checkpoint(self, name: str, *, timeout: float | None = None) -> bool:
        """Cancel an outstanding checkpoint, and return whether there was one of this name.

        Readers that have not passed it go on without it, and the call that waits for it raises
        `CheckpointCancelledError`, in whichever process. Completed checkpoints stay.

        Args:
            name: Of the checkpoint, also an automatic one.
            timeout: Seconds to wait. Default: the client's.
        """
        return self._updater.cancel_checkpoint(check_name(name, "checkpoint"), timeout=timeout)

    @property
    def checkpoints(self) -> Mapping[str, Checkpoint]:
        """The last completed checkpoints by name, the oldest first, as the store has them now."""
        state = self.synchronizer.fetch_updates()
        return {each.name: state.as_checkpoint(each, group=self.name) for each in state.completed_checkpoints}

    def generate_stream_cuts(self, *, timeout: float | None = None) -> Mapping[str, StreamCut]:
        """Return the group's cut of each stream, as each reader reports it between two events: newer than the commits.

        This is a checkpoint that calls no ``on_checkpoint``.

        Args:
            timeout: Seconds to wait. Default: the client's.

        Raises:
            CheckpointTimeoutError: As `checkpoint`.
            CheckpointFailedError: As `checkpoint`.
        """
        timeout = self._client.timeout if timeout is None else timeout
        name = f"cuts-{secrets.token_hex(8)}"
        return self.state.cuts_at(take_checkpoint(self._updater, name, silent=True, timeout=timeout).offsets)

    def reset(self, to: ResetTarget, *, timeout: float | None = None) -> None:
        """Move the group to another place in its streams. Its readers continue from there.

        Each reader loses its segments and the events in hand, and calls ``on_assign`` for the segments that it gets.
        Commits of earlier positions have no effect. Outstanding checkpoints fail.

        Args:
            to: A checkpoint, a mapping of streams to cuts, "head", "tail", or a time of writing (``datetime`` with its
                timezone). Streams without a cut stay where they are.
            timeout: Seconds to wait. Default: the client's.

        Raises:
            InvalidArgumentError: ``to`` is no place in the group's streams.
        """
        reset(self._updater, to, timeout=timeout)

    def update_retention_cuts(self, cuts: Mapping[str, StreamCut], *, timeout: float | None = None) -> None:
        """Let retention policies delete the events before these cuts, of a group with ``retention="MANUAL"``.

        Events behind the committed positions of the group are kept all the same.

        Args:
            cuts: By stream. The others keep their cuts.
            timeout: Seconds to wait. Default: the client's.

        Raises:
            InvalidArgumentError: The group has another retention, or a cut is not one of its streams.
        """
        check_type(cuts, Mapping, "cuts")
        deadline = Deadline(self.synchronizer.clock, self._client.timeout if timeout is None else timeout)
        config = self.synchronizer.fetch_updates(timeout=deadline.remaining()).config
        if config.retention != "MANUAL":
            raise InvalidArgumentError(
                'only a group with retention="MANUAL" takes cuts',
                group=self.name,
                retention=config.retention,
            )
        checked = {}
        for stream, cut in cuts.items():
            if stream not in config.streams:
                raise InvalidArgumentError("the group does not read this stream", stream=stream, group=self.name)
            check_type(cut, StreamCut, f"the cut of {stream}")
            state = self._client.streams.fetch_state(stream, timeout=deadline.remaining())
            self._client.streams.resolve(state, cut, timeout=deadline.remaining(), argument=f"the cut of {stream}")
            checked[stream] = state.cut(state.check_cut(cut))
        if checked:
            self.synchronizer.update_state(
                lambda _: [SetRetentionCuts(cuts=Map(checked))], timeout=deadline.remaining()
            )

    # ------------------------------------------------------------------ without threads

    def step(self) -> float:
        """Run one round of the threads of readers, listeners and recordings; for a clock that ``is_manual``.

        Returns when, on the clock, the next round is due. `Client.step` calls it.
        """
        with self._lock:
            recordings = list(self._recordings)
        return step_each(
            [
                self.coordinator.step,
                self.synchronizer.step,
                *(notifier.step for notifier in self._notifiers),
                *(recording.poll for recording in recordings),
            ]
        )

    # ------------------------------------------------------------------ the end

    def stop(self) -> None:
        """Stop the pools and autoscalers. `close` waits for them."""
        if os.getpid() == self._process_id:  # a forked child: they belong to the parent
            stop_each(list(self._running))

    def close(self) -> None:
        """Close pools, autoscaling, readers, recordings and notifiers. The client calls it. Twice is no error."""
        if os.getpid() != self._process_id:
            return  # a forked child: what was opened is the parent's
        close_groups([self])

    def _open_no_more(self) -> _Opened:
        """Return what was opened here; from now on nothing else is."""
        with self._lock:
            self._closed = True
            return _Opened(list(self._running), list(self._readers), list(self._recordings))

    @property
    def _notifiers(self) -> Sequence[PollingNotifier[ReaderGroupState, Any]]:
        return (*(self._state_notifiers or ()), *list(self._lag_notifiers.values()))

    def __repr__(self) -> str:
        return f"ReaderGroup({self.name!r}, {self.synchronizer.store.url!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        return _reconnect, (self._client, self.name)


def close_groups(groups: Sequence[ReaderGroup]) -> None:
    """Close the groups. All take each step together, so the threads of all end during the same waits."""
    opened = [group._open_no_more() for group in groups]
    running = [each for group in opened for each in group.running]
    recordings = [each for group in opened for each in group.recordings]
    notifiers = [each for group in groups for each in group._notifiers]
    close_each(
        [
            *(each.close for each in running),
            *(reader.close for group in opened for reader in group.readers),
            *(recording.stop for recording in recordings),  # after the readers, so that it records their leaving
            *(recording.close for recording in recordings),
            *(notifier.unregister_all_listeners for notifier in notifiers),
            *(group.synchronizer.close for group in groups),  # ends polls that wait for a store that is away
            *(group._closing.set for group in groups),
            partial(_close_notifiers, notifiers),
        ]
    )


def _close_notifiers(notifiers: Iterable[PollingNotifier[Any, Any]]) -> None:
    deadline = Deadline(SystemClock(), _CLOSE_SECONDS)
    close_each(partial(notifier._close_until, deadline) for notifier in notifiers)


def _claims(sink: SqlSink, counters: GroupCounters) -> Claims:
    with loading():
        from ..sinks.calls import SinkCalls
        from ..sinks.sql_sink import SqlSink

    check_type(sink, SqlSink, "sink")
    return SinkCalls(sink, counters)


def _reconnect(client: GroupClient, name: str) -> ReaderGroup:
    return client.groups.get(name)
