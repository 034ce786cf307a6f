"""Which class a shared state has, by its name in the store."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from synchronizer.threads.loading import loading

if TYPE_CHECKING:
    from synchronizer import State, StateSynchronizer, Update

    from ..client import Client

#: By the first part of the name: where the class of the state and the list of its updates are.
_CLASSES: Final[Mapping[str, tuple[str, str, str]]] = {
    "barrier": ("synchronizer.recipes.coordination.members", "Members", "UPDATES"),
    "config": ("synchronizer.recipes.collections.shared_map", "MapState", "MAP_UPDATES"),
    "counter": ("synchronizer.recipes.collections.shared_counter", "CounterState", "COUNTER_UPDATES"),
    "dead-letter-status": ("readergroup.dead_letters.statuses", "LetterStatuses", "LETTER_UPDATES"),
    "election": ("synchronizer.recipes.coordination.members", "Members", "UPDATES"),
    "group": ("readergroup.group.model.state", "ReaderGroupState", "readergroup.group.model.updates:UPDATES"),
    "lock": ("synchronizer.recipes.coordination.members", "Members", "UPDATES"),
    "map": ("synchronizer.recipes.collections.shared_map", "MapState", "MAP_UPDATES"),
    "membership": ("synchronizer.recipes.coordination.members", "Members", "UPDATES"),
    "semaphore": ("synchronizer.recipes.coordination.members", "Members", "UPDATES"),
    "set": ("synchronizer.recipes.collections.shared_set", "SetState", "SET_UPDATES"),
    "stream": ("readergroup.streams.state", "StreamState", "STREAM_UPDATES"),
}
_OUTBOX: Final = ("readergroup.outbox.state", "OutboxState", "OUTBOX_UPDATES")
#: The states of applications, whose classes only they have, and those of outboxes.
_OWN: Final = "state"
#: The first parts of the names of states.
PREFIXES: Final = (_OWN, *_CLASSES)
#: Their values are stored as msgpack.
_COLLECTIONS: Final = frozenset({"config", "map", "set"})


class Kind(NamedTuple):
    """The classes of a state."""

    state_type: type[State]
    updates: tuple[type[Update[Any]], ...]


def is_name(name: str) -> bool:
    """Whether a state can have this name."""
    return name.partition("/")[0] in PREFIXES


def is_collection(name: str) -> bool:
    return name.partition("/")[0] in _COLLECTIONS


def kind_of(name: str) -> Kind | None:
    """Return the classes of the state; None if only an application has them."""
    first = name.partition("/")[0]
    if first == _OWN and not name.startswith(f"{_OWN}/outbox/"):
        return None
    module, state, updates = _CLASSES.get(first, _OUTBOX)
    elsewhere, _, updates = updates.rpartition(":")
    return Kind(getattr(import_module(module), state), tuple(getattr(import_module(elsewhere or module), updates)))


@contextmanager
def opened(client: Client, name: str, kind: Kind) -> Iterator[StateSynchronizer[Any]]:
    """Open the newest state during the block. Raise `NotFoundError` if there is none."""
    with loading():
        from synchronizer import StateSynchronizer  # pydantic, which most commands do without until they connect

    synchronizer: StateSynchronizer[Any] = StateSynchronizer(
        client.store, name, state_type=kind.state_type, updates=kind.updates, timeout=client.timeout
    )
    try:
        synchronizer.fetch_updates()
        yield synchronizer
    finally:
        synchronizer.close()
