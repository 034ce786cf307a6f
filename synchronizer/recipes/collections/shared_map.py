"""`SharedMap`: a mapping that is the same in every process."""

from __future__ import annotations

from collections.abc import Callable, ItemsView, Iterable, Iterator, Mapping, MutableMapping, ValuesView
from dataclasses import dataclass
from types import UnionType
from typing import Any, Final, Generic, Literal, TypeVar, Unpack, overload

from synchronizer.arguments import check_type
from synchronizer.errors import InvalidArgumentError
from synchronizer.log.entries import Revision
from synchronizer.log.replica import AppliedUpdate
from synchronizer.map import Map
from synchronizer.state import State, Update
from synchronizer.store import ANY, AnyValue, SegmentStore

from .shared import Shared, SynchronizerOptions, whole
from .values import ValueCodec

T = TypeVar("T")
V = TypeVar("V")


class MapState(State):
    """Keys with their values as bytes, so that a process can hold a value whose type it does not know."""

    entries: Map[str, bytes] = Map()


class PutEntry(Update[MapState], tag="put"):
    key: str
    value: bytes

    def apply_to(self, state: MapState, revision: Revision) -> MapState:
        return state.replace(entries=state.entries.set(self.key, self.value))


class RemoveEntry(Update[MapState], tag="remove"):
    key: str

    def apply_to(self, state: MapState, revision: Revision) -> MapState:
        return state.replace(entries=state.entries.delete(self.key))


class ClearMap(Update[MapState], tag="clear"):
    def apply_to(self, state: MapState, revision: Revision) -> MapState:
        return state.replace(entries=Map())


MAP_UPDATES: Final[list[type[Update[MapState]]]] = [PutEntry, RemoveEntry, ClearMap]
#: The result of a decision on a state: updates, and the answer to the caller.
Decided = tuple[Iterable[Update[MapState]], V]


@dataclass(frozen=True)
class EntryChange(Generic[V]):
    """A key whose value changed at ``revision``. None stands for no value."""

    key: str
    before: V | None
    after: V | None
    revision: Revision


