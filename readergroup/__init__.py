"""Reader groups that coordinate themselves through SQLite, PostgreSQL or NATS, with notifications."""

from typing import TYPE_CHECKING

from synchronizer.lazy_exports import lazy_exports

# For type checkers and editors. At run time a name loads its module when it is first used, as _MODULES says.
if TYPE_CHECKING:
    from notifications import Change, Notification, NotificationKey, NotificationSystem, PollingNotifier
    from synchronizer import (
        AlreadyExistsError,
        AppliedUpdate,
        Barrier,
        BrokenBarrierError,
        ClosedError,
        CorruptStateError,
        CorruptStoreError,
        DeadEvent,
        DeadlineExceededError,
        EntryChange,
        EventProcessor,
        EventQueue,
        HandlerError,
        HandlingLatency,
        HeldLock,
        InvalidArgumentError,
        LeaderElection,
        LeaseLostError,
        Lock,
        ManualClock,
        Map,
        Membership,
        NotFoundError,
        OutcomeUnknownError,
        QueuedEvent,
        ReaderGroupError,
        Retries,
        Revision,
        SealedError,
        Semaphore,
        SetChange,
        SharedConfig,
        SharedCounter,
        SharedMap,
        SharedSet,
        State,
        StateSynchronizer,
        StateTooLargeError,
        StoreFullError,
        StorePermissionError,
        StoreUnavailableError,
        Transition,
        TruncatedError,
        UnknownUpdateError,
        UnsupportedError,
        Update,
        ValueChange,
        background_errors,
    )

    from .batch.client import BatchClient
    from .batch.ranges import SegmentRange
    from .client import Client, connect
    from .dead_letters.letters import REPLAYED_FROM, DeadLetters, StoredDeadLetter
    from .errors import (
        CheckpointCancelledError,
        CheckpointFailedError,
        CheckpointTimeoutError,
        CorruptDataError,
        EndOfDataError,
        EventStoredError,
        EventTooLargeError,
        ReaderGroupExistsError,
        ReaderNotInGroupError,
        SinkBehindError,
        StreamBeingCopiedError,
        StreamExistsError,
        WorkerError,
    )
    from .group.distribution import Distribution
    from .group.lag import GroupLag, LagTotals, SegmentLag
    from .group.lag_notifier import LagNotification
    from .group.model.checkpoint import Checkpoint
    from .group.model.config import ReaderGroupConfig
    from .group.model.state import ReaderGroupState
    from .group.model.updates import AddReader, ReassignSegment, ReleaseSegment, RemoveReader
    from .group.notifiers import (
        CheckpointNotification,
        EndOfDataNotification,
        ReaderNotification,
        RetentionNotification,
        SegmentNotification,
    )
    from .group.reader import Reader
    from .group.reader_group import ReaderGroup
    from .group.time_windows import TimeWindow
    from .outbox.notifier import OutboxNotification
    from .outbox.outbox import Outbox, OutboxLag, OutboxStreamLag
    from .outbox.relay import OutboxRelay
    from .record.entries import LagSample, RecordRange
    from .record.record import NotificationRecord
    from .record.recorder import NotificationRecording
    from .retries.attempts import RETRY_OF
    from .scaling.autoscale import Autoscaling
    from .scaling.policy import ReaderScalingPolicy, ScalingDecision
    from .scaling.pool import ReaderPool
    from .scaling.retry import DeadLetter, DelayedRetry, RetryPolicy
    from .streams.config import (
        RetentionPolicy,
        ScalingPolicy,
        ScalingReport,
        SegmentId,
        StreamConfig,
        StreamCut,
        StreamInfo,
    )
    from .streams.event import Event, EventBatch, EventPointer, Position
    from .streams.retention.report import RetentionReport
    from .streams.serializers import BytesSerializer, JsonSerializer, MsgpackSerializer, PydanticSerializer, Serializer
    from .streams.transactions.staging import StagedPart, Staging
    from .streams.transactions.transaction import Transaction, Transactions
    from .streams.writing.writer import EventWriter

