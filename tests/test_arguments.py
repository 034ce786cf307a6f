"""Every public callable refuses a duration or count that cannot be one, at once and with an error of ours.

The callables are found by the annotations of their parameters: one that is new is tried as well, and fails here until
it checks what it is given.
"""

from __future__ import annotations

import inspect
import itertools
import math
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from datetime import UTC, datetime
from types import ModuleType
from typing import NamedTuple

import pytest
from pydantic import BaseModel, ValidationError

import notifications
import readergroup as rg
import synchronizer
from readergroup.group import ReaderGroupManager
from readergroup.streams.manager import StreamManager
from synchronizer import ANY, InvalidArgumentError, ReaderGroupError
from synchronizer.arguments import check_count, check_duration
from synchronizer.configuration import Configuration

STREAM = "shop/orders"
#: For a count and for a duration; those that only some refuse are left out.
BAD = (math.nan, "5", True, -1, -0.5, [], object())
NUMBER = re.compile(r"\b(float|int)\b")
COLLECTION = re.compile(r"(Callable|Mapping|Sequence|Iterable|dict|list|tuple|type)\[.*\]")
#: Data and its places, which the product makes; and what is a plain calculation.
NOT_ARGUMENTS = {
    "amount", "at_most", "attempt", "count", "counter", "end", "epoch", "expected", "expected_offset", "failures",
    "fencing_token", "first", "generation", "handled", "indent", "index", "length", "most", "new", "offset", "place",
    "previous", "start", "start_offset", "value", "_parent_namespace_depth",
}  # fmt: skip
#: Results, and what only a test moves.
NOT_CALLED_BY_APPLICATIONS = (
    synchronizer.DeadEvent, synchronizer.HandlingLatency, synchronizer.Guarantees, synchronizer.ManualClock,
    synchronizer.SystemClock, synchronizer.Flag, synchronizer.RevisionedStream, synchronizer.SegmentStore,
    rg.StagedPart, rg.LagSample, rg.Notification, rg.Transaction,
)  # fmt: skip
#: Applications get them from others.
NOT_MADE = (rg.Reader, rg.NotificationRecord)
NOT_CALLED = {"observe_interval", "growing_pause", "wait_for_growth"}


class Counter(synchronizer.State):
    value: int = 0


class Settings(BaseModel):
    size: int = 0


#: Arguments with a default that a call cannot do without.
ALSO: Mapping[str, Mapping[str, object]] = {
    "ReaderGroup.pool": {"handle": print},
    "StreamManager.scale": {"split": [0]},
    "connect": {"url": "memory://"},
    "SharedConfig.replace": {"expected": 0},
    "EventProcessor": {"handler": print},
}


class Case(NamedTuple):
    call: Callable[..., object]
    parameter: str
    others: Mapping[str, object]

    def with_(self, bad: object) -> object:
        found = self.call(**{**self.others, self.parameter: bad})
        if inspect.isgenerator(found):
            return next(found, None)
        if isinstance(found, AbstractContextManager) and not hasattr(found, "close"):
            return found.__enter__()
        return found


