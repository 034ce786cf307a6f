"""`Telemetry`: what a client has done in this process so far, at one moment."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate
from typing import Final

from pydantic import BaseModel, ConfigDict

from synchronizer.counting import LATENCY_BOUNDS, Latencies

from .counters import Counters, GroupCounters, OutboxCounters, StreamCounters


class _Snapshot(BaseModel):
    model_config = ConfigDict(frozen=True)


class Latency(_Snapshot):
    """How many of something took how long."""

    #: By an upper bound in seconds: how many took no longer. The bounds are the same in all processes.
    buckets: Mapping[float, int]
    #: How many there were.
    count: int
    #: How long all of them took together.
    seconds: float


class StreamTelemetry(_Snapshot):
    """What the writers, transactions and outboxes of the client have stored in a stream."""

    events_written: int
    #: In the store, with routing keys and headers. A transaction counts in the client that commits it.
    bytes_written: int


class GroupTelemetry(_Snapshot):
    """What the readers and pools of the client have done in a group. Worker processes have clients of their own."""

    #: The events that readers have handed out. An event that is handed out again counts again.
    events_read: int
    #: Their bytes in the store, with routing keys and headers, once their batch is no longer in hand.
    bytes_read: int
    #: The renewals of readers' leases, which commit their positions.
    commits: Latency
    #: The segments that the readers have taken over, their first ones included.
    segments_acquired: int
    #: How often a reader was declared dead, or lost its lease, and joined again.
    leases_lost: int
    #: The dead readers, of any process, that this process has removed from the group.
    readers_declared_dead: int
    #: The failed attempts of handlers that were followed by another.
    retries: int
    #: The events that were moved to the stream of dead letters.
    dead_letters: int
    #: The events that handlers of pools with ``concurrency`` handle now.
    events_in_flight: int
    #: The transactions that were committed by a `SqlSink`.
    sink_transactions: int


class OutboxTelemetry(_Snapshot):
    """What the relays of the client have moved from an outbox."""

    events_relayed: int
    #: How long the oldest event of each round, of each stream, had waited. Ask `Outbox.lag` for what waits now.
    delays: Latency


class StoreTelemetry(_Snapshot):
    """What the store object of the client has answered."""

    #: All appends: of events, commits, and updates of states.
    appends: Latency
    #: The calls that were not answered, or failed, by the name of the error, such as ``StoreUnavailableError``.
    errors: Mapping[str, int]


class Telemetry(_Snapshot):
    """What a client has done in this process since it was opened.

    Numbers only grow, apart from ``events_in_flight``. A client counts up to 1000 streams,
    groups and outboxes under their names, and the rest of them together as ``(others)``.
    """

    streams: Mapping[str, StreamTelemetry]
    groups: Mapping[str, GroupTelemetry]
    #: By the name of the table.
    outboxes: Mapping[str, OutboxTelemetry]
    store: StoreTelemetry


def snapshot(counters: Counters) -> Telemetry:
    """Return what these counters say now. Never waits."""
    return Telemetry(
        streams={name: _stream(found) for name, found in counters.streams.all().items()},
        groups={name: _group(found) for name, found in counters.groups.all().items()},
        outboxes={name: _outbox(found) for name, found in counters.outboxes.all().items()},
        store=StoreTelemetry(appends=latency(counters.store.appends), errors=dict(counters.store.errors)),
    )


def _stream(found: StreamCounters) -> StreamTelemetry:
    return StreamTelemetry(events_written=found.events_written, bytes_written=found.bytes_written)


_OF_GROUP: Final = frozenset(GroupTelemetry.model_fields) - {"commits"}


def _group(found: GroupCounters) -> GroupTelemetry:
    return GroupTelemetry(commits=latency(found.commits), **{name: getattr(found, name) for name in _OF_GROUP})


def _outbox(found: OutboxCounters) -> OutboxTelemetry:
    return OutboxTelemetry(events_relayed=found.events_relayed, delays=latency(found.delays))


def latency(found: Latencies) -> Latency:
    """Return what was counted so far."""
    counts = list(accumulate(found.counts.copy()))
    return Latency(buckets=dict(zip(LATENCY_BOUNDS, counts, strict=False)), count=counts[-1], seconds=found.seconds)
