"""The parts of a reader group and of its client that pools and autoscaling use."""

from __future__ import annotations

from contextlib import AbstractContextManager
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, Self, TypeVar

if TYPE_CHECKING:  # a group is loaded without what it can start
    from synchronizer import Clock, HeldLock, StateSynchronizer

    from ..group.following import Claims
    from ..group.lag import GroupLag
    from ..group.model.config import ReaderGroupConfig
    from ..group.model.state import ReaderGroupState
    from ..group.notifiers import EndOfDataNotifier, SegmentNotifier
    from ..group.reader import EventsInFlight, Reader
    from ..streams.manager import StreamManager
    from ..streams.serializers import Serializer

R = TypeVar("R", bound="Reader[Any]")


class ScaledGroup(Protocol):
    """The reader group whose number of readers changes."""

    name: str
    synchronizer: StateSynchronizer[ReaderGroupState]

    @property
    def segment_notifier(self) -> SegmentNotifier: ...
    @property
    def end_of_data_notifier(self) -> EndOfDataNotifier: ...
    @property
    def config(self) -> ReaderGroupConfig: ...
    def lag(self) -> GroupLag: ...
    def open_reader(
        self,
        kind: type[R],
        reader_id: str | None,
        *,
        serializer: Serializer[Any] | None,
        auto_commit: bool = True,
        in_flight: EventsInFlight | None = None,
        claims: Claims | None = None,
    ) -> R: ...


class PoolClient(Protocol):
    """The parts of a client that a pool uses. A worker process has a client of its own and closes it."""

    clock: Clock

    @property
    def streams(self) -> StreamManager: ...
    def lock(self, name: str, *, timeout: float | None) -> AbstractContextManager[HeldLock]: ...
    def __enter__(self) -> Self: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None: ...
