"""What the shared collections have in common: a synchronizer of their own, and who listens to it."""

from __future__ import annotations

import logging
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
from synchronizer.state import S, Update
from synchronizer.state_synchronizer import StateSynchronizer
from synchronizer.store import SegmentStore

T = TypeVar("T")
C = TypeVar("C")  # a change, as a listener hears it

_logger = logging.getLogger(__name__)


class SynchronizerOptions(TypedDict, total=False):
    """Arguments of `StateSynchronizer` that its recipes pass on."""

    clock: Clock | None
    timeout: float
    state_limit_bytes: int
    compaction_bytes: int | None


@dataclass(frozen=True)
class ValueChange(Generic[T]):
    """A value that is another one since ``revision``."""

    before: T
    after: T
    revision: Revision


class Shared(Generic[S]):
    """A state that is read and changed through the methods of a subclass. Threads may share it.

    Reads are of the copy in this process, ask nobody and never block. Changes are decided on the newest state, which
    the copy then is; `refresh` brings it up to date without a change, and a listener or ``watch`` does so as changes
    come. The store is borrowed and never closed.

    A listener hears the changes in order, whoever made them, in a thread of its own. Where it raises, that is logged,
    and it hears the next one. Changes that a compaction hides from it come as one.
    """

    kind: ClassVar[str]  # the name begins with it in the store: a map and a set of one name are two

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
        """On a clock that ``is_manual``: call the listeners with what is new to them. Returns inf, as the
        synchronizer's `StateSynchronizer.step` does."""
        return self.synchronizer.step()

    def close(self) -> None:
        """End the listeners and watchers, and refuse changes. The last copy can still be read. Twice is no error."""
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
        """Call ``tell`` with what ``read`` makes of the states before and after each update from the present copy on.

        ``tell`` calls the listener that it is given; the name of ``listener`` is logged where that raises. A state that
        cannot be read is logged, and passed over.
        """
        told = checked(listener, "a listener")
        state, revision = self.synchronizer.snapshot_of_state
        before = read(state)

        @wraps(listener)
        def hear(applied: AppliedUpdate[S]) -> None:
            nonlocal before
            assert applied.state is not None, "nothing deletes a shared collection"
            try:
                now = read(applied.state)
            except InvalidArgumentError as error:
                _logger.error("a listener of %s goes on at the next change that can be read: %s", self, error)
                return
            earlier, before = before, now
            tell(told, earlier, before, applied)

        return self.synchronizer.on_update(hear, after=revision)


def whole(state: S) -> S:
    """What to read of a state: all."""
    return state