__all__ = [
    "AddReader",
    "AlreadyExistsError",
    "AppliedUpdate",
    "Autoscaling",
    "Barrier",
    "BatchClient",
    "BrokenBarrierError",
    "BytesSerializer",
    "Change",
    "Checkpoint",
    "CheckpointCancelledError",
    "CheckpointFailedError",
    "CheckpointNotification",
    "CheckpointTimeoutError",
    "Client",
    "ClosedError",
    "CorruptDataError",
    "CorruptStateError",
    "CorruptStoreError",
    "DeadEvent",
    "DeadLetter",
    "DeadLetters",
    "DeadlineExceededError",
    "DelayedRetry",
    "Distribution",
    "EndOfDataError",
    "EndOfDataNotification",
    "EntryChange",
    "Event",
    "EventBatch",
    "EventPointer",
    "EventProcessor",
    "EventQueue",
    "EventStoredError",
    "EventTooLargeError",
    "EventWriter",
    "GroupLag",
    "HandlerError",
    "HandlingLatency",
    "HeldLock",
    "InvalidArgumentError",
    "JsonSerializer",
    "LagNotification",
    "LagSample",
    "LagTotals",
    "LeaderElection",
    "LeaseLostError",
    "Lock",
    "ManualClock",
    "Map",
    "Membership",
    "MsgpackSerializer",
    "NotFoundError",
    "Notification",
    "NotificationKey",
    "NotificationRecord",
    "NotificationRecording",
    "NotificationSystem",
    "Outbox",
    "OutboxLag",
    "OutboxNotification",
    "OutboxRelay",
    "OutboxStreamLag",
    "OutcomeUnknownError",
    "PollingNotifier",
    "Position",
    "PydanticSerializer",
    "QueuedEvent",
    "Reader",
    "ReaderGroup",
    "ReaderGroupConfig",
    "ReaderGroupError",
    "ReaderGroupExistsError",
    "ReaderGroupState",
    "ReaderNotInGroupError",
    "ReaderNotification",
    "ReaderPool",
    "ReaderScalingPolicy",
    "ReassignSegment",
    "RecordRange",
    "ReleaseSegment",
    "RemoveReader",
    "RetentionNotification",
    "RetentionPolicy",
    "RetentionReport",
    "Retries",
    "RetryPolicy",
    "Revision",
    "ScalingDecision",
    "ScalingPolicy",
    "ScalingReport",
    "SealedError",
    "SegmentId",
    "SegmentLag",
    "SegmentNotification",
    "SegmentRange",
    "Semaphore",
    "Serializer",
    "SetChange",
    "SharedConfig",
    "SharedCounter",
    "SharedMap",
    "SharedSet",
    "SinkBehindError",
    "StagedPart",
    "Staging",
    "State",
    "StateSynchronizer",
    "StateTooLargeError",
    "StoreFullError",
    "StorePermissionError",
    "StoreUnavailableError",
    "StreamBeingCopiedError",
    "StreamConfig",
    "StreamCut",
    "StreamExistsError",
    "StreamInfo",
    "TimeWindow",
    "Transaction",
    "Transactions",
    "Transition",
    "TruncatedError",
    "UnknownUpdateError",
    "UnsupportedError",
    "Update",
    "ValueChange",
    "WorkerError",
    "background_errors",
    "connect",
    "REPLAYED_FROM",
    "RETRY_OF",
    "StoredDeadLetter",
]


_MODULES = {
    ".batch.client": "BatchClient",
    ".batch.ranges": "SegmentRange",
    ".client": "Client connect",
    ".dead_letters.letters": "DeadLetters REPLAYED_FROM StoredDeadLetter",
    ".errors": (
        "CheckpointCancelledError CheckpointFailedError CheckpointTimeoutError CorruptDataError EndOfDataError "
        "EventStoredError "
        "EventTooLargeError ReaderGroupExistsError ReaderNotInGroupError SinkBehindError StreamBeingCopiedError "
        "StreamExistsError WorkerError"
    ),
    ".group.distribution": "Distribution",
    ".group.lag": "GroupLag LagTotals SegmentLag",
    ".group.lag_notifier": "LagNotification",
    ".group.model.checkpoint": "Checkpoint",
    ".group.model.config": "ReaderGroupConfig",
    ".group.model.state": "ReaderGroupState",
    ".group.model.updates": "AddReader ReassignSegment ReleaseSegment RemoveReader",
    ".group.notifiers": (
        "CheckpointNotification EndOfDataNotification ReaderNotification RetentionNotification SegmentNotification"
    ),
    ".group.reader": "Reader",
    ".group.reader_group": "ReaderGroup",
    ".group.time_windows": "TimeWindow",
    ".outbox.notifier": "OutboxNotification",
    ".outbox.outbox": "Outbox OutboxLag OutboxStreamLag",
    ".outbox.relay": "OutboxRelay",
    ".record.entries": "LagSample RecordRange",
    ".record.record": "NotificationRecord",
    ".record.recorder": "NotificationRecording",
    ".retries.attempts": "RETRY_OF",
    ".scaling.autoscale": "Autoscaling",
    ".scaling.policy": "ReaderScalingPolicy ScalingDecision",
    ".scaling.pool": "ReaderPool",
    ".scaling.retry": "DeadLetter DelayedRetry RetryPolicy",
    ".streams.config": "RetentionPolicy ScalingPolicy ScalingReport SegmentId StreamConfig StreamCut StreamInfo",
    ".streams.event": "Event EventBatch EventPointer Position",
    ".streams.retention.report": "RetentionReport",
    ".streams.serializers": "BytesSerializer JsonSerializer MsgpackSerializer PydanticSerializer Serializer",
    ".streams.transactions.staging": "StagedPart Staging",
    ".streams.transactions.transaction": "Transaction Transactions",
    ".streams.writing.writer": "EventWriter",
    "notifications": "Change Notification NotificationKey NotificationSystem PollingNotifier",
    "synchronizer": (
        "AlreadyExistsError AppliedUpdate Barrier BrokenBarrierError ClosedError CorruptStateError "
        "CorruptStoreError DeadEvent DeadlineExceededError EntryChange EventProcessor EventQueue HandlerError "
        "HandlingLatency HeldLock InvalidArgumentError LeaderElection LeaseLostError Lock ManualClock Map "
        "Membership NotFoundError OutcomeUnknownError QueuedEvent ReaderGroupError Retries Revision "
        "SealedError Semaphore SetChange SharedConfig SharedCounter SharedMap SharedSet State "
        "StateSynchronizer StateTooLargeError StoreFullError StorePermissionError StoreUnavailableError Transition "
        "TruncatedError UnknownUpdateError UnsupportedError Update ValueChange background_errors"
    ),
}

if not TYPE_CHECKING:  # type checkers then refuse names that do not exist
    __getattr__ = lazy_exports(__name__, _MODULES)


def __dir__() -> list[str]:
    """The public names, without the modules that hold them, for completion in an interpreter."""
    return __all__
