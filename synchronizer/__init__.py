"""A small piece of state that is kept the same in many processes, and the segment stores that hold it."""

from typing import TYPE_CHECKING

from .lazy_exports import lazy_exports

# For type checkers and editors. At run time a name loads its module when it is first used, as _MODULES says.
if TYPE_CHECKING:
    from .clock import Clock, Deadline, ManualClock, SystemClock
    from .errors import (
        AlreadyExistsError,
        BrokenBarrierError,
        ClosedError,
        CorruptStateError,
        CorruptStoreError,
        DeadlineExceededError,
        HandlerError,
        InvalidArgumentError,
        LeaseLostError,
        NotFoundError,
        OutcomeUnknownError,
        ReaderGroupError,
        SealedError,
        StateTooLargeError,
        StoreFullError,
        StorePermissionError,
        StoreUnavailableError,
        TruncatedError,
        UnknownUpdateError,
        UnsupportedError,
    )
    from .log.entries import Revision
    from .log.replica import AppliedUpdate, Transition, TransitionFeed
    from .map import Map
    from .recipes.collections.shared import SynchronizerOptions, ValueChange
    from .recipes.collections.shared_config import SharedConfig
    from .recipes.collections.shared_counter import SharedCounter
    from .recipes.collections.shared_map import EntryChange, SharedMap
    from .recipes.collections.shared_set import SetChange, SharedSet
    from .recipes.coordination.barrier import Barrier
    from .recipes.coordination.election import LeaderElection
    from .recipes.coordination.lock import HeldLock, Lock, Semaphore
    from .recipes.coordination.membership import Membership
    from .recipes.queue.consumer import HandlingLatency, QueuedEvent
    from .recipes.queue.dead_letters import DeadEvent
    from .recipes.queue.event_processor import EventProcessor, EventProcessorOptions
    from .recipes.queue.event_queue import EventQueue
    from .recipes.queue.retries import Retries
    from .state import State, Update
    from .state_synchronizer import Proposal, StateSynchronizer
    from .store import (
        ANY,
        MAX_APPEND_BYTES,
        MAX_ATTRIBUTE_CHANGES,
        MAX_DELTA_BYTES,
        MAX_NAME_LENGTH,
        Append,
        Appended,
        AppendResult,
        AttributeChange,
        Conflict,
        Guarantees,
        SegmentCopy,
        SegmentInfo,
        SegmentStart,
        SegmentStore,
        UnknownOutcome,
    )
    from .stores.opening import open_store
    from .threads.background import background_errors

__all__ = [
    "ANY",
    "AlreadyExistsError",
    "Append",
    "AppendResult",
    "Appended",
    "AppliedUpdate",
    "AttributeChange",
    "Barrier",
    "BrokenBarrierError",
    "Clock",
    "ClosedError",
    "Conflict",
    "CorruptStateError",
    "CorruptStoreError",
    "DeadEvent",
    "Deadline",
    "DeadlineExceededError",
    "EntryChange",
    "EventProcessor",
    "EventProcessorOptions",
    "EventQueue",
    "Guarantees",
    "HandlerError",
    "HandlingLatency",
    "HeldLock",
    "InvalidArgumentError",
    "LeaderElection",
    "LeaseLostError",
    "Lock",
    "MAX_APPEND_BYTES",
    "MAX_ATTRIBUTE_CHANGES",
    "MAX_DELTA_BYTES",
    "MAX_NAME_LENGTH",
    "ManualClock",
    "Map",
    "Membership",
    "NotFoundError",
    "OutcomeUnknownError",
    "Proposal",
    "QueuedEvent",
    "ReaderGroupError",
    "Retries",
    "Revision",
    "SealedError",
    "SegmentCopy",
    "SegmentInfo",
    "SegmentStart",
    "SegmentStore",
    "Semaphore",
    "SetChange",
    "SharedConfig",
    "SharedCounter",
    "SharedMap",
    "SharedSet",
    "State",
    "StateSynchronizer",
    "StateTooLargeError",
    "StoreFullError",
    "StorePermissionError",
    "StoreUnavailableError",
    "SynchronizerOptions",
    "SystemClock",
    "Transition",
    "TransitionFeed",
    "TruncatedError",
    "UnknownOutcome",
    "UnknownUpdateError",
    "UnsupportedError",
    "Update",
    "ValueChange",
    "background_errors",
    "open_store",
]


_MODULES = {
    ".clock": "Clock Deadline ManualClock SystemClock",
    ".errors": (
        "AlreadyExistsError BrokenBarrierError ClosedError CorruptStateError CorruptStoreError "
        "DeadlineExceededError HandlerError InvalidArgumentError LeaseLostError NotFoundError "
        "OutcomeUnknownError ReaderGroupError SealedError StateTooLargeError StoreFullError StorePermissionError "
        "StoreUnavailableError TruncatedError UnknownUpdateError UnsupportedError"
    ),
    ".log.entries": "Revision",
    ".log.replica": "AppliedUpdate Transition TransitionFeed",
    ".map": "Map",
    ".recipes.collections.shared": "SynchronizerOptions ValueChange",
    ".recipes.collections.shared_config": "SharedConfig",
    ".recipes.collections.shared_counter": "SharedCounter",
    ".recipes.collections.shared_map": "EntryChange SharedMap",
    ".recipes.collections.shared_set": "SetChange SharedSet",
    ".recipes.coordination.barrier": "Barrier",
    ".recipes.coordination.election": "LeaderElection",
    ".recipes.coordination.lock": "HeldLock Lock Semaphore",
    ".recipes.coordination.membership": "Membership",
    ".recipes.queue.consumer": "HandlingLatency QueuedEvent",
    ".recipes.queue.dead_letters": "DeadEvent",
    ".recipes.queue.event_processor": "EventProcessor EventProcessorOptions",
    ".recipes.queue.event_queue": "EventQueue",
    ".recipes.queue.retries": "Retries",
    ".state": "State Update",
    ".state_synchronizer": "Proposal StateSynchronizer",
    ".store": (
        "ANY Append AppendResult Appended AttributeChange Conflict Guarantees MAX_APPEND_BYTES "
        "MAX_ATTRIBUTE_CHANGES MAX_DELTA_BYTES MAX_NAME_LENGTH SegmentCopy SegmentInfo SegmentStart SegmentStore "
        "UnknownOutcome"
    ),
    ".stores.opening": "open_store",
    ".threads.background": "background_errors",
}

if not TYPE_CHECKING:  # type checkers then refuse names that do not exist
    __getattr__ = lazy_exports(__name__, _MODULES)


def __dir__() -> list[str]:
    """The public names, without the modules that hold them, for completion in an interpreter."""
    return __all__
