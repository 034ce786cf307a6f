"""`SharedSet`: a set that is the same in every process."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, MutableSet
from collections.abc import Set as AbstractSet
from contextlib import suppress
from dataclasses import dataclass
from types import UnionType
from typing import Any, Final, Generic, Self, TypeVar, Unpack

from synchronizer.arguments import check_items
from synchronizer.errors import InvalidArgumentError
from synchronizer.log.entries import Revision
from synchronizer.log.replica import AppliedUpdate
from synchronizer.map import Map
from synchronizer.state import State, Update
from synchronizer.store import SegmentStore

from .shared import Shared, SynchronizerOptions, whole
from .values import ValueCodec

T = TypeVar("T")


class SetState(State):
    """The items as bytes: two items are equal if their bytes are."""

    items: Map[bytes, bool] = Map()  # a persistent set, so that adding one does not copy the others


class AddItem(Update[SetState], tag="add"):
    item: bytes

    def apply_to(self, state: SetState, revision: Revision) -> SetState:
        return state.replace(items=state.items.set(self.item, True))


class DiscardItem(Update[SetState], tag="discard"):
    item: bytes

    def apply_to(self, state: SetState, revision: Revision) -> SetState:
        return state.replace(items=state.items.delete(self.item))


class ClearSet(Update[SetState], tag="clear"):
    def apply_to(self, state: SetState, revision: Revision) -> SetState:
        return state.replace(items=Map())


SET_UPDATES: Final[list[type[Update[SetState]]]] = [AddItem, DiscardItem, ClearSet]


@dataclass(frozen=True)
class SetChange(Generic[T]):
    """The items that were added and removed at ``revision``."""

    added: frozenset[T]
    removed: frozenset[T]
    revision: Revision


class SharedSet(Shared[SetState], MutableSet[T]):
    """A shared set of items of one type, with as many as fit into a state.

    Reads use the copy in this process; `refresh` brings it up to date. A change is decided on the newest state and
    stored when it returns, with the copy up to date. ``|``, ``&``, ``-`` and ``^`` return a ``frozenset``; ``|=``,
    ``&=``, ``-=`` and ``^=`` change the set in one step.

    Args:
        store: Holds the set.
        name: The same in all processes that share it.
        item_type: The type of the items, which are hashable; see `ValueCodec` for the types that can be shared.
        **options: See `SynchronizerOptions`.
    """

    kind = "set"

    def __init__(
        self, store: SegmentStore, name: str, item_type: type[T] | UnionType, **options: Unpack[SynchronizerOptions]
    ) -> None:
        self._values: ValueCodec[T] = ValueCodec(item_type, "item_type")
        super().__init__(store, name, SetState(), SET_UPDATES, options)

    # ------------------------------------------------------------------ reading the copy

    def __contains__(self, item: object) -> bool:
        return not self._possible([item]).isdisjoint(self.synchronizer.state.items)

    def __iter__(self) -> Iterator[T]:
        return map(self._values.decode, sorted(self.synchronizer.state.items))

    def __len__(self) -> int:
        return len(self.synchronizer.state.items)

    def copy(self) -> frozenset[T]:
        """Return all items at one revision."""
        return self._decoded(self.synchronizer.state.items)

    @classmethod
    def _from_iterable(cls, items: Iterable[Any]) -> Any:
        return frozenset(items)

    # ------------------------------------------------------------------ changes

    def add(self, item: T, *, timeout: float | None = None) -> bool:  # type: ignore[override]
        """Add ``item``; return whether this call added it. Of concurrent callers, one gets True."""
        data = self._encoded(item)
        return self._change(lambda items: [] if data in items else [AddItem(item=data)], timeout)

    def discard(self, item: T, *, timeout: float | None = None) -> bool:  # type: ignore[override]
        """Remove ``item`` if present; return whether this call removed it. Of concurrent callers, one gets True."""
        data = self._encoded(item)
        return self._change(lambda items: [DiscardItem(item=data)] if data in items else [], timeout)

    def remove(self, item: T) -> None:
        """Remove ``item``; `KeyError` if it is not in the set."""
        if not self.discard(item):
            raise KeyError(item)

    def pop(self) -> T:
        """Remove an item and return it; each item goes to one caller. `KeyError` if the set is empty."""

        def decide(state: SetState) -> tuple[Iterable[Update[SetState]], bytes | None]:
            item = min(state.items, default=None)
            return ([] if item is None else [DiscardItem(item=item)]), item

        item = self.synchronizer.update_state_returning(decide)
        if item is None:
            raise KeyError("the set is empty")
        return self._values.decode(item)

    def clear(self, *, timeout: float | None = None) -> None:
        """Remove all items in one step."""
        self._change(lambda items: [ClearSet()] if items else [], timeout)

    def update(self, *others: Iterable[T], timeout: float | None = None) -> None:
        """Add all these items in one step: no process sees some of them without the others."""
        for other in others:
            check_items(other, Iterable, "each item of others")
        data = {self._encoded(item) for other in others for item in other}
        self._change(lambda items: [AddItem(item=item) for item in sorted(data - items.keys())], timeout)

    def __ior__(self, other: AbstractSet[T]) -> Self:  # type: ignore[override,misc]
        self.update(other)
        return self

    def __isub__(self, other: AbstractSet[Any]) -> Self:
        data = self._possible(other)
        self._change(lambda items: [DiscardItem(item=item) for item in sorted(data & items.keys())], None)
        return self

    def __iand__(self, other: AbstractSet[Any]) -> Self:
        data = self._possible(other)
        self._change(lambda items: [DiscardItem(item=item) for item in sorted(items.keys() - data)], None)
        return self

    def __ixor__(self, other: AbstractSet[T]) -> Self:  # type: ignore[override,misc]
        data = {self._encoded(item) for item in other}

        def decide(items: Map[bytes, bool]) -> list[Update[SetState]]:
            return [DiscardItem(item=item) if item in items else AddItem(item=item) for item in sorted(data)]

        self._change(decide, None)
        return self

    # ------------------------------------------------------------------ listening

    def watch(self) -> Iterator[frozenset[T]]:
        """Yield all items now, then the newest ones after each change, until the set is closed."""
        return (self._decoded(state.items) for state in self.synchronizer.watch())

    def register_listener(self, listener: Callable[[SetChange[T]], object]) -> Callable[[], None]:
        """Call ``listener`` with every change after the present copy; return a function that ends it."""

        def tell(
            told: Callable[[SetChange[T]], object], before: SetState, after: SetState, applied: AppliedUpdate[SetState]
        ) -> None:
            update = applied.update
            touched: AbstractSet[bytes] = (
                {update.item} if isinstance(update, AddItem | DiscardItem) else before.items.keys() | after.items.keys()
            )
            added = self._decoded(item for item in touched if item not in before.items)
            removed = self._decoded(item for item in touched if item not in after.items)
            if added or removed:
                told(SetChange(added, removed, applied.revision))

        return self._on_update(listener, whole, tell)

    # ------------------------------------------------------------------ steps

    def _change(self, decide: Callable[[Map[bytes, bool]], Iterable[Update[SetState]]], timeout: float | None) -> bool:
        """Apply the updates that ``decide`` returns for the newest items; return whether there were any."""

        def propose(state: SetState) -> tuple[Iterable[Update[SetState]], bool]:
            updates = list(decide(state.items))
            return updates, bool(updates)

        return self.synchronizer.update_state_returning(propose, timeout=timeout)

    def _encoded(self, item: Any) -> bytes:
        try:
            hash(item)
        except TypeError as error:
            raise InvalidArgumentError("an item of a set must be hashable", found=type(item).__name__) from error
        return self._values.encode(item)

    def _possible(self, items: Iterable[Any]) -> set[bytes]:
        """Return the encoded form of the items that fit the item type; others cannot be in the set."""
        found = set()
        for item in items:
            with suppress(InvalidArgumentError):
                found.add(self._encoded(item))
        return found

    def _decoded(self, items: Iterable[bytes]) -> frozenset[T]:
        return frozenset(map(self._values.decode, items))
