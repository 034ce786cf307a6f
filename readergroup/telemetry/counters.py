"""What one client has done in this process, as plain numbers (`synchronizer.counting`).

Where events are handed out or stored there is one line that counts them, once for each batch. What a reader has handed
out of the batch in hand, and what a worker handles now, they know anyway: a snapshot asks them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final, Generic, Protocol, TypeVar
from weakref import WeakValueDictionary

from synchronizer.counting import Latencies, StoreCounters

C = TypeVar("C")

#: How many streams, groups and outboxes are counted under their own names. The rest share one, so that neither memory
#: nor the series of a monitoring system grow without end.
MOST_NAMES: Final = 1000
OTHERS: Final = "(others)"


class HandingOut(Protocol):
    """A reader with a batch in hand."""

    #: How many of its events were handed out.
    handed: int


class Handling(Protocol):
    """A worker that handles many events at once."""

    @property
    def running_events(self) -> int: ...


class StreamCounters:
    """The events that were stored in a stream."""

    __slots__ = ("bytes_written", "events_written")

    def __init__(self) -> None:
        self.events_written = 0
        self.bytes_written = 0

    def count(self, events: int, size: int) -> None:
        self.events_written += events
        self.bytes_written += size


class GroupCounters:
    """What the readers and pools of a group have done."""

    def __init__(self) -> None:
        #: The events of batches that are no longer in hand, and their bytes in the store.
        self.events_of_batches = 0
        self.bytes_read = 0
        self.commits = Latencies()
        self.segments_acquired = 0
        self.leases_lost = 0
        self.readers_declared_dead = 0
        self.retries = 0
        self.dead_letters = 0
        self.sink_transactions = 0
        self._readers: WeakValueDictionary[int, HandingOut] = WeakValueDictionary()
        self._workers: WeakValueDictionary[int, Handling] = WeakValueDictionary()
        self._events_read = 0  # as last seen

    def count_read(self, events: int, size: int) -> None:
        """Count the events of a batch that is no longer in hand."""
        self.events_of_batches += events
        self.bytes_read += size

    def add_reader(self, reader: HandingOut) -> None:
        self._readers[id(reader)] = reader

    def remove_reader(self, reader: HandingOut) -> None:
        self._readers.pop(id(reader), None)

    def add_worker(self, worker: Handling) -> None:
        self._workers[id(worker)] = worker

    @property
    def events_read(self) -> int:
        """The events that were handed out. Never less than before."""
        # A reader sets its number to 0 before it counts its batch. So an event may be missing here for a moment, and
        # none counts twice.
        counted = self.events_of_batches
        counted += sum(reader.handed for ref in self._readers.valuerefs() if (reader := ref()) is not None)
        self._events_read = max(self._events_read, counted)
        return self._events_read

    @property
    def events_in_flight(self) -> int:
        """The events that pools with ``concurrency`` handle now."""
        return sum(worker.running_events for ref in self._workers.valuerefs() if (worker := ref()) is not None)


class OutboxCounters:
    """What the relays of an outbox have done."""

    __slots__ = ("delays", "events_relayed")

    def __init__(self) -> None:
        self.events_relayed = 0
        #: For each stream and round, how long the oldest event had waited.
        self.delays = Latencies()


class Names(Generic[C]):
    """Counters by name, at most `MOST_NAMES`. Threads may share them."""

    def __init__(self, new: Callable[[], C]) -> None:
        self._new = new
        self._found: dict[str, C] = {}

    def __getitem__(self, name: str) -> C:
        found = self._found.get(name)
        if found is None:
            if len(self._found) >= MOST_NAMES:
                name = OTHERS
            found = self._found.setdefault(name, self._new())
        return found

    def all(self) -> Mapping[str, C]:
        return self._found.copy()


class Counters:
    """The counters of one client."""

    def __init__(self, store: StoreCounters) -> None:
        self.store: Final = store
        self.streams: Final = Names(StreamCounters)
        self.groups: Final = Names(GroupCounters)
        self.outboxes: Final = Names(OutboxCounters)
        _all[id(self)] = self


_all: Final[WeakValueDictionary[int, Counters]] = WeakValueDictionary()


def all_counters() -> Sequence[Counters]:
    """Return those of all clients of this process."""
    return [counters for ref in _all.valuerefs() if (counters := ref()) is not None]