class World:
    """One of each object, on a memory store."""

    def __init__(self) -> None:
        self.client = client = rg.connect("memory://")
        client.streams.create(STREAM)
        self.store = client.store
        self.counter = client.synchronizer("counter", initial=Counter(), updates=[])
        self.group = client.groups.create("billing", streams=[STREAM])
        self.writer = client.writer(STREAM)
        with self.writer:
            self.writer.write(b"event")
        (self.range,) = client.batch.segment_ranges(STREAM)
        self.pool = self.group.pool(lambda event: None)
        system = notifications.NotificationSystem()
        polling = notifications.BackgroundPolling(
            lambda: None,
            dict,
            name="polling",
            store=client.store,
            clock=client.clock,
            interval_seconds=5,
            scheduler=None,
        )
        self.objects: Mapping[type, object] = {
            type(each): each
            for each in (
                client,
                client.streams,
                client.groups,
                client.batch,
                client.writer(STREAM),
                client.barrier("barrier", 2),
                client.counter("counter"),
                client.event_queue("queue"),
                client.event_processor("processed", lambda event: None),
                client.leader_election("election", "me"),
                client.membership("members", "me"),
                client.shared_config("config", Settings),
                client.shared_map("map", int),
                client.shared_set("set", int),
                synchronizer.Lock(client.store, "lock"),
                synchronizer.Semaphore(client.store, "semaphore", 2),
                self.counter,
                self.group,
                system.register_listener(print, source="source"),
                polling,
                synchronizer.ConfigEntries(client.store, "other"),
                self.group.reader("reader"),
                self.pool,
                self.group.segment_notifier,
                self.group.record_notifications(),
                rg.Transactions(client.streams),
                synchronizer.Turn(client.store, "state/counter", "turn", client.clock),
            )
        }
        self.arguments: dict[str, object] = {
            "attribute": "turn", "candidate_id": "me", "clock": client.clock, "cut": client.streams.info(STREAM).head,
            "end": client.streams.info(STREAM).tail, "entry": "entry", "event": b"event", "events": [b"event"],
            "generator": lambda state: [], "group": self.group, "handle": lambda event: None,
            "handler": lambda event: None, "handle_batch": None, "initial": Counter(), "item": 1, "items": [1],
            "item_type": int, "key": "key", "listener": lambda each: None, "manager": client.streams,
            "member_id": "me", "model": Settings, "name": "new", "new": 1, "number": 1, "parties": 2, "parts": [],
            "permits": 2, "predicate": lambda state: False, "routing_key": None, "segment": "state/counter",
            "segment_range": self.range, "serializer": rg.BytesSerializer(), "state": Counter(), "store": client.store,
            "stream": STREAM, "synchronizer": self.counter, "to": "head", "updates": [], "value": 1,
            "value_type": int, "poll": lambda: None, "known": dict, "interval_seconds": 1.0, "scheduler": None,
            "workers": "thread", "retry": None, "client": client, "readers": 1, "reader_id": "other", "amount": 1,
            "expected": ANY, "offset": 0, "after": synchronizer.Revision(0, 0), "source": "source", "max_readers": 4,
            "streams": (STREAM,), "segments": 1, "first": client.streams.info(STREAM).head, "time": datetime.now(UTC),
            "key_type": str, "max_bytes": 10, "about_bytes": 10, "timeout_seconds": 1.0,
            "update": None, "field": "size",
            "url": "memory://", "queue_size": 10, "reader": "reader", "config": None, "cuts": {}, "source_name": "x",
            "target": "shop/copy", "cause": None, "log": "record", "lag_interval_seconds": 5.0,
            "retention_seconds": 5.0, "retention_bytes": 5, "threads": True, "limit_bytes": 10, "fields": {},
            "scaling": rg.ScalingPolicy.fixed(1), "prefix": "data/", "is_given_up": lambda name: False, "place": "tail",
            "numbers": [0],
            "thread": False, "on_failure": print, "start": client.streams.info(STREAM).head,
        }  # fmt: skip

    def close(self) -> None:
        self.client.close()


def public_classes(*modules: ModuleType) -> Iterator[type]:
    seen = set()
    for module in modules:
        for name, each in sorted(vars(module).items()):
            if inspect.isclass(each) and not name.startswith("_") and each not in seen:
                seen.add(each)
                yield each


def numbers_of(call: Callable[..., object]) -> list[str]:
    """The parameters that are durations or counts."""
    try:
        signature = inspect.signature(call)
    except (TypeError, ValueError):
        return []
    return [
        name
        for name, parameter in signature.parameters.items()
        if name not in NOT_ARGUMENTS
        and parameter.kind is not parameter.VAR_KEYWORD
        and NUMBER.search(COLLECTION.sub("", str(parameter.annotation)))
    ]


def public_callables() -> Iterator[tuple[str, type | None, str]]:
    """Their names, with the class they are of."""
    for kind in public_classes(synchronizer, notifications, rg):
        if getattr(kind, "_is_protocol", False) or {BaseException, *NOT_CALLED_BY_APPLICATIONS} & {*kind.__mro__}:
            continue
        is_data = issubclass(kind, BaseModel) or issubclass(kind, tuple) or hasattr(kind, "__dataclass_fields__")
        is_made = (not is_data or issubclass(kind, Configuration)) and kind not in NOT_MADE
        if is_made and not inspect.isabstract(kind) and numbers_of(kind):
            yield kind.__name__, kind, ""
        if not is_data:
            for name, member in inspect.getmembers(kind, callable):
                if not name.startswith("_") and numbers_of(member):
                    yield f"{kind.__name__}.{name}", kind, name
    for module in (synchronizer, notifications, rg):
        for name, call in sorted(vars(module).items()):
            if inspect.isfunction(call) and numbers_of(call) and name not in NOT_CALLED:
                yield name, None, name


