"""The asyncio face has the names of the synchronous one: what is not there is listed with its reason."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Mapping
from typing import Final

import pytest

import notifications
import readergroup as rg
import synchronizer
from readergroup import aio
from readergroup.group.manager import ReaderGroupManager
from readergroup.streams.manager import StreamManager

PAIRS: Final[Mapping[type, type]] = {
    rg.Client: aio.Client,
    StreamManager: aio.StreamManager,
    ReaderGroupManager: aio.ReaderGroupManager,
    rg.BatchClient: aio.BatchClient,
    rg.DeadLetters: aio.DeadLetters,
    rg.ReaderGroup: aio.ReaderGroup,
    rg.Reader: aio.Reader,
    rg.ReaderPool: aio.ReaderPool,
    rg.EventWriter: aio.EventWriter,
    rg.Transaction: aio.Transaction,
    notifications.PollingNotifier: aio.Notifier,
    rg.StateSynchronizer: aio.StateSynchronizer,
    rg.SharedMap: aio.SharedMap,
    rg.SharedSet: aio.SharedSet,
    rg.SharedConfig: aio.SharedConfig,
    rg.SharedCounter: aio.SharedCounter,
    rg.EventQueue: aio.EventQueue,
    rg.EventProcessor: aio.EventProcessor,
    rg.Membership: aio.Membership,
    rg.LeaderElection: aio.LeaderElection,
    rg.Barrier: aio.Barrier,
    rg.HeldLock: aio.HeldLock,
}

#: Names of the synchronous classes that their asyncio faces do not have.
LEFT_OUT: Final[Mapping[str, frozenset[str]]] = {
    "for a clock that is moved by hand, which asyncio has no use for": frozenset({
        "Client.step", "EventProcessor.handle_queued", "EventProcessor.step", "LeaderElection.step",
        "Membership.step", "PollingNotifier.step", "ReaderGroup.step", "ReaderGroupManager.step",
        "SharedConfig.step", "SharedCounter.step", "SharedMap.step", "SharedSet.step",
        "StateSynchronizer.poll_listeners", "StateSynchronizer.step", "Barrier.step",
    }),
    "for other parts of the SDK": frozenset({
        "Barrier.arrival", "Barrier.check_open", "Barrier.closed", "BatchClient.ranges_between",
        "EventWriter.begin_write", "EventWriter.begun_writes", "EventWriter.has_ended",
        "EventWriter.has_room", "EventWriter.wait_for_room", "LeaderElection.check_open",
        "LeaderElection.on_news", "ReaderGroup.open_reader",
        "ReaderGroupManager.note_skipped", "ReaderGroupManager.subscribers", "ReaderPool.task",
        "StateSynchronizer.wait_for_growth",
        "StateSynchronizer.transitions", "StateSynchronizer.update_state_with_attributes",
        "StreamManager.delete_staged", "StreamManager.fetch_state", "StreamManager.finish_pending",
        "StreamManager.note_deleted_group",
        "StreamManager.resolve", "StreamManager.segment_lengths", "StreamManager.states",
        "StreamManager.synchronizer", "StreamManager.tail_cut", "StreamManager.timeout",
        "SharedMap.kind", "SharedSet.kind", "SharedConfig.kind", "SharedCounter.kind",
        "StateSynchronizer.segment",
    }),
    "what the client has, or what blocks in the thread of its caller": frozenset({
        "EventProcessor.clock", "EventProcessor.segment", "EventProcessor.store", "EventProcessor.timeout",
        "EventQueue.clock", "EventQueue.segment", "EventQueue.store", "EventQueue.timeout", "ReaderGroup.coordinator",
        "StateSynchronizer.clock", "StateSynchronizer.store", "StateSynchronizer.timeout", "StreamManager.clock",
        "StreamManager.copies", "StreamManager.finished_keys", "StreamManager.maintenance", "StreamManager.metadata",
        "StreamManager.open_writers",
        "StreamManager.retention", "StreamManager.store", "StreamManager.watermarks", "StreamManager.writer_threads",
        "ReaderGroup.counters", "StreamManager.counters",
        "PollingNotifier.owner", "PollingNotifier.synchronizer", "Barrier.synchronizer", "LeaderElection.synchronizer",
        "Membership.synchronizer", "SharedConfig.synchronizer", "SharedCounter.synchronizer",
        "SharedMap.synchronizer", "SharedSet.synchronizer",
    }),
    "for subclasses": frozenset({
        "PollingNotifier.before_poll", "PollingNotifier.detect", "PollingNotifier.look", "PollingNotifier.watched",
    }),
    "the client closes it": frozenset({
        "PollingNotifier.close", "ReaderGroup.close", "ReaderGroupManager.close", "StreamManager.close",
        "EventProcessor.stop", "ReaderGroup.stop", "ReaderGroupManager.stop",
    }),
    "a decorator cannot be awaited: use register_listener": frozenset({"PollingNotifier.listen"}),
    "it runs callbacks in threads of its own: use the synchronous client": frozenset({"ReaderGroup.autoscale"}),
    "a process records without its loop: use the synchronous client": frozenset({
        "ReaderGroup.notification_record", "ReaderGroup.record_notifications",
    }),
}  # fmt: skip


def public(kind: type) -> set[str]:
    """The public names of its objects: members of the class, and attributes that its methods assign."""
    names = set(dir(kind))
    for each in kind.__mro__:
        if each.__module__.split(".")[0] in ("notifications", "readergroup", "synchronizer"):
            for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(each)))):
                match node:
                    case ast.Attribute(ast.Name("self"), name, ast.Store()):
                        names.add(name)
    return {name for name in names if not name.startswith("_")}


@pytest.mark.parametrize("kind", PAIRS, ids=lambda kind: kind.__name__)
def test_each_public_name_is_there_or_left_out_for_a_reason(kind: type) -> None:
    left_out = {name.partition(".")[2] for names in LEFT_OUT.values() for name in names if _is_of(name, kind)}
    assert public(kind) - public(PAIRS[kind]) == left_out


def _is_of(name: str, kind: type) -> bool:
    return name.partition(".")[0] == kind.__name__


def test_every_exported_name_has_a_docstring_and_is_in_dir() -> None:
    assert dir(aio) == sorted(aio.__all__)
    assert all(getattr(aio, name).__doc__ for name in aio.__all__)


def test_the_methods_keep_the_docstrings_and_signatures() -> None:
    assert aio.StreamManager.create.__doc__ == StreamManager.create.__doc__
    assert inspect.signature(aio.StreamManager.create) == inspect.signature(StreamManager.create)
    assert inspect.iscoroutinefunction(aio.StreamManager.create)
    assert inspect.signature(aio.ReaderPool.run) == inspect.signature(rg.ReaderPool.run)
    assert synchronizer.SharedMap.remove.__doc__ == aio.SharedMap.remove.__doc__
