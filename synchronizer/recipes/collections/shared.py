"""The common part of the shared collections: a synchronizer of their own, and its listeners."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import wraps
from typing import ClassVar, Generic, Self, TypedDict, TypeVar

from synchronizer.arguments import check_type
from synchronizer.callables import checked
from synchronizer.clock import Clock
from synchronizer.errors import InvalidArgumentError
from synchronizer.log.entries import Revision
from synchronizer.log.replica import AppliedUpdate
from synchronizer.loggers import get_logger
from synchronizer.state import S, Update
from synchronizer.state_synchronizer import StateSynchronizer
from synchronizer.store import SegmentStore

T = TypeVar("T")
C = TypeVar("C")  # the change that a listener receives

_logger = get_logger(__name__)


class SynchronizerOptions(TypedDict, total=False):
    """Keyword arguments that the recipes pass on to `StateSynchronizer`."""

    clock: Clock | None
    timeout: float
    state_limit_bytes: int
    compaction_bytes: int | None


@dataclass(frozen=True)
class ValueChange(Generic[T]):
    """A value that changed at ``revision``."""

    before: T
    after: T
    revision: Revision


class Shared(Generic[S]):
    """A shared state with the methods of a subclass. Threads may share it. The store is borrowed and never closed.

    Reads use the copy in this process: they never block and make no call to the store. A change is decided on the
    newest state and leaves the copy up to date. `refresh` updates the copy without a change; a listener or ``watch``
    updates it as changes come.

    A listener receives the changes of all processes in order, in a thread of its own. Its errors are logged, and it
    receives the next change. Changes that were compacted before it saw them arrive as one.
    """

    kind: ClassVar[str]  # the prefix of the name in the store: a map and a set may have the same name

    def __init__(
        self,
        store: SegmentStore,
        name: str,
        initial: S,
        updates: Iterable[type[Update[S]]],
        options: SynchronizerOptions,
    ) -> None:
        check_type(name, str, "name")
        self.name = name
        self.synchronizer = StateSynchronizer(store, f"{self.kind}/{name}", initial=initial, updates=updates, **options)

    def refresh(self, *, timeout: float | None = None) -> None:
        """Bring the copy in this process up to date."""
        self.synchronizer.fetch_updates(timeout=timeout)

    def step(self) -> float:
        """On a clock that ``is_manual``: call the listeners with the new changes. Return inf, like
        `StateSynchronizer.step`."""
        return self.synchronizer.step()

    def close(self) -> None:
        """End listeners and watchers and refuse changes. Reads still work. Closing twice is no error."""
        self.synchronizer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r}, {self.synchronizer.store.url!r})"

    def _on_update(
        self,
        listener: Callable[[C], object],
        read: Callable[[S], T],
        tell: Callable[[Callable[[C], object], T, T, AppliedUpdate[S]], None],
    ) -> Callable[[], None]:
        """Call ``tell`` for each update after the present copy, with what ``read`` returns for the states around it.

        ``tell`` calls the listener that it is given. If that raises, the log names ``listener``. A state that cannot be
        read is logged and skipped.
        """
        told = checked(listener, "a listener", "change")
        state, revision = self.synchronizer.snapshot_of_state
        before = read(state)

        @wraps(listener)
        def hear(applied: AppliedUpdate[S]) -> None:
            nonlocal before
            assert applied.state is not None, "nothing deletes a shared collection"
            try:
                now = read(applied.state)
            except InvalidArgumentError as error:
                _logger.error("a listener of %s skipped a change that it cannot read: %s", self, error)
                return
            earlier, before = before, now
            tell(told, earlier, before, applied)

        return self.synchronizer.on_update(hear, after=revision)


def whole(state: S) -> S:
    """Return the state itself: read all of it."""
    return state