CALLABLES = {name: (kind, method) for name, kind, method in public_callables()}
MANAGERS = {
    f"{kind.__name__}.{name}": (kind, name)
    for kind in (StreamManager, ReaderGroupManager)
    for name, member in inspect.getmembers(kind, callable)
    if not name.startswith("_") and numbers_of(member)
}


@pytest.fixture
def world() -> Iterator[World]:
    world = World()
    yield world
    world.close()


def cases(world: World, full_name: str) -> Iterator[Case]:
    kind, method = {**CALLABLES, **MANAGERS}[full_name]
    if kind is rg.BatchClient or kind is StreamManager:
        world.arguments["state"] = world.client.streams.fetch_state(STREAM)
    if kind is None:
        call = getattr(rg, method, None) or getattr(synchronizer, method)
    elif method:
        found = next((each for each in world.objects.values() if isinstance(each, kind)), None)
        assert found is not None, f"give the World of this test a {kind.__name__}"
        call = getattr(found, method)
    else:
        call = kind
    signature = inspect.signature(call)
    needed = [
        name
        for name, parameter in signature.parameters.items()
        if parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
    ]
    for name in numbers_of(call):
        unknown = [each for each in needed if each != name and each not in world.arguments]
        assert not unknown, f"give the World of this test an argument {', '.join(unknown)}"
        others = {each: world.arguments[each] for each in needed if each != name}
        yield Case(call, name, {**others, **{k: v for k, v in ALSO.get(full_name, {}).items() if k != name}})


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", {**CALLABLES, **MANAGERS})
def test_a_duration_or_count_that_cannot_be_one_is_refused(world: World, name: str) -> None:
    tried = 0
    for case, bad in itertools.product(cases(world, name), BAD):
        try:
            answer = case.with_(bad)
        except InvalidArgumentError as error:
            assert case.parameter.removeprefix("min_").removeprefix("max_").split("_")[0] in str(error)
            tried += 1
        except ReaderGroupError as error:
            pytest.fail(f"{name}({case.parameter}={bad!r}) raises {error!r}")
        else:
            pytest.fail(f"{name}({case.parameter}={bad!r}) returns {answer!r}")
    assert tried


def test_there_are_as_many_of_them_as_one_knows() -> None:
    """So that the search does not come to find nothing."""
    assert len(CALLABLES) > 90
    assert {"Reader.read", "Client", "EventWriter.flush", "RetryPolicy", "connect", "Barrier"} <= set(CALLABLES)


@pytest.mark.parametrize("bad", [*BAD, None, math.inf, 2**70, 1.5])
def test_a_count_is_a_whole_number(bad: object) -> None:
    with pytest.raises(InvalidArgumentError, match="readers is a whole number from 1 on"):
        check_count(bad, "readers")
    check_count(1, "readers")
    check_count(None, "readers", or_none=True)


@pytest.mark.parametrize("bad", [*BAD, None])
def test_a_duration_is_a_number_from_0_on(bad: object) -> None:
    with pytest.raises(InvalidArgumentError, match="timeout is a number of seconds"):
        check_duration(bad, "timeout")
    for good in (0, 0.0, 1, 2.5, math.inf):
        check_duration(good, "timeout")
    check_duration(None, "timeout", or_none=True)
    for bad in (0, math.inf, None):
        with pytest.raises(InvalidArgumentError, match="above 0, and finite"):
            check_duration(bad, "timeout", above_zero=True, finite=True)


def test_a_configuration_that_is_wrong_is_one_of_our_errors_and_what_is_stored_is_read_as_ever() -> None:
    with pytest.raises(InvalidArgumentError, match=r"RetryPolicy .*attempts: .* not 'five'.*second: Extra") as caught:
        rg.RetryPolicy(attempts="five", second=1)  # type: ignore[arg-type, call-arg]
    assert isinstance(caught.value.__cause__, ValidationError)
    with pytest.raises(ValidationError):
        rg.RetryPolicy.model_validate({"attempts": "five"})
    with pytest.raises(ValidationError):
        rg.ReaderGroupConfig.model_validate({"streams": [STREAM], "reader_timeout_seconds": math.nan})