class SharedMap(Shared[MapState], MutableMapping[str, V]):
    """A shared mapping from ``str`` to values of one type, with as many entries as fit into a state.

    Reads use the copy in this process; `refresh` brings it up to date. A change is decided on the newest state and
    stored when it returns. It leaves the copy up to date, also if it was refused. Iteration is in order of the keys. A
    value that you read is your own copy: to change the map, put it back.

    Args:
        store: Holds the map.
        name: The same in all processes that share it.
        value_type: The type of the values; see `ValueCodec` for the types that can be shared.
        **options: See `SynchronizerOptions`.
    """

    kind = "map"

    def __init__(
        self, store: SegmentStore, name: str, value_type: type[V] | UnionType, **options: Unpack[SynchronizerOptions]
    ) -> None:
        self._values: ValueCodec[V] = ValueCodec(value_type, "value_type")
        super().__init__(store, name, MapState(), MAP_UPDATES, options)

    # ------------------------------------------------------------------ reading the copy

    def __getitem__(self, key: str) -> V:
        return self._values.decode(self.synchronizer.state.entries[key], key=key)

    def __contains__(self, key: object) -> bool:
        return key in self.synchronizer.state.entries

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self.synchronizer.state.entries))

    def __len__(self) -> int:
        return len(self.synchronizer.state.entries)

    def copy(self) -> dict[str, V]:
        """Return all entries at one revision. `items` and `values` are consistent in the same way."""
        return self._decoded(self.synchronizer.state)

    def items(self) -> ItemsView[str, V]:
        return self.copy().items()

    def values(self) -> ValuesView[V]:
        return self.copy().values()

    # ------------------------------------------------------------------ changes

    def put(self, key: str, value: V, *, timeout: float | None = None) -> None:
        """Set the value of ``key``, whatever it is now."""
        self.synchronizer.update_state_unconditionally(self._put(key, value), timeout=timeout)

    def put_if_absent(self, key: str, value: V, *, timeout: float | None = None) -> bool:
        """Set the value of ``key`` if it has none; return whether this call set it."""
        put = self._put(key, value)

        def decide(state: MapState) -> Decided[bool]:
            return ([], False) if key in state.entries else ([put], True)

        return self.synchronizer.update_state_returning(decide, timeout=timeout)

    def replace(
        self, key: str, new: V, expected: V | Literal[AnyValue.ANY] = ANY, *, timeout: float | None = None
    ) -> bool:
        """Set the value of ``key`` if it has one and that is ``expected``; return whether this call set it."""
        return self._change_if(key, expected, self._put(key, new), timeout)

    def remove(self, key: str, expected: V | Literal[AnyValue.ANY] = ANY, *, timeout: float | None = None) -> bool:
        """Remove ``key`` if its value is ``expected``; return whether this call removed it."""
        return self._change_if(key, expected, RemoveEntry(key=_checked(key)), timeout)

    def clear(self, *, timeout: float | None = None) -> None:
        """Remove all entries in one step."""
        self.synchronizer.update_state(lambda state: [ClearMap()] if state.entries else [], timeout=timeout)

    def update(  # type: ignore[override]
        self, other: Mapping[str, V] | Iterable[tuple[str, V]] = (), /, **entries: V
    ) -> None:
        """Set all these values in one step: no process sees some of them without the others."""
        puts = [self._put(key, value) for key, value in {**dict(other), **entries}.items()]
        self.synchronizer.update_state_unconditionally(*puts)

    def setdefault(self, key: str, default: V) -> V:
        """Return the value of ``key``; if it has none, set it to ``default`` and return that."""
        put = self._put(key, default)

        def decide(state: MapState) -> Decided[bytes]:
            present = state.entries.get(key)
            return ([put], put.value) if present is None else ([], present)

        return self._values.decode(self.synchronizer.update_state_returning(decide), key=key)

    @overload
    def pop(self, key: str, /) -> V: ...
    @overload
    def pop(self, key: str, /, default: T) -> V | T: ...
    def pop(self, key: str, /, default: Any = ANY) -> Any:
        """Remove ``key`` and return its value, or ``default`` if it has none; `KeyError` without a default."""

        def decide(state: MapState) -> Decided[bytes | None]:
            present = state.entries.get(key)
            return ([] if present is None else [RemoveEntry(key=key)]), present

        removed = self.synchronizer.update_state_returning(decide)
        if removed is None:
            if default is ANY:
                raise KeyError(key)
            return default
        return self._values.decode(removed, key=key)

    def popitem(self) -> tuple[str, V]:
        """Remove the first entry and return it; each entry goes to one caller. `KeyError` if the map is empty."""

        def decide(state: MapState) -> Decided[tuple[str, bytes] | None]:
            if not state.entries:
                return [], None
            key = min(state.entries)
            return [RemoveEntry(key=key)], (key, state.entries[key])

        removed = self.synchronizer.update_state_returning(decide)
        if removed is None:
            raise KeyError("the map is empty")
        return removed[0], self._values.decode(removed[1], key=removed[0])

    def __setitem__(self, key: str, value: V) -> None:
        self.put(key, value)

    def __delitem__(self, key: str) -> None:
        if not self.remove(key):
            raise KeyError(key)

    # ------------------------------------------------------------------ listening

    def watch(self) -> Iterator[dict[str, V]]:
        """Yield all entries now, then the newest ones after each change, until the map is closed."""
        return map(self._decoded, self.synchronizer.watch())

    def register_listener(
        self, listener: Callable[[EntryChange[V]], object], *, key: str | None = None
    ) -> Callable[[], None]:
        """Call ``listener`` with every change after the present copy; return a function that ends it.

        With ``key``, only with changes of that key.
        """
        check_type(key, str, "key", or_none=True)
        wanted = key

        def tell(
            told: Callable[[EntryChange[V]], object],
            before: MapState,
            after: MapState,
            applied: AppliedUpdate[MapState],
        ) -> None:
            for key in _changed(before, after, applied) if wanted is None else [wanted]:
                old, new = before.entries.get(key), after.entries.get(key)
                if old != new:
                    told(EntryChange(key, self._known(key, old), self._known(key, new), applied.revision))

        return self._on_update(listener, whole, tell)

    # ------------------------------------------------------------------ steps

    def _put(self, key: str, value: V) -> PutEntry:
        return PutEntry(key=_checked(key), value=self._values.encode(value, key=key))

    def _change_if(
        self, key: str, expected: V | Literal[AnyValue.ANY], change: Update[MapState], timeout: float | None
    ) -> bool:
        # Without the check, an expected value of another type would silently never match.
        wanted = expected if expected is ANY else self._values.checked(expected, key=key)

        def decide(state: MapState) -> Decided[bool]:
            present = state.entries.get(key)
            if present is None or (wanted is not ANY and self._values.decode(present, key=key) != wanted):
                return [], False
            return [change], True

        return self.synchronizer.update_state_returning(decide, timeout=timeout)

    def _known(self, key: str, data: bytes | None) -> V | None:
        return None if data is None else self._values.decode(data, key=key)

    def _decoded(self, state: MapState) -> dict[str, V]:
        return {key: self._values.decode(data, key=key) for key, data in sorted(state.entries.items())}


def _checked(key: object) -> str:
    if not isinstance(key, str):
        raise InvalidArgumentError("a key must be a str", found=type(key).__name__)
    return key


def _changed(before: MapState, after: MapState, applied: AppliedUpdate[MapState]) -> Iterable[str]:
    """Return the keys that may have changed: one if the update names it, otherwise all."""
    if isinstance(applied.update, PutEntry | RemoveEntry):
        return [applied.update.key]
    return sorted({*before.entries, *after.entries})
