"""Fixtures for tests of applications: ``pytest_plugins = ["readergroup.testing"]`` in your ``conftest.py``."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from datetime import datetime
from typing import Any, TypeVar

import pytest
from pydantic import BaseModel

from synchronizer import InvalidArgumentError, SegmentStore, open_store
from synchronizer.arguments import check_items
from synchronizer.clock import is_manual
from synchronizer.testing import (
    FailingStore,
    InstantClock,
    ManualClock,
    TwoReplicas,
    failing_store,
    manual_clock,
    two_replicas,
)

from . import aio
from .aio.calls import Calls
from .client import Client
from .errors import EndOfDataError
from .group.model.config import new_reader_id
from .group.reader_group import ReaderGroup
from .retries.returning import Returning
from .scaling.pool import ReaderPool
from .scaling.retry import DelayedRetry
from .scaling.worker import Worker
from .streams.config import SegmentId
from .streams.data.block import Block, encode_block
from .streams.data.block_slice import BlockSlice
from .streams.data.moments import microseconds_of
from .streams.event import Event, EventBatch
from .streams.serializers import BytesSerializer, JsonSerializer, PydanticSerializer, Serializer, checked_dumps

__all__ = [
    "FailingStore",
    "InstantClock",
    "ManualClock",
    "TwoReplicas",
    "aio_client",
    "aio_store",
    "drain",
    "failing_store",
    "make_batch",
    "make_event",
    "manual_clock",
    "reader_group_client",
    "second_aio_client",
    "second_client",
    "two_replicas",
]

R = TypeVar("R")
T = TypeVar("T")


def __dir__() -> list[str]:
    """The public names, without the modules that hold them, for completion in an interpreter."""
    return __all__


@pytest.fixture
def reader_group_client(failing_store: FailingStore, manual_clock: InstantClock) -> Iterator[Client]:
    """Provide a client of ``failing_store`` whose background work runs when ``manual_clock`` moves.

    That work renews the leases of readers, candidates and members, assigns segments, and calls event processors'
    handlers and all listeners.
    """
    with _driven_client(failing_store, manual_clock) as client:
        yield client
        failing_store.unavailable, failing_store.before, failing_store.after = False, None, None


@pytest.fixture
def second_client(failing_store: FailingStore, manual_clock: InstantClock) -> Iterator[Client]:
    """Provide a client as another process would have it: of the same store, but without its faults."""
    with _driven_client(failing_store.inner, manual_clock) as client:
        yield client


@contextmanager
def _driven_client(store: SegmentStore, clock: InstantClock) -> Iterator[Client]:
    with Client(store, clock=clock) as client:
        clock.run_when_due(client.step)
        yield client


@pytest.fixture
def aio_store() -> Iterator[FailingStore]:
    """Yield an empty store in memory, on a clock that runs, with the faults that the test orders."""
    with FailingStore(open_store("memory://")) as store:
        yield store


@pytest.fixture
def aio_client(aio_store: FailingStore) -> Iterator[aio.Client]:
    """Provide a client for asyncio of ``aio_store``. It belongs to the loop that first uses it.

    A plain fixture, so that it needs no plugin of pytest, and works with each.
    """
    with _closed_on_its_loop(aio_store) as client:
        yield client
        aio_store.unavailable, aio_store.before, aio_store.after = False, None, None


@pytest.fixture
def second_aio_client(aio_store: FailingStore) -> Iterator[aio.Client]:
    """Provide a client for asyncio as another process would have it: of the same store, but without its faults."""
    with _closed_on_its_loop(aio_store.inner) as client:
        yield client


class _CallsOfLoop(Calls):
    """Calls that remember the loop that makes them."""

    loop: asyncio.AbstractEventLoop | None = None

    async def run(self, function: Callable[[], R], **options: Any) -> R:
        self.loop = asyncio.get_running_loop()
        return await super().run(function, **options)


@contextmanager
def _closed_on_its_loop(store: SegmentStore) -> Iterator[aio.Client]:
    calls = _CallsOfLoop()
    client = aio.Client.of(Client(store), calls)
    try:
        yield client
    finally:
        if calls.loop is not None and not calls.loop.is_closed():
            calls.loop.run_until_complete(client.close())  # where callbacks and handlers that the test left can end
        else:
            with closing(asyncio.new_event_loop()) as loop:
                loop.run_until_complete(client.close())


def drain(pool: ReaderPool[Any]) -> int:
    """Handle all available events in this thread, as a worker of ``pool`` does, and return how many there were.

    They are handled one at a time, whatever the ``concurrency`` of the pool. A failed attempt is retried, or its event
    set aside, by the pool's `RetryPolicy`. The delays between attempts move the clock. With a `DelayedRetry` an event
    that fails waits: move the clock by its delay, and call `drain` again.

    Args:
        pool: The pool whose handler and retries apply. The clock of its client ``is_manual``.

    Returns:
        The number of events that were handled, set aside, or left to wait for a `DelayedRetry`.

    Raises:
        HandlerError: As ``pool.run`` does, an event could not be handled or set aside.
        InvalidArgumentError: The clock of the client is not moved by hand, or the pool is one for asyncio.
    """
    if not isinstance(pool, ReaderPool):
        raise InvalidArgumentError(
            "only a pool of a client of readergroup.connect can be drained, such as reader_group_client; it also takes "
            "an async def handler",
            found=f"{type(pool).__module__}.{type(pool).__qualname__}",
        )
    task = pool.task
    group = task.group
    assert isinstance(group, ReaderGroup)
    if not is_manual(task.client.clock):
        raise InvalidArgumentError("a pool can be drained only with a manual clock; otherwise call pool.run")
    returning = Returning(task.client, group, task.retry) if isinstance(task.retry, DelayedRetry) else None
    worker = Worker(replace(task, concurrency=1), new_reader_id())
    handled = looks_in_vain = 0
    with closing(worker), group.reader(worker.reader_id, serializer=task.serializer) as reader:
        while looks_in_vain < 2:  # after the first empty read, segments may complete and successors follow
            group.coordinator.step()
            if returning is not None:
                returning.step()
            try:
                batch = reader.read_batch(task.max_events, timeout=0)
            except EndOfDataError:
                break
            looks_in_vain = 0 if batch else looks_in_vain + 1
            if batch:
                worker.handle(batch)
                handled += len(batch)
    return handled


def make_event(
    data: T,
    *,
    routing_key: str | None = None,
    headers: Mapping[str, bytes] | None = None,
    serializer: Serializer[T] | None = None,
    segment: str = "test/stream/0",
    offset: int = 0,
    written_at: float = 0.0,
    fencing_token: int = 1,
    event_time: datetime | None = None,
) -> Event[T]:
    """Return an event as a reader delivers it, for a test that calls a handler itself.

    Args:
        data: The data of the event.
        routing_key: The routing key. Default: none.
        headers: The headers. Default: none.
        serializer: Encodes ``data``. Default: bytes stay bytes; models and all other values are JSON.
        segment: The segment that the event is in.
        offset: Where the event starts in the segment, in bytes.
        written_at: The time of writing, in seconds since 1970.
        fencing_token: The fencing token of the owner.
        event_time: When the event happened, with a timezone. Default: none.
    """
    return make_batch(
        [data],
        routing_keys=[routing_key],
        headers=[headers],
        serializer=serializer,
        segment=segment,
        offset=offset,
        written_at=written_at,
        fencing_token=fencing_token,
        event_times=[event_time],
    )[0]


def make_batch(
    data: Sequence[T],
    *,
    routing_keys: Sequence[str | None] | None = None,
    headers: Sequence[Mapping[str, bytes] | None] | None = None,
    serializer: Serializer[T] | None = None,
    segment: str = "test/stream/0",
    offset: int = 0,
    written_at: float = 0.0,
    fencing_token: int = 1,
    event_times: Sequence[datetime | None] | None = None,
) -> EventBatch[T]:
    """Return a batch as `Reader.read_batch` returns it, for a test that calls a handler of batches itself.

    Args:
        data: The data of the events, at least one.
        routing_keys: The routing key of each event. Default: none.
        headers: The headers of each event. Default: none.
        serializer: Encodes ``data``. Default: by the first event; bytes stay bytes, models and all other values are
            JSON.
        segment: The segment that the events are in.
        offset: Where the first event starts in the segment, in bytes.
        written_at: The time of writing, in seconds since 1970.
        fencing_token: The fencing token of the owner.
        event_times: When each event happened, with a timezone. Default: none.
    """
    check_items(data, Sequence, "data")
    if not data:
        raise InvalidArgumentError("a batch has at least one event")
    for name, values in (("routing_keys", routing_keys), ("headers", headers), ("event_times", event_times)):
        check_items(values, Sequence, name, or_none=True)
        if values is not None and len(values) != len(data):
            raise InvalidArgumentError(
                "there must be a value for each event", of=name, events=len(data), values=len(values)
            )
    serializer = serializer or _serializer_for(data[0])
    dumps = checked_dumps(serializer)
    block = encode_block(
        [dumps(each) for each in data],
        written_at=round(written_at * 1_000_000),
        writer_id=bytes(16),
        first_number=0,
        keys=routing_keys,
        headers=headers,
        event_times=None if event_times is None else list(map(_microseconds, event_times)),
    )
    whole = BlockSlice(Block(segment, offset, block), 0, len(data))
    return EventBatch([whole], SegmentId(segment), "test", fencing_token, serializer, group="test")


def _microseconds(time: datetime | None) -> int | None:
    return None if time is None else microseconds_of(time, "event_times")


def _serializer_for(data: Any) -> Serializer[Any]:
    if isinstance(data, bytes):
        return BytesSerializer()
    return PydanticSerializer(type(data)) if isinstance(data, BaseModel) else JsonSerializer()
